# mypy: ignore-errors
"""Two stream operations as one GPU launch each, forward and backward: Sinkhorn and the stream mix.

torch.compile would need dozens of launches for the 39 normalisations and would read the streams
four times for the 16 derivatives of `comb`. The plain torch functions in `streams.py` are the
reference.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _sinkhorn_fwd(inp, out, sums, n, ITERS: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, 4)
    at = t[:, None, None] * 16 + i[None, :, None] * 4 + i[None, None, :]
    live = (t < n)[:, None, None] & (i >= 0)[None, :, None] & (i >= 0)[None, None, :]
    m = tl.load(inp + at, mask=live, other=0.0)
    m = tl.exp(m - tl.max(m, 2)[:, :, None])
    m = m / tl.sum(m, 2)[:, :, None] + 1e-6
    rows = (t < n)[:, None] & (i >= 0)[None, :]
    s = tl.sum(m, 1) + 1e-6
    m = m / s[:, None, :]
    slot = t[:, None] * ((2 * ITERS - 1) * 4) + i[None, :]
    tl.store(sums + slot, s, mask=rows)
    for k in range(ITERS - 1):
        s = tl.sum(m, 2) + 1e-6
        m = m / s[:, :, None]
        tl.store(sums + slot + (2 * k + 1) * 4, s, mask=rows)
        s = tl.sum(m, 1) + 1e-6
        m = m / s[:, None, :]
        tl.store(sums + slot + (2 * k + 2) * 4, s, mask=rows)
    tl.store(out + at, m, mask=live)


@triton.jit
def _sinkhorn_bwd(out, sums, grad, din, n, ITERS: tl.constexpr, BLOCK: tl.constexpr):
    """Walks the normalisations backwards; each earlier matrix is the later one times its stored
    sums."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, 4)
    at = t[:, None, None] * 16 + i[None, :, None] * 4 + i[None, None, :]
    live = (t < n)[:, None, None] & (i >= 0)[None, :, None] & (i >= 0)[None, None, :]
    rows = (t < n)[:, None] & (i >= 0)[None, :]
    m = tl.load(out + at, mask=live, other=0.25)
    g = tl.load(grad + at, mask=live, other=0.0)
    slot = t[:, None] * ((2 * ITERS - 1) * 4) + i[None, :]
    for q in range(ITERS - 1):
        k = ITERS - 2 - q
        s = tl.load(sums + slot + (2 * k + 2) * 4, mask=rows, other=1.0)[:, None, :]
        g = (g - tl.sum(g * m, 1)[:, None, :]) / s
        m = m * s
        s = tl.load(sums + slot + (2 * k + 1) * 4, mask=rows, other=1.0)[:, :, None]
        g = (g - tl.sum(g * m, 2)[:, :, None]) / s
        m = m * s
    s = tl.load(sums + slot, mask=rows, other=1.0)[:, None, :]
    g = (g - tl.sum(g * m, 1)[:, None, :]) / s
    m = m * s - 1e-6
    g = m * (g - tl.sum(g * m, 2)[:, :, None])
    tl.store(din + at, g, mask=live)


@triton.jit
def _mix_fwd(x, y, post, comb, out, D: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D)
    yv = tl.load(y + t * D + d).to(tl.float32)
    x0 = tl.load(x + t * 4 * D + d).to(tl.float32)
    x1 = tl.load(x + t * 4 * D + D + d).to(tl.float32)
    x2 = tl.load(x + t * 4 * D + 2 * D + d).to(tl.float32)
    x3 = tl.load(x + t * 4 * D + 3 * D + d).to(tl.float32)
    for k in tl.static_range(4):
        c = comb + t * 16 + k
        v = tl.load(post + t * 4 + k) * yv + tl.load(c) * x0 + tl.load(c + 4) * x1
        v += tl.load(c + 8) * x2 + tl.load(c + 12) * x3
        tl.store(out + (t * 4 + k) * D + d, v.to(out.dtype.element_ty))


