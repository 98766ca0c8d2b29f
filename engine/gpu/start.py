"""GPU engines from the configuration: what ``engine/load.py`` calls for device = "cuda".

With several ranks the leader forks the others before anything touches CUDA; all load their share,
agree on how to sum and on the kernels that are right, and capture the same graphs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from decant.engine.checkpoint import Checkpoint
from decant.engine.gpu import start_record
from decant.engine.gpu.communicator import Communicator, Unasked, choose
from decant.engine.gpu.device import choose_device
from decant.engine.gpu.draft import GpuDraftEngine
from decant.engine.gpu.engine import GpuEngine
from decant.engine.gpu.group import GpuGroupDraft, GpuGroupEngine
from decant.engine.gpu.header import BUCKETS, Sizes, StepHeader, bucket_of
from decant.engine.gpu.layout import GpuLayout, check_shape
from decant.engine.gpu.memory import pin
from decant.engine.gpu.model import GpuModel
from decant.engine.gpu.ops import ALL, Ops
from decant.engine.gpu.pool import GpuPool
from decant.engine.gpu.precompile import compile_all, note, prepare
from decant.engine.gpu.probe import PROBED, probe
from decant.engine.gpu.runner import PEER_WAIT_S, Runner
from decant.engine.gpu.weights import load_weights
from decant.engine.load import instance_number, max_context, model_folder, pool_prefix
from decant.engine.parallel import locked, start_group
from decant.kernels import tuned
from decant.protocol.config import Config
from decant.protocol.errors import CheckpointError, ConfigError

log = logging.getLogger("decant.engine.gpu")


class Times:
    """Seconds of a start's parts, in the log."""

    def __init__(self, who: str) -> None:
        self._who, self._last = who, time.monotonic()
        try:  # of the process: what it imported before is part of its start
            with open("/proc/self/stat") as file:
                ticks = int(file.read().rsplit(")", 1)[1].split()[19])
            with open("/proc/uptime") as file:
                up = float(file.read().split()[0])
            self._last -= max(0.0, up - ticks / os.sysconf("SC_CLK_TCK"))
        except (OSError, ValueError, IndexError):
            pass

    def lap(self, what: str) -> None:
        now = time.monotonic()
        log.info("%s: %s %.2f s", self._who, what, now - self._last)
        self._last = now


def _prepare(config: Config, room: Any) -> Checkpoint:
    """What can be wrong, before memory is taken or a process starts."""
    checkpoint = Checkpoint(model_folder(config))
    check_shape(checkpoint.shape)
    checkpoint.shape.check_tp(room.tp)
    return checkpoint


def _join(
    config: Config, role: str, room: Any, rank: int, file: str, device: torch.device, shape: Any
) -> Communicator | None:
    """The rank's collectives; None in a group of one."""
    widest = max(config.prefill.tp, config.decode.tp, config.draft.tp)
    if config.gpu.mps and widest > 1:  # ranks that wait leave no room for large clusters
        tuned.use_shared()
    if room.tp == 1:
        return None
    rows = bucket_of(config.decode.max_batch) * (1 + config.kv.max_drafts)
    columns = shape.vocab_size // room.tp
    wanted = config.gpu.collectives
    comm = choose(file, rank, room.tp, device, (rows, shape.hidden_size), columns, wanted)
    comm.patience(config.gpu.start_s)  # others may compile meanwhile
    return comm


def _agree(ops: Ops, comm: Communicator | None) -> None:
    """Run the kernels that every rank found right."""
    if comm is not None:
        everybody = comm.host_gather([int(name in ops.enabled) for name in ALL])
        ops.enabled &= {n for n, good in zip(ALL, zip(*everybody, strict=True), strict=True)
                        if all(good)}  # fmt: skip


def _model(
    checkpoint: Checkpoint,
    device: torch.device,
    trunk: bool,
    mtp: str,
    kernels: set[str] | None,
    comm: Communicator | None,
) -> GpuModel:
    def progress(done: int, total: int) -> None:
        log.info("layer %d of %d is on %s", done, total, device)

    tp, rank = (1, 0) if comm is None else (comm.size, comm.rank)
    with torch.inference_mode():
        weights = load_weights(checkpoint, device, trunk, mtp, tp, rank, progress)
    ops = Ops.create(checkpoint.shape, device, kernels, tp)
    return GpuModel(checkpoint.shape, weights, ops, comm)


