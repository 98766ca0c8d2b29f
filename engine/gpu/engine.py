"""The GPU engine of one rank, as ``interface.Engine`` asks: plans to the runner, pages between
pools. Knows nothing of requests and sampling.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from decant.engine.gpu.device import on_device
from decant.engine.gpu.draws import DeviceSampler
from decant.engine.gpu.header import StepBody, StepHeader
from decant.engine.gpu.layout import GpuLayout
from decant.engine.gpu.model import GpuModel
from decant.engine.gpu.pool import GpuPool
from decant.engine.gpu.runner import Runner
from decant.engine.group import unlock
from decant.engine.interface import F32, Scores, StepPlan, StepResult
from decant.engine.plan_check import PlanLimits
from decant.engine.sampler import Draw, Row
from decant.protocol.errors import HandoffError
from decant.protocol.messages import PoolHandle

ABORT_POLL_S = 0.05

log = logging.getLogger("decant.engine.gpu")


class PeerPools:
    """Mapped pools of peers by name. Thread-safe: a pull may run beside a step."""

    def __init__(self, layout: GpuLayout, device: torch.device, rank: int) -> None:
        self._layout, self._device, self._rank = layout, device, rank
        self._lock = threading.Lock()
        self._pools: dict[str, GpuPool] = {}

    def attach(self, peer: str, handles: Sequence[PoolHandle]) -> None:
        """Map the peer's pool of our rank. Raises: HandoffError."""
        mine = [h for h in handles if h.rank == self._rank]
        if len(mine) != 1:
            raise HandoffError(f"peer {peer} offers no pool of rank {self._rank}")
        self.attach_pool(peer, GpuPool.open(mine[0], self._layout, self._device))

    def attach_pool(self, peer: str, pool: GpuPool) -> None:
        """Take over a pool that is mapped already."""
        with self._lock:
            old = self._pools.pop(peer, None)
            self._pools[peer] = pool
        if old is not None:
            old.close()

    def detach(self, peer: str) -> None:
        with self._lock:
            pool = self._pools.pop(peer, None)
        if pool is not None:
            pool.close()

    def get(self, peer: str) -> GpuPool:
        """Raises: HandoffError if the peer is not attached or its pool changed."""
        with self._lock:
            pool = self._pools.get(peer)
        if pool is None:
            raise HandoffError(f"peer {peer} is not attached")
        pool.check()
        return pool

    def close(self) -> None:
        for peer in list(self._pools):
            self.detach(peer)


