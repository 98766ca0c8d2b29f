"""Mixture of experts of one layer: gate, routing, clamped experts."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decant.engine.model_shape import ModelShape
from decant.engine.reference import layers, ops, products

PAIR_TILE = 16  # total rows of the pair buffers: keeps elementwise loops free of tails


def route(
    shape: ModelShape, ffn: layers.Experts, v: Tensor, tokens: Tensor
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Chosen experts [rows, top k], ascending, and their weights (sum 1, times the scaling factor).

    v: [rows, hidden], normalised. tokens: [rows] input ids (hash layers). Ties: the lower expert
    wins."""
    num, topk = shape.n_routed_experts, shape.num_experts_per_tok
    score = ops.stable_softplus(products.mm(v, ffn.gate)).sqrt_().numpy()[:, :num]
    if ffn.tid2eid is not None:
        chosen = ffn.tid2eid[tokens].numpy().astype(np.int64)
    else:
        assert ffn.bias is not None
        chosen = np.argsort(-(score + ffn.bias.numpy()), axis=1, kind="stable")[:, :topk]
    chosen = np.sort(chosen, axis=1)
    weight = np.take_along_axis(score, chosen, axis=1)
    total = weight[:, 0].copy()
    for i in range(1, topk):
        total += weight[:, i]
    weight = weight / total[:, None] * np.float32(shape.routed_scaling_factor)
    return chosen, weight


def run(
    shape: ModelShape,
    ffn: layers.Experts,
    v: Tensor,
    tokens: Tensor,
    valid: NDArray[np.bool_],
    quantise: bool,
) -> Tensor:
    """v: [rows, hidden], normalised. Returns this rank's K-shards [shards, rows, hidden].

    One buffer holds all rows for the shared expert, then the rows of each routed expert that has
    any, each padded to a multiple of ROW_TILE."""
    rows, hidden = v.shape
    chosen, weight = route(shape, ffn, v, tokens)
    pair_row, pair_k = np.nonzero(np.broadcast_to(valid[:, None], chosen.shape))
    expert = chosen[pair_row, pair_k]
    order = np.argsort(expert, kind="stable")
    counts = np.bincount(expert, minlength=shape.n_routed_experts)
    padded = -(-counts // ops.ROW_TILE) * ops.ROW_TILE
    begins = rows + np.concatenate([[0], np.cumsum(padded)[:-1]])
    size = ops.round_up(rows + int(padded.sum()), PAIR_TILE)
    source = np.zeros(size, np.int64)
    source[:rows] = np.arange(rows)
    scale = np.ones(size, np.float32)
    sorted_expert = expert[order]
    within = np.arange(len(order)) - np.concatenate([[0], np.cumsum(counts)[:-1]])[sorted_expert]
    place = begins[sorted_expert] + within
    source[place] = pair_row[order]
    scale[place] = weight[pair_row[order], pair_k[order]]
    where = np.zeros(chosen.shape, np.int64)
    where[pair_row[order], pair_k[order]] = place

    spans = [(shape.n_routed_experts, 0, rows)]
    spans += [(int(e), int(begins[e]), int(begins[e] + padded[e])) for e in np.flatnonzero(counts)]
    if spans[-1][2] < size:  # the tail belongs to the last expert
        spans[-1] = (spans[-1][0], spans[-1][1], size)

    x = ops.round_e4m3(v, 128) if quantise else v
    x = x.index_select(0, torch.from_numpy(source))
    shards = ffn.w2[0].shape[0]
    parts = [products.bmm(x[a:b].expand(shards, -1, -1), ffn.w13[e]) for e, a, b in spans]
    h = torch.cat(parts, 1)
    inner = h.shape[2] // 2
    g = ops.swiglu(h[..., :inner], h[..., inner:], shape.swiglu_limit)
    g.mul_(torch.from_numpy(scale)[:, None])
    if quantise:
        flat = g.transpose(0, 1).reshape(size, -1)
        g = ops.round_e4m3(flat, 128).view(size, shards, inner).transpose(0, 1)
    y = torch.cat([products.bmm(g[:, a:b], ffn.w2[e]) for e, a, b in spans], 1)

    picked = y.index_select(1, torch.from_numpy(where.reshape(-1)))
    picked = picked.view(shards, rows, -1, hidden)
    out = picked[:, :, 0]
    for i in range(1, picked.shape[2]):
        out = out + picked[:, :, i]
    return out + y[:, :rows]
