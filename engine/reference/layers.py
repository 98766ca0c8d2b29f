"""Weights of one layer as the model multiplies with them: float32, [in, out], packed per TP rank.

Column-parallel products are cut into fixed blocks (one per output group, or per K-shard of the
product that follows) and row-parallel ones into ``num_shards`` K-shards, so that a rank of any TP
size runs the very same products on its share of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decant.engine.model_shape import ModelShape, num_shards
from decant.engine.reference.ops import MIN_COLUMNS, round_up
from decant.engine.weights import WeightReader


def transposed(*matrices: Tensor) -> Tensor:
    """[out, in] matrices side by side as one [in, out rounded up]: few columns take another BLAS
    kernel, so there are at least MIN_COLUMNS."""
    width = sum(len(m) for m in matrices)
    out = matrices[0].new_zeros(matrices[0].shape[1], max(MIN_COLUMNS, round_up(width, 4)))
    at = 0
    for m in matrices:
        out[:, at : at + len(m)] = m.t()
        at += len(m)
    return out


def column_blocks(weight: Tensor, blocks: int) -> Tensor:
    """[out, in] -> [blocks, in, out / blocks]."""
    return weight.view(blocks, -1, weight.shape[1]).transpose(1, 2).contiguous()


def row_shards(weight: Tensor, shards: int) -> Tensor:
    """[out, in] -> [shards, in / shards, out]."""
    return weight.t().contiguous().view(shards, -1, len(weight))


@dataclass(frozen=True)
class Site:
    """A hyper-connection site. fn: [S hidden, n]; base, scale: [n]."""

    fn: Tensor
    base: Tensor
    scale: Tensor
    num: int

    @staticmethod
    def load(reader: WeightReader, prefix: str, streams: int) -> Site:
        fn, base = reader.get(prefix + "_fn"), reader.get(prefix + "_base")
        scale = reader.get(prefix + "_scale")
        num = len(base)
        if num > streams:  # pre, post, comb have one scale each
            counts = torch.tensor([streams, streams, streams * streams])
            scale = scale.repeat_interleave(counts)
        else:
            scale = scale.expand(num)
        packed = transposed(fn)
        padding = packed.shape[1] - num
        pad = torch.nn.functional.pad
        return Site(packed, pad(base, (0, padding)), pad(scale, (0, padding)), num)


@dataclass(frozen=True)
class Compressor:
    """ratio tokens -> one entry. The products are in Attention.aux."""

    ratio: int
    width: int  # of an entry
    ape: Tensor  # [ratio, width or 2 width]
    norm: Tensor

    @staticmethod
    def load(reader: WeightReader, prefix: str, ratio: int) -> Compressor:
        norm = reader.get(prefix + "norm.weight")
        return Compressor(ratio, len(norm), reader.get(prefix + "ape"), norm)


@dataclass(frozen=True)
class Indexer:
    wq_b: Tensor  # [q_lora, heads * dim]
    compressor: Compressor
    hadamard: Tensor


@dataclass(frozen=True)
class Attention:
    """groups = output groups of this rank; heads = heads of this rank."""

    ratio: int
    wq_kv: Tensor  # [hidden, q_lora + head_dim]: wq_a and wkv
    aux: Tensor | None  # [hidden, ...]: compressor wkv, wgate; indexer wkv, wgate, weights_proj
    q_norm: Tensor
    kv_norm: Tensor
    wq_b: Tensor  # [groups, q_lora, heads per group * head_dim]
    wo_a: Tensor  # [groups, heads per group * head_dim, o_lora]
    wo_b: Tensor  # [shards, o_groups * o_lora / num_shards, hidden]
    sink: Tensor  # [heads]
    compressor: Compressor | None
    indexer: Indexer | None


@dataclass(frozen=True)
class Experts:
    """The shared expert is the last one. shards: of this rank."""

    gate: Tensor  # [hidden, num experts rounded up]
    bias: Tensor | None  # [num experts]
    tid2eid: Tensor | None  # [vocab, top k] int32
    w13: list[Tensor]  # per expert [shards, hidden, 2 * inner / num_shards]: w1 then w3 columns
    w2: list[Tensor]  # per expert [shards, inner / num_shards, hidden]


@dataclass(frozen=True)
class Layer:
    hc_attn: Site
    hc_ffn: Site
    attn_norm: Tensor
    ffn_norm: Tensor
    attn: Attention
    ffn: Experts | None  # None: this process only needs the layer's window keys


@dataclass(frozen=True)
class Head:
    """Stream collapse, final norm and vocabulary of one rank."""

    site: Site
    norm: Tensor


def load_attention(reader: WeightReader, shape: ModelShape, prefix: str, ratio: int) -> Attention:
    get, tp = reader.get, reader.tp
    aux, compressor, indexer = [], None, None
    if ratio:
        name = prefix + "compressor."
        compressor = Compressor.load(reader, name, ratio)
        aux += [get(name + "wkv.weight"), get(name + "wgate.weight")]
    if ratio == 4:
        name = prefix + "indexer."
        comp = name + "compressor."
        aux += [get(comp + "wkv.weight"), get(comp + "wgate.weight")]
        aux.append(get(name + "weights_proj.weight"))
        from decant.engine.reference.ops import hadamard

        indexer = Indexer(
            transposed(get(name + "wq_b.weight")),
            Compressor.load(reader, comp, 4),
            hadamard(shape.index_head_dim),
        )
    groups = shape.o_groups // tp
    shards = num_shards(shape.o_groups * shape.o_lora_rank) // tp
    return Attention(
        ratio=ratio,
        wq_kv=transposed(get(prefix + "wq_a.weight"), get(prefix + "wkv.weight")),
        aux=transposed(*aux) if aux else None,
        q_norm=get(prefix + "q_norm.weight"),
        kv_norm=get(prefix + "kv_norm.weight"),
        wq_b=column_blocks(get(prefix + "wq_b.weight"), groups),
        wo_a=column_blocks(get(prefix + "wo_a.weight"), groups),
        wo_b=row_shards(get(prefix + "wo_b.weight"), shards),
        sink=get(prefix + "attn_sink"),
        compressor=compressor,
        indexer=indexer,
    )


def load_experts(reader: WeightReader, shape: ModelShape, prefix: str) -> Experts:
    get = reader.get
    shards = num_shards(shape.moe_intermediate_size) // reader.tp
    w13, w2 = [], []
    owners = [f"{prefix}experts.{e}." for e in range(shape.n_routed_experts)]
    for owner in [*owners, prefix + "shared_experts."]:
        w1 = column_blocks(get(owner + "w1.weight"), shards)
        w3 = column_blocks(get(owner + "w3.weight"), shards)
        w13.append(torch.cat([w1, w3], 2))
        w2.append(row_shards(get(owner + "w2.weight"), shards))
    hashed = prefix + "gate.tid2eid" in reader
    return Experts(
        gate=transposed(get(prefix + "gate.weight")),
        bias=None if hashed else get(prefix + "gate.bias"),
        tid2eid=reader.full(prefix + "gate.tid2eid").int() if hashed else None,
        w13=w13,
        w2=w2,
    )


def load_layer(
    reader: WeightReader, shape: ModelShape, prefix: str, ratio: int, keys_only: bool = False
) -> Layer:
    """A layer by its published prefix, ``layers.3.`` or ``mtp.0.``."""
    return Layer(
        hc_attn=Site.load(reader, prefix + "hc_attn", shape.hc_mult),
        hc_ffn=Site.load(reader, prefix + "hc_ffn", shape.hc_mult),
        attn_norm=reader.get(prefix + "attn_norm.weight"),
        ffn_norm=reader.get(prefix + "ffn_norm.weight"),
        attn=load_attention(reader, shape, prefix + "attn.", ratio),
        ffn=None if keys_only else load_experts(reader, shape, prefix + "ffn."),
    )


def load_head(reader: WeightReader, shape: ModelShape, prefix: str) -> Head:
    site = Site.load(reader, prefix + "hc_head", shape.hc_mult)
    return Head(site, reader.get(prefix + "norm.weight"))


def load_vocabulary(reader: WeightReader, shape: ModelShape) -> Tensor:
    """[blocks, hidden, vocab / num_shards] of this rank."""
    blocks = num_shards(shape.vocab_size) // reader.tp
    return column_blocks(reader.get("head.weight"), max(1, blocks))
