"""Random weights of one TP rank at real width, made on the device: for measuring a step's time and
memory, and for comparing kernels at the shapes that are served. Nothing is read from disk.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from decant.engine.gpu import weights as w
from decant.engine.model_shape import ModelShape
from decant.engine.reference.ops import hadamard, rope_frequencies
from decant.kernels.fp4_moe import PackedExperts

MXFP4_ONE = 29  # the group scale of a row's largest group (kernels/fp4_moe.py)


class Maker:
    """Tensors of one rank's share, by seed."""

    def __init__(self, shape: ModelShape, device: torch.device, tp: int, seed: int) -> None:
        self.shape, self.device, self.tp = shape, device, tp
        self._random = torch.Generator(device).manual_seed(seed)

    def normal(self, *size: int, by: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        value = torch.empty(size, dtype=dtype, device=self.device)
        return value.normal_(0, by, generator=self._random)

    def norm(self, width: int) -> Tensor:
        return (1 + self.normal(width, by=0.05)).bfloat16()

    def whole(self, low: int, high: int, *size: int) -> Tensor:
        value = torch.empty(size, dtype=torch.uint8, device=self.device)
        return value.random_(low, high, generator=self._random)

    def linear(self, rows: int, columns: int) -> w.Linear:
        """e4m3 codes of size 2^-3 to 2^3, block scales that make weights of about K ^ -1/2."""
        codes = self.whole(32, 88, rows, columns)
        codes |= self.whole(0, 2, rows, columns) << 7
        exponent = 127 + round(math.log2(columns**-0.5 / 3))
        blocks = (-(-rows // 128), -(-columns // 128))
        scale = torch.full(blocks, exponent, dtype=torch.uint8, device=self.device)
        return w.Linear(codes.view(torch.float8_e4m3fn), scale)

    def packed(self, rows: int, columns: int) -> PackedExperts:
        num = self.shape.n_routed_experts
        codes = self.whole(0, 256, num, columns // 64, rows, 32)
        scales = torch.full(
            (num, columns // 32, rows), MXFP4_ONE, dtype=torch.uint8, device=self.device
        )
        factor = 2.0 ** round(math.log2(columns**-0.5 / 2.7))
        return PackedExperts(codes, scales, torch.full((num, rows), factor, device=self.device), 32)

    def site(self, mixes: int) -> w.Site:
        columns = self.shape.hc_mult * self.shape.hidden_size
        f32 = torch.float32
        return w.Site(
            self.normal(mixes, columns, by=columns**-0.5, dtype=f32),
            self.normal(mixes, by=0.1, dtype=f32),
            torch.ones(3 if mixes > 4 else 1, device=self.device),
        )

    def compressor(self, ratio: int, width: int) -> w.Compressor:
        size = width * (2 if ratio == 4 else 1)
        ape = self.normal(ratio, size, by=0.1, dtype=torch.float32)
        return w.Compressor(ratio, ape, self.norm(width))

    def attention(self, ratio: int) -> w.Attention:
        s = self.shape
        heads, groups = s.num_attention_heads // self.tp, s.o_groups // self.tp
        columns = 0
        if ratio:
            columns += 2 * s.head_dim * (2 if ratio == 4 else 1)
        if ratio == 4:
            columns += 4 * s.index_head_dim + s.index_n_heads
        by = s.hidden_size**-0.5
        csa = ratio == 4
        first, own = heads * s.head_dim, s.index_n_heads * s.index_head_dim
        both = self.linear(first + (own if csa else 0), s.q_lora_rank)
        return w.Attention(
            ratio=ratio,
            heads=heads,
            groups=groups,
            wq_kv=self.linear(s.q_lora_rank + s.head_dim, s.hidden_size),
            q_norm=self.norm(s.q_lora_rank),
            kv_norm=self.norm(s.head_dim),
            wq_b=both.rows(0, first),
            wo_a=self.linear(groups * s.o_lora_rank, heads * s.head_dim // groups),
            wo_b=self.linear(s.hidden_size, groups * s.o_lora_rank),
            sink=self.normal(heads, by=0.1, dtype=torch.float32),
            aux=self.normal(columns, s.hidden_size, by=by) if ratio else None,
            compressor=self.compressor(ratio, s.head_dim) if ratio else None,
            index=self.compressor(4, s.index_head_dim) if csa else None,
            index_wq_b=both.rows(first, first + own) if csa else None,
            wq_both=both if csa else None,
        )

    def experts(self, is_hash: bool) -> w.Experts:
        s = self.shape
        inner, num = s.moe_intermediate_size // self.tp, s.n_routed_experts
        table = None
        if is_hash:
            first = torch.arange(s.vocab_size, device=self.device)[:, None] * 7
            step = torch.arange(s.num_experts_per_tok, device=self.device) * 41
            table = ((first + step) % num).int()
        return w.Experts(
            gate=self.normal(num, s.hidden_size, by=s.hidden_size**-0.5),
            bias=None if is_hash else self.normal(num, by=0.01, dtype=torch.float32),
            table=table,
            w13=self.packed(2 * inner, s.hidden_size),
            w2=self.packed(s.hidden_size, inner),
            shared13=self.linear(2 * inner, s.hidden_size),
            shared2=self.linear(s.hidden_size, inner),
        )

    def layer(self, ratio: int, is_hash: bool) -> w.Layer:
        return w.Layer(
            hc_attn=self.site(24),
            hc_ffn=self.site(24),
            attn_norm=self.norm(self.shape.hidden_size),
            ffn_norm=self.norm(self.shape.hidden_size),
            attn=self.attention(ratio),
            ffn=self.experts(is_hash),
        )


def make_slice(
    shape: ModelShape, device: torch.device, tp: int, seed: int = 0, maker: type[Maker] = Maker
) -> w.Weights:
    """Weights of one of ``tp`` ranks for all layers of ``shape``; no MTP layer."""
    make = maker(shape, device, tp, seed)
    return w.Weights(
        embed=make.normal(shape.vocab_size, shape.hidden_size),
        layers=[
            make.layer(ratio, i < shape.num_hash_layers)
            for i, ratio in enumerate(shape.compress_ratios)
        ],
        head=w.Head(make.site(shape.hc_mult), make.norm(shape.hidden_size)),
        vocabulary=make.normal(
            shape.vocab_size // tp, shape.hidden_size, by=shape.hidden_size**-0.5
        ),
        mtp=None,
        plain=rope_frequencies(shape, False).to(device),
        compressed=rope_frequencies(shape, True).to(device),
        hadamard=hadamard(128).to(device),
    )
