"""The CPU engine: one TP rank's trunk and pool, as ``interface.Engine`` asks. Knows nothing of
requests, sampling or other ranks (``parallel.py`` joins ranks to a group).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import torch

from decant.engine.group import unlock
from decant.engine.interface import F32, PrefillChunk, Scores, StepPlan, StepResult
from decant.engine.kv_layout import KVLayout
from decant.engine.plan_check import PlanLimits
from decant.engine.pool import Pool
from decant.engine.reference.model import Model
from decant.engine.reference.rows import RowPlanner
from decant.engine.scoring import score_chunk
from decant.protocol.errors import HandoffError
from decant.protocol.messages import PoolHandle


class PeerPools:
    """Mapped pools of peers by name. Thread-safe: a pull may run beside a step."""

    def __init__(self, layout: KVLayout, rank: int) -> None:
        self._layout, self._rank = layout, rank
        self._lock = threading.Lock()
        self._pools: dict[str, Pool] = {}

    def attach(self, peer: str, handles: Sequence[PoolHandle]) -> None:
        """Map the peer's pool of our rank. Raises: HandoffError."""
        mine = [h for h in handles if h.rank == self._rank]
        if len(mine) != 1:
            raise HandoffError(f"peer {peer} offers no pool of rank {self._rank}")
        pool = Pool.open(mine[0], self._layout)
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

    def get(self, peer: str) -> Pool:
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


