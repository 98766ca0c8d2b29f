"""GPU engines from the configuration: what ``engine/load.py`` calls for device = "cuda"."""

from __future__ import annotations

import logging
from typing import Any

import torch

from decant.engine import group as processes
from decant.engine.checkpoint import Checkpoint
from decant.engine.gpu.device import choose_device
from decant.engine.gpu.draft import GpuDraftEngine
from decant.engine.gpu.engine import GpuEngine
from decant.engine.gpu.layout import GpuLayout, check_shape
from decant.engine.gpu.model import GpuModel
from decant.engine.gpu.ops import Ops
from decant.engine.gpu.pool import GpuPool
from decant.engine.gpu.probe import probe
from decant.engine.gpu.weights import load_weights
from decant.engine.load import max_context, model_folder, pool_prefix
from decant.protocol.config import Config
from decant.protocol.errors import CheckpointError, ConfigError

log = logging.getLogger("decant.engine.gpu")


def _prepare(config: Config, role: str, room: Any) -> tuple[Checkpoint, torch.device]:
    if room.tp != 1:
        raise ConfigError(
            f"{role}.tp = {room.tp}: the GPU engine runs with tp = 1 so far (tensor parallelism "
            "over NCCL is not there yet)"
        )
    checkpoint = Checkpoint(model_folder(config))
    check_shape(checkpoint.shape)
    return checkpoint, choose_device(config, room.devices)


def _model(
    checkpoint: Checkpoint,
    device: torch.device,
    layout: GpuLayout,
    trunk: bool,
    mtp: str,
    tag: str,
    kernels: set[str] | None,
) -> GpuModel:
    def progress(done: int, total: int) -> None:
        log.info("layer %d of %d is on %s", done, total, device)

    with torch.inference_mode():
        weights = load_weights(checkpoint, device, trunk, mtp, progress=progress)
    model = GpuModel(checkpoint.shape, weights, Ops.create(checkpoint.shape, device, kernels))
    if trunk and kernels is None:
        probe(model, layout, device, tag)
    return model


def start_engine(
    config: Config, role: str, kernels: set[str] | None = None, graphs: bool = True
) -> GpuEngine:
    """See load.load_engine. kernels: those that run, unprobed; None: all that a probe finds right.
    graphs: capture decode's buckets (on a GPU)."""
    if role not in ("prefill", "decode"):
        raise ConfigError(f"there is no engine for role {role!r}")
    room = config.prefill if role == "prefill" else config.decode
    checkpoint, device = _prepare(config, role, room)
    layout = GpuLayout(checkpoint.shape, config.kv.page_tokens, config.kv.max_drafts)
    lock = processes.lock_rank(config.run_dir, role, 0) if config.run_dir else -1
    prefix = f"{pool_prefix(config, role)}-0"
    try:
        model = _model(checkpoint, device, layout, True, "keys", prefix + "-probe", kernels)
        pool = GpuPool.create(prefix, layout, room.pages, room.slots, device)
        checkpoint.close()
        engine = GpuEngine(
            model,
            pool,
            max_context(config, checkpoint.shape),
            config.kv.max_drafts,
            checkpoint.model_hash,
            max(config.prefill.chunk_tokens, 128),
        )
        engine.lock = lock
        if graphs and role == "decode" and device.type == "cuda":
            rows = 1 + (config.draft.num_drafts if config.draft.enabled else 0)
            with torch.inference_mode():
                engine.runner.capture_all(config.decode.max_batch, rows)
    except BaseException:
        processes.unlock(lock)
        raise
    return engine


def start_draft(config: Config, kernels: set[str] | None = None) -> GpuDraftEngine:
    """See load.load_draft; kernels as in start_engine."""
    checkpoint, device = _prepare(config, "draft", config.draft)
    if not checkpoint.shape.has_mtp:
        raise CheckpointError("the checkpoint has no MTP layer: set draft.enabled = false")
    layout = GpuLayout(checkpoint.shape, config.kv.page_tokens, config.kv.max_drafts)
    lock = processes.lock_rank(config.run_dir, "draft", 0) if config.run_dir else -1
    try:
        model = _model(checkpoint, device, layout, False, "full", "", kernels)
        checkpoint.close()
    except BaseException:
        processes.unlock(lock)
        raise
    engine = GpuDraftEngine(model, layout, device, config.kv.max_drafts, checkpoint.model_hash)
    engine.lock = lock
    return engine
