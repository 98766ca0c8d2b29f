"""The trunk and the MTP layer as a fixed sequence of operations on rows (``ops.Rows``).

The rows' numbers (tokens, positions, slots, pages) are device tensors and no branch looks at their
values, so a decode step can be captured as a graph. Streams are bf16 [rows, 4, hidden].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from decant.engine.gpu import plain
from decant.engine.gpu import weights as w
from decant.engine.gpu.communicator import Communicator
from decant.engine.gpu.layout import GpuLayout
from decant.engine.gpu.ops import Begun, Boundary, Codes, Ops, Projected, Queries, Rows
from decant.engine.gpu.pool import GpuPool
from decant.engine.model_shape import ModelShape
from decant.kernels.layout import Part


@dataclass
class GpuModel:
    """Weights of one rank and how to run them. comm: the other ranks; None: a group of one."""

    shape: ModelShape
    weights: w.Weights
    ops: Ops
    comm: Communicator | None = None

    def _joined(self, y: Tensor) -> Tensor:
        return y if self.comm is None else self.comm.all_reduce(y)

    # -- attention ---------------------------------------------------------------------------------

    def attention(
        self,
        attn: w.Attention,
        number: int,
        site: Boundary,
        rows: Rows,
        ropes: Begun,
        pool: GpuPool,
        window: Part,
    ) -> Tensor:
        """site: the boundary before. Returns float32 [R, hidden], of this rank's heads."""
        shape, layout, ops = self.shape, pool.layout, self.ops
        rope = ropes.compressed if attn.ratio else ropes.plain
        u, aux = site.value, None
        with ops.beside(len(u)):
            if attn.aux is not None:
                aux = plain.mm_f32(u, attn.aux)
        first = ops.linear(site.given, attn.wq_kv, coded=True)
        readers = (attn.wq_b,) if attn.index_wq_b is None else (attn.wq_b, attn.index_wq_b)
        r = ops.norm(first[:, : shape.q_lora_rank], attn.q_norm, readers)
        q, psi = self._queries(attn, r)
        compressors, queries = self._projected(attn, number, aux, psi, rope, layout)
        ops.join(len(u))
        q, queries = ops.row_work(
            q, first[:, shape.q_lora_rank :], attn.kv_norm, rope,
            ropes.entries[attn.ratio] if attn.ratio else None, rows, window, pool.slots, pool.pages,
            self.weights.hadamard, compressors, queries,
        )  # fmt: skip
        part, chosen = None, None
        if attn.ratio:
            part = layout.pages.keys[number]
        if queries is not None:
            index = layout.pages.index[number]
            chosen = ops.select(queries, rows, pool.pages, index, self.weights.hadamard)
        o = ops.attend(q, rows, window, pool.pages, part, attn.sink, attn.ratio, chosen)
        z = ops.wo_a(o, rope, attn)
        return self._joined(ops.linear(z, attn.wo_b, torch.float32))

    def _queries(self, attn: w.Attention, r: Tensor | Codes) -> tuple[Tensor, Tensor | None]:
        """q bf16 [R, H, 512] and, in CSA layers, the indexer's [R, heads, 128]; of one product if
        r came as codes (then they are parts of longer rows)."""
        shape, ops, psi = self.shape, self.ops, None
        if isinstance(r, Codes) and attn.wq_both is not None:
            both = ops.linear(r, attn.wq_both, coded=True)
            cut = attn.heads * shape.head_dim
            q, psi = both[:, :cut], both[:, cut:]
        else:
            q = ops.linear(r, attn.wq_b, coded=True)
            if attn.index_wq_b is not None:
                psi = ops.linear(r, attn.index_wq_b, coded=True)
        if psi is not None:
            psi = psi.view(len(q), shape.index_n_heads, shape.index_head_dim)
        return q.view(len(q), attn.heads, shape.head_dim), psi

    def _projected(
        self,
        attn: w.Attention,
        number: int,
        aux: Tensor | None,
        psi: Tensor | None,
        rope: Tensor,
        layout: GpuLayout,
    ) -> tuple[list[Projected], Queries | None]:
        """Inputs of the layer's compressors, and of the indexer in CSA layers; aux: products of
        their bf16 weights."""
        if aux is None:
            return [], None
        shape = self.shape
        assert attn.compressor is not None
        n = 2 * attn.compressor.ape.shape[1]
        state, part = layout.slots.state[number], layout.pages.keys[number]
        found = [Projected(aux[:, :n], attn.compressor, state, part)]
        if attn.index is None:
            return found, None
        assert psi is not None
        m = n + 2 * attn.index.ape.shape[1]
        state, part = layout.slots.index_state[number], layout.pages.index[number]
        found.append(Projected(aux[:, n:m], attn.index, state, part))
        return found, Queries(psi, aux[:, m : m + shape.index_n_heads], rope)

    # -- experts -----------------------------------------------------------------------------------

    def experts(self, ffn: w.Experts, site: Boundary, rows: Rows) -> Tensor:
        """site: the boundary before -> float32 [R, hidden]."""
        ops = self.ops
        assert site.half is not None
        num = len(site.value)
        with ops.beside(num):
            both = ops.linear(site.given, ffn.shared13, coded=True)
            g = ops.swiglu(both, (ffn.shared2,))
            shared = ops.linear(g, ffn.shared2, torch.float32, coded=True)
        routed = ops.route(site.value, ffn, rows.tokens)
        ops.join(num)
        return self._joined(ops.experts(site.value, site.half, ffn, routed, shared))

    # -- the whole ---------------------------------------------------------------------------------

    def start(self, streams: Tensor) -> tuple[Tensor, None, Tensor, Tensor]:
        """The state between sites before the first: streams, no output, post and comb."""
        rows, s = len(streams), self.shape.hc_mult
        new = streams.new_empty  # the first boundary has nothing to add and reads neither
        f32 = torch.float32
        return streams, None, new(rows, s, dtype=f32), new(rows, s, s, dtype=f32)

    def layer(
        self,
        layer: w.Layer,
        number: int,
        state: tuple[Tensor, Tensor | None, Tensor, Tensor],
        rows: Rows,
        ropes: Begun,
        pool: GpuPool,
        window: Part,
        before_attention: Callable[[], None] | None = None,
        after_attention: Callable[[], None] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """state: streams, the last sub-layer's output (added by the next boundary), post, comb."""
        ops = self.ops
        readers = (layer.attn.wq_kv,)
        site = ops.boundary(*state, layer.hc_attn, layer.attn_norm, readers=readers)
        if before_attention is not None:
            before_attention()
        y = self.attention(layer.attn, number, site, rows, ropes, pool, window)
        if after_attention is not None:
            after_attention()
        assert layer.ffn is not None
        site = ops.boundary(
            site.streams, y, site.post, site.comb, layer.hc_ffn, layer.ffn_norm, half=True,
            readers=(layer.ffn.shared13,),
        )  # fmt: skip
        return site.streams, self.experts(layer.ffn, site, rows), site.post, site.comb

    def trunk(
        self,
        rows: Rows,
        pool: GpuPool,
        before: Callable[[int], None] | None = None,
        after: Callable[[int], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Streams after the last layer, and the normalised input of the vocabulary. before, after:
        called with the layer's number around its attention (a chunk's window buffer)."""
        all_weights = self.weights
        ropes = self.ops.begin(rows, all_weights.embed, all_weights.plain, all_weights.compressed)
        rows.plan = None  # of an earlier launch with these buffers
        state: tuple[Tensor, Tensor | None, Tensor, Tensor] = self.start(ropes.streams)
        for number, layer in enumerate(self.weights.layers):
            window = pool.layout.slots.window[number]
            state = self.layer(
                layer, number, state, rows, ropes, pool, self._window(window, rows, pool),
                None if before is None else lambda n=number: before(n),  # type: ignore[misc]
                None if after is None else lambda n=number: after(n),  # type: ignore[misc]
            )  # fmt: skip
        assert self.weights.head is not None
        head = self.weights.head
        last = self.ops.boundary(*state, head.site, head.norm)
        return last.streams, last.value

    @staticmethod
    def _window(window: Part, rows: Rows, pool: GpuPool) -> Part:
        """The ring of the slots, or the only part of a chunk's buffer."""
        if rows.rings.data_ptr() == pool.slots.data_ptr():
            return window
        return chunk_part(rows.rings.shape[1])

    def logits(self, h: Tensor) -> Tensor:
        """h bf16 [R, hidden] -> float32 [R, vocab], on every rank."""
        share = plain.mm_f32(h, self.weights.vocabulary)
        return share if self.comm is None else self.comm.all_gather(share)

    def collapse(self, streams: Tensor, head: w.Head | None = None) -> Tensor:
        """Final streams -> normalised input of the vocabulary."""
        head = head or self.weights.head
        assert head is not None
        return self.ops.boundary(*self.start(streams), head.site, head.norm).value

    # -- MTP ---------------------------------------------------------------------------------------

    def mtp_input(self, streams: Tensor, next_tokens: Tensor) -> Tensor:
        """e_proj norm(embed) + h_proj norm(stream), per stream: bf16 [R, 4, hidden]."""
        mtp = self.weights.mtp
        assert mtp is not None
        ops, f32 = self.ops, torch.float32
        e = ops.norm(self.weights.embed.index_select(0, next_tokens), mtp.enorm, (mtp.e_proj,))
        a = ops.linear(e, mtp.e_proj, f32, coded=True)
        h = ops.norm(streams.flatten(0, 1), mtp.hnorm, (mtp.h_proj,))
        b = ops.linear(h, mtp.h_proj, f32, coded=True).view(streams.shape)
        return (b + a[:, None]).bfloat16()

    def run_mtp(self, rows: Rows, streams: Tensor, pool: GpuPool) -> tuple[Tensor, Tensor]:
        """One pass: its own streams, and the normalised input of the vocabulary. rows.tokens are
        the tokens after the rows' positions."""
        mtp, layout = self.weights.mtp, pool.layout
        assert mtp is not None
        streams = self.mtp_input(streams, rows.tokens)
        state = self.start(streams)
        number = layout.mtp_layer
        window = layout.slots.window[number]
        rope = self.ops.rope(rows.positions, self.weights.plain)
        ropes = Begun(streams, rope, rope, {})  # its only layer compresses nothing
        out = self.layer(mtp.layer, number, state, rows, ropes, pool, window)
        last = self.ops.boundary(*out, mtp.head.site, mtp.head.norm)
        return last.streams, last.value

    def write_mtp_keys(self, rows: Rows, streams: Tensor, pool: GpuPool) -> None:
        """Only the window keys of the MTP layer (prefill): no attention, no experts."""
        mtp, layout, ops = self.weights.mtp, pool.layout, self.ops
        assert mtp is not None
        layer = mtp.layer
        state = self.start(self.mtp_input(streams, rows.tokens))
        readers = (layer.attn.wq_kv,)
        site = ops.boundary(*state, layer.hc_attn, layer.attn_norm, readers=readers)
        first = ops.linear(site.given, layer.attn.wq_kv, coded=True)
        shape = self.shape
        q = first.new_zeros(len(first), 4, shape.head_dim)
        rope = ops.rope(rows.positions, self.weights.plain)
        window = layout.slots.window[layout.mtp_layer]
        ops.store(q, first[:, shape.q_lora_rank :], layer.attn.kv_norm, rope, rows, window)


def chunk_part(extent_bytes: int) -> Part:
    """The window part of a chunk's buffer: one extent that holds nothing else."""
    return Part(0, extent_bytes // 584, 576, 8)


def chunk_bytes(rows: int) -> int:
    """Size of a chunk's buffer for at least ``rows`` keys, in whole rows of 576 bytes."""
    rows = -(-rows // 144) * 144
    return rows * 584


__all__ = ["GpuModel", "chunk_bytes", "chunk_part"]
