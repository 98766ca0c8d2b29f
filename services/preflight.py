"""What ``decant up`` settles and checks before it starts anything: profile, model folder, port,
memory, shared memory. Every finding is a ConfigError of one sentence.

Reads names and sizes only; the tensors themselves are checked by the engine's loader.
"""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from decant.protocol.config import Config, build, merge
from decant.protocol.errors import ConfigError
from decant.services.model_folder import SHIPPED
from decant.services.supervisor import FOLDER

DEMO_NAME = "decant-demo"
ARCHITECTURE = "DeepseekV4ForCausalLM"
PROCESS_BYTES = 420 << 20  # resident set of a worker without weights and pool (torch, CPU)
LIGHT_BYTES = 110 << 20  # of router, tokenizer, gateway
MARGIN_BYTES = 64 << 20  # of /dev/shm


def profiles() -> list[str]:
    """Names of the profiles that ship with the package."""
    return sorted(p.stem for p in FOLDER.glob("*.toml"))


def read_profile(name: str) -> dict[str, Any]:
    """A profile's table, by the name of a shipped one or the path of a TOML file."""
    import tomllib

    path = Path(name)
    try:
        if name in profiles():
            text = (FOLDER / f"{name}.toml").read_text()
        elif path.suffix == ".toml":
            text = path.read_text()
        else:
            raise ConfigError(f"there is no profile {name!r}; there are {', '.join(profiles())}")
        return tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read the profile {name}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the profile {name} is not TOML: {error}") from error


def demo_folder() -> Path:
    """The model folder that ships with the package."""
    return SHIPPED.absolute()