class CpuEngine:
    """A rank of the CPU engine.

    model: the rank's weights. pool: its own pool. max_context: tokens a sequence may have.
    Every call but the pulls belongs to one thread."""

    def __init__(
        self, model: Model, pool: Pool, max_context: int, max_drafts: int, model_hash: str
    ) -> None:
        shape, layout = model.shape, pool.layout
        self.model, self.pool = model, pool
        self.vocab_size, self.hidden_size = shape.vocab_size, shape.hidden_size
        self.max_context, self.max_drafts = max_context, max_drafts
        self.page_tokens = layout.page_tokens
        self.num_pages, self.num_slots = pool.handle.num_pages, pool.handle.num_slots
        self.model_hash, self.kv_layout_hash = model_hash, layout.hash
        self.eos_token_id = shape.eos_token_id
        heads = shape.num_attention_heads
        if model.trunk:
            heads = len(model.trunk[0].attn.sink)
        self.planner = RowPlanner(layout, heads)
        self.mtp_planner = RowPlanner(layout, heads, mtp=True) if model.mtp else None
        self.limits = PlanLimits(
            self.num_pages, self.num_slots, self.page_tokens, max_context, max_drafts,
            self.vocab_size,
        )  # fmt: skip
        self._peers = PeerPools(layout, pool.handle.rank)
        stride = layout.slot_stride // (shape.hc_mult * shape.hidden_size)
        self._streams_stride = stride
        self.lock = -1  # descriptor of the rank's file lock, held until close

    # -- steps -------------------------------------------------------------------------------------

    def pools(self) -> list[PoolHandle]:
        return [self.pool.handle]

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        """See interface.Engine. Decode rows and chunk go through the model as one batch."""
        began = time.monotonic_ns()
        self.limits.check(plan)
        shape = self.model.shape
        if not plan.decode and plan.chunk is None:
            empty = np.zeros((0, shape.hc_mult, shape.hidden_size), np.float32)
            return StepResult(np.zeros((0, shape.vocab_size), np.float32), empty)
        rows = self.planner.plan(plan.decode, plan.chunk)
        streams = self.model.run_trunk(rows, self.pool)
        chosen: list[int] = []
        last: list[int] = []
        slots: list[int] = []
        scores: Scores | None = None
        if plan.decode:
            size = rows.segments[0].size
            for i, s in enumerate(plan.decode):
                chosen.extend(range(i * size, i * size + len(s.token_ids)))
                last.append(i * size + len(s.token_ids) - 1)
                slots.append(s.slot)
        if plan.chunk is not None:
            begin, count = rows.chunk_rows
            own = streams[begin : begin + count]
            self._write_mtp_keys(plan.chunk, own)
            scores = score_chunk(
                plan.chunk, lambda first, end: self.model.logits(own[first:end]).numpy()
            )
            last.append(begin + count - 1)
            slots.append(plan.chunk.slot)
        index = torch.tensor(slots) * self._streams_stride
        kept = streams.index_select(0, torch.tensor(last)).flatten(1)
        self.pool.rows("streams").index_copy_(0, index, kept)
        if chosen:
            out = streams.index_select(0, torch.tensor(chosen))
            logits = self.model.logits(out)
        else:
            out, logits = streams[:0], torch.zeros(0, shape.vocab_size)
        return StepResult(logits.numpy(), out.numpy(), time.monotonic_ns() - began, scores)

    def _write_mtp_keys(self, chunk: PrefillChunk, streams: torch.Tensor) -> None:
        """MTP window keys of positions start - 1 .. end - 2; that of end - 1 waits for its token.

        Only positions that a later query can see are computed."""
        if self.mtp_planner is None:
            return
        tokens = np.asarray(chunk.token_ids, np.int64)
        before = streams[:-1]
        start = chunk.start
        if chunk.start > 0:
            slot = torch.tensor([chunk.slot * self._streams_stride])
            old = self.pool.rows("streams").index_select(0, slot).view(1, *streams.shape[1:])
            before, start = torch.cat([old, before]), start - 1
        else:
            tokens = tokens[1:]
        keep = min(len(tokens), self.model.shape.sliding_window)
        if keep == 0:
            return
        start += len(tokens) - keep
        keys = PrefillChunk(chunk.slot, start, tokens[-keep:].astype(np.int32), ())
        plan = self.mtp_planner.plan((), keys)
        padded = torch.zeros(plan.num, *streams.shape[1:])
        padded[:keep] = before[-keep:]
        self.model.write_mtp_keys(plan, padded, self.pool)

    @torch.inference_mode()
    def head(self, slots: Sequence[int]) -> F32:
        logits: F32 = self.model.logits(torch.from_numpy(self.last_streams(slots))).numpy()
        return logits

    def last_streams(self, slots: Sequence[int]) -> F32:
        for slot in slots:
            self.limits.check_slot(slot)
        shape = self.model.shape
        rows = np.asarray(slots, np.int64) * self._streams_stride
        matrix = self.pool.rows("streams").numpy()
        kept: F32 = matrix[rows].reshape(len(rows), shape.hc_mult, shape.hidden_size)
        return kept

    def clear_slot(self, slot: int) -> None:
        self.pool.clear_slot(slot)

    # -- hand-off ----------------------------------------------------------------------------------

    def attach(self, peer: str, pools: Sequence[PoolHandle]) -> None:
        self._peers.attach(peer, pools)

    def detach(self, peer: str) -> None:
        self._peers.detach(peer)

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
        for s, t, n, checksum in zip(source, target, num_tokens, wanted, strict=True):
            self.pool.pull_page(pool, s, t, n)
            pool.check()
            if checksum is not None and self.pool.page_checksum(t, n) != checksum:
                raise HandoffError(f"page {s} of {peer} does not match its checksum", page=s)

    def pull_slot(
        self, peer: str, source: int, target: int, num_tokens: int, checksum: int
    ) -> None:
        """See interface.Engine. A checksum of -1 skips that check."""
        pool = self._peers.get(peer)
        self.pool.pull_slot(pool, source, target, num_tokens)
        pool.check()
        if checksum != -1 and self.pool.slot_checksum(target, num_tokens) != checksum:
            raise HandoffError(f"slot {source} of {peer} does not match its checksum", slot=source)

    def page_checksum(self, page: int, num_tokens: int) -> int:
        return self.pool.page_checksum(page, num_tokens)

    def slot_checksum(self, slot: int, num_tokens: int) -> int:
        return self.pool.slot_checksum(slot, num_tokens)

    def copy_page(self, source: int, target: int) -> None:
        self.pool.pull_page(self.pool, source, target, self.page_tokens)

    def copy_slot(self, source: int, target: int, num_tokens: int) -> None:
        self.pool.pull_slot(self.pool, source, target, num_tokens)

    def save_page(self, page: int, num_tokens: int) -> bytes:
        return self.pool.save_page(page, num_tokens)

    def save_slot(self, slot: int, num_tokens: int) -> bytes:
        return self.pool.save_slot(slot, num_tokens)

    def load_page(self, page: int, num_tokens: int, data: bytes) -> None:
        self.pool.load_page(page, num_tokens, data)

    def load_slot(self, slot: int, num_tokens: int, data: bytes) -> None:
        self.pool.load_slot(slot, num_tokens, data)

    def close(self) -> None:
        self._peers.close()
        self.pool.close()
        unlock(self.lock)
        self.lock = -1
