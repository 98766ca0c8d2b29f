"""FP4 mixture of experts: gate/up GEMM with clamped SwiGLU, down GEMM, weighted sum over experts.

Data sheet
  weights     MXFP4 (e2m1, one E8M0 scale per 32 along K) or NVFP4 (e2m1, one E4M3 scale per 16,
              one fp32 scale
              per tensor), shuffled once by ``pack_experts``; trunk and MTP experts alike
  activations fp16 (W4A16): every product is exact, accumulation fp32
  decode      weight rows are the M operand, up to ``BLOCK_T`` tokens of one expert the N operand
  work list   device tensors from ``gate.route``: no host decision depends on the routing
  result      fp32 partials [pairs, hidden], summed over a token's experts in list order: no atomics
  floor       bytes of the experts hit over the read rate

A loop step takes several groups: their one-byte scales are too narrow for asynchronous copies, so
every step waits once for them.

FP4 codes become fp16 / 2^14 by shifts and masks; the group scale is one fp16 multiply; what is
left of the scale (the row's largest exponent, or NVFP4's tensor scale) multiplies the accumulator.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from decant.kernels import fp4_moe_cuda, tuned
from decant.kernels.config import Config, lookup
from decant.kernels.tiles import cast_like, fp4_tile, mma

SWIGLU_LIMIT = 10.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# (architecture, kernel) -> ((largest number of pairs, configuration), ...), ascending
CONFIGS: dict[tuple[str, str], tuple[tuple[int, Config], ...]] = {
    ("sm_90", "gate_up"): (
        (12, Config(block_n=16, block_t=16, block_k=512, num_warps=1, num_stages=3)),
        (64, Config(block_n=32, block_t=16, block_k=128, num_warps=2, num_stages=4)),
        (512, Config(block_n=32, block_t=16, num_warps=2, num_stages=5)),
        (4096, Config(block_n=64, block_t=32, num_warps=4, num_stages=4)),
        (1 << 30, Config(block_n=64, block_t=128, block_k=128, num_warps=4, num_stages=3)),
    ),
    ("sm_90", "down"): (
        (12, Config(block_n=32, block_t=16, block_k=128, num_warps=2, num_stages=3)),
        (64, Config(block_n=32, block_t=16, block_k=128, num_warps=2, num_stages=3)),
        (512, Config(block_n=32, block_t=16, num_warps=2, num_stages=5)),
        (4096, Config(block_n=128, block_t=32, num_warps=4, num_stages=4)),
        (1 << 30, Config(block_n=64, block_t=128, block_k=64, num_warps=4, num_stages=3)),
    ),
    ("sm_120", "gate_up"): (
        (12, Config(block_n=16, block_t=16, num_warps=1, num_stages=6)),
        (512, Config(block_n=64, block_t=16, num_warps=2, num_stages=4)),
        (4096, Config(block_n=64, block_t=32, num_warps=4, num_stages=3)),
        (1 << 30, Config(block_n=64, block_t=64, num_warps=4, num_stages=3)),
    ),
    ("sm_120", "down"): (
        (12, Config(block_n=64, block_t=16, num_warps=2, num_stages=4)),
        (512, Config(block_n=128, block_t=16, num_warps=4, num_stages=4)),
        (4096, Config(block_n=128, block_t=32, num_warps=4, num_stages=3)),
        (1 << 30, Config(block_n=128, block_t=64, num_warps=4, num_stages=3)),
    ),
}


@dataclass(frozen=True)
class PackedExperts:
    """One projection of all experts: shuffled codes, group scales, row factors.

    codes  uint8 [E, K / (2 * group), N, group]
    scales uint8 [E, K / group, N]: MXFP4 an fp16 exponent field relative to the row's largest
    scale,
           NVFP4 the e4m3 byte
    rows   fp32 [E, N]: factor of the accumulator
    """

    codes: torch.Tensor
    scales: torch.Tensor
    rows: torch.Tensor
    group: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """(experts, N, K) of the unpacked weights."""
        experts, blocks, n, group = self.codes.shape
        return experts, n, blocks * 2 * group


def recode(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Two e2m1 codes a byte, with the bits where the kernel needs them (see ``tiles.fp4_tile``).

    low, high: uint8 codes 0..15 of two neighbouring groups. Returns uint8 of the same shape.
    """
    first = ((low >> 3) << 7) | ((low & 7) << 1)
    second = ((high >> 3) << 6) | (((high >> 1) & 3) << 4) | (high & 1)
    return first | second