class GpuEngine:
    """One rank. Every call but the pulls belongs to one thread; pulls have a stream of their
    own. header: of the group; None: a group of one.

    Attributes: draws_on_device: ``step_and_draw`` and ``draw_heads`` bring token ids to the host
    instead of logits; residual streams stay in the slots, where draft ranks read them."""

    draws_on_device = True

    def __init__(
        self,
        model: GpuModel,
        pool: GpuPool,
        max_context: int,
        max_drafts: int,
        model_hash: str,
        chunk_rows: int = 2048,
        header: StepHeader | None = None,
    ) -> None:
        shape, layout = model.shape, pool.layout
        self.model, self.pool = model, pool
        self.vocab_size, self.hidden_size = shape.vocab_size, shape.hidden_size
        self.max_context, self.max_drafts = max_context, max_drafts
        self.page_tokens = layout.page_tokens
        self.num_pages, self.num_slots = pool.handle.num_pages, pool.handle.num_slots
        self.model_hash, self.kv_layout_hash = model_hash, layout.hash
        self.eos_token_id = shape.eos_token_id
        self.device = pool.device
        self.limits = PlanLimits(
            self.num_pages, self.num_slots, self.page_tokens, max_context, max_drafts,
            self.vocab_size,
        )  # fmt: skip
        self.runner = Runner(model, pool, max_context, chunk_rows, header)
        self.header = self.runner.header
        self._sampler = DeviceSampler(self.vocab_size, self.eos_token_id, self.device)
        self._peers = PeerPools(layout, self.device, pool.handle.rank)
        self._copies = threading.local()  # one stream per thread that copies
        self._scores: Scores | None = None  # of the last step's chunk
        self.lock = -1  # descriptor of the rank's file lock, held until close
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None
        if model.comm is not None:
            self._watcher = threading.Thread(target=self._watch_abort, daemon=True)
            self._watcher.start()

    def warm_up(self, most: int) -> None:
        """What requests need beside the model: draws of up to ``most`` rows, page copies."""
        if self.device.type == "cuda":
            self._sampler.warm_up(most)
            self.pool.pull_pages(self.pool, [0], [0])

    # -- steps -------------------------------------------------------------------------------------

    def pools(self) -> list[PoolHandle]:
        return [self.pool.handle]

    def write(self, plan: StepPlan) -> StepBody:
        """Check a plan and put it into the header. Raises: KVPageError, EngineError."""
        self.limits.check(plan)
        return self.header.write(plan)

    def step(self, plan: StepPlan) -> StepResult:
        """See interface.Engine. The chunk runs after the decode rows, apart from them."""
        return self.run(self.write(plan))

    @on_device
    def run(self, body: StepBody) -> StepResult:
        """A step from its header, on the leading rank: logits and streams to the host."""
        began = time.monotonic_ns()
        shape = self.model.shape
        logits = np.zeros((0, shape.vocab_size), np.float32)
        streams = np.zeros((0, shape.hc_mult, shape.hidden_size), np.float32)
        on_device = self._launch(body)
        if on_device is not None:
            logits, streams = (t.float().cpu().numpy() for t in on_device)
        self._finish()
        return StepResult(logits, streams, time.monotonic_ns() - began, self._scores)

    @on_device
    def run_header(self, epoch: int) -> None:
        """The step ``epoch`` as the header says it, on a rank that only follows. Raises:
        EngineError."""
        self._launch(self.header.read(epoch))
        self._finish()

    def _launch(self, body: StepBody) -> tuple[torch.Tensor, torch.Tensor] | None:
        on_device = None
        if body.num:
            on_device = self.runner.run_decode(body)
        self._scores = self.runner.run_prefill(body) if body.chunk is not None else None
        return on_device

    def step_and_draw(self, plan: StepPlan, rows: Callable[[], list[Row]]) -> list[Draw]:
        """See interface.DrawingEngine."""
        return self.run_and_draw(self.write(plan), rows)

    @on_device
    def run_and_draw(self, body: StepBody, rows: Callable[[], list[Row]]) -> list[Draw]:
        """A step from its header and its draws; ``rows`` is called while the step runs."""
        on_device = self._launch(body)
        draws: list[Draw] = []
        if on_device is not None:
            draws = self._sampler.draw(on_device[0], rows())
        self._finish()
        return draws

    @on_device
    def draw_heads(self, slots: Sequence[int], rows: list[Row]) -> list[Draw]:
        """See interface.DrawingEngine."""
        return self._sampler.draw(self._head_logits(slots), rows)

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        if self.model.comm is not None:
            self.model.comm.check()

    def _watch_abort(self) -> None:
        """End the waits for other ranks as soon as the group is told to stop."""
        comm = self.model.comm
        assert comm is not None
        while not self._closing.wait(ABORT_POLL_S):
            if self.header.is_aborted:
                log.warning("the group is told to stop: no rank waits for another any more")
                comm.abort()
                return

    def _head_logits(self, slots: Sequence[int]) -> torch.Tensor:
        for slot in slots:
            self.limits.check_slot(slot)
        streams = self.pool.read_streams(torch.tensor(slots, device=self.device))
        return self.model.logits(self.model.collapse(streams))

    @on_device
    def head(self, slots: Sequence[int]) -> F32:
        logits: F32 = self._head_logits(slots).cpu().numpy()
        return logits

    @on_device
    def run_heads(self, slots: Sequence[int]) -> None:
        """``head`` on a rank that only follows."""
        self._head_logits(slots)
        self._finish()

    @on_device
    def last_streams(self, slots: Sequence[int]) -> F32:
        for slot in slots:
            self.limits.check_slot(slot)
        index = torch.tensor(slots, dtype=torch.int64, device=self.device)
        streams: F32 = self.pool.read_streams(index).float().cpu().numpy()
        return streams

    @on_device
    def clear_slot(self, slot: int) -> None:
        self.pool.clear_slot(slot)

    # -- hand-off ----------------------------------------------------------------------------------

    @on_device
    def attach(self, peer: str, pools: Sequence[PoolHandle]) -> None:
        self._peers.attach(peer, pools)

    def detach(self, peer: str) -> None:
        self._peers.detach(peer)

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        if self.device.type != "cuda":
            yield
            return
        torch.cuda.set_device(self.device)
        if not hasattr(self._copies, "stream"):
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._copies.stream = stream
        with torch.cuda.stream(self._copies.stream):
            yield
            self._copies.stream.synchronize()

    @on_device
    def pull_pages(
        self,
        peer: str,
        source: Sequence[int],
        target: Sequence[int],
        num_tokens: Sequence[int],
        checksums: Sequence[int],
    ) -> None:
        """See interface.Engine. An empty ``checksums`` skips that check."""
        pool = self._peers.get(peer)
        with self._copying():
            self.pool.pull_pages(pool, source, target)
            if not checksums:
                return
            found = self.pool.page_checksums(target, num_tokens)
            for s, checksum, here in zip(source, checksums, found, strict=True):
                if checksum != here:
                    raise HandoffError(f"page {s} of {peer} does not match its checksum", page=s)

    @on_device
    def pull_slot(
        self, peer: str, source: int, target: int, num_tokens: int, checksum: int
    ) -> None:
        """See interface.Engine. A checksum of -1 skips that check."""
        pool = self._peers.get(peer)
        with self._copying():
            self.pool.pull_slot(pool, source, target)
            pool.check()
            if checksum != -1 and self.pool.slot_checksum(target, num_tokens) != checksum:
                raise HandoffError(
                    f"slot {source} of {peer} differs from its checksum", slot=source
                )

    @on_device
    def page_checksum(self, page: int, num_tokens: int) -> int:
        return self.pool.page_checksum(page, num_tokens)

    @on_device
    def page_checksums(self, pages: Sequence[int], num_tokens: Sequence[int]) -> list[int]:
        """``page_checksum`` of several, with one wait for the device. On a stream of its own, so
        that it may run beside steps."""
        with self._copying():
            return self.pool.page_checksums(pages, num_tokens)

    @on_device
    def slot_checksum(self, slot: int, num_tokens: int) -> int:
        return self.pool.slot_checksum(slot, num_tokens)

    @on_device
    def copy_page(self, source: int, target: int) -> None:
        self.pool.pull_page(self.pool, source, target)

    @on_device
    def copy_slot(self, source: int, target: int, num_tokens: int) -> None:
        self.pool.pull_slot(self.pool, source, target)

    @on_device
    def save_page(self, page: int, num_tokens: int) -> bytes:
        """The whole extent, dead rows too."""
        return self.pool.save_page(page)

    @on_device
    def save_slot(self, slot: int, num_tokens: int) -> bytes:
        """The whole extent, dead rows too."""
        return self.pool.save_slot(slot)

    @on_device
    def load_page(self, page: int, num_tokens: int, data: bytes) -> None:
        self.pool.load_page(page, data)

    @on_device
    def load_slot(self, slot: int, num_tokens: int, data: bytes) -> None:
        self.pool.load_slot(slot, data)

    def close(self) -> None:
        self._closing.set()
        if self._watcher is not None:
            self._watcher.join()
        self.runner.drop_graphs()
        self._peers.close()
        self.pool.close()
        if self.model.comm is not None:
            self.model.comm.close()
        self.header.close()
        unlock(self.lock)
        self.lock = -1