def _compile(
    config: Config, model: GpuModel, layout: GpuLayout, context: int, role: str, drafts: int
) -> None:
    """Rank 0 compiles for all ranks, which have the same shapes; the others wait."""
    device, comm = model.ops.device, model.comm
    if device.type != "cuda":
        return
    if comm is None or comm.rank == 0:
        chunk = max(config.prefill.chunk_tokens, 128)
        pool = GpuPool.create("", layout, -(-chunk // layout.page_tokens), 1, device)
        try:
            most = bucket_of(config.decode.max_batch) if role == "decode" else 1
            sizes = range(1, 2 + drafts) if role == "decode" else (1,)
            buckets = [(num, size) for num in BUCKETS if num <= most for size in sizes]
            buckets += PROBED
            prepare(model, lambda alone: Runner(alone, pool, context, chunk), buckets)
        finally:
            pool.close()
    if comm is not None:
        comm.host_gather([0])


def build_engine(
    config: Config,
    role: str,
    checkpoint: Checkpoint,
    rank: int,
    file: str,
    header: StepHeader | None,
    kernels: set[str] | None = None,
    graphs: bool = True,
) -> GpuEngine:
    """One rank. file: the group's rendezvous. Raises: ConfigError, CheckpointError."""
    room = config.prefill if role == "prefill" else config.decode
    device = choose_device(config, config.gpus(role, instance_number(config, role)), rank)
    shape = checkpoint.shape
    layout = GpuLayout(shape, config.kv.page_tokens, config.kv.max_drafts)
    comm = _join(config, role, room, rank, file, device, shape)
    prefix = f"{pool_prefix(config, role)}-{rank}"
    context = max_context(config, shape)
    model = _model(checkpoint, device, True, "keys", kernels, comm)
    checkpoint.close()
    drafts = config.draft.num_drafts if config.draft.enabled else 0
    times = Times(f"{role} rank {rank}")
    times.lap("device and weights")
    facts = {
        "model": checkpoint.model_hash, "role": role, "tp": room.tp, "rank": rank,
        "context": context, "chunk": config.prefill.chunk_tokens, "drafts": drafts,
        "batch": config.decode.max_batch, "layout": layout.hash,
    }  # fmt: skip
    record = start_record.path_of(device, facts)
    known = start_record.read(record) if kernels is None and graphs else None
    if _all_know(comm, known):
        assert known is not None
        model.ops.enabled &= known
    else:
        if graphs:  # what only checks a few steps compiles what these need
            _compile(config, model, layout, context, role, drafts)
            times.lap("kernels compiled")
        if kernels is None:
            probe(model, layout, device, prefix + "-probe")
            times.lap("kernels probed")
    _agree(model.ops, comm)
    if kernels is None and graphs and device.type == "cuda":
        start_record.write(record, model.ops.enabled)
    if header is not None and device.type == "cuda":
        pin(header.memory)
    pool = GpuPool.create(prefix, layout, room.pages, room.slots, device, rank)
    engine = GpuEngine(
        model,
        pool,
        context,
        config.kv.max_drafts,
        checkpoint.model_hash,
        max(config.prefill.chunk_tokens, 128),
        header,
    )
    if graphs and role == "decode" and device.type == "cuda":
        again = rank == 0 and _started_before(config)  # in a group rank 0's clock decides
        budget = config.gpu.graphs_again_s if again else config.gpu.graphs_s
        with torch.inference_mode():
            engine.runner.capture_all(config.decode.max_batch, 1 + drafts, budget)
        times.lap("graphs")
    if graphs:
        with torch.inference_mode():
            most = config.decode.max_batch * (1 + drafts) if role == "decode" else 1
            engine.warm_up(most if rank == 0 else 0)  # rank 0 draws for all
        times.lap("draws and copies")
    engine.runner.wait_s = PEER_WAIT_S
    if comm is not None:
        comm.patience(PEER_WAIT_S)
    return engine


def _all_know(comm: Communicator | None, known: set[str] | None) -> bool:
    """Whether every rank has a record of its start."""
    if comm is None:
        return known is not None
    return all(row[0] for row in comm.host_gather([int(known is not None)]))


def _started_before(config: Config) -> bool:
    """Whether this worker of this set was there before: then it is waited for. Notes it."""
    if not config.run_dir or not config.instance:
        return False
    mark = Path(config.run_dir) / f"{config.instance}.started"
    was = mark.exists()
    with contextlib.suppress(OSError):
        mark.touch()
    return was


def start_engine(
    config: Config, role: str, kernels: set[str] | None = None, graphs: bool = True
) -> GpuEngine | GpuGroupEngine:
    """See load.load_engine. kernels: those that run, unprobed; None: all that a probe finds right.
    graphs: capture decode's buckets (on a GPU)."""
    if role not in ("prefill", "decode"):
        raise ConfigError(f"there is no engine for role {role!r}")
    room = config.prefill if role == "prefill" else config.decode
    checkpoint = _prepare(config, room)
    context = max_context(config, checkpoint.shape)
    with locked(config, role, 0) as lock:
        if room.tp == 1:
            own = build_engine(config, role, checkpoint, 0, "", None, kernels, graphs)
            own.lock = lock
            return own
        pages = -(-context // config.kv.page_tokens)
        sizes = Sizes(room.slots, 1 + config.kv.max_drafts, pages, context, room.slots)
        header = StepHeader.create(f"{pool_prefix(config, role)}-header", sizes)

        def build(rank: int, file: str) -> GpuEngine:
            return build_engine(config, role, checkpoint, rank, file, header, kernels, graphs)

        try:
            own, followers, handles = start_group(config, role, room.tp, build, config.gpu.start_s)
        except BaseException:
            header.close()
            raise
        own.lock = lock
    return GpuGroupEngine(own, followers, handles)


def _compile_draft(engine: GpuDraftEngine, max_batch: int) -> None:
    """As ``_compile``, for what proposals run."""
    model = engine.model
    comm = model.comm
    if engine.device.type != "cuda":
        return
    if comm is None or comm.rank == 0:
        engine.model = replace(model, comm=None if comm is None else Unasked(comm.size))
        wanted = note(lambda: engine.warm_up(max_batch))
        engine.model = model
        compile_all(wanted, int(model.ops.arch.removeprefix("sm_")))
    if comm is not None:
        comm.host_gather([0])


def build_draft(
    config: Config, checkpoint: Checkpoint, rank: int, file: str, kernels: set[str] | None
) -> GpuDraftEngine:
    """One rank of the draft. Raises: ConfigError, CheckpointError."""
    room = config.draft
    device = choose_device(config, config.gpus("draft"), rank)
    shape = checkpoint.shape
    layout = GpuLayout(shape, config.kv.page_tokens, config.kv.max_drafts)
    comm = _join(config, "draft", room, rank, file, device, shape)
    model = _model(checkpoint, device, False, "full", kernels, comm)
    checkpoint.close()
    _agree(model.ops, comm)
    drafts, name = config.kv.max_drafts, checkpoint.model_hash
    engine = GpuDraftEngine(model, layout, device, drafts, name, rank)
    times = Times(f"draft rank {rank}")
    times.lap("device and weights")
    facts = {
        "model": name, "role": "draft", "tp": room.tp, "rank": rank, "drafts": drafts,
        "batch": config.decode.max_batch, "layout": layout.hash,
    }  # fmt: skip
    record = start_record.path_of(device, facts)
    if not _all_know(comm, start_record.read(record)):
        _compile_draft(engine, config.decode.max_batch)
        times.lap("kernels compiled")
    engine.warm_up(config.decode.max_batch)
    times.lap("warm")
    if kernels is None and device.type == "cuda":
        start_record.write(record, model.ops.enabled)
    if comm is not None:
        comm.patience(PEER_WAIT_S)
    return engine


def start_draft(config: Config, kernels: set[str] | None = None) -> GpuDraftEngine | GpuGroupDraft:
    """See load.load_draft; kernels as in start_engine."""
    room = config.draft
    checkpoint = _prepare(config, room)
    if not checkpoint.shape.has_mtp:
        raise CheckpointError("the checkpoint has no MTP layer: set draft.enabled = false")

    def build(rank: int, file: str) -> GpuDraftEngine:
        return build_draft(config, checkpoint, rank, file, kernels)

    with locked(config, "draft", 0) as lock:
        if room.tp == 1:
            own = build(0, "")
            own.lock = lock
            return own
        own, followers, _ = start_group(config, "draft", room.tp, build, config.gpu.start_s)
        own.lock = lock
    return GpuGroupDraft(own, followers)
