"""FP8 block-scaled linear: y = x W^T with e4m3 weights, one power-of-two scale per 128 x 128 block.

Data sheet
  weights     e4m3 [N, K], scales E8M0 [N / 128, K / 128]
  activations bf16 or fp32; quantised in the kernel to e4m3, one power-of-two scale per (row, 128
  channels): the model's rule
  arithmetic  fp32 accumulation inside each 128-wide K block, then times both scales into a second
              accumulator
  decode      weight rows are the M operand, 16 rows of x the N operand; K split over programs,
              partial sums
              added in split order by the last program of an output tile (which clears its counter)
  prefill     activations are quantised by a launch of their own when the caller gives room for
              the codes; then the same kernel, one split, wide token tiles
  floor       decode: N * K bytes over the read rate
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from decant.kernels import cuda, tuned
from decant.kernels.config import SHARED_MEMORY_LIMIT, Config, lookup
from decant.kernels.tiles import cast_like, mma, power_of_two_scale, to_e4m3
from decant.kernels.tuned import Choice

CUDA_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CUDA_ROWS = 64  # weight rows of a block of csrc/linear.cu

BLOCK = 128  # scale blocks of the checkpoint
QUANTISE_ROWS = 32  # rows a program of the quantising launch takes

# architecture -> ((largest number of rows, configuration), ...); splits is the most, see
# ``splits_for``
CONFIGS: dict[str, tuple[tuple[int, Config], ...]] = {
    "sm_90": (
        (4, Config(block_n=64, block_t=16, splits=8, num_warps=4, num_stages=4)),
        (16, Config(block_n=64, block_t=16, splits=8, num_warps=4, num_stages=4)),
        (32, Config(block_n=64, block_t=32, splits=8, num_warps=4, num_stages=4)),
        (64, Config(block_n=64, block_t=64, splits=8, num_warps=4, num_stages=4)),
        (1 << 30, Config(block_n=64, block_t=128, splits=1, num_warps=4, num_stages=4)),
    ),
    "sm_120": (
        (16, Config(block_n=64, block_t=16, splits=8, num_warps=4, num_stages=4)),
        (32, Config(block_n=64, block_t=32, splits=8, num_warps=4, num_stages=4)),
        (64, Config(block_n=64, block_t=64, splits=8, num_warps=4, num_stages=3)),
        (1 << 30, Config(block_n=128, block_t=64, splits=1, num_warps=8, num_stages=2)),
    ),
}
TARGET_PROGRAMS = {
    "sm_90": 264,
    "sm_120": 376,
}  # two per multiprocessor of the full chip; a constant on purpose


def quantise_ref(x: torch.Tensor) -> torch.Tensor:
    """x [T, K] -> the values that the FP8 product sees, float64: e4m3 per 128 channels,
    power-of-two scale.
    """
    groups = x.float().unflatten(-1, (-1, BLOCK))
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    mantissa, exponent = torch.frexp(amax * (1.0 / 448.0))
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    codes = torch.ldexp(groups, -exponent).clamp(-448, 448).to(torch.float8_e4m3fn)
    return torch.ldexp(codes.double(), exponent).flatten(-2)


def dequantise_weight_ref(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """e4m3 [N, K], E8M0 bytes [N / 128, K / 128] -> float64 [N, K]."""
    factor = torch.exp2(scale.view(torch.uint8).double() - 127.0)
    factor = factor.repeat_interleave(BLOCK, 0)[: weight.shape[0]].repeat_interleave(BLOCK, 1)
    return weight.double() * factor[:, : weight.shape[1]]


def fp8_linear_ref(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Plain torch in float64: quantise_ref(x) @ W^T."""
    return quantise_ref(x) @ dequantise_weight_ref(weight, scale).T


