"""First output projection: inverse rotation, then one FP8 matrix per group of heads.

Data sheet
  input       attention output [T, H, 512] bf16 or fp32, not quantised (the model's rule); the last
              64
              channels of every head are rotated back while they are loaded, or by a launch
              of its own when the caller gives room (better from a few tokens on)
  weights     e4m3 [G * R, 8 * 512], E8M0 scales per 128 x 128 block; group g = heads 8 g .. 8 g + 7
  arithmetic  codes and inputs in fp16 (both exact or finer than bf16), fp32 sums per K block times
              scale
  decode      weight rows are the M operand, tokens the N operand; K split over programs, partial
              sums added in split order by the last program of a tile
  floor       the weights' bytes over the read rate
"""

import torch
import triton
import triton.language as tl

from decant.kernels import tuned
from decant.kernels.config import Config, lookup
from decant.kernels.fp8_linear import (
    BLOCK,
    chosen_for,
    cuda_linear,
    dequantise_weight_ref,
    splits_for,
)
from decant.kernels.kv_store import rotate_last_64, rotate_ref
from decant.kernels.tiles import cast_like, mma

GROUP_HEADS = 8
ROTATE_HEADS = 4  # heads a program of the rotating launch takes

CONFIGS: dict[str, tuple[tuple[int, Config], ...]] = {
    "sm_90": (
        (16, Config(block_n=64, block_t=16, splits=4, num_warps=4, num_stages=3)),
        (32, Config(block_n=64, block_t=32, splits=8, num_warps=4, num_stages=3)),
        (64, Config(block_n=64, block_t=64, splits=4, num_warps=8, num_stages=3)),
        (1 << 30, Config(block_n=64, block_t=128, splits=1, num_warps=4, num_stages=3)),
    ),
    "sm_120": (
        (16, Config(block_n=64, block_t=16, splits=8, num_warps=4, num_stages=3)),
        (32, Config(block_n=64, block_t=32, splits=8, num_warps=4, num_stages=2)),
        (64, Config(block_n=64, block_t=64, splits=8, num_warps=8, num_stages=1)),
        (1 << 30, Config(block_n=64, block_t=64, splits=1, num_warps=8, num_stages=1)),
    ),
}


