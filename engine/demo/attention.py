"""Trainable attention of the demo model: window, compressed entries, indexer, sink, grouped output.

Whole sequences only (no cache): the paged engine is tested against the same fixtures. Shapes: B
rows of T tokens (a multiple of the window and of 128), H query heads of width d, E compressed
entries. Source: sections 3.1 to 3.6 of the model's specification; the published inference model's
Attention.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decant.engine.demo.shape import EPS
from decant.engine.demo.streams import rms, unflatten

# Scores are bounded by sqrt(d) times the key norm's weight (queries and keys are normalised), so a
# fixed offset replaces the softmax's maximum; the clamp keeps exp finite if the weight should grow.
SCORE_OFFSET = 20.0
SCORE_LIMIT = 60.0

Rope = tuple[Tensor, Tensor]


def rope_tables(c: SimpleNamespace, positions: Tensor, compressed: bool, width: int) -> Rope:
    """cos and sin [T, width] fp32; the last qk_rope_head_dim channels rotate as interleaved pairs,
    the others have cos 1 and sin 0."""
    r = c.qk_rope_head_dim
    base = c.compress_rope_theta if compressed else c.rope_theta
    i = torch.arange(r // 2, dtype=torch.float32, device=positions.device)
    f = base ** (-2 * i / r)
    y = c.rope_scaling
    if compressed and y:

        def bound(turns: float) -> float:
            length = y["original_max_position_embeddings"] / (2 * math.pi * turns)
            return float(r * math.log(length) / (2 * math.log(base)))

        low = max(math.floor(bound(y["beta_fast"])), 0)
        high = min(math.ceil(bound(y["beta_slow"])), r - 1)
        keep = 1 - ((i - low) / max(high - low, 0.001)).clamp(0, 1)
        f = f * keep + f / y["factor"] * (1 - keep)
    angle = positions.float()[:, None] * f
    cos = F.pad(angle.cos().repeat_interleave(2, -1), (width - r, 0), value=1.0)
    sin = F.pad(torch.stack([-angle.sin(), angle.sin()], -1).flatten(-2), (width - r, 0))
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Interleaved rotation; one expression for rotating and plain channels fuses best."""
    swapped = unflatten(x, -1, (-1, 2)).flip(-1).flatten(-2)
    return x * cos + swapped * sin


def exp_score(s: Tensor) -> Tensor:
    """exp of a score, moved down by the fixed offset (which cancels in the softmax), fp32."""
    return (s.float() - SCORE_OFFSET).clamp(max=SCORE_LIMIT).exp()


class Norm(nn.Module):
    """Weighted RMS norm, fp32."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, x: Tensor) -> Tensor:
        return rms(x, self.weight)


def linear(i: int, o: int) -> nn.Linear:
    return nn.Linear(i, o, bias=False)


class Compressor(nn.Module):
    """Turns every `ratio` tokens into one entry by a per-channel softmax; ratio 4 also looks at the
    previous four tokens (channels 0..width-1 belong to the next entry, the others to this one)."""

    def __init__(self, hidden: int, width: int, ratio: int) -> None:
        super().__init__()
        self.ratio, self.width = ratio, width
        out = 2 * width if ratio == 4 else width
        self.wkv, self.wgate = linear(hidden, out), linear(hidden, out)
        self.ape = nn.Parameter(torch.zeros(ratio, out))
        self.norm = Norm(width)

    def forward(self, u: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """u [B, T, D] -> entries [B, T / ratio, width] fp32, rotated at their first token."""
        m, d = self.ratio, self.width
        c = unflatten(self.wkv(u).float(), 1, (-1, m))
        s = unflatten(self.wgate(u).float(), 1, (-1, m)) + self.ape
        if m == 4:
            c = torch.cat([F.pad(c[:, :-1, :, :d], (0, 0, 0, 0, 1, 0)), c[..., d:]], 2)
            past = F.pad(s[:, :-1, :, :d], (0, 0, 0, 0, 1, 0), value=-1e30)
            s = torch.cat([past, s[..., d:]], 2)
        e = (s.softmax(2) * c).sum(2)
        return rotate(self.norm(e), cos[::m], sin[::m])


class Indexer(nn.Module):
    """Scores of the compressed entries."""

    def __init__(self, c: SimpleNamespace) -> None:
        super().__init__()
        self.heads, self.width = c.index_n_heads, c.index_head_dim
        self.wq_b = linear(c.q_lora_rank, self.heads * self.width)
        self.weights_proj = linear(c.hidden_size, self.heads)
        self.compressor = Compressor(c.hidden_size, self.width, 4)

    def forward(self, u: Tensor, r: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, E] fp32. The Hadamard rotation of both sides leaves scores unchanged: left out."""
        keys = self.compressor(u, cos, sin).to(u.dtype)
        q = unflatten(self.wq_b(r), -1, (self.heads, self.width))
        q = rotate(q, cos[:, None], sin[:, None]).to(u.dtype)
        w = self.weights_proj(u).float() * (self.width * self.heads) ** -0.5
        dots = unflatten(q.flatten(1, 2) @ keys.transpose(1, 2), 1, (-1, self.heads)).float()
        score: Tensor = (w[..., None] * dots.relu()).sum(2)
        return score


