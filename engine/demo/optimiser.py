"""Optimisers of the demo model: Muon for the hidden matrices, AdamW for the rest.

Source: Muon (Jordan et al. 2024): momentum, orthogonalised by a Newton-Schulz iteration.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from decant.engine.demo.streams import unflatten

HIDDEN = ("wq_a", "wq_b", "wkv", "wgate", "wo_a", "wo_b", "e_proj", "h_proj", "w1", "w2", "w3")
SHARP = ("kv_norm.weight", "compressor.norm.weight", "ape")
"""Parameters that set how sharp attention can become: a faster rate lets recall appear earlier."""


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """g [n, R, C] -> nearest orthogonal matrices, about; bf16 inside on a GPU, fp32 out."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16() if g.is_cuda else g.float()  # CPUs multiply bf16 seven times slower
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    out: Tensor = x.mT if tall else x
    return out.float()


def _as_one(t: Tensor) -> Tensor:
    return t if t.dim() == 3 else t[None]


class Muon:
    """Momentum orthogonalised per matrix; matrices of one shape are handled in one batch.

    groups: `wo_a` is one matrix per output group, the experts are stacked."""

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        groups: int,
        lr: float,
        momentum: float = 0.95,
        decay: float = 0.01,
    ) -> None:
        self.lr, self.momentum, self.decay = lr, momentum, decay
        View = Callable[[Tensor], Tensor]
        self.sets: dict[tuple[int, ...], list[tuple[nn.Parameter, View]]] = {}
        for name, p in named:
            view: View = _as_one
            if name.endswith("wo_a.weight"):
                view = lambda t: unflatten(t, 0, (groups, -1))  # noqa: E731
            self.sets.setdefault(tuple(view(p).shape[1:]), []).append((p, view))
        self.buffers = {
            key: torch.cat([torch.zeros_like(v(p)) for p, v in members])
            for key, members in self.sets.items()
        }

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One update at learning rate lr * factor from the parameters' gradients."""
        for key, members in self.sets.items():
            g = torch.cat(
                [v(torch.zeros_like(p) if p.grad is None else p.grad) for p, v in members]
            )
            m = self.buffers[key]
            m.lerp_(g, 1 - self.momentum)
            lr = self.lr * factor
            u = orthogonalise(g.lerp(m, self.momentum)) * (lr * max(1, key[0] / key[1]) ** 0.5)
            parts = u.split([v(p).shape[0] for p, v in members])
            ps = [p.data for p, _ in members]
            torch._foreach_mul_(ps, 1 - lr * self.decay)
            torch._foreach_sub_(ps, [x.reshape(p.shape) for x, p in zip(parts, ps, strict=True)])


def make_optimisers(
    model: nn.Module, groups: int, lr: float, lr_table: float, lr_fn: float, lr_rest: float
) -> tuple[Muon, torch.optim.AdamW]:
    """Muon and AdamW over all parameters; AdamW's groups carry their peak rate as `peak`."""
    hidden: list[tuple[str, nn.Parameter]] = []
    rest: dict[str, list[nn.Parameter]] = {"table": [], "fn": [], "sharp": [], "rest": []}
    for name, p in model.named_parameters():
        leaf = name.split(".")[-2] if name.endswith(".weight") else name.split(".")[-1]
        if leaf in HIDDEN:
            hidden.append((name, p))
        elif leaf in ("embed", "head"):
            rest["table"].append(p)
        elif leaf.endswith("_fn"):
            rest["fn"].append(p)
        elif name.endswith(SHARP):
            rest["sharp"].append(p)
        else:
            rest["rest"].append(p)
    peak = {"table": lr_table, "fn": lr_fn, "sharp": 3 * lr_rest, "rest": lr_rest}
    adam = torch.optim.AdamW(
        [{"params": v, "peak": peak[k]} for k, v in rest.items()],
        lr=1e-3,
        betas=(0.9, 0.95),
        eps=1e-10,
        weight_decay=0.0,
        fused=torch.cuda.is_available(),
    )
    return Muon(hidden, groups, lr), adam
