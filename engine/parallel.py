"""Engines as TP groups on the CPU: start of the ranks, and rank 0's face of the group.

Every rank runs the same plan on its share of the weights; ``Model.gather`` joins the K-shards. KV
is identical on all ranks, so page and slot numbers serve all and rank i pulls from rank i.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import torch

from decant.engine import group as processes
from decant.engine.checkpoint import Checkpoint
from decant.engine.cpu_engine import CpuEngine
from decant.engine.group import Channel, Followers, run_on_all
from decant.engine.interface import (
    F32,
    DraftEngine,
    DraftSlot,
    Engine,
    PrefillChunk,
    SlotRows,
    StepPlan,
    StepResult,
    page_checksums,
)
from decant.engine.kv_layout import KVLayout
from decant.engine.load import group_name, max_context, model_folder, pool_prefix
from decant.engine.pool import Pool
from decant.engine.reference.model import GatherShards, load_model
from decant.engine.weights import WeightReader
from decant.protocol.config import Config
from decant.protocol.errors import CheckpointError, ConfigError
from decant.protocol.messages import PoolHandle

if TYPE_CHECKING:
    from decant.engine.draft import CpuDraftEngine


# -- commands between ranks ------------------------------------------------------------------------


def _pack(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "shape": list(value.shape), "data": value.tobytes()}
    raise NotImplementedError(f"a {type(value).__name__} does not travel between ranks")


def command(name: str, *args: Any) -> bytes:
    """A call, as the followers get it."""
    return msgspec.msgpack.encode([name, *args], enc_hook=_pack)


def _array(value: dict[str, Any]) -> Any:
    if not value["data"]:  # an empty buffer is refused by numpy
        return np.zeros(value["shape"], value["dtype"])
    return np.frombuffer(bytearray(value["data"]), value["dtype"]).reshape(value["shape"])


def _plan(value: dict[str, Any]) -> StepPlan:
    rows = tuple(
        SlotRows(r["slot"], r["start"], tuple(r["token_ids"]), tuple(r["block_table"]))
        for r in value["decode"]
    )
    c = value["chunk"]
    chunk = None
    if c is not None:
        ids = _array(c["token_ids"])
        table = tuple(c["block_table"])
        chunk = PrefillChunk(c["slot"], c["start"], ids, table, c["next_token"], c["num_top"])
    return StepPlan(value["step"], rows, chunk)


def _draft_slot(value: dict[str, Any]) -> DraftSlot:
    next_tokens = tuple(value.pop("next_tokens"))
    return DraftSlot(next_tokens=next_tokens, streams=_array(value.pop("streams")), **value)


def _handles(value: list[Any]) -> list[PoolHandle]:
    return [msgspec.convert(h, PoolHandle) for h in value]


# What a follower does with the arguments of each command before it calls its own engine.
UNPACK: dict[str, Callable[..., tuple[Any, ...]]] = {
    "step": lambda plan: (_plan(plan),),
    "propose": lambda peer, slots: (peer, [_draft_slot(s) for s in slots]),
    "attach": lambda peer, pools: (peer, _handles(pools)),
}
STEP_COMMANDS = (
    *("step", "head", "propose", "clear_slot", "copy_page", "copy_slot"),
    *("load_page", "load_slot", "run_header", "run_heads"),
)
COPY_COMMANDS = ("attach", "detach", "pull_pages", "pull_slot")


def run_command(engine: Any, allowed: Sequence[str], frame: bytes) -> None:
    name, *args = msgspec.msgpack.decode(frame)
    if name not in allowed:
        raise ConfigError(f"a rank got the command {name!r}")
    unpack = UNPACK.get(name)
    getattr(engine, name)(*(unpack(*args) if unpack else args))


def follow(engine: Any, steps: Channel, copies: Channel) -> None:
    """A follower's life: steps in this thread, copies beside them."""
    thread = threading.Thread(
        target=processes.serve,
        args=(copies, lambda frame: run_command(engine, COPY_COMMANDS, frame)),
        daemon=True,
    )
    thread.start()
    processes.serve(steps, lambda frame: run_command(engine, STEP_COMMANDS, frame))
    engine.close()


# -- rank 0's face ---------------------------------------------------------------------------------


