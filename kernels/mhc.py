"""Hyper-connection boundary: combine the four streams with a sub-layer's output, mix, collapse,
RMSNorm.

One boundary ends one site and begins the next:
    X'_k = post_k y + sum_j C_jk X_j                         (end of the previous site; left out at
    the first) m = (fn X') / sqrt(mean(X'^2) + eps)                     24 values
    pre = sigmoid(..) + eps, post = 2 sigmoid(..), C = Sinkhorn(..)
    u = RMSNorm(sum_j pre_j X'_j)

Data sheet
  streams  bf16 [T, 4, D], rounded once; everything else fp32; products with fn in fp32, or,
           from three tokens on, with fn as three bf16 terms (the streams are bf16 already)
  launches 2: streams and partial products over shares of D (fn is read once a token tile), then
  one program a token
  order    shares are added in share order
  floor    decode: fn's 1.57 MB; prefill: 9 D bf16 values read and 5 D written a token
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from decant.kernels import cuda, tuned
from decant.kernels.config import SHARED_MEMORY_LIMIT, Config, lookup
from decant.kernels.fp8_linear import quantise
from decant.kernels.tiles import cast_like, keep_layout, mma, to_bf16

EPS = 1e-6
STREAMS = 4
MIX = 24  # 4 pre + 4 post + 16 comb
SLOTS = 32  # a row of partial results: 24 products, the sum of squares, padding
ROUNDS = 20

# architecture -> ((largest number of tokens, configuration), ...); splits: shares of D, block_k
# channels a step
CONFIGS: dict[str, tuple[tuple[int, Config], ...]] = {
    arch: (
        (2, Config(block_t=1, block_k=64, splits=64, num_warps=4, num_stages=1)),
        (16, Config(block_t=4, block_k=32, splits=128, num_warps=4, num_stages=1)),
        (256, Config(block_t=16, block_k=64, splits=64, num_warps=4, num_stages=1)),
        (1 << 30, Config(block_t=64, block_k=32, splits=8, num_warps=8, num_stages=1)),
    )
    for arch in ("sm_90", "sm_120")
}


def combine_ref(
    x: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """X'_k = post_k y + sum_j C_jk X_j: x [T, 4, D], y [T, D], post [T, 4], comb [T, 4, 4] ->
    float64 [T, 4, D].
    """
    mixed = torch.einsum("tjk,tjd->tkd", comb.double(), x.double())
    return mixed + post.double()[:, :, None] * y.double()[:, None, :]


def mix_ref(
    x: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """pre [T, 4], post [T, 4], comb [T, 4, 4] of streams x [T, 4, D], in float64."""
    flat = x.double().flatten(1)
    rho = (flat.square().mean(-1, keepdim=True) + EPS).rsqrt()
    m = rho * (flat @ fn.double().T)
    scale, base = scale.double(), base.double()
    pre = torch.sigmoid(m[:, :4] * scale[0] + base[:4]) + EPS
    post = 2 * torch.sigmoid(m[:, 4:8] * scale[1] + base[4:8])
    comb = (m[:, 8:] * scale[2] + base[8:]).unflatten(-1, (4, 4)).softmax(-1) + EPS
    comb = comb / (comb.sum(-2, keepdim=True) + EPS)
    for _ in range(ROUNDS - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + EPS)
        comb = comb / (comb.sum(-2, keepdim=True) + EPS)
    return pre, post, comb


def collapse_ref(x: torch.Tensor, pre: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """RMSNorm of sum_j pre_j X_j rounded to bf16: float64 [T, D]."""
    u = torch.einsum("tj,tjd->td", pre.double(), x.double()).bfloat16().double()
    return u * (u.square().mean(-1, keepdim=True) + EPS).rsqrt() * norm.double()


@triton.jit
def _product(x, fn, acc):
    """acc [T, 32] + x [T, K] fn^T, x bf16, fn fp32 [32, K] as the sum of three bf16 terms: every
    product is exact, what is left of fn is below 2^-24 of it.
    """
    high = to_bf16(fn)
    rest = fn - high.to(tl.float32)
    middle = to_bf16(rest)
    low = to_bf16(rest - middle.to(tl.float32))
    x = keep_layout(x)
    acc = mma(x, tl.trans(low), acc)
    acc = mma(x, tl.trans(middle), acc)
    return mma(x, tl.trans(high), acc)


@triton.jit
def _coefficients(post, comb, token, live, K: tl.constexpr):
    """post_k and C_0k .. C_3k of some tokens, each [T, 1]."""
    c = comb + token * 16 + K
    return (
        tl.load(post + token * 4 + K, mask=live, other=0.0)[:, None],
        tl.load(c, mask=live, other=0.0)[:, None],
        tl.load(c + 4, mask=live, other=0.0)[:, None],
        tl.load(c + 8, mask=live, other=0.0)[:, None],
        tl.load(c + 12, mask=live, other=0.0)[:, None],
    )


@triton.jit
def _combine(p, c0, c1, c2, c3, v, x0, x1, x2, x3):
    """One new stream, rounded to bf16."""
    new = p * v
    new += c0 * x0.to(tl.float32)
    new += c1 * x1.to(tl.float32)
    new += c2 * x2.to(tl.float32)
    new += c3 * x3.to(tl.float32)
    return to_bf16(new)


@triton.jit(do_not_specialize=["tokens"])
def _combine_kernel(
    x, y, post, comb, fn, streams, partial, tokens,
    D: tl.constexpr, DOTS: tl.constexpr, SPLITS: tl.constexpr, COMBINE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """streams = X' and partial[split, t, :] = products and sum of squares over the split's
    channels. All loads of a step stand before its stores, so that none waits for another.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = token < tokens
    split = tl.program_id(1)
    SHARE: tl.constexpr = D // SPLITS
    slot = tl.arange(0, 32)
    token64 = token.to(tl.int64)
    row_mask = live[:, None]
    fn_mask = (slot < DOTS)[:, None]
    acc = tl.zeros([BLOCK_T, 32], dtype=tl.float32)
    squares = tl.zeros([BLOCK_T], dtype=tl.float32)
    if COMBINE:
        p0, a0, b0, e0, f0 = _coefficients(post, comb, token, live, 0)
        p1, a1, b1, e1, f1 = _coefficients(post, comb, token, live, 1)
        p2, a2, b2, e2, f2 = _coefficients(post, comb, token, live, 2)
        p3, a3, b3, e3, f3 = _coefficients(post, comb, token, live, 3)
    for step in range(SHARE // BLOCK_D):
        d = split * SHARE + step * BLOCK_D + tl.arange(0, BLOCK_D)
        offset = token64[:, None] * (4 * D) + d[None, :]
        fn_at = fn + slot[:, None] * (4 * D) + d[None, :]
        x0 = tl.load(x + offset, mask=row_mask, other=0.0)
        x1 = tl.load(x + offset + D, mask=row_mask, other=0.0)
        x2 = tl.load(x + offset + 2 * D, mask=row_mask, other=0.0)
        x3 = tl.load(x + offset + 3 * D, mask=row_mask, other=0.0)
        if BLOCK_T < 16:
            w0 = tl.load(fn_at, mask=fn_mask, other=0.0)
            w1 = tl.load(fn_at + D, mask=fn_mask, other=0.0)
            w2 = tl.load(fn_at + 2 * D, mask=fn_mask, other=0.0)
            w3 = tl.load(fn_at + 3 * D, mask=fn_mask, other=0.0)
        if COMBINE:
            v = tl.load(y + token64[:, None] * D + d[None, :], mask=row_mask, other=0.0)
            v = v.to(tl.float32)
        if COMBINE:
            n0 = _combine(p0, a0, b0, e0, f0, v, x0, x1, x2, x3)
            n1 = _combine(p1, a1, b1, e1, f1, v, x0, x1, x2, x3)
            n2 = _combine(p2, a2, b2, e2, f2, v, x0, x1, x2, x3)
            n3 = _combine(p3, a3, b3, e3, f3, v, x0, x1, x2, x3)
        else:
            n0, n1, n2, n3 = x0, x1, x2, x3
        g0, g1 = n0.to(tl.float32), n1.to(tl.float32)
        g2, g3 = n2.to(tl.float32), n3.to(tl.float32)
        squares += tl.sum(g0 * g0 + g1 * g1 + g2 * g2 + g3 * g3, axis=1)
        if BLOCK_T < 16:  # too few tokens for a matrix instruction
            terms = g0[:, None, :] * w0[None, :, :] + g1[:, None, :] * w1[None, :, :]
            terms += g2[:, None, :] * w2[None, :, :] + g3[:, None, :] * w3[None, :, :]
            acc += tl.sum(terms, axis=2)
        else:
            acc = _product(n0, tl.load(fn_at, mask=fn_mask, other=0.0), acc)
            acc = _product(n1, tl.load(fn_at + D, mask=fn_mask, other=0.0), acc)
            acc = _product(n2, tl.load(fn_at + 2 * D, mask=fn_mask, other=0.0), acc)
            acc = _product(n3, tl.load(fn_at + 3 * D, mask=fn_mask, other=0.0), acc)
        if COMBINE:
            tl.store(streams + offset, n0, mask=row_mask)
            tl.store(streams + offset + D, n1, mask=row_mask)
            tl.store(streams + offset + 2 * D, n2, mask=row_mask)
            tl.store(streams + offset + 3 * D, n3, mask=row_mask)
    acc = tl.where(slot[None, :] == 24, squares[:, None], acc)
    tl.store(partial + (split * tokens + token64[:, None]) * 32 + slot[None, :], acc, mask=row_mask)


@triton.jit(do_not_specialize=["tokens"])
def _collapse_kernel(
    streams, partial, base, scale, norm, post, comb, out, out16, tokens,
    D: tl.constexpr, SPLITS: tl.constexpr, HEAD: tl.constexpr, WITH_FP16: tl.constexpr,
    ROUNDS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """One token: Sinkhorn, collapse, RMSNorm. HEAD: only the four pre values, one scale (end of
    the model).
    """
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D)
    four = tl.arange(0, 4)
    split = tl.arange(0, SPLITS)
    x_base = streams + token * 4 * D + d
    rows = partial + (split * tokens + token) * 32
    x0 = tl.load(x_base)  # early: they arrive while the mixing values are computed
    x1 = tl.load(x_base + D)
    x2 = tl.load(x_base + 2 * D)
    x3 = tl.load(x_base + 3 * D)
    rho = tl.rsqrt(tl.sum(tl.load(rows + 24), axis=0) / (4 * D) + EPS)
    m_pre = tl.sum(tl.load(rows[:, None] + four[None, :]), axis=0) * rho
    pre = tl.sigmoid(m_pre * tl.load(scale) + tl.load(base + four)) + EPS
    if not HEAD:
        m_post = tl.sum(tl.load(rows[:, None] + 4 + four[None, :]), axis=0) * rho
        tl.store(
            post + token * 4 + four,
            2 * tl.sigmoid(m_post * tl.load(scale + 1) + tl.load(base + 4 + four)),
        )
        place = four[:, None] * 4 + four[None, :]
        m_comb = tl.sum(tl.load(rows[:, None, None] + 8 + place[None, :, :]), axis=0) * rho
        c = m_comb * tl.load(scale + 2) + tl.load(base + 8 + place)
        c = tl.exp(c - tl.max(c, axis=1)[:, None])
        c = c / tl.sum(c, axis=1)[:, None] + EPS
        c = c / (tl.sum(c, axis=0)[None, :] + EPS)
        for _ in range(ROUNDS - 1):
            c = c / (tl.sum(c, axis=1)[:, None] + EPS)
            c = c / (tl.sum(c, axis=0)[None, :] + EPS)
        tl.store(comb + token * 16 + place, c)
    u = tl.sum(tl.where(four == 0, pre, 0.0), axis=0) * x0.to(tl.float32)
    u += tl.sum(tl.where(four == 1, pre, 0.0), axis=0) * x1.to(tl.float32)
    u += tl.sum(tl.where(four == 2, pre, 0.0), axis=0) * x2.to(tl.float32)
    u += tl.sum(tl.where(four == 3, pre, 0.0), axis=0) * x3.to(tl.float32)
    u = to_bf16(u).to(tl.float32)
    normed = u * tl.rsqrt(tl.sum(u * u, axis=0) / D + EPS) * tl.load(norm + d).to(tl.float32)
    tl.store(out + token * D + d, cast_like(normed, out))
    if WITH_FP16:
        tl.store(out16 + token * D + d, to_bf16(normed).to(tl.float32).to(tl.float16))


def cuda_shared_bytes(options: Mapping[str, int], width: int, dots: int) -> int:
    """Shared memory of a block of ``csrc/mhc.cu``."""
    channels, tokens = width // options["cluster"], options["tokens"]
    fn = dots * STREAMS * channels * 4 if options["fn_shared"] else 0
    sums = (options["cluster"] + 1) * 36 + 8 * 10  # received and added up; parts of warps
    return fn + tokens * channels * STREAMS * 2 + tokens * sums * 4 + 32 * 4


def cuda_problem(options: Mapping[str, int], arch: str, width: int) -> str:
    """Why the CUDA kernel cannot be built for this width; empty if it can."""
    cluster, tokens = options["cluster"], options["tokens"]
    most = cuda.PORTABLE_CLUSTER if arch == "sm_120" else 16
    if cluster > most or width % (cluster * 128) or width > cluster * 2048:
        return f"{width} channels over a cluster of {cluster}"
    if not 1 <= tokens <= 16:
        return f"{tokens} tokens a cluster"
    if cuda_shared_bytes(options, width, MIX) > SHARED_MEMORY_LIMIT[arch]:
        return f"{cuda_shared_bytes(options, width, MIX)} bytes of shared memory"
    return ""


def _cuda_boundary(
    options: Mapping[str, int],
    arch: str,
    tensors: tuple[torch.Tensor | None, ...],
    y: torch.Tensor | None,
    tokens: int,
    width: int,
    dots: int,
) -> None:
    out16, codes = tensors[10], tensors[11]
    kernel = cuda.function(
        "mhc", "boundary_kernel", arch, D=width, CLUSTER=options["cluster"],
        TOKENS=options["tokens"], DOTS=dots, COMBINE=y is not None,
        Y_TYPE=1 if y is not None and y.dtype == torch.bfloat16 else 0,
        FN_SHARED=options["fn_shared"], WITH_FP16=out16 is not None, WITH_CODES=codes is not None,
    )  # fmt: skip
    clusters = triton.cdiv(tokens, options["tokens"])
    cuda.launch(
        kernel, (clusters * options["cluster"], 1, 1), (256, 1, 1),
        cuda_shared_bytes(options, width, dots), *tensors, tokens,
        cluster=options["cluster"], overlap=True,
    )  # fmt: skip


def workspace(max_tokens: int, arch: str, device: torch.device | str) -> torch.Tensor:
    """Scratch fp32 [splits, T, 32] for up to max_tokens tokens (any smaller batch uses its
    beginning).
    """
    most = max(config.splits * min(bound, max_tokens) for bound, config in CONFIGS[arch])
    return torch.empty(most * SLOTS, dtype=torch.float32, device=device)


def mhc_boundary(
    x: torch.Tensor,
    y: torch.Tensor | None,
    post: torch.Tensor,
    comb: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm: torch.Tensor,
    streams: torch.Tensor,
    partial: torch.Tensor,
    out: torch.Tensor,
    arch: str,
    out16: torch.Tensor | None = None,
    config: Config | None = None,
    codes: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """One boundary for T tokens.

    x bf16 [T, 4, D]; y [T, D] bf16 or fp32, None at the first site (then streams is x itself and
    unchanged); post fp32 [T, 4] and comb fp32 [T, 4, 4] hold the previous site's values and
    receive the next site's. fn fp32 [24, 4 D] (or [4, 4 D] with scale [1]: the head's collapse),
    norm bf16 [D]. streams bf16 [T, 4, D] receives X' (may be x: each element is read before it is
    written by the same program). out bf16 [T, D]; out16, if given, the same values in fp16. codes
    (e4m3 [T, D], factors fp32 [D / 128, T]), if given: the same values by the linears' rule
    (``fp8_linear``, argument ``factors``); one launch more unless the tuned kernel makes them.
    """
    tokens, streams_n, width = x.shape
    if streams_n != STREAMS or fn.shape[0] not in (MIX, STREAMS) or fn.shape[1] != STREAMS * width:
        raise ValueError(f"streams {tuple(x.shape)} and fn {tuple(fn.shape)} do not fit")
    chosen = tuned.choice(arch, "mhc", tokens)
    if config is None and chosen.is_cuda and not cuda_problem(chosen.options, arch, width):
        pair = codes or (None, None)
        tensors = (x, y, post, comb, fn, base, scale, norm, streams, out, out16, *pair)
        _cuda_boundary(chosen.options, arch, tensors, y, tokens, width, fn.shape[0])
        return out
    config = config or lookup(CONFIGS[arch], tokens)
    splits = min(config.splits, width // config.block_k)
    if width % (splits * config.block_k):
        raise ValueError(f"width {width} does not split into {splits} shares of {config.block_k}")
    if partial.numel() < splits * tokens * SLOTS:
        raise ValueError(f"scratch is too small for {splits} shares of {tokens} tokens")
    _combine_kernel[(triton.cdiv(tokens, config.block_t), splits)](
        x,
        y,
        post,
        comb,
        fn,
        streams,
        partial,
        tokens,
        D=width,
        DOTS=fn.shape[0],
        SPLITS=splits,
        COMBINE=y is not None,
        BLOCK_T=config.block_t,
        BLOCK_D=config.block_k,
        **config.launch(),
    )
    _collapse_kernel[(tokens,)](
        streams if y is not None else x,
        partial,
        base,
        scale,
        norm,
        post,
        comb,
        out,
        out16,
        tokens,
        D=width,
        SPLITS=splits,
        HEAD=fn.shape[0] == STREAMS,
        WITH_FP16=out16 is not None,
        ROUNDS=ROUNDS,
        EPS=EPS,
        num_warps=8,
    )
    if codes is not None:
        quantise(out, *codes)
    return out
