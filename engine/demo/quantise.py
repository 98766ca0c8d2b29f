"""Weights to the published formats and back: FP8 e4m3 in 128x128 blocks, packed FP4 e2m1 per 32 of
K.

Scales are powers of two stored as E8M0 bytes. `fake_*` return the value a rounded weight stands
for, which is what quantisation-aware training multiplies with. Source: section 6.3 of the
specification.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from decant.engine.demo.shape import FP4_GROUP, FP8_BLOCK
from decant.engine.demo.streams import unflatten

FP8_MAX, FP4_MAX = 448.0, 6.0
E8M0_BIAS = 127
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _exponent(amax: Tensor, largest: float) -> Tensor:
    """Smallest integer e with amax / 2^e <= largest, as float; frexp keeps exact powers of two
    exact."""
    mantissa, e = torch.frexp(amax.clamp(min=1e-30) / largest)
    return torch.where(mantissa == 0.5, e - 1, e).clamp(-126, 127).float()


def _blocks(w: Tensor) -> Tensor:
    """[..., R, C] -> [..., R / 128, 128, C / 128, 128], zero padded."""
    rows, cols = w.shape[-2:]
    w = F.pad(w, (0, -cols % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    return unflatten(unflatten(w, -1, (-1, FP8_BLOCK)), -3, (-1, FP8_BLOCK))


def fp8_parts(w: Tensor) -> tuple[Tensor, Tensor]:
    """w [..., R, C] -> values / scale [..., R, C] fp32 on the e4m3 grid, exponents per block."""
    rows, cols = w.shape[-2:]
    b = _blocks(w.float())
    e = _exponent(b.abs().amax((-3, -1)), FP8_MAX)
    v = b / torch.exp2(e)[..., :, None, :, None]
    v = v.to(torch.float8_e4m3fn).float().flatten(-4, -3).flatten(-2)
    return v[..., :rows, :cols], e


def fake_fp8(w: Tensor) -> Tensor:
    """The values that `w` [..., R, C] has after rounding to FP8 blocks, fp32."""
    v, e = fp8_parts(w)
    return (
        (_blocks(v) * torch.exp2(e)[..., :, None, :, None])
        .flatten(-4, -3)
        .flatten(-2)[..., : w.shape[-2], : w.shape[-1]]
    )


def fp4_parts(w: Tensor) -> tuple[Tensor, Tensor]:
    """w [..., R, K] -> e2m1 codes (0..15) [..., R, K] uint8 and exponents [..., R, K / 32]."""
    g = unflatten(w.float(), -1, (-1, FP4_GROUP))
    e = _exponent(g.abs().amax(-1), FP4_MAX)
    x = g / torch.exp2(e)[..., None]
    grid = torch.tensor(GRID, device=w.device)
    code = torch.bucketize(x.abs(), (grid[1:] + grid[:-1]) / 2)
    return (code + 8 * (x < 0)).to(torch.uint8).flatten(-2), e


def fp4_values(code: Tensor, e: Tensor) -> Tensor:
    """Codes [..., R, K] and exponents [..., R, K / 32] -> fp32 values."""
    grid = torch.tensor(GRID, device=code.device)
    v = grid[(code & 7).long()] * (1 - 2 * (code >> 3).float())
    return (unflatten(v, -1, (-1, FP4_GROUP)) * torch.exp2(e)[..., None]).flatten(-2)


def fake_fp4(w: Tensor) -> Tensor:
    """The values that `w` [..., R, K] has after rounding to FP4 groups, fp32."""
    return fp4_values(*fp4_parts(w))


def scale_bytes(e: Tensor) -> Tensor:
    """Exponents -> E8M0 tensor."""
    return (e + E8M0_BIAS).to(torch.uint8).view(torch.float8_e8m0fnu)


def exponents(scale: Tensor) -> Tensor:
    """E8M0 tensor -> exponents, fp32."""
    return scale.view(torch.uint8).float() - E8M0_BIAS


def pack_fp8(w: Tensor) -> tuple[Tensor, Tensor]:
    """w [R, C] -> F8_E4M3 [R, C], E8M0 [ceil(R / 128), ceil(C / 128)]."""
    v, e = fp8_parts(w)
    return v.to(torch.float8_e4m3fn).contiguous(), scale_bytes(e)


def unpack_fp8(weight: Tensor, scale: Tensor) -> Tensor:
    """The inverse of `pack_fp8`, fp32."""
    s = torch.exp2(exponents(scale))
    s = s.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return weight.float() * s[: weight.shape[0], : weight.shape[1]]


def pack_fp4(w: Tensor) -> tuple[Tensor, Tensor]:
    """w [R, K] -> I8 [R, K / 2] (low nibble = even index), E8M0 [R, K / 32]."""
    code, e = fp4_parts(w)
    packed = code[:, 0::2] | (code[:, 1::2] << 4)
    return packed.view(torch.int8).contiguous(), scale_bytes(e)


def unpack_fp4(weight: Tensor, scale: Tensor) -> Tensor:
    """The inverse of `pack_fp4`, fp32."""
    b = weight.view(torch.uint8)
    code = torch.stack([b & 15, b >> 4], -1).flatten(-2)
    return fp4_values(code, exponents(scale))