@triton.jit
def _mix_bwd(x, y, post, comb, g, dx, dy, dpost, dcomb, D: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D)
    yv = tl.load(y + t * D + d).to(tl.float32)
    g0 = tl.load(g + t * 4 * D + d).to(tl.float32)
    g1 = tl.load(g + t * 4 * D + D + d).to(tl.float32)
    g2 = tl.load(g + t * 4 * D + 2 * D + d).to(tl.float32)
    g3 = tl.load(g + t * 4 * D + 3 * D + d).to(tl.float32)
    p = post + t * 4
    v = tl.load(p) * g0 + tl.load(p + 1) * g1 + tl.load(p + 2) * g2 + tl.load(p + 3) * g3
    tl.store(dy + t * D + d, v.to(dy.dtype.element_ty))
    tl.store(dpost + t * 4, tl.sum(g0 * yv, 0))
    tl.store(dpost + t * 4 + 1, tl.sum(g1 * yv, 0))
    tl.store(dpost + t * 4 + 2, tl.sum(g2 * yv, 0))
    tl.store(dpost + t * 4 + 3, tl.sum(g3 * yv, 0))
    for j in tl.static_range(4):
        xj = tl.load(x + (t * 4 + j) * D + d).to(tl.float32)
        c = t * 16 + j * 4
        v = tl.load(comb + c) * g0 + tl.load(comb + c + 1) * g1
        v += tl.load(comb + c + 2) * g2 + tl.load(comb + c + 3) * g3
        tl.store(dx + (t * 4 + j) * D + d, v.to(dx.dtype.element_ty))
        tl.store(dcomb + c, tl.sum(g0 * xj, 0))
        tl.store(dcomb + c + 1, tl.sum(g1 * xj, 0))
        tl.store(dcomb + c + 2, tl.sum(g2 * xj, 0))
        tl.store(dcomb + c + 3, tl.sum(g3 * xj, 0))


BLOCK = 64


@torch.library.custom_op("decant_demo::sinkhorn", mutates_args=())
def sinkhorn_op(logits: torch.Tensor, iters: int) -> tuple[torch.Tensor, torch.Tensor]:
    logits = logits.contiguous()
    n = logits.numel() // 16
    out = torch.empty_like(logits)
    sums = logits.new_empty(n, 2 * iters - 1, 4)
    _sinkhorn_fwd[(triton.cdiv(n, BLOCK),)](logits, out, sums, n, iters, BLOCK, num_warps=4)
    return out, sums


@sinkhorn_op.register_fake
def _(logits, iters):
    return torch.empty_like(logits, memory_format=torch.contiguous_format), logits.new_empty(
        logits.numel() // 16, 2 * iters - 1, 4
    )


@torch.library.custom_op("decant_demo::sinkhorn_bwd", mutates_args=())
def sinkhorn_bwd_op(
    out: torch.Tensor, sums: torch.Tensor, grad: torch.Tensor, iters: int
) -> torch.Tensor:
    n = out.numel() // 16
    din = torch.empty_like(out)
    _sinkhorn_bwd[(triton.cdiv(n, BLOCK),)](
        out, sums, grad.contiguous(), din, n, iters, BLOCK, num_warps=4
    )
    return din


@sinkhorn_bwd_op.register_fake
def _(out, sums, grad, iters):
    return torch.empty_like(out)


def _keep(ctx, inputs, output):
    ctx.iters = inputs[1]
    ctx.save_for_backward(*output)


sinkhorn_op.register_autograd(
    lambda ctx, g, _: (sinkhorn_bwd_op(*ctx.saved_tensors, g, ctx.iters), None), setup_context=_keep
)


@torch.library.custom_op("decant_demo::mix", mutates_args=())
def mix_op(
    x: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    x, y, post, comb = (v.contiguous() for v in (x, y, post, comb))
    out = torch.empty_like(x)
    _mix_fwd[(y.numel() // y.shape[-1],)](x, y, post, comb, out, y.shape[-1], num_warps=2)
    return out


@mix_op.register_fake
def _(x, y, post, comb):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("decant_demo::mix_bwd", mutates_args=())
def mix_bwd_op(
    x: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, g: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    x, y, post, comb, g = (v.contiguous() for v in (x, y, post, comb, g))
    outs = [torch.empty_like(v) for v in (x, y, post, comb)]
    _mix_bwd[(y.numel() // y.shape[-1],)](x, y, post, comb, g, *outs, y.shape[-1], num_warps=2)
    return tuple(outs)


@mix_bwd_op.register_fake
def _(x, y, post, comb, g):
    return tuple(
        torch.empty_like(v, memory_format=torch.contiguous_format) for v in (x, y, post, comb)
    )


mix_op.register_autograd(
    lambda ctx, g: mix_bwd_op(*ctx.saved_tensors, g),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