def resolve(profile: str, pairs: list[str], run_dir: Path) -> Config:
    """The config of a set: profile, then ``pairs`` (``a.b=value``), then what follows from them.

    Sets ``run_dir``, an absolute ``model.path``, ``model.served_name`` and a free port for port 0.
    Pools that cannot hold one request of ``model.max_context`` are enlarged unless ``pairs`` size
    them. Raises: ConfigError.
    """
    table = merge(read_profile(profile), pairs)
    table["run_dir"] = str(run_dir)
    config: Config = build(Config, table)
    folder = Path(config.model.path).expanduser().absolute() if config.model.path else None
    name = config.model.served_name or (folder.name if folder else DEMO_NAME)
    model = replace(config.model, path=str(folder or demo_folder()), served_name=name)
    gateway = config.gateway
    if gateway.port == 0:
        gateway = replace(gateway, port=free_port(gateway.host))
    named = {pair.partition("=")[0].strip() for pair in pairs}
    need = -(-model.max_context // config.kv.page_tokens)
    prefill, decode = config.prefill, config.decode
    for room, pages in (("prefill", prefill.pages), ("decode", decode.pages)):
        if pages < need and f"{room}.pages" in named:
            raise ConfigError(
                f"{room}.pages = {pages} holds {pages * config.kv.page_tokens} tokens,"
                f" less than model.max_context = {model.max_context}"
            )
    prefill = replace(prefill, pages=max(prefill.pages, need))
    decode = replace(decode, pages=max(decode.pages, need))
    return replace(config, model=model, gateway=gateway, prefill=prefill, decode=decode)


def free_port(host: str) -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def check_port(host: str, port: int) -> None:
    """Raises: ConfigError if nobody can listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host} port {port}: {(error.strerror or str(error)).lower()};"
                " choose another with --port"
            ) from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder. Raises: ConfigError if one is missing."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{index} is not an index of safetensors files") from error
        files = [folder / str(name) for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [f.name for f in files if not f.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(f"the model folder {folder} lacks {missing[0]}{more}")
    if not files:
        raise ConfigError(f"the model folder {folder} has no *.safetensors file")
    return files


def check_model(folder: Path) -> int:
    """Check a model folder by its files and its config.json. Returns the bytes of its weights.

    Raises: ConfigError.
    """
    if not folder.exists():
        raise ConfigError(f"the model folder {folder} does not exist")
    if not folder.is_dir():
        raise ConfigError(f"the model path {folder} is not a folder")
    config = read_json(folder / "config.json")
    names = config.get("architectures") or [config.get("model_type")]
    if ARCHITECTURE not in names and config.get("model_type") != "deepseek_v4":
        raise ConfigError(
            f"{folder} holds a model of kind {names[0]}; decant serves {ARCHITECTURE} only"
        )
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"the model folder {folder} lacks tokenizer.json")
    files = weight_files(folder)
    for file in files:
        check_safetensors(file)
    return sum(f.stat().st_size for f in files)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises: ConfigError."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"the model folder {path.parent} lacks {path.name}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return value


def check_safetensors(path: Path) -> None:
    """Raises: ConfigError if the file is cut short (a broken download, a Git LFS pointer)."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if not 2 <= length <= min(size - 8, 1 << 30):
            raise ConfigError(f"{path} is not a safetensors file (a broken download?)")
        try:
            table = json.loads(file.read(length))
            end = max(
                (t["data_offsets"][1] for name, t in table.items() if name != "__metadata__"),
                default=0,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} has a broken header") from error
    if 8 + length + end != size:
        raise ConfigError(f"{path} has {size} bytes, its header says {8 + length + end}")


def shm_bytes(config: Config) -> int:
    """Shared memory that the pools of all groups take, from the shape in config.json.

    An estimate from above (float32 rows): per token of a page every 4th token one CSA row and one
    indexer row, every 128th one HCA row, per slot the rings.
    """
    if config.device != "cpu":
        return 0
    shape = read_json(Path(config.model.path) / "config.json")
    layers = int(shape.get("num_hidden_layers", 1))
    row, index = int(shape.get("head_dim", 512)), int(shape.get("index_head_dim", 128))
    ratios = list(shape.get("compress_ratios") or [4] * layers)[: layers + 1]
    page = sum(config.kv.page_tokens // r * (row + (index if r == 4 else 0)) for r in ratios if r)
    window = int(shape.get("sliding_window", 128)) + config.kv.max_drafts + 1
    state = {4: 16 * 4 * (row + index), 128: 256 * 2 * row}
    slot = sum(window * row + state.get(r, 0) for r in ratios) + window * row
    slot += 4 * int(shape.get("hidden_size", 0))
    rooms = (config.prefill, config.decode)
    return sum(4 * r.tp * (r.pages * page + r.slots * slot) for r in rooms)


def check_memory(config: Config, weight_bytes: int) -> None:
    """Raises: ConfigError if the set cannot fit into free memory or /dev/shm."""
    if config.device != "cpu":
        return
    ranks = [config.prefill.tp, config.decode.tp]
    if config.draft.enabled:
        ranks.append(config.draft.tp)
    # Weights stay as they are on disk or grow to bfloat16 and float32 when the loader unpacks them.
    pool = shm_bytes(config)
    need = sum(ranks) * PROCESS_BYTES + len(ranks) * 4 * weight_bytes + pool
    need += (2 + config.tokenizer.instances) * LIGHT_BYTES
    free = psutil.virtual_memory().available
    if need > free:
        raise ConfigError(
            f"too little memory: the set needs about {need / 1e9:.1f} GB,"
            f" {free / 1e9:.1f} GB are available"
        )
    shm = psutil.disk_usage("/dev/shm").free
    if pool + MARGIN_BYTES > shm:
        raise ConfigError(
            f"too little shared memory: the KV pools need about {pool / 1e9:.2f} GB,"
            f" /dev/shm has {shm / 1e9:.2f} GB free; lower decode.pages and prefill.pages"
            " with --set, or enlarge /dev/shm (docker run --shm-size)"
        )


def check(config: Config) -> None:
    """All checks. Raises: ConfigError with the first finding."""
    weight_bytes = check_model(Path(config.model.path))
    check_port(config.gateway.host, config.gateway.port)
    loopback = config.gateway.host in ("localhost", "::1") or config.gateway.host.startswith("127.")
    if not loopback and not config.gateway.keys_file:
        raise ConfigError(
            f"gateway.host {config.gateway.host} is reachable from outside: set gateway.keys_file"
            " to a file with one API key a line"
        )
    if config.gateway.keys_file and not Path(config.gateway.keys_file).is_file():
        raise ConfigError(f"gateway.keys_file {config.gateway.keys_file} does not exist")
    check_memory(config, weight_bytes)
