"""A TP group on the CPU: rank 0 leads, the others are its forked children."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from decant.engine.checkpoint import Checkpoint
from decant.engine.cpu_engine import CpuEngine
from decant.engine.kv_layout import KVLayout
from decant.engine.load import max_context, model_folder, pool_prefix
from decant.engine.pool import Pool
from decant.engine.reference.model import load_model
from decant.engine.weights import WeightReader
from decant.protocol.config import Config
from decant.protocol.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from decant.engine.draft import CpuDraftEngine


def start_engine(config: Config, role: str) -> CpuEngine:
    room = config.prefill if role == "prefill" else config.decode
    if room.threads != 1:
        raise ConfigError("the CPU engine runs on one thread: set threads = 1")
    torch.set_num_threads(1)
    checkpoint = Checkpoint(model_folder(config))
    layout = KVLayout(checkpoint.shape, config.kv.page_tokens)
    prefix = pool_prefix(config, role)
    pool = Pool.create(f"{prefix}-0", layout, room.pages, room.slots)
    with torch.inference_mode():
        model = load_model(
            WeightReader(checkpoint), config.model.quantise_activations, trunk=True, mtp="keys"
        )
    context = max_context(config, checkpoint.shape)
    return CpuEngine(model, pool, context, config.kv.max_drafts, checkpoint.model_hash)


def start_draft(config: Config) -> CpuDraftEngine:
    from decant.engine.draft import CpuDraftEngine

    torch.set_num_threads(1)
    checkpoint = Checkpoint(model_folder(config))
    if not checkpoint.shape.has_mtp:
        raise CheckpointError("the checkpoint has no MTP layer: set draft.enabled = false")
    layout = KVLayout(checkpoint.shape, config.kv.page_tokens)
    with torch.inference_mode():
        model = load_model(
            WeightReader(checkpoint), config.model.quantise_activations, trunk=False, mtp="full"
        )
    return CpuDraftEngine(model, layout, config.kv.max_drafts, checkpoint.model_hash)
