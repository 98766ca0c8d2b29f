"""The trainable demo model: experts, layers, MTP and the losses of one packed batch.

Parameter names are the published checkpoint names, experts stacked (`checkpoint.py` takes them
apart). Shapes as in `attention.py`; S = 4 residual streams of width D.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decant.engine.demo import streams
from decant.engine.demo.attention import Attention, Norm, Rope, linear, rope_tables
from decant.engine.demo.shape import STREAMS

Tables = dict[tuple[bool, int], Rope]


def swiglu(a: Tensor, b: Tensor, limit: float) -> Tensor:
    """Clamped SwiGLU, fp32: the gate from above only, the other side on both."""
    a, b = a.float().clamp(max=limit), b.float().clamp(-limit, limit)
    return a * torch.sigmoid(a) * b


class Gate(nn.Module):
    """Routing weights; hash layers take the experts from a table by token id."""

    bias: Tensor
    tid2eid: Tensor

    def __init__(self, c: SimpleNamespace, hashed: bool, generator: torch.Generator) -> None:
        super().__init__()
        n, k = c.n_routed_experts, c.num_experts_per_tok
        self.k, self.hashed, self.scale = k, hashed, c.routed_scaling_factor
        weight = torch.randn(n, c.hidden_size, generator=generator) * c.hidden_size**-0.5
        self.weight = nn.Parameter(weight)
        if hashed:
            pick = torch.rand(c.vocab_size, n, generator=generator).argsort(-1)[:, :k]
            self.register_buffer("tid2eid", pick)
        else:
            self.register_buffer("bias", torch.zeros(n))

    def forward(self, v: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Dense weights [B, T, n], zero where an expert is not chosen, and the choice as 0 / 1."""
        with torch.autocast(v.device.type, enabled=False):
            score = F.softplus(F.linear(v.float(), self.weight.float())).sqrt()
        if self.hashed:
            one_hot = F.one_hot(self.tid2eid[ids], score.shape[-1])
            chosen = one_hot.sum(-2).to(score.dtype)
        else:
            rest, chosen = (score + self.bias).detach(), torch.zeros_like(score)
            for _ in range(self.k):
                one = F.one_hot(rest.argmax(-1), score.shape[-1])
                chosen = chosen + one
                rest = rest - 1e9 * one
        w = score * chosen
        return w / w.sum(-1, keepdim=True) * self.scale, chosen


class MoE(nn.Module):
    """All experts run on all tokens and the gate's zeros mask them: with few experts this is the
    fastest form. The shared expert is the last of the stack, with weight 1."""

    def __init__(self, c: SimpleNamespace, hashed: bool, generator: torch.Generator) -> None:
        super().__init__()
        n, hidden, inner = c.n_routed_experts + 1, c.hidden_size, c.moe_intermediate_size
        self.limit = c.swiglu_limit
        self.gate = Gate(c, hashed, generator)
        self.w1 = nn.Parameter(torch.empty(n, inner, hidden))
        self.w2 = nn.Parameter(torch.empty(n, hidden, inner))
        self.w3 = nn.Parameter(torch.empty(n, inner, hidden))

    def forward(self, v: Tensor, ids: Tensor, dt: torch.dtype) -> tuple[Tensor, Tensor]:
        weights, chosen = self.gate(v, ids)
        weights = F.pad(weights, (0, 1), value=1.0)
        v = v.to(dt)
        a, b = F.linear(v, self.w1.flatten(0, 1)), F.linear(v, self.w3.flatten(0, 1))
        g = streams.unflatten(swiglu(a, b, self.limit), -1, (weights.shape[-1], -1))
        g = g * weights[..., None]
        return F.linear(g.flatten(-2).to(dt), self.w2.transpose(0, 1).flatten(1)), chosen


