"""Engines and model facts from the configuration. ``model_info`` is cheap and needs no torch."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from decant.engine.model_shape import ModelShape
from decant.protocol.config import Config

if TYPE_CHECKING:
    from decant.engine.interface import DraftEngine, Engine

_unnamed = itertools.count()


@dataclass(frozen=True)
class ModelInfo:
    """What processes without the weights need to know."""

    path: str
    served_name: str
    vocab_size: int
    max_context: int
    bos_token_id: int
    eos_token_id: int
    has_mtp: bool
    model_hash: str


def model_folder(config: Config) -> Path:
    """The checkpoint folder: configured, or the model that ships with the package."""
    if config.model.path:
        return Path(config.model.path)
    return Path(__file__).parent / "demo"


def max_context(config: Config, shape: ModelShape) -> int:
    return min(config.model.max_context, shape.max_position_embeddings)


def model_info(config: Config) -> ModelInfo:
    """Reads config.json and the headers of the weights only. Raises: CheckpointError."""
    from decant.engine.checkpoint import Checkpoint

    checkpoint = Checkpoint(model_folder(config))
    shape = checkpoint.shape
    return ModelInfo(
        path=str(checkpoint.folder),
        served_name=config.model.served_name or checkpoint.folder.name,
        vocab_size=shape.vocab_size,
        max_context=max_context(config, shape),
        bos_token_id=shape.bos_token_id,
        eos_token_id=shape.eos_token_id,
        has_mtp=shape.has_mtp,
        model_hash=checkpoint.model_hash,
    )


def group_name(config: Config, role: str) -> str:
    """Of this process's group of ranks, for locks and pools: prefill, prefill1 ..."""
    number = instance_number(config, role)
    return f"{role}{number}" if number else role


def instance_number(config: Config, role: str) -> int:
    """Of this process among those of its role; 0 where it has no name."""
    number = config.instance.removeprefix(f"{role}-")
    return int(number) if number.isdigit() else 0


def pool_prefix(config: Config, role: str) -> str:
    """Name of a group's pools in shared memory, without rank and epoch. Without a run directory
    (tests, tools) every engine gets its own."""
    if config.run_dir:
        return f"{config.shm_prefix}{group_name(config, role)}"
    return f"{config.shm_prefix}{role}-{os.getpid()}-{next(_unnamed)}"


def load_engine(config: Config, role: str) -> Engine:
    """The trunk for role "prefill" or "decode". Call it from the main thread, before other threads
    start: with several ranks it forks.

    Raises: ConfigError, CheckpointError."""
    if config.device == "cuda" or config.gpu.twin:
        from decant.engine.gpu.device import check_gpu

        check_gpu(config)  # without a GPU nothing else needs to be loaded
        from decant.engine.gpu import start

        return start.start_engine(config, role)
    from decant.engine.parallel import start_engine

    return start_engine(config, role)


def load_draft(config: Config) -> DraftEngine:
    """The MTP layer. Call it from the main thread, before other threads start.

    Raises: ConfigError, CheckpointError."""
    if config.device == "cuda" or config.gpu.twin:
        from decant.engine.gpu.device import check_gpu

        check_gpu(config)
        from decant.engine.gpu import start

        return start.start_draft(config)
    from decant.engine.parallel import start_draft

    return start_draft(config)
