"""Hyper-connection streams for training: Sinkhorn, mix, read and head collapse.

Shapes: x [B, T, 4, D] streams, y [B, T, D] a sub-layer's output, post [B, T, 4], comb [B, T, 4, 4].
Source: the published inference model's hc_pre, hc_post and hc_head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decant.engine.demo.shape import EPS, STREAMS

try:
    from decant.engine.demo import triton_streams
except ImportError:  # a CPU build of torch: the plain functions serve
    triton_streams = None  # type: ignore[assignment]


def unflatten(x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    """Tensor.unflatten, typed."""
    out: Tensor = x.unflatten(dim, sizes)  # type: ignore[no-untyped-call]
    return out


def rms(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """Root-mean-square normalisation over the last axis, fp32."""
    x = x.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return x if weight is None else x * weight


def sinkhorn_ref(logits: Tensor, iters: int) -> Tensor:
    """[..., 4, 4] logits to almost doubly stochastic matrices: row softmax, columns, rows, ...,
    columns."""
    m = logits.softmax(-1) + EPS
    m = m / (m.sum(-2, keepdim=True) + EPS)
    for _ in range(iters - 1):
        m = m / (m.sum(-1, keepdim=True) + EPS)
        m = m / (m.sum(-2, keepdim=True) + EPS)
    return m


def mix_ref(x: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New stream k = post_k y + sum_j comb[j, k] x_j."""
    out = post[..., None] * y.float()[..., None, :]
    out = out + (comb[..., None] * x.float()[..., :, None, :]).sum(-3)
    return out.to(x.dtype)


def sinkhorn(logits: Tensor, iters: int) -> Tensor:
    """`sinkhorn_ref`, one launch on a GPU."""
    if logits.is_cuda:
        out: Tensor = triton_streams.sinkhorn_op(logits, iters)[0]
        return out
    return sinkhorn_ref(logits, iters)


def mix(x: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`mix_ref`, one launch on a GPU."""
    if x.is_cuda:
        out: Tensor = triton_streams.mix_op(x, y, post, comb)
        return out
    return mix_ref(x, y, post, comb)


def add_site(
    owner: nn.Module, name: str, rows: int, hidden: int, generator: torch.Generator, layer: int = 0
) -> None:
    """Gives `owner` the flat published parameters of one site: NAME_fn, NAME_base, NAME_scale.

    A site starts as: read mostly one stream, post 1, comb near the identity."""
    base = torch.zeros(rows)
    if rows > STREAMS:
        base[:STREAMS] = -2.0
        base[layer % STREAMS] = 1.0
        base[2 * STREAMS :] = 4.0 * torch.eye(STREAMS).flatten()
    fn = torch.randn(rows, STREAMS * hidden, generator=generator) * 0.02
    setattr(owner, name + "_fn", nn.Parameter(fn))
    setattr(owner, name + "_base", nn.Parameter(base))
    setattr(owner, name + "_scale", nn.Parameter(torch.full((3 if rows > STREAMS else 1,), 0.1)))


def project(x: Tensor, fn: Tensor) -> Tensor:
    """rho * (fn . x) over the flattened streams, fp32."""
    flat = x.flatten(2)
    rho = torch.rsqrt(flat.float().square().mean(-1, keepdim=True) + EPS)
    return F.linear(flat, fn).float() * rho


def read(
    x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sub-layer input [B, T, D] fp32, post [B, T, 4] and comb [B, T, 4, 4]."""
    m, s = project(x, fn), STREAMS
    pre = torch.sigmoid(m[..., :s] * scale[0] + base[:s]) + EPS
    post = 2 * torch.sigmoid(m[..., s : 2 * s] * scale[1] + base[s : 2 * s])
    comb = sinkhorn(unflatten(m[..., 2 * s :] * scale[2] + base[2 * s :], -1, (s, s)), iters)
    return (pre[..., None] * x.float()).sum(-2), post, comb


def collapse(x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor) -> Tensor:
    """The head's single vector [B, T, D] fp32 of the four streams, normalised."""
    p = torch.sigmoid(project(x, fn) * scale + base) + EPS
    return rms((p[..., None] * x.float()).sum(-2), norm)
