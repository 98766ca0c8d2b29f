"""The GPU engine of one rank, as ``interface.Engine`` asks: plans to the runner, pages between
pools. Knows nothing of requests and sampling.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from decant.engine.gpu.layout import GpuLayout
from decant.engine.gpu.model import GpuModel
from decant.engine.gpu.pool import GpuPool
from decant.engine.gpu.runner import Runner
from decant.engine.group import unlock
from decant.engine.interface import F32, StepPlan, StepResult
from decant.engine.plan_check import PlanLimits
from decant.protocol.errors import HandoffError
from decant.protocol.messages import PoolHandle


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
        pool = GpuPool.open(mine[0], self._layout, self._device)
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
    own."""

    def __init__(
        self,
        model: GpuModel,
        pool: GpuPool,
        max_context: int,
        max_drafts: int,
        model_hash: str,
        chunk_rows: int = 2048,
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
        self.runner = Runner(model, pool, max_context, chunk_rows)
        self._peers = PeerPools(layout, self.device, pool.handle.rank)
        self._copies = threading.local()  # one stream per thread that copies
        self.lock = -1  # descriptor of the rank's file lock, held until close

    # -- steps -------------------------------------------------------------------------------------

    def pools(self) -> list[PoolHandle]:
        return [self.pool.handle]

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        """See interface.Engine. The chunk runs after the decode rows, apart from them."""
        began = time.monotonic_ns()
        self.limits.check(plan)
        shape = self.model.shape
        logits = np.zeros((0, shape.vocab_size), np.float32)
        streams = np.zeros((0, shape.hc_mult, shape.hidden_size), np.float32)
        if plan.decode:
            on_device = self.runner.decode(plan.decode)
        if plan.chunk is not None:
            self.runner.prefill(plan.chunk)
        if plan.decode:
            logits, streams = (t.float().cpu().numpy() for t in on_device)
        self._finish()
        return StepResult(logits, streams, time.monotonic_ns() - began)

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    @torch.inference_mode()
    def head(self, slots: Sequence[int]) -> F32:
        for slot in slots:
            self.limits.check_slot(slot)
        streams = self.pool.read_streams(torch.tensor(slots, device=self.device))
        logits: F32 = self.model.logits(self.model.collapse(streams)).cpu().numpy()
        return logits

    @torch.inference_mode()
    def last_streams(self, slots: Sequence[int]) -> F32:
        for slot in slots:
            self.limits.check_slot(slot)
        index = torch.tensor(slots, dtype=torch.int64, device=self.device)
        streams: F32 = self.pool.read_streams(index).float().cpu().numpy()
        return streams

    @torch.inference_mode()
    def clear_slot(self, slot: int) -> None:
        self.pool.clear_slot(slot)

    # -- hand-off ----------------------------------------------------------------------------------

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

    @torch.inference_mode()
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
        wanted: Sequence[int | None] = checksums or [None] * len(source)
        with self._copying():
            for s, t, n, checksum in zip(source, target, num_tokens, wanted, strict=True):
                self.pool.pull_page(pool, s, t)
                pool.check()
                if checksum is not None and self.pool.page_checksum(t, n) != checksum:
                    raise HandoffError(f"page {s} of {peer} does not match its checksum", page=s)

    @torch.inference_mode()
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

    @torch.inference_mode()
    def page_checksum(self, page: int, num_tokens: int) -> int:
        return self.pool.page_checksum(page, num_tokens)

    @torch.inference_mode()
    def slot_checksum(self, slot: int, num_tokens: int) -> int:
        return self.pool.slot_checksum(slot, num_tokens)

    @torch.inference_mode()
    def copy_page(self, source: int, target: int) -> None:
        self.pool.pull_page(self.pool, source, target)

    @torch.inference_mode()
    def copy_slot(self, source: int, target: int, num_tokens: int) -> None:
        self.pool.pull_slot(self.pool, source, target)

    @torch.inference_mode()
    def save_page(self, page: int, num_tokens: int) -> bytes:
        """The whole extent, dead rows too."""
        return self.pool.save_page(page)

    @torch.inference_mode()
    def save_slot(self, slot: int, num_tokens: int) -> bytes:
        """The whole extent, dead rows too."""
        return self.pool.save_slot(slot)

    @torch.inference_mode()
    def load_page(self, page: int, num_tokens: int, data: bytes) -> None:
        self.pool.load_page(page, data)

    @torch.inference_mode()
    def load_slot(self, slot: int, num_tokens: int, data: bytes) -> None:
        self.pool.load_slot(slot, data)

    def close(self) -> None:
        self.runner.drop_graphs()
        self._peers.close()
        self.pool.close()
        unlock(self.lock)
        self.lock = -1
