"""The draft engine on a device: the MTP layer, whose window ring lies in decode's slots.

As on the CPU: teacher-force the verified positions, then chain drafts with the layer's own
streams, drawn by the trunk's sampler with the trunk's noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from decant.engine.gpu.engine import PeerPools
from decant.engine.gpu.layout import GpuLayout
from decant.engine.gpu.model import GpuModel
from decant.engine.gpu.ops import Rows
from decant.engine.gpu.pool import GpuPool
from decant.engine.group import unlock
from decant.engine.interface import DraftSlot
from decant.engine.sampler import Row, Sampler
from decant.kernels.layout import WINDOW
from decant.protocol.errors import KVPageError
from decant.protocol.messages import PoolHandle, Sampling


class GpuDraftEngine:
    """See interface.DraftEngine. One thread calls it."""

    def __init__(
        self,
        model: GpuModel,
        layout: GpuLayout,
        device: torch.device,
        max_drafts: int,
        model_hash: str,
        rank: int = 0,
    ) -> None:
        assert model.weights.mtp is not None
        self.model, self.model_hash, self.max_drafts = model, model_hash, max_drafts
        self.kv_layout_hash, self.device = layout.hash, device
        self._peers = PeerPools(layout, device, rank)
        self.lock = -1
        self._sampler = Sampler(model.shape.vocab_size, model.shape.eos_token_id)
        self._no_table = torch.zeros(1, 1, dtype=torch.int32, device=device)

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
        size = max(len(s.next_tokens) for s in slots)
        tokens = np.zeros((len(slots), size), np.int32)
        positions = np.full((len(slots), size), -1, np.int32)
        given = np.zeros((len(slots), size, *slots[0].streams.shape[1:]), np.float32)
        for i, s in enumerate(slots):
            n = len(s.next_tokens)
            tokens[i, :n], given[i, :n] = s.next_tokens, s.streams
            positions[i, :n] = np.arange(s.start, s.start + n)
        x = torch.from_numpy(given.reshape(-1, *given.shape[2:])).to(self.device, torch.bfloat16)
        streams, h = self._forward(pool, slots, tokens, positions, x)
        at = [i * size + len(s.next_tokens) - 1 for i, s in enumerate(slots)]
        for depth in range(max(s.num_drafts for s in slots)):
            keep = [n for n, i in enumerate(live) if slots[i].num_drafts > depth]
            live = [live[n] for n in keep]
            index = torch.tensor([at[n] for n in keep], device=self.device)
            asked = [slots[i] for i in live]
            drawn = self._draw(h.index_select(0, index), asked, depth)
            for i, token in zip(live, drawn, strict=True):
                drafts[i].append(token)
            if not any(slots[i].num_drafts > depth + 1 for i in live):
                break
            own = streams.index_select(0, index)
            next_tokens = np.array(drawn, np.int32)[:, None]
            places = [[s.start + len(s.next_tokens) + depth] for s in asked]
            streams, h = self._forward(pool, asked, next_tokens, np.array(places, np.int32), own)
            at = list(range(len(asked)))
        pool.check()
        return drafts

    def _forward(
        self,
        pool: GpuPool,
        slots: Sequence[DraftSlot],
        tokens: np.ndarray,
        positions: np.ndarray,
        streams: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """tokens, positions int32 [slots, rows]; streams bf16 [slots * rows, 4, hidden]."""

        def sent(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array.reshape(-1))).to(self.device)

        size = positions.shape[1]
        owner = sent(np.repeat(np.array([s.slot for s in slots], np.int32), size))
        holes = np.repeat(np.array([s.mtp_valid_from for s in slots], np.int32), size)
        hidden = bool((holes > np.maximum(positions.reshape(-1) - WINDOW + 1, 0)).any())
        rows = Rows(
            tokens=sent(tokens),
            positions=sent(positions),
            slots=owner,
            tables=self._no_table,
            per_sequence=size,
            most=0,
            ring_of_row=owner,
            rings=pool.slots,
            ring_tables=self._no_table,
            valid_from=sent(holes) if hidden else None,
        )
        return self.model.run_mtp(rows, streams, pool)

    def _draw(self, h: Tensor, slots: list[DraftSlot], depth: int) -> list[int]:
        logits = self.model.logits(h).cpu().numpy()
        rows = []
        for s in slots:
            sampling = Sampling(
                seed=s.seed, temperature=s.temperature, top_p=s.top_p, top_k=s.top_k, min_p=s.min_p
            )
            position = s.start + len(s.next_tokens) + 1 + depth
            rows.append(Row(sampling, s.choice, position, 0))
        draws = self._sampler.draw(logits, rows)
        return [min(max(d.token_id, 0), self.model.shape.vocab_size - 1) for d in draws]

    def _check(self, pool: GpuPool, slots: Sequence[DraftSlot]) -> None:
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
