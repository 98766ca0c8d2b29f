"""Queries and window keys: norm, rotation, FP8, store into the ring. One launch.

Data sheet
  rope     cos and sin of a row are computed once a step (``rope_rows``), as fp32 products of
           position
           and frequency, which is the model's own rounding
  q        per head: q / sqrt(mean(q^2) + eps), last 64 channels rotated, rounded to bf16 once
  k        RMSNorm with weight, rotated, rounded to bf16, channels 0..447 to e4m3 in groups of 64
  rows     a row with a negative position is padding: q becomes zero, nothing is stored
  prefill  the same kernel; the chunk buffer is an extent with as many ring rows as it holds
  floor    q read and written once, 584 bytes a key
"""

import torch
import triton
import triton.language as tl

from decant.kernels.layout import DATA_BYTES, KEY_CHANNELS, SCALE_BYTES, Part
from decant.kernels.tiles import power_of_two_scale, to_bf16, to_e4m3

EPS = 1e-6


def rope_ref(positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """positions [T], frequencies fp32 [32] -> fp32 [T, 64]: 32 cosines, then 32 sines."""
    angle = positions.float()[:, None] * frequencies.float()
    return torch.cat((angle.double().cos(), angle.double().sin()), dim=-1).float()


def rotate_ref(x: torch.Tensor, rope: torch.Tensor, sign: float = 1.0) -> torch.Tensor:
    """Rotate the last 64 channels of x [T, ..., D] (pairs of neighbours), in float64."""
    x = x.double().clone()
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (32,)
    cos, sin = rope[:, :32].double().view(shape), rope[:, 32:].double().view(shape) * sign
    even, odd = x[..., -64::2].clone(), x[..., -63::2].clone()
    x[..., -64::2] = even * cos - odd * sin
    x[..., -63::2] = even * sin + odd * cos
    return x


def norm_ref(x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    """RMSNorm over the last axis in float64."""
    x = x.double()
    x = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return x if weight is None else x * weight.double()


@triton.jit(do_not_specialize=["shift"])
def _rope_kernel(positions, frequencies, out, shift):
    """cos and sin of one row's angles; a negative position counts as 0."""
    row = tl.program_id(0)
    i = tl.arange(0, 32)
    position = tl.maximum(tl.load(positions + row) + shift, 0)
    angle = position.to(tl.float32) * tl.load(frequencies + i)
    tl.store(out + row * 64 + i, tl.cos(angle))
    tl.store(out + row * 64 + 32 + i, tl.sin(angle))


@triton.jit
def rotate_last_64(x, rope, SIGN: tl.constexpr):
    """Rotate the last 64 channels of x [H, D]; rope points to the row's 32 cosines and 32 sines."""
    H: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    even, odd = tl.split(tl.reshape(x, [H, D // 2, 2]))
    pair = tl.arange(0, D // 2) - (D // 2 - 32)
    cos = tl.load(rope + pair, mask=pair >= 0, other=1.0)[None, :]
    sin = SIGN * tl.load(rope + 32 + pair, mask=pair >= 0, other=0.0)[None, :]
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [H, D])


@triton.jit
def store_key(key, data, scale):
    """Write one key [1, 512] (fp32 values that are exact in bf16) as 576 data and 8 scale bytes."""
    group = tl.arange(0, 8)
    inside = tl.arange(0, 64)
    grouped = tl.reshape(key, [8, 64])
    nope = group < 7
    _, inverse, exponent = power_of_two_scale(tl.max(tl.abs(grouped), axis=1))
    codes = to_e4m3(grouped * inverse[:, None]).to(tl.uint8, bitcast=True)
    place = group[:, None] * 64 + inside[None, :]
    tl.store(data + place, codes, mask=nope[:, None])
    tl.store(scale + group, tl.where(nope, exponent, 0).to(tl.uint8))
    rope_data = (data + 448).to(tl.pointer_type(tl.bfloat16)) + place - 448
    tl.store(rope_data, to_bf16(grouped), mask=(group == 7)[:, None])


@triton.jit
def _norm_rope_store_kernel(
    q, out, k, k_norm, rope, slot_of_row, position_of_row, extents, stride16, offset16,
    q_stride, out_stride, k_stride,
    H: tl.constexpr, BLOCK_H: tl.constexpr, RING: tl.constexpr, DATA: tl.constexpr,
    SCALES: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """See ``store_row``."""
    store_row(
        tl.program_id(0).to(tl.int64), tl.program_id(1), q, out, k, k_norm, rope, slot_of_row,
        position_of_row, extents, stride16, offset16, q_stride, out_stride, k_stride, H, BLOCK_H,
        RING, DATA, SCALES, EPS,
    )  # fmt: skip


@triton.jit
def store_row(
    row, part, q, out, k, k_norm, rope, slot_of_row, position_of_row, extents, stride16, offset16,
    q_stride, out_stride, k_stride,
    H: tl.constexpr, BLOCK_H: tl.constexpr, RING: tl.constexpr, DATA: tl.constexpr,
    SCALES: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Parts 0 .. H / BLOCK_H - 1 of a row are query heads, the last one is the key."""
    position = tl.load(position_of_row + row)
    channel = tl.arange(0, 512)
    if part * BLOCK_H < H:
        head = part * BLOCK_H + tl.arange(0, BLOCK_H)
        mask = (head < H)[:, None] & (channel >= 0)[None, :]
        place = head[:, None] * 512 + channel[None, :]
        x = tl.load(q + row * q_stride + place, mask=mask, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, axis=1) / 512 + EPS)[:, None]
        x = rotate_last_64(x, rope + row * 64, 1.0)
        x = tl.where(position >= 0, x, 0.0)
        tl.store(out + row * out_stride + place, to_bf16(x), mask=mask)
    elif position >= 0:
        x = tl.load(k + row * k_stride + channel).to(tl.float32)
        x = (
            x
            * tl.rsqrt(tl.sum(x * x, axis=0) / 512 + EPS)
            * tl.load(k_norm + channel).to(tl.float32)
        )
        x = rotate_last_64(tl.reshape(x, [1, 512]), rope + row * 64, 1.0)
        slot = tl.load(slot_of_row + row).to(tl.int64)
        base = extents + (slot * stride16 + offset16) * 16
        ring_row = (position % RING).to(tl.int64)
        store_key(
            to_bf16(x).to(tl.float32),
            base + ring_row * DATA,
            base + RING * DATA + ring_row * SCALES,
        )


def rope_rows(
    positions: torch.Tensor, frequencies: torch.Tensor, out: torch.Tensor, shift: int = 0
) -> torch.Tensor:
    """Fill out fp32 [T, 64] with cos and sin of (positions + shift) times frequencies fp32 [32].

    shift is 1 - ratio for entries that a row completes (they are rotated at their first token).
    """
    _rope_kernel[(positions.numel(),)](positions, frequencies, out, shift, num_warps=1)
    return out


def norm_rope_store(
    q: torch.Tensor,
    k: torch.Tensor,
    k_norm: torch.Tensor,
    rope: torch.Tensor,
    slot_of_row: torch.Tensor,
    position_of_row: torch.Tensor,
    extents: torch.Tensor,
    stride: int,
    window: Part,
    out: torch.Tensor | None = None,
) -> None:
    """Normalise and rotate q [T, H, 512] bf16 into out (as q; None: in place); store k [T, 512]
    into the window rings.

    rope fp32 [T, 64] from ``rope_rows``; extents uint8 with ``stride`` bytes a slot; positions of
    one launch that share a slot must fall into different ring rows. One launch.
    """
    rows, heads, width = q.shape
    if width != KEY_CHANNELS or q.stride(1) != width or q.stride(2) != 1 or k.stride(1) != 1:
        raise ValueError(f"q must be [rows, heads, {KEY_CHANNELS}] with contiguous heads")
    if stride % 16 or window.offset % 16:
        raise ValueError("stride and offset must be multiples of 16 bytes")
    target = q if out is None else out
    if target.shape != q.shape or target.stride(1) != width or target.stride(2) != 1:
        raise ValueError(f"out must be [rows, heads, {KEY_CHANNELS}] with contiguous heads")
    block = 4
    _norm_rope_store_kernel[(rows, triton.cdiv(heads, block) + 1)](
        q,
        target,
        k,
        k_norm,
        rope,
        slot_of_row,
        position_of_row,
        extents,
        stride // 16,
        window.offset // 16,
        q.stride(0),
        target.stride(0),
        k.stride(0),
        H=heads,
        BLOCK_H=block,
        RING=window.rows,
        DATA=DATA_BYTES,
        SCALES=SCALE_BYTES,
        EPS=EPS,
        num_warps=4,
    )