class GroupEngine:
    """interface.Engine over all ranks of a group."""

    def __init__(self, own: Engine, followers: Followers, handles: list[PoolHandle]) -> None:
        self._own, self._followers, self._handles = own, followers, handles
        self.vocab_size, self.hidden_size = own.vocab_size, own.hidden_size
        self.max_context, self.page_tokens = own.max_context, own.page_tokens
        self.num_pages, self.num_slots = own.num_pages, own.num_slots
        self.max_drafts, self.model_hash = own.max_drafts, own.model_hash
        self.kv_layout_hash, self.eos_token_id = own.kv_layout_hash, own.eos_token_id

    def _all(self, name: str, *args: Any) -> Any:
        """Run a method on every rank."""
        f = self._followers
        own = getattr(self._own, name)
        channels, lock = (
            (f.copies, f.copy_lock) if name in COPY_COMMANDS else (f.steps, f.step_lock)
        )
        return run_on_all(channels, lock, command(name, *args), lambda: own(*args))

    def pools(self) -> list[PoolHandle]:
        return self._handles

    def step(self, plan: StepPlan) -> StepResult:
        return cast(StepResult, self._all("step", plan))

    def head(self, slots: Sequence[int]) -> F32:
        return cast(F32, self._all("head", list(slots)))

    def last_streams(self, slots: Sequence[int]) -> F32:
        return self._own.last_streams(slots)

    def clear_slot(self, slot: int) -> None:
        self._all("clear_slot", slot)

    def attach(self, peer: str, pools: Sequence[PoolHandle]) -> None:
        self._all("attach", peer, list(pools))

    def detach(self, peer: str) -> None:
        self._all("detach", peer)

    def pull_pages(
        self,
        peer: str,
        source: Sequence[int],
        target: Sequence[int],
        num_tokens: Sequence[int],
        checksums: Sequence[int],
    ) -> None:
        lists = (list(source), list(target), list(num_tokens), list(checksums))
        self._all("pull_pages", peer, *lists)

    def pull_slot(
        self, peer: str, source: int, target: int, num_tokens: int, checksum: int
    ) -> None:
        self._all("pull_slot", peer, source, target, num_tokens, checksum)

    def page_checksum(self, page: int, num_tokens: int) -> int:
        return self._own.page_checksum(page, num_tokens)

    def page_checksums(self, pages: Sequence[int], num_tokens: Sequence[int]) -> list[int]:
        return page_checksums(self._own, pages, num_tokens)

    def slot_checksum(self, slot: int, num_tokens: int) -> int:
        return self._own.slot_checksum(slot, num_tokens)

    def copy_page(self, source: int, target: int) -> None:
        self._all("copy_page", source, target)

    def copy_slot(self, source: int, target: int, num_tokens: int) -> None:
        self._all("copy_slot", source, target, num_tokens)

    # KV is the same on all ranks: one saves for all.
    def save_page(self, page: int, num_tokens: int) -> bytes:
        return self._own.save_page(page, num_tokens)

    def save_slot(self, slot: int, num_tokens: int) -> bytes:
        return self._own.save_slot(slot, num_tokens)

    def load_page(self, page: int, num_tokens: int, data: bytes) -> None:
        self._all("load_page", page, num_tokens, data)

    def load_slot(self, slot: int, num_tokens: int, data: bytes) -> None:
        self._all("load_slot", slot, num_tokens, data)

    def close(self) -> None:
        self._followers.close()
        self._own.close()


class GroupDraftEngine:
    """interface.DraftEngine over all ranks of a group."""

    def __init__(self, own: DraftEngine, followers: Followers) -> None:
        self._own, self._followers = own, followers
        self.model_hash, self.kv_layout_hash = own.model_hash, own.kv_layout_hash
        self.max_drafts = own.max_drafts

    def _all(self, name: str, *args: Any) -> Any:
        f = self._followers
        own = getattr(self._own, name)
        channels, lock = (
            (f.copies, f.copy_lock) if name in COPY_COMMANDS else (f.steps, f.step_lock)
        )
        return run_on_all(channels, lock, command(name, *args), lambda: own(*args))

    def attach(self, peer: str, pools: Sequence[PoolHandle]) -> None:
        self._all("attach", peer, list(pools))

    def detach(self, peer: str) -> None:
        self._all("detach", peer)

    def propose(self, peer: str, slots: Sequence[DraftSlot]) -> list[list[int]]:
        return cast(list[list[int]], self._all("propose", peer, list(slots)))

    def close(self) -> None:
        self._followers.close()
        self._own.close()


# -- start -----------------------------------------------------------------------------------------


def build_engine(
    config: Config, role: str, checkpoint: Checkpoint, rank: int, gather: GatherShards | None
) -> CpuEngine:
    """One rank. Raises: ConfigError, CheckpointError."""
    room = config.prefill if role == "prefill" else config.decode
    layout = KVLayout(checkpoint.shape, config.kv.page_tokens)
    reader = WeightReader(checkpoint, room.tp, rank)
    name = f"{pool_prefix(config, role)}-{rank}"
    pool = Pool.create(name, layout, room.pages, room.slots, rank)
    try:
        with torch.inference_mode():
            quantise = config.model.quantise_activations
            model = load_model(reader, quantise, trunk=True, mtp="keys", gather=gather)
        checkpoint.close()
    except BaseException:
        pool.close()
        raise
    context = max_context(config, checkpoint.shape)
    return CpuEngine(model, pool, context, config.kv.max_drafts, checkpoint.model_hash)


