"""The model that defines truth: trunk and MTP layer in plain torch, float32, over a paged pool.

Nothing here knows of processes, sequences or sampling: a row plan says what the rows are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from decant.engine.model_shape import ModelShape
from decant.engine.pool import Pool
from decant.engine.reference import layers, moe, ops, products
from decant.engine.reference.attention import AttentionRunner, Rotations, write
from decant.engine.reference.rows import RowPlan
from decant.engine.weights import WeightReader

# K-shards of this rank [shards, rows, width] -> those of all ranks, in rank order.
GatherShards = Callable[[Tensor], Tensor]


def sum_shards(shards: Tensor) -> Tensor:
    """[shards, rows, width] -> [rows, width]: added one by one, in order."""
    total = shards[0]
    for i in range(1, len(shards)):
        total = total + shards[i]
    return total


@dataclass
class Model:
    """Weights of one TP rank and how to run them.

    embed: [vocab, hidden], whole. vocabulary: [blocks, hidden, columns] of this rank, or None where
    no logits are needed. mtp: the MTP layer's weights, or None."""

    shape: ModelShape
    embed: Tensor
    trunk: list[layers.Layer]
    head: layers.Head | None
    vocabulary: Tensor | None
    mtp: MtpWeights | None
    quantise: bool
    gather: GatherShards

    def __post_init__(self) -> None:
        self.attention = AttentionRunner(self.shape, self.quantise)
        self._plain = ops.rope_frequencies(self.shape, False)
        self._compressed = ops.rope_frequencies(self.shape, True)

    # -- parts of a layer --------------------------------------------------------------------------

    def rotations(self, plan: RowPlan, compressed: bool) -> Rotations:
        freq = self._compressed if compressed else self._plain
        rows = ops.rotations(plan.positions, freq)
        closing = {}
        if compressed:
            closing = {r: ops.rotations(c.positions, freq) for r, c in plan.closing.items()}
        return Rotations(rows, rows.conj().resolve_conj(), closing)

    def mix(self, streams: Tensor, site: layers.Site) -> Tensor:
        """rho * (fn . x) * scale + base: [rows, columns of the site, padded]."""
        flat = streams.flatten(1)
        rho = flat.square().mean(-1, keepdim=True).add_(self.shape.rms_norm_eps).rsqrt_()
        return products.mm(flat, site.fn).mul_(rho).mul_(site.scale).add_(site.base)

    def collapse(self, streams: Tensor, site: layers.Site) -> tuple[Tensor, Tensor, Tensor]:
        """Sub-layer input [rows, hidden], post [rows, S], comb [rows, S, S] (section 2)."""
        shape, s = self.shape, self.shape.hc_mult
        m = self.mix(streams, site)
        gates = torch.sigmoid(m)
        pre, post = gates[:, :s] + shape.hc_eps, gates[:, s : 2 * s] * 2
        logits = m[:, 2 * s : 2 * s + s * s].reshape(-1, s, s)
        comb = ops.sinkhorn(logits, shape.hc_sinkhorn_iters, shape.hc_eps)
        return (streams * pre[..., None]).sum(1), post, comb

    def expand(self, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """X'_k = post_k y + sum_j comb_jk X_j."""
        return torch.baddbmm(post[..., None] * y[:, None], comb.transpose(1, 2), streams)

    def run_layer(
        self,
        layer: layers.Layer,
        number: int,
        streams: Tensor,
        plan: RowPlan,
        rotations: Rotations,
        pool: Pool,
        window: str = "window",
    ) -> Tensor:
        """[rows, S, hidden] -> the same, after both sites."""
        eps = self.shape.rms_norm_eps
        u, post, comb = self.collapse(streams, layer.hc_attn)
        u = ops.rms_norm(u, eps, layer.attn_norm)
        shards = self.attention.run(layer.attn, number, u, plan, rotations, pool, window)
        streams = self.expand(streams, sum_shards(self.gather(shards)), post, comb)
        assert layer.ffn is not None
        u, post, comb = self.collapse(streams, layer.hc_ffn)
        v = ops.rms_norm(u, eps, layer.ffn_norm)
        shards = moe.run(self.shape, layer.ffn, v, plan.tokens, plan.valid, self.quantise)
        return self.expand(streams, sum_shards(self.gather(shards)), post, comb)

    # -- trunk -------------------------------------------------------------------------------------

    def run_trunk(
        self, plan: RowPlan, pool: Pool, probe: Callable[[int, Tensor], None] | None = None
    ) -> Tensor:
        """Streams [rows, S, hidden] after the last layer; writes pages and rings.

        probe: called with the layer number and the streams before each layer (verification)."""
        plain, compressed = self.rotations(plan, False), self.rotations(plan, True)
        streams = self.embed[plan.tokens][:, None].expand(-1, self.shape.hc_mult, -1).contiguous()
        for number, layer in enumerate(self.trunk):
            if probe is not None:
                probe(number, streams)
            rotations = compressed if layer.attn.ratio else plain
            streams = self.run_layer(layer, number, streams, plan, rotations, pool)
        return streams

    def logits(self, streams: Tensor, head: layers.Head | None = None) -> Tensor:
        """[rows, S, hidden] -> [rows, vocab]. Any number of rows."""
        head = head or self.head
        assert head is not None and self.vocabulary is not None
        rows, s = len(streams), self.shape.hc_mult
        if rows % ops.ROW_TILE:
            extra = ops.round_up(rows, ops.ROW_TILE) - rows
            streams = torch.cat([streams, streams[:1].expand(extra, -1, -1)])
        pre = torch.sigmoid(self.mix(streams, head.site))[:, :s] + self.shape.hc_eps
        h = ops.rms_norm((streams * pre[..., None]).sum(1), self.shape.rms_norm_eps, head.norm)
        blocks = products.bmm(h.expand(len(self.vocabulary), -1, -1), self.vocabulary)
        return self.gather(blocks).transpose(0, 1).reshape(len(streams), -1)[:rows]

    # -- MTP ---------------------------------------------------------------------------------------

    def mtp_input(self, streams: Tensor, next_tokens: Tensor) -> Tensor:
        """Z = e_proj norm(embed) + h_proj norm(stream), per stream (5.1). rows: any multiple of
        ROW_TILE."""
        assert self.mtp is not None
        eps = self.shape.rms_norm_eps
        e = ops.rms_norm(self.embed[next_tokens], eps, self.mtp.enorm)
        a = products.mm(self.attention.rounded(e), self.mtp.e_proj)
        b = ops.rms_norm(streams.flatten(0, 1), eps, self.mtp.hnorm)
        b = products.mm(self.attention.rounded(b), self.mtp.h_proj)
        return b.view_as(streams).add_(a[:, None])

    def run_mtp(self, plan: RowPlan, streams: Tensor, pool: Pool) -> Tensor:
        """One pass of the MTP layer: [rows, S, hidden] -> its own streams.

        plan.tokens are the tokens *after* the rows' positions; its ring is "mtp_window"."""
        assert self.mtp is not None
        z = self.mtp_input(streams, plan.tokens)
        rotations = self.rotations(plan, False)
        return self.run_layer(self.mtp.layer, -1, z, plan, rotations, pool, "mtp_window")

    def write_mtp_keys(self, plan: RowPlan, streams: Tensor, pool: Pool) -> None:
        """Only the window keys of the MTP layer (prefill): no attention, no experts."""
        assert self.mtp is not None
        z = self.mtp_input(streams, plan.tokens)
        layer = self.mtp.layer
        u, _, _ = self.collapse(z, layer.hc_attn)
        u = ops.rms_norm(u, self.shape.rms_norm_eps, layer.attn_norm)
        first = products.mm(self.attention.rounded(u), layer.attn.wq_kv)
        rank, dim = self.shape.q_lora_rank, self.shape.head_dim
        keys = self.attention.window_keys(
            layer.attn, first[:, rank : rank + dim], self.rotations(plan, False)
        )
        write(pool.rows("mtp_window"), plan, "mtp_window", keys)


@dataclass(frozen=True)
class MtpWeights:
    """The MTP layer."""

    e_proj: Tensor
    h_proj: Tensor
    enorm: Tensor
    hnorm: Tensor
    layer: layers.Layer
    head: layers.Head


def load_mtp(reader: WeightReader, shape: ModelShape, keys_only: bool) -> MtpWeights:
    get = reader.get
    return MtpWeights(
        e_proj=layers.transposed(get("mtp.0.e_proj.weight")),
        h_proj=layers.transposed(get("mtp.0.h_proj.weight")),
        enorm=get("mtp.0.enorm.weight"),
        hnorm=get("mtp.0.hnorm.weight"),
        layer=layers.load_layer(reader, shape, "mtp.0.", 0, keys_only),
        head=layers.load_head(reader, shape, "mtp.0."),
    )


def load_model(
    reader: WeightReader, quantise: bool, trunk: bool, mtp: str, gather: GatherShards | None = None
) -> Model:
    """trunk: load the trunk's layers. mtp: "full", "keys" (window keys only) or "none"."""
    shape = reader.checkpoint.shape
    shape.check_tp(reader.tp, quantise)
    products.is_invariant()  # probe now, not in the first step
    count = shape.num_hidden_layers if trunk else 0
    return Model(
        shape=shape,
        embed=reader.get("embed.weight"),
        trunk=[
            layers.load_layer(reader, shape, f"layers.{i}.", shape.compress_ratios[i])
            for i in range(count)
        ],
        head=layers.load_head(reader, shape, "") if trunk else None,
        vocabulary=layers.load_vocabulary(reader, shape),
        mtp=load_mtp(reader, shape, mtp == "keys") if mtp != "none" and shape.has_mtp else None,
        quantise=quantise,
        gather=gather or (lambda shards: shards),
    )