def wo_a_ref(
    o: torch.Tensor, rope: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """o [T, H, 512], rope [T, 64], weight e4m3 [G * R, 4096] -> float64 [T, G * R]."""
    tokens, heads, width = o.shape
    groups = heads // GROUP_HEADS
    x = rotate_ref(o, rope, -1.0).view(tokens, groups, GROUP_HEADS * width)
    w = dequantise_weight_ref(weight, scale).view(groups, -1, GROUP_HEADS * width)
    return torch.einsum("tgk,grk->tgr", x, w).flatten(1)


@triton.jit
def _rotate_kernel(o, rope, rotated, H: tl.constexpr, BLOCK_H: tl.constexpr):
    """rotated = o with the last 64 channels of every head rotated back, fp16."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    channel = tl.arange(0, 512)
    place = row * (H * 512) + head[:, None] * 512 + channel[None, :]
    mask = (head < H)[:, None] & (channel >= 0)[None, :]
    x = tl.load(o + place, mask=mask, other=0.0).to(tl.float32)
    x = rotate_last_64(x, rope + row * 64, -1.0)
    tl.store(rotated + place, x.to(tl.float16), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _wo_a_kernel(
    o, rope, weight, scale, partial, counter, out, tokens,
    GROUPS: tl.constexpr, R: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[t, g * R + r]; program (n tile over all groups, t tile, split). ROTATED: o is fp16
    and rotated back already.
    """
    n_tile = tl.program_id(0)
    t_tile = tl.program_id(1)
    split = tl.program_id(2)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    group = n_tile * BLOCK_N // R
    token = t_tile * BLOCK_T + tl.arange(0, BLOCK_T)
    live = token < tokens
    token64 = token.to(tl.int64)
    N: tl.constexpr = GROUPS * R
    K_BLOCKS: tl.constexpr = K // BLOCK_K
    SHARE: tl.constexpr = (K_BLOCKS + SPLITS - 1) // SPLITS
    first = split * SHARE
    last = tl.minimum(first + SHARE, K_BLOCKS)
    k = tl.arange(0, BLOCK_K)
    w_pointer = weight + n[:, None].to(tl.int64) * K + k[None, :]
    x_base = o + token64[None, :] * (GROUPS * K) + group * K
    s_pointer = scale + (n // 128) * K_BLOCKS
    sign = (1 - 2 * (k % 2)).to(tl.float32)[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
    for block in range(first, last):
        w = tl.load(w_pointer + block * BLOCK_K)
        channel = block * BLOCK_K + k
        v = tl.load(x_base + channel[:, None], mask=live[None, :], other=0.0)
        if not ROTATED:
            v = v.to(tl.float32)
            pair = (channel % 512 - 448) // 2
            rotated = (channel % 512 >= 448)[:, None] & live[None, :]
            other = tl.load(x_base + (channel ^ 1)[:, None], mask=rotated, other=0.0).to(tl.float32)
            angle = rope + token64[None, :] * 64 + pair[:, None]
            cos = tl.load(angle, mask=rotated, other=1.0)
            sin = tl.load(angle + 32, mask=rotated, other=0.0)
            v = (v * cos + sign * other * sin).to(tl.float16)
        exponent = tl.load(s_pointer + block).to(tl.int32)
        factor = (exponent << 23).to(tl.float32, bitcast=True)
        product = mma(w.to(tl.float16), v, tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32))
        acc += product * factor[:, None]
    o_offset = token64[None, :] * N + n[:, None]
    o_mask = live[None, :] & (n[:, None] < N)
    if SPLITS == 1:
        tl.store(out + o_offset, cast_like(acc, out), mask=o_mask)
    else:
        plane = tokens.to(tl.int64) * N
        tl.store(partial + split * plane + o_offset, acc, mask=o_mask)
        tl.debug_barrier()
        counter_pointer = counter + t_tile * tl.num_programs(0) + n_tile
        ticket = tl.atomic_add(counter_pointer, 1, sem="acq_rel")
        if ticket == SPLITS - 1:
            tl.debug_barrier()
            total = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
            for s in range(SPLITS):
                total += tl.load(
                    partial + s * plane + o_offset, mask=o_mask, other=0.0, cache_modifier=".cg"
                )
            tl.store(out + o_offset, cast_like(total, out), mask=o_mask)
            tl.store(counter_pointer, 0)


def wo_a(
    o: torch.Tensor,
    rope: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    scratch: tuple[torch.Tensor, torch.Tensor] | None,
    out: torch.Tensor,
    arch: str,
    config: Config | None = None,
    rotated: torch.Tensor | None = None,
) -> torch.Tensor:
    """out [T, G * R] = per group: W_g (o_g rotated back).

    o [T, 8 * G, 512] contiguous; rope fp32 [T, 64]; weight e4m3 [G * R, 4096]; scale uint8 E8M0
    [G * R / 128, 32]; scratch as of ``fp8_linear.workspace`` (None for prefill). rotated, if
    given, is fp16 scratch of o's shape: o is then rotated once in a launch of its own instead of by
    every tile of the product; else one launch.
    """
    tokens, heads, width = o.shape
    groups, k = heads // GROUP_HEADS, GROUP_HEADS * width
    n = weight.shape[0]
    if width != 512 or heads % GROUP_HEADS or n % groups or weight.shape[1] != k:
        raise ValueError(f"o {tuple(o.shape)} and weight {tuple(weight.shape)} do not fit")
    if not o.is_contiguous() or scale.shape != (n // BLOCK, k // BLOCK):
        raise ValueError("o must be contiguous and scales must cover blocks of 128 x 128")
    rank = n // groups
    chosen = None if config or rank % 64 else chosen_for(arch, "wo_a", tokens, n, k)
    if chosen is not None:
        width_all = heads * width
        return cuda_linear(
            chosen, arch, 2, o, None, weight, scale, rope, out, tokens, width_all, rank
        )
    config = config or tuned.choice(arch, f"wo_a_{k}", tokens).config()
    config = config or lookup(CONFIGS[arch], tokens)
    if rank % config.block_n:
        raise ValueError(f"group rank {rank} is not a multiple of {config.block_n}")
    splits = splits_for(config, n, k, arch)
    partial, counter = scratch if scratch is not None else (None, None)
    if splits > 1 and (partial is None or partial.numel() < splits * tokens * n):
        raise ValueError(f"scratch is too small for {splits} splits of {tokens} x {n}")
    if rotated is not None:
        if rotated.shape != o.shape or rotated.dtype != torch.float16:
            raise ValueError(f"rotated must be fp16 {tuple(o.shape)}")
        _rotate_kernel[(tokens, triton.cdiv(heads, ROTATE_HEADS))](
            o, rope, rotated, H=heads, BLOCK_H=ROTATE_HEADS, num_warps=4
        )
        o = rotated
    _wo_a_kernel[(n // config.block_n, triton.cdiv(tokens, config.block_t), splits)](
        o,
        rope,
        weight,
        scale.view(torch.uint8),
        partial,
        counter,
        out,
        tokens,
        GROUPS=groups,
        R=rank,
        K=k,
        SPLITS=splits,
        ROTATED=rotated is not None,
        BLOCK_N=config.block_n,
        BLOCK_T=config.block_t,
        BLOCK_K=BLOCK,
        **config.launch(),
    )
    return out