@triton.jit(do_not_specialize=["tokens"])
def _quantise_kernel(
    x, codes, factors, tokens, x_stride, K: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """e4m3 codes [T, K] and their scales [K / 128, T] for one (128 channels, token tile)."""
    block = tl.program_id(0)
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = token < tokens
    k = block * BLOCK_K + tl.arange(0, BLOCK_K)
    token64 = token.to(tl.int64)
    v = tl.load(x + token64[:, None] * x_stride + k[None, :], mask=live[:, None], other=0.0)
    v = v.to(tl.float32)
    factor, inverse, _ = power_of_two_scale(tl.max(tl.abs(v), axis=1))
    tl.store(
        codes + token64[:, None] * K + k[None, :], to_e4m3(v * inverse[:, None]), mask=live[:, None]
    )
    tl.store(factors + block.to(tl.int64) * tokens + token, factor, mask=live)


@triton.jit(do_not_specialize=["tokens"])
def _linear_kernel(
    x, factors, weight, scale, partial, counter, out, tokens, x_stride,
    N: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, QUANTISED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[t, n] for one (n tile, t tile, split). QUANTISED: x holds e4m3 codes with factors."""
    n_tile = tl.program_id(0)
    t_tile = tl.program_id(1)
    split = tl.program_id(2)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    token = t_tile * BLOCK_T + tl.arange(0, BLOCK_T)
    live = token < tokens
    inside = n < N
    K_BLOCKS: tl.constexpr = K // BLOCK_K
    SHARE: tl.constexpr = (K_BLOCKS + SPLITS - 1) // SPLITS
    first = split * SHARE
    last = tl.minimum(first + SHARE, K_BLOCKS)
    k = tl.arange(0, BLOCK_K)
    w_pointer = weight + n[:, None].to(tl.int64) * K + k[None, :]
    x_pointer = x + token[None, :].to(tl.int64) * x_stride + k[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32)
    for block in range(first, last):
        if SPLITS > 1:
            w = tl.load(
                w_pointer + block * BLOCK_K,
                mask=inside[:, None],
                other=0.0,
                eviction_policy="evict_first",
            )
        else:
            w = tl.load(w_pointer + block * BLOCK_K, mask=inside[:, None], other=0.0)
        v = tl.load(x_pointer + block * BLOCK_K, mask=live[None, :], other=0.0)
        if QUANTISED:
            codes = v
            factor = tl.load(factors + block * tokens.to(tl.int64) + token, mask=live, other=0.0)
        else:
            v = v.to(tl.float32)
            factor, inverse, _ = power_of_two_scale(tl.max(tl.abs(v), axis=0))
            codes = to_e4m3(v * inverse[None, :])
        product = mma(w, codes, tl.zeros([BLOCK_N, BLOCK_T], dtype=tl.float32))
        if BLOCK_K % BLOCK_N == 0:  # the tile lies in one scale block
            w_exponent = tl.load(scale + n_tile * BLOCK_N // 128 * K_BLOCKS + block).to(tl.int32)
            w_factor = (w_exponent << 23).to(tl.float32, bitcast=True)
            acc += product * (w_factor * factor)[None, :]
        else:
            w_exponent = tl.load(scale + (n // 128) * K_BLOCKS + block, mask=inside, other=0)
            w_factor = (w_exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)
            acc += product * (w_factor[:, None] * factor[None, :])
    o_offset = token[None, :].to(tl.int64) * N + n[:, None]
    o_mask = live[None, :] & inside[:, None]
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


def quantise(x: torch.Tensor, codes: torch.Tensor, factors: torch.Tensor) -> None:
    """x [T, K] bf16 or fp32 -> codes e4m3 [T, K] and factors fp32 [K / 128, T]. One launch."""
    tokens, k = x.shape
    if codes.shape != x.shape or factors.shape != (k // BLOCK, tokens):
        raise ValueError(f"room for codes is {tuple(codes.shape)}, not {tuple(x.shape)}")
    _quantise_kernel[(k // BLOCK, triton.cdiv(tokens, QUANTISE_ROWS))](
        x,
        codes,
        factors,
        tokens,
        x.stride(0),
        K=k,
        BLOCK_T=QUANTISE_ROWS,
        BLOCK_K=BLOCK,
        num_warps=4,
    )


def splits_for(config: Config, n: int, k: int, arch: str) -> int:
    """Splits of K for a weight shape: enough programs for the full chip, at least two K blocks
    each.
    """
    if config.splits == 1:
        return 1
    tiles = -(-n // config.block_n)
    wanted = -(-TARGET_PROGRAMS[arch] // tiles)
    return max(1, min(config.splits, wanted, k // BLOCK // 2))


def workspace(
    n: int, max_tokens: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(partial, counter) for up to max_tokens decode rows of outputs n wide; counter starts and
    ends at zero.
    """
    return (
        torch.empty(8 * max_tokens * n, dtype=torch.float32, device=device),
        torch.zeros(-(-n // 16) * -(-max_tokens // 16), dtype=torch.int32, device=device),
    )


def cuda_shared_bytes(options: Mapping[str, int]) -> int:
    """Shared memory of a block of ``csrc/linear.cu``, or of ``csrc/linear_wide.cu`` if the options
    name its rows."""
    kb, tokens = options["kb"], options["tokens"]
    if "rows" in options:
        return kb * BLOCK * (options["rows"] + tokens) + kb * tokens * 4
    share = kb * BLOCK
    return CUDA_ROWS * (share + 64) + tokens * (share * 2 + 16) + kb * tokens * 4


def cuda_problem(options: Mapping[str, int], arch: str, n: int, k: int) -> str:
    """Why the CUDA kernel does not take weights [n, k] with these options; empty if it does."""
    kb, tokens, rows = options["kb"], options["tokens"], options.get("rows", 0)
    if tokens not in (8, 16, 32, 64) or (not rows and tokens < 32 and kb % 2):
        return f"{kb} scale blocks and {tokens} tokens"
    if rows and arch != "sm_90":
        return f"{arch} has no matrix instruction of four warps"
    if rows:
        groups, items = options["threads"] // 128, tokens * kb * 8 // options["threads"]
        if rows not in (64, 128) or groups * 64 % rows or kb % max(1, groups * 64 // rows):
            return f"{kb} scale blocks of {rows} rows for {groups} groups of warps"
        if not items:
            return f"{tokens} tokens and {kb} scale blocks for {options['threads']} threads"
    if k % (kb * BLOCK) or n % (rows or CUDA_ROWS):
        return f"weights [{n}, {k}] in pieces of [{rows or CUDA_ROWS}, {kb * BLOCK}]"
    if k // (kb * BLOCK) > (cuda.PORTABLE_CLUSTER if arch == "sm_120" else 16):
        return f"{k // (kb * BLOCK)} blocks are no cluster of {arch}"
    if cuda_shared_bytes(options) > SHARED_MEMORY_LIMIT[arch]:
        return f"{cuda_shared_bytes(options)} bytes of shared memory"
    return ""


def cuda_build(
    options: Mapping[str, int], k: int, mode: int, given: int, out: int
) -> tuple[str, dict[str, int]]:
    """(source, constants) for weights [n, k]; given, out: numbers of CUDA_TYPES."""
    constants = {"KB": options["kb"], "SPLITS": k // (options["kb"] * BLOCK), "MODE": mode}
    constants |= {"TOKENS": options["tokens"], "IN": given, "OUT": out}
    if "rows" not in options:
        return "linear", constants
    return "linear_wide", constants | {"ROWS": options["rows"], "THREADS": options["threads"]}


def chosen_for(arch: str, op: str, tokens: int, n: int, k: int) -> Choice | None:
    """The tuned CUDA kernel for weights [n, k], or None: Triton."""
    found = tuned.choice(arch, f"{op}_{k}", tokens)
    usable = found.is_cuda and not cuda_problem(found.options, arch, n, k)
    return found if usable else None


def cuda_linear(
    chosen: Choice,
    arch: str,
    mode: int,
    x: torch.Tensor,
    factors: torch.Tensor | None,
    weight: torch.Tensor,
    scale: torch.Tensor,
    rope: torch.Tensor | None,
    out: torch.Tensor,
    tokens: int,
    x_stride: int,
    group_rows: int,
) -> torch.Tensor:
    """Launch ``csrc/linear.cu`` or ``csrc/linear_wide.cu``; mode 0: quantise x, 1: x holds codes,
    2: wo_a, which the second does not know."""
    n, k = weight.shape
    rows, threads = chosen.options.get("rows", 0), chosen.options.get("threads", 256)
    given = 0 if mode == 1 else CUDA_TYPES[x.dtype]
    source, constants = cuda_build(chosen.options, k, mode, given, CUDA_TYPES[out.dtype])
    kernel = cuda.function(source, f"{source}_kernel", arch, **constants)
    where: tuple[object, ...] = (out, tokens, cuda.Int64(x_stride), n, k)
    if not rows:
        where = (rope, *where, group_rows)
    splits = constants["SPLITS"]
    cuda.launch(
        kernel, (splits, n // (rows or CUDA_ROWS), -(-tokens // chosen.options["tokens"])),
        (threads, 1, 1), cuda_shared_bytes(chosen.options),
        x, factors, weight, scale.view(torch.uint8), *where, cluster=splits, overlap=True,
    )  # fmt: skip
    return out


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    scratch: tuple[torch.Tensor, torch.Tensor] | None,
    out: torch.Tensor,
    arch: str,
    config: Config | None = None,
    quantised: tuple[torch.Tensor, torch.Tensor] | None = None,
    factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """out [T, N] = x [T, K] W^T.

    x bf16 or fp32, last dimension contiguous; weight e4m3 [N, K]; scale uint8 (E8M0) [N / 128, K /
    128]; out bf16 or fp32. quantised (codes e4m3 [T, K], factors fp32 [K / 128, T]) is scratch for
    many rows: x is then quantised once in a launch of its own, not again by every tile of N; else
    one launch. factors fp32 [K / 128, T]: x holds e4m3 codes already, that somebody else made by
    the same rule. Raises ValueError for shapes that the blocks do not cover.
    """
    tokens, k = x.shape
    n = weight.shape[0]
    if k % BLOCK or weight.shape[1] != k or x.stride(1) != 1:
        raise ValueError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit blocks of {BLOCK}"
        )
    if scale.shape != (-(-n // BLOCK), k // BLOCK):
        raise ValueError(
            f"scale has shape {tuple(scale.shape)}, expected {(-(-n // BLOCK), k // BLOCK)}"
        )
    if (factors is not None) != (x.dtype == torch.float8_e4m3fn):
        raise ValueError("codes come with their factors, and nothing else does")
    if factors is not None and (factors.shape != (k // BLOCK, tokens) or quantised is not None):
        raise ValueError(f"factors must be [{k // BLOCK}, {tokens}]")
    chosen = None if config else chosen_for(arch, "linear", tokens, n, k)
    if factors is not None and (x.stride(0) % 16 or x.data_ptr() % 16):
        chosen = None  # codes are fetched 16 at a time
    if chosen is not None:
        mode = 0 if factors is None else 1
        stride = x.stride(0)
        return cuda_linear(
            chosen, arch, mode, x, factors, weight, scale, None, out, tokens, stride, n
        )
    config = config or tuned.choice(arch, f"linear_{k}", tokens).config()
    config = config or lookup(CONFIGS[arch], tokens)
    splits = splits_for(config, n, k, arch)
    partial, counter = scratch if scratch is not None else (None, None)
    if splits > 1 and (partial is None or partial.numel() < splits * tokens * n):
        raise ValueError(f"scratch is too small for {splits} splits of {tokens} x {n}")
    if quantised is not None:
        codes, factors = quantised
        quantise(x, codes, factors)
        x = codes
    grid = (triton.cdiv(n, config.block_n), triton.cdiv(tokens, config.block_t), splits)
    _linear_kernel[grid](
        x,
        factors,
        weight,
        scale.view(torch.uint8),
        partial,
        counter,
        out,
        tokens,
        x.stride(0),
        N=n,
        K=k,
        SPLITS=splits,
        QUANTISED=factors is not None,
        BLOCK_N=config.block_n,
        BLOCK_T=config.block_t,
        BLOCK_K=BLOCK,
        **config.launch(),
    )
    return out
