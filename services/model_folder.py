"""What the processes without tensors need to know of a model folder. Never imports torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from decant.protocol.config import Config
from decant.protocol.errors import ConfigError

SHIPPED = Path(__file__).parent.parent / "engine" / "demo"


@dataclass(frozen=True)
class ModelFolder:
    """Facts of config.json and generation_config.json, with the deployment's limits applied."""

    path: Path
    name: str  # as clients call it
    vocab_size: int
    max_context: int  # tokens, prompt and output together
    eos_id: int
    created: int  # seconds since 1970: when the folder was written
    added_ids: dict[str, int]  # control tokens by text

    @property
    def tokenizer_path(self) -> Path:
        return self.path / "tokenizer.json"


def read(config: Config) -> ModelFolder:
    """Raises: ConfigError with one sentence if the folder is missing or unreadable."""
    path = Path(config.model.path) if config.model.path else SHIPPED
    file = path / "config.json"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        created = int(file.stat().st_mtime)
        vocab_size = int(data["vocab_size"])
        longest = int(data.get("max_position_embeddings") or config.model.max_context)
        eos = data.get("eos_token_id", 1)
        file = path / "tokenizer.json"
        added = json.loads(file.read_text(encoding="utf-8"))["added_tokens"]
        added_ids = {str(token["content"]): int(token["id"]) for token in added}
    except OSError as error:
        raise ConfigError(f"{path} is no model folder: {file.name}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"cannot read {file}: {error!r}") from error
    name = config.model.served_name or (path.resolve().name if config.model.path else "decant-demo")
    return ModelFolder(
        path=path,
        name=name,
        vocab_size=vocab_size,
        max_context=min(config.model.max_context, longest),
        eos_id=int(eos[0] if isinstance(eos, list) else eos),
        created=created,
        added_ids=added_ids,
    )
