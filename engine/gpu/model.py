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
from decant.engine.gpu.ops import Boundary, Codes, Ops, Rows
from decant.engine.gpu.pool import GpuPool
from decant.engine.model_shape import ModelShape
from decant.kernels.layout import Part


@dataclass(frozen=True)
class Ropes:
    """Rotations of a launch: of the rows, and of the windows that they complete, by ratio."""

    plain: Tensor
    compressed: Tensor
    entries: dict[int, Tensor]


@dataclass
class GpuModel:
    """Weights of one rank and how to run them. comm: the other ranks; None: a group of one."""

    shape: ModelShape
    weights: w.Weights
    ops: Ops
    comm: Communicator | None = None

    def ropes(self, rows: Rows) -> Ropes:
        freq, compressed = self.weights.plain, self.weights.compressed
        return Ropes(
            plain.rope_rows(rows.positions, freq),
            plain.rope_rows(rows.positions, compressed),
            {r: plain.rope_rows(rows.positions, compressed, 1 - r) for r in (4, 128)},
        )

    def _joined(self, y: Tensor) -> Tensor:
        return y if self.comm is None else self.comm.all_reduce(y)

    # -- attention ---------------------------------------------------------------------------------

    def attention(
        self,
        attn: w.Attention,
        number: int,
        site: Boundary,
        rows: Rows,
        ropes: Ropes,
        pool: GpuPool,
        window: Part,
    ) -> Tensor:
        """site: the boundary before. Returns float32 [R, hidden], of this rank's heads."""
        shape, layout, ops = self.shape, pool.layout, self.ops
        rope = ropes.compressed if attn.ratio else ropes.plain
        first = ops.linear(site.given, attn.wq_kv, coded=True)
        readers = (attn.wq_b,) if attn.index_wq_b is None else (attn.wq_b, attn.index_wq_b)
        r = ops.norm(first[:, : shape.q_lora_rank], attn.q_norm, readers)
        q = ops.linear(r, attn.wq_b, coded=True).view(len(first), attn.heads, shape.head_dim)
        q = ops.store(q, first[:, shape.q_lora_rank :], attn.kv_norm, rope, rows, window)
        part, chosen = None, None
        if attn.ratio:
            part = layout.pages.keys[number]
            chosen = self._compress(attn, number, site.value, r, rope, rows, ropes, pool)
        o = ops.attend(q, rows, window, pool.pages, part, attn.sink, attn.ratio, chosen)
        z = ops.wo_a(o, rope, attn)
        return self._joined(ops.linear(z, attn.wo_b, torch.float32))

    def _compress(
        self,
        attn: w.Attention,
        number: int,
        u: Tensor,
        r: Tensor | Codes,
        rope: Tensor,
        rows: Rows,
        ropes: Ropes,
        pool: GpuPool,
    ) -> tuple[Tensor, Tensor] | None:
        """State and entries of the rows; for CSA also the entries that each row attends to."""
        layout, ops, shape = pool.layout, self.ops, self.shape
        assert attn.aux is not None and attn.compressor is not None
        aux = plain.mm_f32(u, attn.aux)
        n = 2 * attn.compressor.ape.shape[1]
        hadamard = self.weights.hadamard
        ops.compress(
            aux[:, :n], attn.compressor, ropes.entries[attn.ratio], rows, pool.slots,
            layout.slots.state[number], pool.pages, layout.pages.keys[number], hadamard,
        )  # fmt: skip
        if attn.index is None:
            return None
        assert attn.index_wq_b is not None
        m = n + 2 * attn.index.ape.shape[1]
        part = layout.pages.index[number]
        ops.compress(
            aux[:, n:m], attn.index, ropes.entries[4], rows, pool.slots,
            layout.slots.index_state[number], pool.pages, part, hadamard,
        )  # fmt: skip
        psi = ops.linear(r, attn.index_wq_b, coded=True)
        psi = psi.view(len(u), shape.index_n_heads, shape.index_head_dim)
        omega = aux[:, m : m + shape.index_n_heads]
        return ops.select(psi, omega, rope, rows, pool.pages, part, hadamard)

    # -- experts -----------------------------------------------------------------------------------

    def experts(self, ffn: w.Experts, site: Boundary, rows: Rows) -> Tensor:
        """site: the boundary before -> float32 [R, hidden]."""
        ops = self.ops
        assert site.half is not None
        both = ops.linear(site.given, ffn.shared13, coded=True)
        g = ops.swiglu(both, (ffn.shared2,))
        shared = ops.linear(g, ffn.shared2, torch.float32, coded=True)
        routed = ops.route(site.value, ffn, rows.tokens)
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
        ropes: Ropes,
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

    def embed(self, tokens: Tensor) -> Tensor:
        """All four streams begin as the embedding."""
        e = self.weights.embed.index_select(0, tokens)
        return e[:, None].expand(-1, self.shape.hc_mult, -1).contiguous()

    def trunk(
        self,
        rows: Rows,
        pool: GpuPool,
        before: Callable[[int], None] | None = None,
        after: Callable[[int], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Streams after the last layer, and the normalised input of the vocabulary. before, after:
        called with the layer's number around its attention (a chunk's window buffer)."""
        ropes = self.ropes(rows)
        rows.plan = None  # of an earlier launch with these buffers
        state: tuple[Tensor, Tensor | None, Tensor, Tensor] = self.start(self.embed(rows.tokens))
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
        state = self.start(self.mtp_input(streams, rows.tokens))
        number = layout.mtp_layer
        window = layout.slots.window[number]
        out = self.layer(mtp.layer, number, state, rows, self.ropes(rows), pool, window)
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
        rope = plain.rope_rows(rows.positions, self.weights.plain)
        window = layout.slots.window[layout.mtp_layer]
        ops.store(q, first[:, shape.q_lora_rank :], layer.attn.kv_norm, rope, rows, window)


def chunk_part(extent_bytes: int) -> Part:
    """The window part of a chunk's buffer: one extent that holds nothing else."""
    return Part(0, extent_bytes // 584, 576, 8)


def chunk_bytes(rows: int) -> int:
    """Size of a chunk's buffer for at least ``rows`` keys, in whole rows of 576 bytes."""
    rows = -(-rows // 144) * 144
    return rows * 584


__all__ = ["GpuModel", "Ropes", "chunk_bytes", "chunk_part"]
