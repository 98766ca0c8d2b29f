"""The draft engine on a device: the MTP layer, whose window ring lies in decode's slots.

As on the CPU: teacher-force the verified positions, then chain drafts with the layer's own
streams, drawn with the trunk's noise. The trunk's streams of verified positions are read from
decode's slots, which are mapped; drawn tokens stay on the device until the chain is done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decant.engine.gpu.device import on_device
from decant.engine.gpu.draws import Columns, DeviceSampler, columns
from decant.engine.gpu.engine import PeerPools
from decant.engine.gpu.header import bucket_of
from decant.engine.gpu.layout import GpuLayout
from decant.engine.gpu.model import GpuModel
from decant.engine.gpu.ops import Rows
from decant.engine.gpu.pool import GpuPool
from decant.engine.group import unlock
from decant.engine.interface import DraftSlot
from decant.engine.sampler import Row
from decant.kernels.layout import WINDOW
from decant.protocol.errors import KVPageError
from decant.protocol.messages import PoolHandle, Sampling

log = logging.getLogger("decant.engine.gpu")

I32 = NDArray[np.int32]


@dataclass
class Pass:
    """One run of the layer over [num, size] rows on static buffers. inputs int32 [4 * rows]:
    tokens after the rows, positions (-1: padding), slots, first position whose key counts. given:
    streams [rows, 4, hidden]. Outputs, of each sequence's last row: streams, logits."""

    num: int
    size: int
    inputs: Tensor
    given: Tensor
    streams: Tensor
    logits: Tensor
    run: Callable[[], None]


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
        self.layout = layout
        self._peers = PeerPools(layout, device, rank)
        self.lock = -1
        self._sampler = DeviceSampler(model.shape.vocab_size, model.shape.eos_token_id, device)
        self._no_table = torch.zeros(1, 1, dtype=torch.int32, device=device)
        self._passes: dict[tuple[str, int, int, bool, bool], Pass] = {}
        self._seen: set[tuple[str, int, int, bool, bool]] = set()
        comm = model.comm
        self._captures = device.type == "cuda" and (comm is None or comm.can_capture)

    def attach(self, peer: str, pools: Sequence[PoolHandle]) -> None:
        self.detach(peer)
        self._peers.attach(peer, pools)

    def detach(self, peer: str) -> None:
        self._passes = {k: v for k, v in self._passes.items() if k[0] != peer}
        self._seen = {k for k in self._seen if k[0] != peer}
        self._peers.detach(peer)

    def close(self) -> None:
        self._passes.clear()
        self._peers.close()
        if self.model.comm is not None:
            self.model.comm.close()
        unlock(self.lock)
        self.lock = -1

    # -- proposals ---------------------------------------------------------------------------------

    @on_device
    def propose(self, peer: str, slots: Sequence[DraftSlot]) -> list[list[int]]:
        """See interface.DraftEngine. Raises: HandoffError, KVPageError."""
        pool = self._peers.get(peer)
        self._check(pool, slots)
        if not slots:
            return []
        num = bucket_of(len(slots))
        size = max(len(s.next_tokens) for s in slots)
        rows = np.zeros((4, num, size), np.int32)
        rows[1] = -1
        for i, s in enumerate(slots):
            n = len(s.next_tokens)
            rows[0, i, :n] = s.next_tokens
            rows[1, i, :n] = np.arange(s.start, s.start + n)
            rows[2, i], rows[3, i] = s.slot, s.mtp_valid_from
        given = self._given(slots, num, size)
        streams, logits = self._forward(peer, pool, rows, self._sent(rows), given)
        depths = max(s.num_drafts for s in slots)
        drawn: list[Tensor] = []
        draw = self._drawing(slots, num) if depths else None
        ends = rows[1].max(1)  # position of each sequence's last verified row
        for depth in range(depths):
            assert draw is not None
            tokens = draw(logits, depth)
            drawn.append(tokens)
            if depth + 1 == depths:
                break
            # Every slot goes as deep as the deepest: keys beyond what a slot asked for lie at
            # positions that are written again when they are verified.
            after = np.zeros((4, num, 1), np.int32)
            after[1, :, 0] = np.where(ends >= 0, ends + 1 + depth, -1)
            after[2, :, 0], after[3, :, 0] = rows[2, :, 0], rows[3, :, 0]
            inputs = self._sent(after)
            inputs[:num] = tokens
            streams, logits = self._forward(peer, pool, after, inputs, streams)
        pool.check()
        if not drawn:
            return [[] for _ in slots]
        found = torch.stack(drawn, 1).cpu().tolist()
        return [found[i][: s.num_drafts] for i, s in enumerate(slots)]

    def _sent(self, rows: I32) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(rows).reshape(-1)).to(self.device)

    def _given(self, slots: Sequence[DraftSlot], num: int, size: int) -> Tensor | None:
        """Streams that came with the proposal, bf16 [num * size, 4, hidden]; None: they are in the
        slots."""
        shape = slots[0].streams.shape[1:]
        if shape[1] == 0:
            return None
        given = np.zeros((num, size, *shape), np.float32)
        for i, s in enumerate(slots):
            given[i, : len(s.next_tokens)] = s.streams
        return torch.from_numpy(given.reshape(-1, *shape)).to(self.device, torch.bfloat16)

    def _drawing(self, slots: Sequence[DraftSlot], num: int) -> Callable[[Tensor, int], Tensor]:
        """(logits [num, vocab], depth) -> token ids int32 [num], on the device."""
        rows = []
        for s in slots:
            sampling = Sampling(
                seed=s.seed, temperature=s.temperature, top_p=s.top_p, top_k=s.top_k, min_p=s.min_p
            )
            rows.append(Row(sampling, s.choice, s.start + len(s.next_tokens) + 1, 0))
        rows += [Row(Sampling(temperature=0.0), 0, 0, 0)] * (num - len(rows))
        last = self.model.shape.vocab_size - 1
        if not self._sampler.use_kernel:

            def on_host(logits: Tensor, depth: int) -> Tensor:
                here = [Row(r.sampling, r.choice, r.position + depth, 0) for r in rows]
                ids = [d.token_id for d in self._sampler.draw(logits, here)]
                return torch.tensor(ids, dtype=torch.int32).clamp(0, last)

            return on_host
        given = columns(rows, self.device)

        def on_device(logits: Tensor, depth: int) -> Tensor:
            here = Columns(**{**vars(given), "positions": given.positions + depth})
            return self._sampler.tokens(logits, here).clamp(0, last)

        return on_device

    # -- passes ------------------------------------------------------------------------------------

    def _forward(
        self, peer: str, pool: GpuPool, rows: I32, inputs: Tensor, given: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Streams and logits of each sequence's last row. rows: [4, num, size] on the host, inputs
        the same on the device. given: streams of all rows; None: they are in the slots.

        A shape runs eagerly the first time (compiles, makes scratch), then as a graph."""
        _, num, size = rows.shape
        hidden = bool((rows[3] > np.maximum(rows[1] - WINDOW + 1, 0)).any())
        key = (peer, num, size, given is None, hidden)
        found = self._passes.get(key)
        if found is None and self._captures and key in self._seen:
            found = self._passes[key] = self._capture(pool, num, size, given is None, hidden)
        if found is None:
            self._seen.add(key)
            return self._run(pool, inputs, given, num, size, hidden)
        found.inputs.copy_(inputs)
        if given is not None:
            found.given.copy_(given)
        found.run()
        return found.streams, found.logits

    def _run(
        self,
        pool: GpuPool,
        inputs: Tensor,
        given: Tensor | None,
        num: int,
        size: int,
        hidden: bool,
    ) -> tuple[Tensor, Tensor]:
        tokens, positions, owner, holes = inputs.view(4, num * size)
        if given is None:
            given = pool.read_recent(owner, positions)
        rows = Rows(
            tokens=tokens,
            positions=positions,
            slots=owner,
            tables=self._no_table,
            per_sequence=size,
            most=0,
            ring_of_row=owner,
            rings=pool.slots,
            ring_tables=self._no_table,
            valid_from=holes if hidden else None,
        )
        streams, h = self.model.run_mtp(rows, given, pool)
        if size > 1:
            count = (positions.view(num, size) >= 0).sum(1)
            at = torch.arange(num, device=self.device) * size + (count - 1).clamp(min=0)
            streams, h = streams.index_select(0, at), h.index_select(0, at)
        return streams, self.model.logits(h)

    def _capture(self, pool: GpuPool, num: int, size: int, in_slots: bool, hidden: bool) -> Pass:
        count, shape = num * size, self.model.shape
        inputs = torch.zeros(4 * count, dtype=torch.int32, device=self.device)
        inputs[count : 2 * count] = -1
        given = torch.zeros(
            0 if in_slots else count, shape.hc_mult, shape.hidden_size,
            dtype=torch.bfloat16, device=self.device,
        )  # fmt: skip
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            streams, logits = self._run(
                pool, inputs, None if in_slots else given, num, size, hidden
            )
        return Pass(num, size, inputs, given, streams, logits, graph.replay)

    def warm_up(self, max_batch: int) -> None:
        """Compile what proposals will run, on a small pool of our own. Ranks do it together."""
        if self.device.type != "cuda":
            return
        pool = GpuPool.create("", self.layout, 1, bucket_of(max_batch), self.device)
        name = "warm-up"
        streams = np.zeros((1, self.model.shape.hc_mult, 0), np.float32)
        self._peers.attach_pool(name, pool)
        try:
            num = 1
            while num <= pool.handle.num_slots:
                slots = [DraftSlot(i, 5, (7,), streams, self.max_drafts) for i in range(num)]
                self.propose(name, slots)
                num *= 2
        finally:
            self.detach(name)

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
            width = s.streams.shape[2] if s.streams.ndim == 3 else -1
            if s.streams.shape[:2] != (rows, shape.hc_mult) or width not in (0, shape.hidden_size):
                raise KVPageError(f"slot {s.slot}: streams of shape {s.streams.shape}")
            if width != slots[0].streams.shape[2]:
                raise KVPageError("streams of some slots only")
            if not 0 <= s.num_drafts <= self.max_drafts:
                raise KVPageError(f"slot {s.slot}: {s.num_drafts} drafts")
            if not all(0 <= t < shape.vocab_size for t in s.next_tokens):
                raise KVPageError(f"slot {s.slot}: a token id is outside the vocabulary")
