"""The small functions of the model in plain torch, float32. Nothing about layers or memory.

Row invariance. The bits of a row must not depend on the rows around it (docs/architecture.md,
exactness). What makes it so:

* ``products.py``: the number of rows of every product is a multiple of 4 (below 4 rows BLAS takes
  another kernel), and every product has at least 16 columns;
* elementwise functions see a multiple of 16 elements, so none falls into a vector loop's tail;
* a sum always runs over the same columns in the same places: keys sit at columns that depend on
  their position alone, masked columns add exact zeros, tiles are added in order;
* one thread.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from decant.engine.model_shape import ModelShape

ROW_TILE = 4
MIN_COLUMNS = 16
E4M3_MAX, E2M1_MAX = 448.0, 6.0


def round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def grouped(x: Tensor, size: int) -> Tensor:
    """A view [..., width / size, size] of the last axis."""
    return x.view(*x.shape[:-1], -1, size)


def rms_norm(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps), times the weight. x: [..., width] float32."""
    scale = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    out = x * scale
    return out if weight is None else out.mul_(weight)


# -- rotary positions ------------------------------------------------------------------------------


def rope_frequencies(shape: ModelShape, compressed: bool) -> Tensor:
    """[qk_rope_head_dim / 2] float32: radians per position of each pair."""
    width = shape.qk_rope_head_dim
    base = shape.compress_rope_theta if compressed else shape.rope_theta
    pair = torch.arange(0, width, 2, dtype=torch.float32)
    freq = 1.0 / (base ** (pair / width))
    yarn = shape.yarn
    if not compressed or yarn is None:
        return freq

    def pair_of(turns: float) -> float:
        ratio = yarn.original_max_position_embeddings / (2 * math.pi * turns)
        return width * math.log(ratio) / (2 * math.log(base))

    low = max(math.floor(pair_of(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_of(yarn.beta_slow)), width - 1)
    ramp = (torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return freq / yarn.factor * (1 - keep) + freq * keep


def rotations(positions: Tensor, frequencies: Tensor) -> Tensor:
    """[n, pairs] complex64: cos + i sin of float32(position) x float32(frequency)."""
    angle = positions.float()[:, None] * frequencies
    return torch.complex(angle.cos(), angle.sin())


def rotate(x: Tensor, rotation: Tensor, width: int) -> Tensor:
    """Rotate the last ``width`` channels of x in place, as interleaved pairs; returns x.

    x: [..., dim] float32, contiguous in the last axis. rotation: broadcastable complex."""
    torch.view_as_complex(grouped(x[..., -width:], 2)).mul_(rotation)
    return x


# -- hyper-connections -----------------------------------------------------------------------------


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """[n, 4, 4] logits -> almost doubly stochastic matrices: row softmax, then columns, rows, ...,
    columns. n is a multiple of 4.

    The 39 normalisations run in numpy on a preallocated [5, 5, n] whose fifth row and column hold
    eps, so that a sum over five is the sum plus eps: two ufunc calls each, on IEEE sums and
    quotients, which need no care about vector tails."""
    e = (logits - logits.amax(-1, keepdim=True)).exp_()
    bordered = np.full((5, 5, len(logits)), eps, np.float32)
    m, rows, columns = bordered[:4, :4], bordered[:4], bordered[:, :4]
    m[:] = e.numpy().transpose(1, 2, 0)
    total = np.empty((4, len(logits)), np.float32)
    by_row, divide = total[:, None], np.divide
    np.add.reduce(m, 1, out=total)
    divide(m, by_row, m)
    np.add(m, np.float32(eps), m)
    for i in range(iters):
        if i:
            np.add.reduce(rows, 1, out=total)
            divide(m, by_row, m)
        np.add.reduce(columns, 0, out=total)
        divide(m, total, m)
    return torch.from_numpy(np.ascontiguousarray(m.transpose(2, 0, 1)))


# -- quantisation simulation -----------------------------------------------------------------------


def power_of_two_scale(amax: Tensor, largest: float) -> Tensor:
    """2 ** ceil(log2(amax / largest)), exactly."""
    mantissa, exponent = torch.frexp(amax / largest)
    return torch.ldexp(torch.ones_like(amax), exponent - (mantissa == 0.5).int())


def quantise_e4m3(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Codes (float8_e4m3fn, shape of x) and scales [..., width / group] (float32)."""
    parts = grouped(x, group)
    scale = power_of_two_scale(parts.abs().amax(-1, keepdim=True).clamp_(min=1e-4), E4M3_MAX)
    codes = (parts / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.view(x.shape), scale[..., 0]


def round_e4m3(x: Tensor, group: int) -> Tensor:
    """x through e4m3 and back, in groups of the last axis."""
    codes, scale = quantise_e4m3(x, group)
    value = grouped(codes.float(), group).mul_(scale[..., None])
    return value.view(x.shape)


def round_e2m1(x: Tensor, group: int = 32) -> Tensor:
    """x through e2m1 and back, in groups of the last axis; ties go to the even code."""
    parts = grouped(x, group)
    amax = parts.abs().amax(-1, keepdim=True).clamp_(min=E2M1_MAX * 2.0**-126)
    scale = power_of_two_scale(amax, E2M1_MAX)
    a = (parts / scale).abs_().clamp_(max=E2M1_MAX)
    # Steps of 0.5 below 2, 1 below 4, 2 above: round() is to even in each binade.
    coarse = torch.where(a < 4, a.round(), (a * 0.5).round() * 2)
    a = torch.where(a < 2, (a * 2).round() * 0.5, coarse)
    out: Tensor = a.copysign_(parts).mul_(scale)
    return out.view(x.shape)


def round_kv(x: Tensor, rope_width: int) -> Tensor:
    """Window keys and entries: the channels before the rotary ones go through e4m3, in place."""
    x[..., :-rope_width] = round_e4m3(x[..., :-rope_width].contiguous(), 64)
    return x


def hadamard(size: int) -> Tensor:
    """[size, size] Walsh-Hadamard matrix in natural (Sylvester) order times size ** -0.5."""
    m = torch.ones(1, 1)
    while len(m) < size:
        m = torch.cat([torch.cat([m, m], 1), torch.cat([m, -m], 1)])
    out: Tensor = m * size**-0.5
    return out


# -- experts ---------------------------------------------------------------------------------------


def swiglu(a: Tensor, b: Tensor, limit: float) -> Tensor:
    """min(a, limit) * sigmoid(.) * clamp(b, -limit, limit)."""
    a = a.clamp(max=limit)
    return torch.nn.functional.silu(a, inplace=True).mul_(b.clamp(-limit, limit))


def stable_softplus(x: Tensor) -> Tensor:
    """ln(1 + e^x) = max(x, 0) + log1p(e^-|x|)."""
    return x.abs().neg_().exp_().log1p_().add_(x.clamp(min=0))
