"""The draft engine of one rank: the MTP layer, whose window ring lies in decode's slots.

Per slot: teacher-force the verified positions (so that the ring holds keys of real states), then
chain drafts with the layer's own streams. Draft tokens are drawn by the trunk's sampler with the
trunk's noise, so that they agree with what decode will draw as often as the distributions do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decant.engine.cpu_engine import PeerPools
from decant.engine.group import unlock
from decant.engine.interface import DraftSlot, SlotRows
from decant.engine.kv_layout import KVLayout
from decant.engine.pool import Pool
from decant.engine.reference.model import Model
from decant.engine.reference.rows import RowPlanner
from decant.engine.sampler import Row, Sampler
from decant.protocol.errors import KVPageError
from decant.protocol.messages import PoolHandle, Sampling


class CpuDraftEngine:
    """See interface.DraftEngine. One thread calls it."""

    def __init__(
        self, model: Model, layout: KVLayout, max_drafts: int, model_hash: str, rank: int = 0
    ) -> None:
        assert model.mtp is not None
        self.model, self.model_hash, self.max_drafts = model, model_hash, max_drafts
        self.kv_layout_hash = layout.hash
        self._peers = PeerPools(layout, rank)
        self.lock = -1  # descriptor of the rank's file lock, held until close
        self._planner = RowPlanner(layout, len(model.mtp.layer.attn.sink), mtp=True)
        self._sampler = Sampler(model.shape.vocab_size, model.shape.eos_token_id)

    def attach(self, peer: str, pools: Sequence[PoolHandle]) -> None:
        self._peers.attach(peer, pools)

    def detach(self, peer: str) -> None:
        self._peers.detach(peer)

    def close(self) -> None:
        self._peers.close()
        unlock(self.lock)
        self.lock = -1

    @torch.inference_mode()
    def propose(self, peer: str, slots: Sequence[DraftSlot]) -> list[list[int]]:
        """See interface.DraftEngine. Raises: HandoffError, KVPageError."""
        pool = self._peers.get(peer)
        self._check(pool, slots)
        drafts: list[list[int]] = [[] for _ in slots]
        live = list(range(len(slots)))
        if not live:
            return drafts
        rows = [SlotRows(s.slot, s.start, s.next_tokens, ()) for s in slots]
        given = [torch.tensor(s.streams) for s in slots]  # copied: frames are read-only
        streams, size = self.forward(pool, slots, rows, given)
        at = [i * size + len(s.next_tokens) - 1 for i, s in enumerate(slots)]
        for depth in range(max(s.num_drafts for s in slots)):
            keep = [n for n, i in enumerate(live) if slots[i].num_drafts > depth]
            live = [live[n] for n in keep]
            own = streams.index_select(0, torch.tensor([at[n] for n in keep]))
            tokens = self._draw(own, [slots[i] for i in live], depth)
            for i, token in zip(live, tokens, strict=True):
                drafts[i].append(token)
            if not any(slots[i].num_drafts > depth + 1 for i in live):
                break
            # Slot t + depth + 1 of every sequence: its own streams and the token just drafted.
            asked = [slots[i] for i in live]
            rows = [
                SlotRows(s.slot, s.start + len(s.next_tokens) + depth, (t,), ())
                for s, t in zip(asked, tokens, strict=True)
            ]
            streams, size = self.forward(pool, asked, rows, list(own[:, None]))
            at = [n * size for n in range(len(asked))]
        pool.check()
        return drafts

    def forward(
        self, pool: Pool, slots: Sequence[DraftSlot], rows: list[SlotRows], streams: list[Tensor]
    ) -> tuple[Tensor, int]:
        """One MTP pass. streams: per slot [rows, S, hidden]. Returns all output rows
        [.., S, hidden] and the rows per slot."""
        plan = self._planner.plan(rows, None, [s.mtp_valid_from for s in slots])
        size = plan.segments[0].size
        given = torch.zeros(plan.num, *streams[0].shape[1:])
        for i, x in enumerate(streams):
            given[i * size : i * size + len(x)] = x
        return self.model.run_mtp(plan, given, pool), size

    def _draw(self, streams: Tensor, slots: list[DraftSlot], depth: int) -> list[int]:
        assert self.model.mtp is not None
        logits = self.model.logits(streams, self.model.mtp.head).numpy()
        rows = []
        for s in slots:
            sampling = Sampling(
                seed=s.seed, temperature=s.temperature, top_p=s.top_p, top_k=s.top_k, min_p=s.min_p
            )
            # Slot t (its token is at t + 1) predicts the token of t + 2.
            position = s.start + len(s.next_tokens) + 1 + depth
            rows.append(Row(sampling, s.choice, position, 0))
        draws = self._sampler.draw(logits, rows)
        return [min(max(d.token_id, 0), self.model.shape.vocab_size - 1) for d in draws]

    def _check(self, pool: Pool, slots: Sequence[DraftSlot]) -> None:
        shape = self.model.shape
        seen = set()
        for s in slots:
            if not 0 <= s.slot < pool.handle.num_slots or s.slot in seen:
                raise KVPageError(f"slot {s.slot} is not one of {pool.handle.num_slots}, or twice")
            seen.add(s.slot)
            rows = len(s.next_tokens)
            if not 1 <= rows <= 1 + self.max_drafts or s.start < 0:
                raise KVPageError(f"slot {s.slot}: {rows} verified positions from {s.start}")
            if s.streams.shape != (rows, shape.hc_mult, shape.hidden_size):
                raise KVPageError(f"slot {s.slot}: streams of shape {s.streams.shape}")
            if not 0 <= s.num_drafts <= self.max_drafts:
                raise KVPageError(f"slot {s.slot}: {s.num_drafts} drafts")
            if not all(0 <= t < shape.vocab_size for t in s.next_tokens):
                raise KVPageError(f"slot {s.slot}: a token id is outside the vocabulary")