def build_draft(
    config: Config, checkpoint: Checkpoint, rank: int, gather: GatherShards | None
) -> CpuDraftEngine:
    """One rank of the draft. Raises: CheckpointError."""
    from decant.engine.draft import CpuDraftEngine

    layout = KVLayout(checkpoint.shape, config.kv.page_tokens)
    reader = WeightReader(checkpoint, config.draft.tp, rank)
    with torch.inference_mode():
        quantise = config.model.quantise_activations
        model = load_model(reader, quantise, trunk=False, mtp="full", gather=gather)
    checkpoint.close()
    return CpuDraftEngine(model, layout, config.kv.max_drafts, checkpoint.model_hash, rank)


def _prepare(config: Config, role: str, tp: int, threads: int) -> Checkpoint:
    """Everything that can be wrong, before memory is taken or a process starts."""
    if threads != 1:
        raise ConfigError(f"the CPU engine runs on one thread: set {role}.threads = 1")
    torch.set_num_threads(1)
    checkpoint = Checkpoint(model_folder(config))
    checkpoint.shape.check_tp(tp, config.model.quantise_activations)
    return checkpoint


@contextlib.contextmanager
def locked(config: Config, role: str, rank: int) -> Iterator[int]:
    """The rank's lock while its engine is made; given back if that fails."""
    name = group_name(config, role)
    lock = processes.lock_rank(config.run_dir, name, rank) if config.run_dir else -1
    try:
        yield lock
    except BaseException:
        processes.unlock(lock)
        raise


def start_group(
    config: Config,
    role: str,
    tp: int,
    build: Callable[[int, str], Any],
    wait_s: float = processes.START_WAIT_S,
) -> tuple[Any, Followers, list[PoolHandle]]:
    """Fork, join, load: this rank's engine, the followers, and the pool handles of all ranks.

    build: (rank, rendezvous file) -> engine. wait_s: for a follower, after the leader is ready."""

    def life(rank: int, rendezvous: str, steps: Channel, copies: Channel) -> None:
        with locked(config, role, rank) as lock:
            engine = build(rank, rendezvous)
            engine.lock = lock
        handles = engine.pools() if hasattr(engine, "pools") else []
        steps.send(msgspec.msgpack.encode(handles))
        follow(engine, steps, copies)

    followers = processes.fork_followers(config.run_dir, role, tp, life)
    followers.watch()
    own = None
    try:
        own = build(0, followers.rendezvous)
        handles = own.pools() if hasattr(own, "pools") else []
        for channel in followers.steps:
            raw = channel.receive(wait_s)
            handles = [*handles, *msgspec.msgpack.decode(raw, type=list[PoolHandle])]
    except BaseException:
        followers.close()
        if own is not None:
            own.close()
        raise
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(followers.rendezvous)
    return own, followers, handles


def start_engine(config: Config, role: str) -> Engine:
    """See load.load_engine."""
    if role not in ("prefill", "decode"):
        raise ConfigError(f"there is no engine for role {role!r}")
    room = config.prefill if role == "prefill" else config.decode
    checkpoint = _prepare(config, role, room.tp, room.threads)

    def build(rank: int, file: str) -> CpuEngine:
        gather = processes.join_gloo(file, rank, room.tp) if file else None
        return build_engine(config, role, checkpoint, rank, gather)

    with locked(config, role, 0) as lock:
        if room.tp == 1:
            own = build(0, "")
            own.lock = lock
            return own
        own, followers, handles = start_group(config, role, room.tp, build)
        own.lock = lock
    return GroupEngine(own, followers, handles)


def start_draft(config: Config) -> DraftEngine:
    """See load.load_draft."""
    room = config.draft
    checkpoint = _prepare(config, "draft", room.tp, room.threads)
    if not checkpoint.shape.has_mtp:
        raise CheckpointError("the checkpoint has no MTP layer: set draft.enabled = false")

    def build(rank: int, file: str) -> CpuDraftEngine:
        gather = processes.join_gloo(file, rank, room.tp) if file else None
        return build_draft(config, checkpoint, rank, gather)

    with locked(config, "draft", 0) as lock:
        if room.tp == 1:
            own = build(0, "")
            own.lock = lock
            return own
        own, followers, _ = start_group(config, "draft", room.tp, build)
        own.lock = lock
    return GroupDraftEngine(own, followers)