class Attention(nn.Module):
    """One attention sub-layer of ratio 0, 4 or 128."""

    def __init__(self, c: SimpleNamespace, ratio: int) -> None:
        super().__init__()
        hidden, heads, d, groups = c.hidden_size, c.num_attention_heads, c.head_dim, c.o_groups
        self.ratio, self.heads, self.d, self.groups = ratio, heads, d, groups
        self.window = c.sliding_window
        self.wq_a, self.q_norm = linear(hidden, c.q_lora_rank), Norm(c.q_lora_rank)
        self.wq_b = linear(c.q_lora_rank, heads * d)
        self.wkv, self.kv_norm = linear(hidden, d), Norm(d)
        self.wo_a = linear(heads * d // groups, groups * c.o_lora_rank)
        self.wo_b = linear(groups * c.o_lora_rank, hidden)
        self.attn_sink = nn.Parameter(torch.zeros(heads))
        if ratio:
            self.compressor = Compressor(hidden, d, ratio)
        if ratio == 4:
            self.indexer = Indexer(c)

    def window_part(
        self, q: Tensor, k: Tensor, seg: Tensor | None, history: Tensor | None, reach: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Softmax numerators' sum [B, T, H] and weighted keys [B, T, H, d] of the window.

        Blocks of W queries against their own and the previous block of keys. `history` (chained
        drafts): keys of the older slots; the slot's own key is `k`."""
        B, T = k.shape[:2]
        H, d, W, dt = self.heads, self.d, self.window, k.dtype
        past = (k if history is None else history).view(B, T // W, W, d)
        keys = torch.cat([F.pad(past[:, :-1], (0, 0, 0, 0, 1, 0)), past], 2)
        s = (q.view(B, T // W, W * H, d) @ keys.transpose(-1, -2)).view(B, T // W, W, H, 2 * W)
        i = torch.arange(W, device=k.device)[:, None, None]
        j = torch.arange(2 * W, device=k.device)
        n = torch.arange(T // W, device=k.device)[:, None, None, None]
        last = i + W if history is None else i + W - 1
        seen = (j > i) & (j <= last) & ((j >= W) | (n > 0))
        if seg is not None:
            own = seg.view(B, T // W, W)
            both = torch.cat([F.pad(own[:, :-1], (0, 0, 1, 0)), own], 2)
            seen = seen & (own[..., None, None] == both[:, :, None, None])
        if reach is not None:
            seen = seen & (j > i + W - reach.view(B, 1, 1, 1, 1))
        p = torch.where(seen, exp_score(s), 0.0)
        total = p.sum(-1).view(B, T, H)
        o = (p.to(dt).view(B, T // W, W * H, 2 * W) @ keys).view(B, T, H, d)
        if history is not None:
            alone = exp_score((q.float() * k.float()[:, :, None]).sum(-1))
            total = total + alone
            o = o + alone.to(dt)[..., None] * k[:, :, None]
        return total, o

    def forward(
        self,
        u: Tensor,
        seg: Tensor | None,
        rope: Rope,
        index_rope: Rope,
        topk: int = 0,
        learn_index: bool = False,
        history: Tensor | None = None,
        reach: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """u [B, T, D] -> y [B, T, D], window keys [B, T, d], indexer loss.

        topk > 0 lets the indexer choose; 0 shows every complete entry. `seg` [B, T] numbers the
        conversations packed into a row, which do not see each other; None: one per row. `reach`
        [B] shortens the window of a row (training only), so that near things too must be found
        among the entries."""
        B, T, _ = u.shape
        H, d, dt = self.heads, self.d, u.dtype
        cos, sin = rope
        r = self.q_norm(self.wq_a(u)).to(dt)
        q = rms(self.wq_b(r).view(B, T, H, d))
        q = (rotate(q, cos[:, None], sin[:, None]) * d**-0.5).to(dt)
        k = rotate(self.kv_norm(self.wkv(u)), cos, sin).to(dt)
        total, o = self.window_part(q, k, seg, history, reach)
        total = total + (self.attn_sink - SCORE_OFFSET).exp()

        index_loss = u.new_zeros((), dtype=torch.float32)
        if self.ratio:
            entries = self.compressor(u, cos, sin).to(dt)
            E = entries.shape[1]
            t = torch.arange(T, device=u.device)[:, None]
            seen = (torch.arange(E, device=u.device) < (t + 1) // self.ratio)[None]
            if seg is not None:
                seen = seen & (seg[:, :, None] == seg[:, None, :: self.ratio])
            s = (q.view(B, T * H, d) @ entries.transpose(1, 2)).view(B, T, H, E)
            score = None
            if self.ratio == 4 and (learn_index or 0 < topk < E):
                score = self.indexer(u.detach(), r.detach(), *index_rope)
                score = torch.where(seen, score, -1e30)
                if 0 < topk < E:
                    chosen = torch.zeros_like(score, dtype=torch.bool)
                    seen = seen & chosen.scatter(-1, score.topk(topk).indices, True)
            p = torch.where(seen[:, :, None], exp_score(s), 0.0)
            total = total + p.sum(-1)
            o = o + (p.to(dt).view(B, T * H, E) @ entries).view(B, T, H, d)
            if score is not None and learn_index:
                # Cross-entropy to the heads' summed attention, weighted by its mass.
                target = (p / total[..., None]).sum(2).detach()
                index_loss = -(target * score.log_softmax(-1)).sum() / (target.sum() + EPS)

        o = o.float() / total[..., None]
        o = rotate(o, cos[:, None], -sin[:, None]).to(dt)
        o = o.view(B, T, self.groups, -1)
        w = self.wo_a.weight.view(self.groups, -1, o.shape[-1]).to(dt)
        z = torch.einsum("btgi,goi->btgo", o, w)
        return self.wo_b(z.flatten(2)), k, index_loss