class Layer(nn.Module):
    """One decoder layer: attention site, expert site."""

    hc_attn_fn: Tensor
    hc_attn_base: Tensor
    hc_attn_scale: Tensor
    hc_ffn_fn: Tensor
    hc_ffn_base: Tensor
    hc_ffn_scale: Tensor

    def __init__(
        self, c: SimpleNamespace, index: int, ratio: int, hashed: bool, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.c, self.iters = c, c.hc_sinkhorn_iters
        self.attn_norm, self.ffn_norm = Norm(c.hidden_size), Norm(c.hidden_size)
        rows = 2 * STREAMS + STREAMS * STREAMS
        streams.add_site(self, "hc_attn", rows, c.hidden_size, generator, 2 * index)
        streams.add_site(self, "hc_ffn", rows, c.hidden_size, generator, 2 * index + 1)
        self.attn = Attention(c, ratio)
        self.ffn = MoE(c, hashed, generator)

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        seg: Tensor | None,
        rope: Rope,
        index_rope: Rope,
        topk: int = 0,
        learn_index: bool = False,
        history: Tensor | None = None,
        reach: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Streams x [B, T, 4, D] -> new streams, window keys, expert loads [n], indexer loss."""
        dt, site = x.dtype, (self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale)
        u, post, comb = streams.read(x, *site, self.iters)
        y, keys, index_loss = self.attn(
            self.attn_norm(u).to(dt), seg, rope, index_rope, topk, learn_index, history, reach
        )
        x = streams.mix(x, y, post, comb)
        site = (self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale)
        u, post, comb = streams.read(x, *site, self.iters)
        y, chosen = self.ffn(self.ffn_norm(u), ids, dt)
        return streams.mix(x, y, post, comb), keys, chosen.mean((0, 1)), index_loss


class MTP(Layer):
    """One more ratio-0 layer that predicts the token after the next, from the streams of a slot and
    the embedding of the next token."""

    hc_head_fn: Tensor
    hc_head_base: Tensor
    hc_head_scale: Tensor

    def __init__(self, c: SimpleNamespace, generator: torch.Generator) -> None:
        super().__init__(c, 0, c.compress_ratios[-1], False, generator)
        hidden = c.hidden_size
        self.enorm, self.hnorm, self.norm = Norm(hidden), Norm(hidden), Norm(hidden)
        self.e_proj, self.h_proj = linear(hidden, hidden), linear(hidden, hidden)
        streams.add_site(self, "hc_head", STREAMS, hidden, generator)

    def draft(
        self,
        x: Tensor,
        embedded: Tensor,
        ids: Tensor,
        seg: Tensor | None,
        rope: Rope,
        history: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """New streams, collapsed vector, window keys, expert loads."""
        dt = x.dtype
        z = self.h_proj(self.hnorm(x).to(dt)) + self.e_proj(self.enorm(embedded).to(dt))[:, :, None]
        x, keys, load, _ = self.forward(z.to(dt), ids, seg, rope, rope, 0, False, history)
        site = (self.hc_head_fn, self.hc_head_base, self.hc_head_scale)
        return x, streams.collapse(x, *site, self.norm.weight), keys, load


def token_loss(h: Tensor, weight: Tensor, target: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted sum of cross-entropies and the argmax tokens [B, T]."""
    logits = F.linear(h, weight.to(h.dtype)).float()
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return (loss.view(target.shape) * w).sum(), logits.argmax(-1)


MATRICES = ("w1", "w3", "wq_a", "wq_b", "wkv", "wgate", "wo_a", "e_proj", "h_proj", "weights_proj")


class Model(nn.Module):
    """Trunk and MTP of one configuration."""

    hc_head_fn: Tensor
    hc_head_base: Tensor
    hc_head_scale: Tensor

    def __init__(self, config: dict[str, Any], seed: int = 0) -> None:
        super().__init__()
        c = self.c = SimpleNamespace(**config)
        gen = torch.Generator().manual_seed(seed)
        self.embed = nn.Embedding(c.vocab_size, c.hidden_size)
        self.head, self.norm = linear(c.hidden_size, c.vocab_size), Norm(c.hidden_size)
        layers = [
            Layer(c, i, c.compress_ratios[i], i < c.num_hash_layers, gen)
            for i in range(c.num_hidden_layers)
        ]
        self.layers = nn.ModuleList(layers)
        self.mtp = nn.ModuleList([MTP(c, gen) for _ in range(c.num_nextn_predict_layers)])
        streams.add_site(self, "hc_head", STREAMS, c.hidden_size, gen)
        self._reset(gen)
        self.loss_fn: Any = token_loss  # compile_parts replaces these three
        self.collapse_fn: Any = self.collapse
        first: Any = next(iter(self.mtp), None)
        self.draft_fn: Any = first.draft if first is not None else None

    def _reset(self, gen: torch.Generator) -> None:
        for name, p in self.named_parameters():
            leaf = name.split(".")[-2] if name.endswith(".weight") else name.split(".")[-1]
            if leaf == "embed":
                nn.init.normal_(p, 0, 0.5, generator=gen)
            elif leaf == "head":
                nn.init.normal_(p, 0, 0.02, generator=gen)
            elif leaf == "ape":
                nn.init.normal_(p, 0, 0.5, generator=gen)
            elif leaf in ("wo_b", "w2"):
                nn.init.normal_(p, 0, 0.1 * p.shape[-1] ** -0.5, generator=gen)
            elif leaf in MATRICES:
                nn.init.normal_(p, 0, 0.6 * p.shape[-1] ** -0.5, generator=gen)

    def tables(self, T: int, device: torch.device) -> Tables:
        """Rotation tables of T positions for every (compressed?, width) in use."""
        c, t = self.c, torch.arange(T, device=device)
        widths = {c.head_dim, c.index_head_dim}
        return {(z, w): rope_tables(c, t, z, w) for z in (False, True) for w in widths}

    def trunk(
        self,
        ids: Tensor,
        tables: Tables,
        dt: torch.dtype,
        topk: int = 0,
        learn_index: bool = False,
        seg: Tensor | None = None,
        reach: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """ids [B, T] -> last streams [B, T, 4, D], expert loads, indexer loss.

        `reach` leaves layer 0 alone: it is where neighbouring tokens meet."""
        c = self.c
        x = F.embedding(ids, self.embed.weight).to(dt)[:, :, None].expand(-1, -1, STREAMS, -1)
        x = x.contiguous()
        loads: list[Tensor] = []
        index_loss = torch.zeros((), device=ids.device)
        for i, layer in enumerate(self.layers):
            ratio = c.compress_ratios[i]
            rope, index_rope = tables[ratio > 0, c.head_dim], tables[True, c.index_head_dim]
            learn = learn_index and ratio == 4
            short = reach if i else None
            chosen = topk if ratio == 4 else 0
            x, _, load, loss = layer(x, ids, seg, rope, index_rope, chosen, learn, None, short)
            loads.append(load)
            index_loss = index_loss + loss
        return x, loads, index_loss

    def collapse(self, x: Tensor) -> Tensor:
        """Vector before the head [B, T, D] fp32."""
        site = (self.hc_head_fn, self.hc_head_base, self.hc_head_scale)
        return streams.collapse(x, *site, self.norm.weight)

    def losses(
        self,
        batch: Tensor,
        weights: Tensor,
        tables: Tables,
        dt: torch.dtype,
        topk: int = 0,
        learn_index: bool = False,
        drafts: int = 1,
        reach: Tensor | None = None,
    ) -> dict[str, Any]:
        """batch [B, T + 2] ids. Summed cross-entropies (main, mtp1, ...), argmax tokens (pred0,
        ...), expert loads and the indexer loss.

        Draft 1 at slot t sees the trunk's streams of position t and token t+1 and predicts token
        t+2. Draft k+1 at slot t sees draft k's streams of slot t-1, the same token t+1, and the
        trunk-fed keys of the slots before t."""
        T = batch.shape[1] - 2
        ids = batch[:, :T].contiguous()
        seg = (ids == self.c.bos_token_id).cumsum(1)
        if reach is None:
            reach = torch.full((len(ids),), self.c.sliding_window, device=ids.device)
        x, loads, index_loss = self.trunk(ids, tables, dt, topk, learn_index, seg, reach)
        out: dict[str, Any] = {"index": index_loss, "loads": loads}
        h = self.collapse_fn(x).to(dt)
        out["main"], out["pred0"] = self.loss_fn(
            h, self.head.weight, batch[:, 1 : T + 1], weights[:, 1 : T + 1]
        )
        nxt, history = batch[:, 1 : T + 1].contiguous(), None
        embedded = F.embedding(nxt, self.embed.weight).to(dt)
        rope = tables[False, self.c.head_dim]
        for k in range(1, drafts + 1):
            assert self.draft_fn is not None
            x, h, keys, load = self.draft_fn(x, embedded, nxt, seg, rope, history)
            out[f"mtp{k}"], out[f"pred{k}"] = self.loss_fn(
                h.to(dt), self.head.weight, batch[:, 2 : T + 2], weights[:, 2 : T + 2]
            )
            if k == 1:
                loads.append(load)
                history = keys
            x = F.pad(x[:, :-1], (0, 0, 0, 0, 1, 0))
        return out

    def compile_parts(self) -> None:
        """torch.compile part by part; layers of one kind share their code."""
        torch._dynamo.config.recompile_limit = 64
        for layer in self.layers:
            layer.compile(dynamic=False)
        self.loss_fn = torch.compile(token_loss, dynamic=False)
        self.collapse_fn = torch.compile(self.collapse, dynamic=False)
        if len(self.mtp):
            self.draft_fn = torch.compile(self.draft_fn, dynamic=False)