def pack_experts(
    packed: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor | None = None
) -> PackedExperts:
    """Turn checkpoint FP4 weights into the kernels' layout.

    packed: uint8 or int8 [E, N, K / 2], low nibble = even index. scales: E8M0 bytes [E, N, K / 32]
    (MXFP4), or e4m3 [E, N, K / 16] together with global_scale fp32 [E] or [E, N] (NVFP4). Raises
    ValueError for a shape or scale that has no exact form here.
    """
    packed = packed.view(torch.uint8)
    experts, n, half_k = packed.shape
    k = 2 * half_k
    group = k // scales.shape[-1]
    if group not in (16, 32) or scales.shape != (experts, n, k // group) or k % (2 * group):
        raise ValueError(
            f"FP4 scales of shape {tuple(scales.shape)} do not fit weights [{experts}, {n}, {k}]"
        )
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    blocks = codes.view(experts, n, k // (2 * group), 2, group)
    shuffled = recode(blocks[..., 0, :], blocks[..., 1, :]).transpose(1, 2).contiguous()
    raw = scales.view(torch.uint8)
    if group == 32:
        if global_scale is not None:
            raise ValueError("MXFP4 has no tensor scale")
        if bool((raw == 255).any()):
            raise ValueError("an E8M0 scale is NaN (byte 255)")
        largest = raw.amax(-1, keepdim=True).to(torch.int32)
        relative = (29 - (largest - raw.to(torch.int32))).clamp_min(0)
        field, rows = relative.to(torch.uint8), torch.exp2(largest[..., 0].float() - 127.0)
    else:
        if global_scale is None:
            raise ValueError("NVFP4 weights need their tensor scale")
        field = raw
        shape = global_scale.float().reshape(experts, -1)
        rows = (shape * 128.0).expand(experts, n)
    return PackedExperts(shuffled, field.transpose(1, 2).contiguous(), rows.contiguous(), group)


def unpack_experts_ref(weights: PackedExperts) -> torch.Tensor:
    """PackedExperts -> fp32 [E, N, K]."""
    experts, n, k = weights.shape
    group = weights.group
    octets = weights.codes.long()
    table = torch.tensor(E2M1 + tuple(-v for v in E2M1), device=octets.device)
    low = ((octets >> 7) << 3) | ((octets >> 1) & 7)
    high = (((octets >> 6) & 1) << 3) | (((octets >> 4) & 3) << 1) | (octets & 1)
    halves = (table[low], table[high])
    values = torch.stack(halves, dim=3).transpose(1, 2)  # [E, N, blocks, 2, group]
    values = values.reshape(experts, n, k // group, group)
    if group == 32:
        exponent = weights.scales.to(torch.int32) - 29
        scale = torch.where(weights.scales == 0, 0.0, torch.exp2(exponent.float()))
    else:
        scale = weights.scales.view(torch.float8_e4m3fn).float() / 128.0
    return (values * scale.transpose(1, 2)[..., None] * weights.rows[:, :, None, None]).flatten(-2)


def swiglu_ref(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(min(gate, 10)) * clamp(up, -10, 10) in the inputs' precision."""
    gate = gate.clamp(max=SWIGLU_LIMIT)
    return gate * torch.sigmoid(gate) * up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)


def fp4_moe_ref(
    x: torch.Tensor,
    w13: PackedExperts,
    w2: PackedExperts,
    experts: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Plain torch: x [T, D], experts int [T, k], weights fp32 [T, k] -> [T, D] in float64."""
    up_down = unpack_experts_ref(w13).double(), unpack_experts_ref(w2).double()
    half = w13.shape[1] // 2
    out = torch.zeros_like(x, dtype=torch.float64)
    for token in range(x.shape[0]):
        for choice, weight in zip(experts[token].tolist(), weights[token].tolist(), strict=True):
            hidden = up_down[0][choice] @ x[token].double()
            out[token] += weight * (up_down[1][choice] @ swiglu_ref(hidden[:half], hidden[half:]))
    return out


@triton.jit
def _group_scale(pointer, NVFP4: tl.constexpr):
    """Group scales of some rows as fp16, times 2^14 (MXFP4, relative) or 2^7 (NVFP4)."""
    raw = tl.load(pointer)
    if NVFP4:
        return raw.to(tl.float8e4nv, bitcast=True).to(tl.float16) * 128.0
    else:
        return (raw.to(tl.uint16) << 10).to(tl.float16, bitcast=True)


@triton.jit
def _gate_up_kernel(
    x, codes, scales, rows, out, pairs, tile_expert, tile_start, tile_count, num_tiles,
    TOP_K: tl.constexpr, K: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """g[sorted position, n] = swiglu(w1 x, w3 x) for one tile of tokens of one expert. N counts w1
    and w3 rows.
    """
    tile = tl.program_id(1)
    if tile >= tl.load(num_tiles):
        return
    HALF: tl.constexpr = N // 2
    expert = tl.load(tile_expert + tile).to(tl.int64)
    start = tl.load(tile_start + tile)
    count = tl.load(tile_count + tile)
    slot = tl.arange(0, BLOCK_T)
    valid = slot < count
    token = tl.load(pairs + start + slot, mask=valid, other=0) // TOP_K
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, GROUP)
    code_base = codes + expert * (N * K // 2)
    scale_base = scales + expert * (N * K // GROUP)
    gate_offsets = n[:, None] * GROUP + column[None, :]
    up_offsets = gate_offsets + HALF * GROUP
    x_pointer = x + token[None, :].to(tl.int64) * K + column[:, None]
    gate = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
    for first in range(0, K // (2 * GROUP), UNROLL):
        for u in tl.static_range(UNROLL):
            block = first + u
            x_low = tl.load(x_pointer + block * 2 * GROUP, mask=valid[None, :], other=0.0)
            x_high = tl.load(x_pointer + block * 2 * GROUP + GROUP, mask=valid[None, :], other=0.0)
            base = code_base + block * (N * GROUP)
            low_scale = scale_base + (2 * block) * N + n
            high_scale = low_scale + N
            low, high = fp4_tile(base + gate_offsets)
            gate = mma(low * _group_scale(low_scale, GROUP == 16)[:, None], x_low, gate)
            gate = mma(high * _group_scale(high_scale, GROUP == 16)[:, None], x_high, gate)
            low, high = fp4_tile(base + up_offsets)
            up = mma(low * _group_scale(low_scale + HALF, GROUP == 16)[:, None], x_low, up)
            up = mma(high * _group_scale(high_scale + HALF, GROUP == 16)[:, None], x_high, up)
    row_base = rows + expert * N + n
    gate = tl.minimum(gate * tl.load(row_base)[:, None], LIMIT)
    up = tl.minimum(tl.maximum(up * tl.load(row_base + HALF)[:, None], -LIMIT), LIMIT)
    g = gate * up / (1.0 + tl.exp(-gate))
    position = (start + slot).to(tl.int64)
    tl.store(out + position[None, :] * HALF + n[:, None], g.to(tl.float16), mask=valid[None, :])


@triton.jit
def _down_kernel(
    g, codes, scales, rows, weights, out, pairs, tile_expert, tile_start, tile_count, num_tiles,
    K: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """out[pair, n] = routing weight * (w2 g) in fp32."""
    tile = tl.program_id(1)
    if tile >= tl.load(num_tiles):
        return
    expert = tl.load(tile_expert + tile).to(tl.int64)
    start = tl.load(tile_start + tile)
    count = tl.load(tile_count + tile)
    slot = tl.arange(0, BLOCK_T)
    valid = slot < count
    pair = tl.load(pairs + start + slot, mask=valid, other=0).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, GROUP)
    code_base = codes + expert * (N * K // 2)
    scale_base = scales + expert * (N * K // GROUP)
    offsets = n[:, None] * GROUP + column[None, :]
    g_pointer = g + (start + slot)[None, :].to(tl.int64) * K + column[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
    for first in range(0, K // (2 * GROUP), UNROLL):
        for u in tl.static_range(UNROLL):
            block = first + u
            g_low = tl.load(g_pointer + block * 2 * GROUP, mask=valid[None, :], other=0.0)
            g_high = tl.load(g_pointer + block * 2 * GROUP + GROUP, mask=valid[None, :], other=0.0)
            low_scale = scale_base + (2 * block) * N + n
            low, high = fp4_tile(code_base + block * (N * GROUP) + offsets)
            acc = mma(low * _group_scale(low_scale, GROUP == 16)[:, None], g_low, acc)
            acc = mma(high * _group_scale(low_scale + N, GROUP == 16)[:, None], g_high, acc)
    weight = tl.load(weights + pair, mask=valid, other=0.0)
    acc = acc * tl.load(rows + expert * N + n)[:, None] * weight[None, :]
    tl.store(out + pair[None, :] * N + n[:, None], acc, mask=valid[None, :])


@triton.jit
def _combine_kernel(
    partial, shared, out, N: tl.constexpr, TOP_K: tl.constexpr, HAS_SHARED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[t] = partial[t, 0] + ... + partial[t, TOP_K - 1] (+ shared[t]), summed in that order."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.load(partial + token * TOP_K * N + n)
    for choice in tl.static_range(1, TOP_K):
        total += tl.load(partial + (token * TOP_K + choice) * N + n)
    if HAS_SHARED:
        total += tl.load(shared + token * N + n).to(tl.float32)
    tl.store(out + token * N + n, cast_like(total, out))


@dataclass(frozen=True)
class TileList:
    """Work list on the device (gate.route fills it): one entry per (expert, <= block_t tokens).

    pairs int32 [P]: token * top_k + choice, sorted by expert, then ascending. expert, start, count
    int32 [tiles]. num_tiles int32 [1]. block_t: the tokens per tile that it was built for.
    """

    pairs: torch.Tensor
    expert: torch.Tensor
    start: torch.Tensor
    count: torch.Tensor
    num_tiles: torch.Tensor
    block_t: int


def max_tiles(num_pairs: int, num_experts: int, block_t: int) -> int:
    """Upper bound of the number of tiles for any routing: depends on the bucket only."""
    touched = min(num_pairs, num_experts)
    return touched + (num_pairs - touched) // block_t


def chosen_for(arch: str, num_pairs: int, w13: PackedExperts) -> tuned.Choice:
    """The tuned implementation if it takes experts of these shapes, else Triton."""
    chosen = tuned.choice(arch, "moe", num_pairs)
    _, n13, width = w13.shape
    if chosen.is_cuda and fp4_moe_cuda.problem(
        chosen.options, arch, n13, width, n13 // 2, w13.group
    ):
        return tuned.TRITON
    return chosen


def block_tokens(num_pairs: int, arch: str, w13: PackedExperts) -> int:
    """Tokens per tile that the configuration table wants for this many (token, expert) pairs."""
    chosen = chosen_for(arch, num_pairs, w13)
    if chosen.is_cuda:
        return chosen.options["tokens"]
    return triton_config(arch, "gate_up", num_pairs).block_t


def triton_config(arch: str, kernel: str, num_pairs: int) -> Config:
    """Configuration of "gate_up" or "down": the tuned one, else the table's."""
    tuned_one = tuned.choice(arch, f"moe_{kernel}", num_pairs).config()
    return tuned_one or lookup(CONFIGS[arch, kernel], num_pairs)


def unroll(config: Config, k: int, group: int) -> int:
    """Pairs of groups a loop step takes: block_k channels, fewer where K has no such multiple."""
    blocks = k // (2 * group)
    wanted = max(1, min(config.block_k // (2 * group), blocks))
    while blocks % wanted:
        wanted -= 1
    return wanted


def fp4_moe(
    x: torch.Tensor,
    w13: PackedExperts,
    w2: PackedExperts,
    weights: torch.Tensor,
    tiles: TileList,
    hidden: torch.Tensor,
    partial: torch.Tensor,
    out: torch.Tensor,
    arch: str,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """Routed experts of T tokens: out[t] = sum_k weights[t, k] * w2[e](swiglu(w1[e] x, w3[e] x))
    (+ shared).

    x fp16 [T, D]; w13 holds w1's rows then w3's ([E, 2 I, D]); w2 [E, D, I]; weights fp32 [T, k].
    Scratch, fully rewritten where read: hidden fp16 [T * k, I], partial fp32 [T * k, D]. out [T,
    D] fp32 or bf16. Capture-safe: three launches, grids depend on T only.
    """
    tokens, top_k = weights.shape
    _, n13, width = w13.shape
    _, n2, k2 = w2.shape
    for name, tensor, dtype in (("x", x, torch.float16), ("hidden", hidden, torch.float16)):
        if tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous {dtype}")
    if n2 != width or k2 * 2 != n13 or x.shape != (tokens, width):
        raise ValueError(f"expert shapes {w13.shape} and {w2.shape} do not fit x {tuple(x.shape)}")
    num_pairs = tokens * top_k
    chosen = chosen_for(arch, num_pairs, w13)
    if chosen.is_cuda:
        if tiles.block_t != chosen.options["tokens"]:
            raise ValueError(f"the tile list holds {tiles.block_t} tokens a tile")
        return fp4_moe_cuda.run(
            chosen.options, arch, x, w13, w2, weights, tiles, hidden, partial, out, shared
        )
    up = triton_config(arch, "gate_up", num_pairs)
    down = triton_config(arch, "down", num_pairs)
    if tiles.block_t != up.block_t or down.block_t != up.block_t:
        raise ValueError(
            f"the tile list holds {tiles.block_t} tokens a tile, the kernels want {up.block_t}"
        )
    listed = (tiles.pairs, tiles.expert, tiles.start, tiles.count, tiles.num_tiles)
    count = tiles.expert.numel()
    block_n = min(up.block_n, n13 // 2)
    _gate_up_kernel[(n13 // 2 // block_n, count)](
        x,
        w13.codes,
        w13.scales,
        w13.rows,
        hidden,
        *listed,
        TOP_K=top_k,
        K=width,
        N=n13,
        GROUP=w13.group,
        LIMIT=SWIGLU_LIMIT,
        BLOCK_N=block_n,
        BLOCK_T=up.block_t,
        UNROLL=unroll(up, width, w13.group),
        **up.launch(),
    )
    block_n = min(down.block_n, n2)
    _down_kernel[(n2 // block_n, count)](
        hidden,
        w2.codes,
        w2.scales,
        w2.rows,
        weights,
        partial,
        *listed,
        K=k2,
        N=n2,
        GROUP=w2.group,
        BLOCK_N=block_n,
        BLOCK_T=down.block_t,
        UNROLL=unroll(down, k2, w2.group),
        **down.launch(),
    )
    block = min(1024, n2)
    _combine_kernel[(tokens, n2 // block)](
        partial,
        partial if shared is None else shared,
        out,
        N=n2,
        TOP_K=top_k,
        HAS_SHARED=shared is not None,
        BLOCK_N=block,
        num_warps=4,
    )
    return out
