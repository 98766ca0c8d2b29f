"""The attention of one layer: queries, window keys, compressors, indexer, one softmax with a sink,
inverse rotation. Reads and writes the pool through a row plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decant.engine.model_shape import ModelShape
from decant.engine.pool import Pool
from decant.engine.reference import layers, ops, products
from decant.engine.reference.rows import ENTRY_TILE, Closing, Entries, RowPlan, Segment

MAX_GATHERED_ROWS = 64  # rows whose selected entries are copied at a time


@dataclass(frozen=True)
class Rotations:
    """cos + i sin for the rows and the closing windows of a plan, for one kind of layer."""

    rows: Tensor  # [num_rows, pairs] complex
    inverse: Tensor  # conjugate
    closing: dict[int, Tensor]  # ratio -> [padded windows, pairs]


@dataclass(frozen=True)
class Keys:
    """Keys = values of one part of a softmax.

    values: [groups, columns, dim]; bias: [rows, 1, columns]; columns is a multiple of tile."""

    values: Tensor
    bias: Tensor
    tile: int


def softmax_attention(q: Tensor, parts: list[Keys], sink: Tensor) -> Tensor:
    """One softmax over all parts with a sink logit per head.

    q: [rows, heads, dim], already scaled. Rows of a group of ``values`` are consecutive.
    sink: [heads]. Returns [rows, heads, dim].

    The denominator and the weighted sum add window columns first and then tile by tile, so that
    tiles of masked columns change no bit."""
    rows, heads, dim = q.shape
    scores = []
    top = sink.expand(rows, heads)
    for part in parts:
        groups, columns, _ = part.values.shape
        s = products.scores(q.view(groups, -1, dim), part.values, part.tile)
        s = s.view(rows, heads, columns).add_(part.bias)
        top = torch.maximum(top, s.amax(-1))
        scores.append(s)
    total: Tensor | None = None
    out: Tensor | None = None
    for part, s in zip(parts, scores, strict=True):
        groups, columns, _ = part.values.shape
        p = s.sub_(top[..., None]).exp_()
        tiles = columns // part.tile
        if tiles == 1:
            sums = [p.sum(-1)]
            values = [products.bmm(p.view(groups, -1, columns), part.values).view(rows, heads, dim)]
        else:
            per_tile = p.view(rows, heads, tiles, part.tile)
            partial = per_tile.sum(-1)
            sums = [partial[..., i] for i in range(tiles)]
            left = p.view(groups, -1, tiles, part.tile).transpose(1, 2)
            left = left.reshape(groups * tiles, -1, part.tile)
            right = part.values.view(groups * tiles, part.tile, dim)
            mixed = products.bmm(left, right).view(groups, tiles, -1, dim)
            values = [mixed[:, i].reshape(rows, heads, dim) for i in range(tiles)]
        for a, b in zip(sums, values, strict=True):
            total = a if total is None else total.add_(a)
            out = b if out is None else out.add_(b)
    assert total is not None and out is not None
    total = total + (sink - top).exp_()
    return out.div_(total[..., None])


class AttentionRunner:
    """Runs the attention of any layer of a model on a pool.

    quantise: simulate the reference's rounding of activations and keys."""

    def __init__(self, shape: ModelShape, quantise: bool) -> None:
        self.shape, self.quantise = shape, quantise
        self.scale = shape.head_dim**-0.5
        n = shape.index_n_heads
        self.index_scale = (n * shape.index_head_dim) ** -0.5

    def rounded(self, x: Tensor) -> Tensor:
        """Input of an FP8 or FP4 linear."""
        return ops.round_e4m3(x, 128) if self.quantise else x

    def window_keys(self, layer: layers.Attention, kv: Tensor, rotations: Rotations) -> Tensor:
        """[rows, head_dim]: normalised, rotated, rounded (3.2)."""
        shape = self.shape
        k = ops.rms_norm(kv, shape.rms_norm_eps, layer.kv_norm)
        ops.rotate(k, rotations.rows, shape.qk_rope_head_dim)
        return ops.round_kv(k, shape.qk_rope_head_dim) if self.quantise else k

    def run(
        self,
        layer: layers.Attention,
        number: int,
        u: Tensor,
        plan: RowPlan,
        rotations: Rotations,
        pool: Pool,
        window: str = "window",
    ) -> Tensor:
        """u: [rows, hidden], normalised. Returns this rank's K-shards [shards, rows, hidden]."""
        shape = self.shape
        eps, rope = shape.rms_norm_eps, shape.qk_rope_head_dim
        first = products.mm(self.rounded(u), layer.wq_kv)
        rank = shape.q_lora_rank
        r = ops.rms_norm(first[:, :rank], eps, layer.q_norm)
        keys = self.window_keys(layer, first[:, rank : rank + shape.head_dim], rotations)
        r_in = self.rounded(r)
        groups = layer.wq_b.shape[0]
        q = products.bmm(r_in.expand(groups, -1, -1), layer.wq_b)
        q = q.transpose(0, 1).contiguous().view(plan.num, -1, shape.head_dim)
        q = ops.rms_norm(q, eps)
        ops.rotate(q, rotations.rows[:, None], rope).mul_(self.scale)

        aux = None if layer.aux is None else products.mm(u, layer.aux)
        old_keys = self._write_window(number, keys, plan, pool, window)
        if aux is not None:
            self._compress(layer, number, aux, plan, rotations, pool)

        out = torch.empty_like(q)
        for segment in plan.segments:
            rows = slice(segment.first_row, segment.first_row + segment.num_rows)
            source = pool.rows(window, number)
            if segment.is_chunk:
                begin, count = plan.chunk_rows
                assert old_keys is not None
                source = torch.cat([old_keys, keys[begin : begin + count]])
            buffer = source.index_select(0, segment.window_index)
            buffer = buffer.view(segment.groups, -1, shape.head_dim)
            part = Keys(buffer, segment.window_bias, buffer.shape[1])
            out[rows] = self._attend(
                layer, number, q[rows], part, segment, aux, r_in[rows], rotations, rows, pool
            )
        used = plan.segments[-1].first_row + plan.segments[-1].num_rows
        if used < plan.num:
            out[used:] = 0
        ops.rotate(out, rotations.inverse[:, None], rope)
        z = out.view(plan.num, groups, -1).transpose(0, 1)
        z = products.bmm(z, layer.wo_a)  # [groups, rows, o_lora]
        z = self.rounded(z.transpose(0, 1).reshape(plan.num, -1))
        shards = layer.wo_b.shape[0]
        z = z.view(plan.num, shards, -1).transpose(0, 1)
        return products.bmm(z, layer.wo_b)

    # -- state -------------------------------------------------------------------------------------

    def _write_window(
        self, number: int, keys: Tensor, plan: RowPlan, pool: Pool, window: str
    ) -> Tensor | None:
        """Put keys into the ring; returns what the ring held before a chunk."""
        ring = pool.rows(window, number)
        old = ring.index_select(0, plan.chunk_old[window]) if window in plan.chunk_old else None
        write(ring, plan, window, keys)
        return old

    def _compress(
        self,
        layer: layers.Attention,
        number: int,
        aux: Tensor,
        plan: RowPlan,
        rotations: Rotations,
        pool: Pool,
    ) -> None:
        """Keep c and s of the rows (ape included), and write the entries of completed windows."""
        assert layer.compressor is not None
        closing = plan.closing.get(layer.ratio)
        state = "csa_state" if layer.ratio == 4 else "hca_state"
        entry = "csa" if layer.ratio == 4 else "hca"
        width = layer.compressor.ape.shape[1]
        todo = [(layer.compressor, state, entry, aux[:, : 2 * width])]
        if layer.indexer is not None:
            own = layer.indexer.compressor
            n = 2 * own.ape.shape[1]
            todo.append((own, "index_state", "index", aux[:, 2 * width : 2 * width + n]))
        for compressor, name, target, both in todo:
            size = compressor.ape.shape[1]
            cs = both.contiguous()
            cs[:, size:] += compressor.ape[plan.positions % compressor.ratio]
            ring = pool.rows(name, number)
            begin, count = plan.chunk_rows
            buffer = None
            if count and closing is not None and len(closing.from_chunk):
                old = ring.index_select(0, plan.chunk_old[name])
                buffer = torch.cat([old, cs[begin : begin + count]])
            write(ring, plan, name, cs)
            if closing is None:
                continue
            sources = []
            if len(closing.from_ring[name]):
                sources.append(ring.index_select(0, closing.from_ring[name]))
            if buffer is not None:
                sources.append(buffer.index_select(0, closing.from_chunk))
            rows = sources[0] if len(sources) == 1 else torch.cat(sources)
            entries = self.pool_windows(compressor, rows, closing)
            ops.rotate(entries, rotations.closing[layer.ratio], self.shape.qk_rope_head_dim)
            if target == "index":
                assert layer.indexer is not None
                entries = products.mm(entries, layer.indexer.hadamard)
                if self.quantise:
                    entries = ops.round_e2m1(entries)
            elif self.quantise:
                entries = ops.round_kv(entries, self.shape.qk_rope_head_dim)
            pool.rows(target, number).index_copy_(0, closing.target[target], entries[: closing.num])

    def pool_windows(self, compressor: layers.Compressor, rows: Tensor, closing: Closing) -> Tensor:
        """Per-channel softmax over the positions of each window, then the norm (3.5).

        rows: [windows * positions, c and s]. Returns [windows, width]."""
        d, size = compressor.width, compressor.ape.shape[1]
        n = len(closing.is_first)
        rows = rows.view(n, -1, 2 * size)
        c, s = rows[..., :size], rows[..., size:]
        if compressor.ratio == 4:
            # Series a (first half) of the previous four positions, series b of these four.
            c = torch.cat([c[:, :4, :d], c[:, 4:, d:]], 1)
            s = torch.cat([s[:, :4, :d], s[:, 4:, d:]], 1)
            s[:, :4].masked_fill_(closing.is_first[:, None, None], float("-inf"))
        p = (s - s.amax(1, keepdim=True)).exp_()
        mixed = (p * c).sum(1).div_(p.sum(1))
        return ops.rms_norm(mixed, self.shape.rms_norm_eps, compressor.norm)

    # -- softmax -----------------------------------------------------------------------------------

    def _attend(
        self,
        layer: layers.Attention,
        number: int,
        q: Tensor,
        window: Keys,
        segment: Segment,
        aux: Tensor | None,
        r_in: Tensor,
        rotations: Rotations,
        rows: slice,
        pool: Pool,
    ) -> Tensor:
        entries = segment.entries.get(layer.ratio)
        if entries is None:
            return softmax_attention(q, [window], layer.sink)
        dim, tile = self.shape.head_dim, ENTRY_TILE[layer.ratio]
        name = "csa" if layer.ratio == 4 else "hca"
        matrix = pool.rows(name, number)
        if layer.ratio == 128 or entries.most <= self.shape.index_topk:
            values = matrix.index_select(0, entries.index[name])
            values = values.view(entries.num_shared, entries.columns, dim)
            return softmax_attention(q, [window, Keys(values, entries.bias, tile)], layer.sink)
        assert aux is not None
        chosen = self.select(layer, number, aux[rows], r_in, rotations.rows[rows], entries, pool)
        return self._attend_selected(q, window, segment, entries, chosen, matrix, layer.sink)

    def select(
        self,
        layer: layers.Attention,
        number: int,
        aux: Tensor,
        r_in: Tensor,
        rotation: Tensor,
        entries: Entries,
        pool: Pool,
    ) -> Tensor:
        """[rows, index_topk] int64, ascending: the entries with the highest scores; among equal
        scores the lower index wins. Entries that are not visible fill up at the end."""
        assert layer.indexer is not None and layer.compressor is not None
        shape, topk = self.shape, self.shape.index_topk
        size, heads = shape.index_head_dim, shape.index_n_heads
        n = len(r_in)
        psi = products.mm(r_in, layer.indexer.wq_b).view(n, heads, size)
        ops.rotate(psi, rotation[:, None], shape.qk_rope_head_dim)
        psi = products.mm(psi.view(-1, size), layer.indexer.hadamard)
        if self.quantise:
            psi = ops.round_e2m1(psi)
        at = 2 * layer.compressor.ape.shape[1] + 2 * layer.indexer.compressor.ape.shape[1]
        omega = aux[:, at : at + heads] * self.index_scale
        keys = pool.rows("index", number).index_select(0, entries.index["index"])
        keys = keys.view(entries.num_shared, entries.columns, size)
        out = []
        per = n // entries.num_shared
        step = max(1, MAX_GATHERED_ROWS * 16 // per) if entries.num_shared > 1 else 1
        for g in range(0, entries.num_shared, step):
            part = slice(g * per, min(n, (g + step) * per))
            k = keys[g : g + step]
            psi_part = psi.view(n, heads, size)[part].reshape(len(k), -1, size)
            dots = products.scores(psi_part, k, ENTRY_TILE[4])
            dots = dots.view(-1, heads, entries.columns).relu_().mul_(omega[part, :, None])
            score = dots[:, 0]
            for h in range(1, heads):
                score = score + dots[:, h]
            out.append(top_entries(score + entries.bias[part, 0], topk))
        return torch.cat(out)

    def _attend_selected(
        self,
        q: Tensor,
        window: Keys,
        segment: Segment,
        entries: Entries,
        chosen: Tensor,
        matrix: Tensor,
        sink: Tensor,
    ) -> Tensor:
        """Every row has its own entries: copy them, in blocks of whole groups."""
        rows, heads, dim = q.shape
        tile = ENTRY_TILE[4]
        topk = chosen.shape[1]
        columns = ops.round_up(topk, tile)
        bias = torch.full((rows, 1, columns), float("-inf"))
        bias[:, 0, :topk].masked_fill_(chosen < entries.visible[:, None], 0.0)
        flat = entries.index["csa"].view(entries.num_shared, -1)
        if entries.num_shared == 1:
            gather = flat[0][chosen]
        else:
            gather = flat.gather(1, chosen.view(entries.num_shared, -1)).view(rows, topk)
        gather = torch.nn.functional.pad(gather, (0, columns - topk), value=int(flat[0, 0]))
        if heads < ops.ROW_TILE:  # a product per row: too few heads take another kernel
            return self._attend_few_heads(q, window, segment, gather, bias, matrix, sink)
        out = torch.empty_like(q)
        step = max(1, MAX_GATHERED_ROWS // segment.size)
        for g in range(0, segment.groups, step):
            part = slice(g * segment.size, min(segment.groups, g + step) * segment.size)
            values = matrix.index_select(0, gather[part].reshape(-1)).view(-1, columns, dim)
            near = Keys(window.values[g : g + step], window.bias[part], window.tile)
            far = Keys(values, bias[part], tile)
            out[part] = softmax_attention(q[part], [near, far], sink)
        return out

    def _attend_few_heads(
        self,
        q: Tensor,
        window: Keys,
        segment: Segment,
        gather: Tensor,
        bias: Tensor,
        matrix: Tensor,
        sink: Tensor,
    ) -> Tensor:
        heads = q.shape[1]
        extra = ops.ROW_TILE - heads
        padded = torch.nn.functional.pad(q, (0, 0, 0, extra))
        tile, dim, columns = ENTRY_TILE[4], q.shape[2], gather.shape[1]
        values = matrix.index_select(0, gather.view(-1)).view(-1, columns, dim)
        sinks = torch.nn.functional.pad(sink, (0, extra))
        out = softmax_attention(padded, [window, Keys(values, bias, tile)], sinks)
        return out[:, :heads].contiguous()


def top_entries(score: Tensor, topk: int) -> Tensor:
    """[rows, topk] indices of the highest scores, ascending; the lower index wins ties.

    score: [rows, columns] with columns >= topk; -inf where not visible."""
    bound = score.topk(topk, dim=-1).values[:, -1:]
    above = score > bound
    equal = score == bound
    room = topk - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= room))
    return chosen.nonzero()[:, 1].view(len(score), topk)


def write(ring: Tensor, plan: RowPlan, name: str, rows: Tensor) -> None:
    """Put the plan's rows of a state into its ring."""
    chosen = plan.write_rows[name]
    if len(chosen) != plan.num:
        rows = rows.index_select(0, chosen)
    ring.index_copy_(0, plan.write_to[name], rows)
