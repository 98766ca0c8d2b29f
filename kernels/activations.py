"""What stands between two FP8 linears, RMSNorm or SwiGLU, and the e4m3 codes that are read next.

Data sheet
  input    bf16, or fp32, rows with a stride
  norm     x / sqrt(mean(x^2) + eps) * weight, rounded to bf16 once
  swiglu   silu(min(gate, 10)) * clamp(up, -10, 10), rounded to bf16 once
  codes    e4m3 with one power-of-two scale per (row, 128 channels): the model's rule, and what
           ``fp8_linear`` makes of the bf16 values itself
  launches 1; a program a row (norm), a program a row and 128 channels (swiglu)
  floor    the input read once
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from decant.kernels.fp4_moe import SWIGLU_LIMIT, swiglu_ref
from decant.kernels.fp8_linear import BLOCK
from decant.kernels.kv_store import norm_ref
from decant.kernels.tiles import power_of_two_scale, to_bf16, to_e4m3

EPS = 1e-6


def norm_codes_ref(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Plain torch: the normalised values of x [T, K] in float64, not quantised."""
    return norm_ref(x, weight)


def swiglu_codes_ref(x: torch.Tensor) -> torch.Tensor:
    """Plain torch: x [T, 2 K], gates then ups -> float64 [T, K], not quantised."""
    half = x.shape[1] // 2
    return swiglu_ref(x[:, :half].double(), x[:, half:].double())


@triton.jit
def _store_codes(v, codes, factors, live):
    """v fp32 [G, 128], rounded to bf16 -> codes and factors at pointers [G, 128] and [G]."""
    v = to_bf16(v).to(tl.float32)
    factor, inverse, _ = power_of_two_scale(tl.max(tl.abs(v), axis=1))
    tl.store(codes, to_e4m3(v * inverse[:, None]), mask=live[:, None])
    tl.store(factors, factor, mask=live)


@triton.jit(do_not_specialize=["tokens"])
def _norm_codes_kernel(
    x, weight, codes, factors, tokens, x_stride,
    K: tl.constexpr, GROUPS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """One row of K channels in GROUPS (a power of two) groups of 128."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    channel = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    live = group * 128 < K
    v = tl.load(x + row * x_stride + channel, mask=live[:, None], other=0.0).to(tl.float32)
    w = tl.load(weight + channel, mask=live[:, None], other=0.0).to(tl.float32)
    total = tl.sum(tl.sum(v * v, axis=1), axis=0)
    v = v * tl.rsqrt(total / K + EPS) * w
    _store_codes(v, codes + row * K + channel, factors + group * tokens + row, live)


@triton.jit(do_not_specialize=["tokens"])
def _swiglu_codes_kernel(x, codes, factors, tokens, x_stride, K: tl.constexpr, LIMIT: tl.constexpr):
    """128 channels of one row."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) + tl.arange(0, 1)
    channel = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    live = group * 128 < K
    gate = tl.load(x + row * x_stride + channel).to(tl.float32)
    up = tl.load(x + row * x_stride + K + channel).to(tl.float32)
    gate = tl.minimum(gate, LIMIT)
    up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    v = gate * up / (1.0 + tl.exp(-gate))
    _store_codes(v, codes + row * K + channel, factors + group * tokens + row, live)


def _check(x: torch.Tensor, codes: torch.Tensor, factors: torch.Tensor, width: int) -> None:
    tokens = len(x)
    if width % BLOCK or x.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} does not fit groups of {BLOCK} channels")
    if codes.shape != (tokens, width) or factors.shape != (width // BLOCK, tokens):
        raise ValueError(f"codes {tuple(codes.shape)} are not [{tokens}, {width}] with factors")


def norm_codes(
    x: torch.Tensor, weight: torch.Tensor, codes: torch.Tensor, factors: torch.Tensor
) -> None:
    """RMSNorm of x [T, K] bf16 with weight bf16 [K] into codes e4m3 [T, K] and factors fp32
    [K / 128, T]. Raises ValueError for shapes that do not fit."""
    width = x.shape[1]
    _check(x, codes, factors, width)
    groups = triton.next_power_of_2(width // BLOCK)
    _norm_codes_kernel[(len(x),)](
        x, weight, codes, factors, len(x), x.stride(0), K=width, GROUPS=groups, EPS=EPS,
        num_warps=4 if groups >= 4 else 1,
    )  # fmt: skip


def swiglu_codes(x: torch.Tensor, codes: torch.Tensor, factors: torch.Tensor) -> None:
    """SwiGLU of x [T, 2 K] bf16 (gates, then ups) into codes and factors as in ``norm_codes``."""
    width = x.shape[1] // 2
    _check(x, codes, factors, width)
    _swiglu_codes_kernel[(len(x), width // BLOCK)](
        x, codes, factors, len(x), x.stride(0), K=width, LIMIT=SWIGLU_LIMIT, num_warps=1
    )
