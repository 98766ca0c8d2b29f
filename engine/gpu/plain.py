"""Every operation of a step in plain torch, on any device: what runs where no kernel fits a shape,
and what kernels are compared with at start. No host branch on values, so a step can be captured.

The roundings are those of the kernels: bf16 between operations, e4m3 for keys and for the inputs
of FP8 linears, FP8 for the indexer's queries. ``extents`` are uint8 [num, bytes] (pages or slots);
padded rows have position -1 and write to the last extent, the dump.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decant.engine.gpu import weights as w
from decant.engine.reference import ops
from decant.kernels.fp4_moe import TileList
from decant.kernels.gate import new_tile_list
from decant.kernels.layout import DATA_BYTES, KEY_CHANNELS, WINDOW, Part
from decant.kernels.rows import dequantise_keys_ref, quantise_keys_ref

EPS = 1e-6
UNIT = 256  # bytes; divides state rows
ROWS_AT_ONCE = 64


def mm_f32(x: Tensor, weight: Tensor) -> Tensor:
    """x [R, K] bf16, weight [N, K] bf16 -> float32 [R, N], float32 sums."""
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return x.float() @ weight.float().t()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """bf16, statistics in float32."""
    return ops.rms_norm(x.float(), eps, weight.float()).bfloat16()


def swiglu(x: Tensor, limit: float) -> Tensor:
    """x [R, 2 K], gates then ups -> bf16 [R, K]."""
    wide, half = x.float(), x.shape[1] // 2
    return ops.swiglu(wide[:, :half], wide[:, half:], limit).bfloat16()


def rounded(x: Tensor) -> Tensor:
    """x as FP8 linears see it, float32: through e4m3 per 128 channels."""
    return ops.round_e4m3(x.float().contiguous(), 128)


def rope_rows(positions: Tensor, frequencies: Tensor, shift: int = 0) -> Tensor:
    """float32 [R, 64]: 32 cosines and 32 sines of (position + shift) x frequency."""
    angle = (positions + shift).clamp(min=0).float()[:, None] * frequencies
    return torch.cat((angle.cos(), angle.sin()), 1)


def rotate(x: Tensor, rope: Tensor, sign: float = 1.0) -> Tensor:
    """Rotate the last 64 channels of float32 x [R, ..., D] in place; returns x."""
    shape = (len(x),) + (1,) * (x.dim() - 2) + (32,)
    cos, sin = rope[:, :32].view(shape), rope[:, 32:].view(shape) * sign
    pairs = x[..., -64:].reshape(*x.shape[:-1], 32, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
    x[..., -64:] = turned.flatten(-2)
    return x


def boundary(
    x: Tensor,
    y: Tensor | None,
    post: Tensor,
    comb: Tensor,
    site: w.Site,
    norm: Tensor,
    rounds: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Streams, normalised input of the next site, its post and comb (see kernels/mhc.py)."""
    if y is not None:
        mixed = torch.einsum("tjk,tjd->tkd", comb, x.float())
        x = (mixed + post[:, :, None] * y.float()[:, None]).bfloat16()
    wide = x.float()
    flat = wide.flatten(1)
    rho = (flat.square().mean(-1, keepdim=True) + EPS).rsqrt()
    m = rho * (flat @ site.fn.t())
    scale, base = site.scale, site.base
    pre = torch.sigmoid(m[:, :4] * scale[0] + base[:4]) + EPS
    if len(site.fn) > 4:
        post = 2 * torch.sigmoid(m[:, 4:8] * scale[1] + base[4:8])
        comb = (m[:, 8:] * scale[2] + base[8:]).view(-1, 4, 4).softmax(-1) + EPS
        comb = comb / (comb.sum(-2, keepdim=True) + EPS)
        for _ in range(rounds - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + EPS)
            comb = comb / (comb.sum(-2, keepdim=True) + EPS)
    u = (pre[..., None] * wide).sum(1).bfloat16()
    return x, rms_norm(u, norm, EPS), post, comb


def linear(x: Tensor, weight: w.Linear, dtype: torch.dtype) -> Tensor:
    """x [R, K] -> [R, N]; inputs of FP8 weights are rounded to e4m3 per 128 channels."""
    value = x.bfloat16()
    if weight.codes is not None:
        value = rounded(x).bfloat16()
    return mm_f32(value, weight.dense()).to(dtype)


# -- rows of extents -------------------------------------------------------------------------------


def _row(extents: Tensor, start: int, width: int, owner: Tensor, row: Tensor) -> Tensor:
    """Number of a row of ``width`` bytes in the extents seen as rows of that width."""
    return (owner.long() * extents.shape[1] + start) // width + row.long()


def _units(extents: Tensor, width: int) -> Tensor:
    flat = extents.view(-1)
    return flat[: flat.numel() // width * width].view(-1, width)


def gather(extents: Tensor, part: Part, owner: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """Data [n, data_bytes] and scales [n, scale_bytes] of the rows."""
    data, scale = part.data_bytes, part.scale_bytes
    at = _row(extents, part.offset, data, owner, row).flatten()
    scale_at = _row(extents, part.scale_offset, scale, owner, row).flatten()
    return (
        _units(extents, data).index_select(0, at),
        _units(extents, scale).index_select(0, scale_at),
    )


def put(
    extents: Tensor, part: Part, owner: Tensor, row: Tensor, data: Tensor, scales: Tensor
) -> None:
    """Write rows: data uint8 [n, data_bytes], scales uint8 [n, scale_bytes]."""
    at = _row(extents, part.offset, part.data_bytes, owner, row).flatten()
    scale_at = _row(extents, part.scale_offset, part.scale_bytes, owner, row).flatten()
    _units(extents, part.data_bytes).index_copy_(0, at, data)
    _units(extents, part.scale_bytes).index_copy_(0, scale_at, scales)


def keys_at(extents: Tensor, part: Part, owner: Tensor, row: Tensor) -> Tensor:
    """float32 [..., 512]."""
    owner = owner.expand(row.shape)
    keys = dequantise_keys_ref(*gather(extents, part, owner, row))
    return keys.view(*row.shape, KEY_CHANNELS)


def _state_units(extents: Tensor, part: Part, owner: Tensor, row: Tensor) -> Tensor:
    count = part.data_bytes // UNIT
    first = (owner.long() * extents.shape[1] + part.offset) // UNIT + row.long() * count
    return first[..., None] + torch.arange(count, device=first.device)


def _dump(extents: Tensor, owner: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep, owner.long(), len(extents) - 1)


# -- keys, compressors -----------------------------------------------------------------------------


def norm_rope_store(
    q: Tensor,
    k: Tensor,
    k_norm: Tensor,
    rope: Tensor,
    slot_of_row: Tensor,
    positions: Tensor,
    extents: Tensor,
    window: Part,
) -> Tensor:
    """q [R, H, 512] bf16 normalised and rotated (returned); k into the window rings."""
    wide = rotate(ops.rms_norm(q.float(), EPS), rope)
    wide = wide.masked_fill((positions < 0)[:, None, None], 0)
    key = rotate(ops.rms_norm(k.float(), EPS, k_norm.float()), rope)
    data, scales = quantise_keys_ref(key.bfloat16())
    owner = _dump(extents, slot_of_row, positions >= 0)
    put(extents, window, owner, positions.clamp(min=0) % window.rows, data, scales)
    return wide.bfloat16()


def compress(
    projected: Tensor,
    compressor: w.Compressor,
    rope: Tensor,
    slots: Tensor,
    state: Part,
    pages: Tensor,
    part: Part,
    slot_of_row: Tensor,
    positions: Tensor,
    tables: Tensor,
    hadamard: Tensor,
    emit: Tensor | None,
) -> None:
    """See kernels/compressor.py. emit: rows that may complete a window; None: any row."""
    ratio, size = compressor.ratio, compressor.ape.shape[1]
    width = compressor.norm.numel()
    value = projected.clone()
    live = positions.clamp(min=0).long()
    value[:, size:] += compressor.ape[live % ratio]
    rows = torch.arange(len(positions), device=positions.device) if emit is None else emit
    if len(rows):
        back = torch.arange(2 * ratio if ratio == 4 else ratio, device=rows.device).flip(0)
        wanted = positions[rows, None] - back
        source = rows[:, None] - back
        inside = source.clamp(min=0)
        here = (source >= 0) & (slot_of_row[inside] == slot_of_row[rows, None])
        here &= positions[inside] == wanted
        owner = slot_of_row[rows, None].expand(wanted.shape)
        units = _state_units(slots, state, owner, wanted.clamp(min=0) % state.rows)
        ring = _units(slots, UNIT).index_select(0, units.flatten()).view(torch.float32)
        ring = ring.view(*wanted.shape, 2 * size)
        both = torch.where(here[..., None], value[inside], ring)
        c, s = both[..., :size], both[..., size:]
        if ratio == 4:
            c = torch.cat((c[:, :4, :width], c[:, 4:, width:]), 1)
            s = torch.cat((s[:, :4, :width], s[:, 4:, width:]), 1)
        exists = (wanted >= 0)[..., None]
        s = s.masked_fill(~exists, float("-inf"))
        peak = s.amax(1, keepdim=True)
        p = torch.exp(s - torch.where(peak == float("-inf"), 0.0, peak))
        mixed = (p * torch.where(exists, c, 0.0)).sum(1) / p.sum(1).clamp(min=1e-30)
        key = ops.rms_norm(mixed.bfloat16().float(), EPS, compressor.norm.float())
        key = rotate(key, rope[rows]).bfloat16()
        closes = (positions[rows] >= 0) & ((positions[rows] + 1) % ratio == 0)
        entry = (live[rows] // ratio) * closes
        page = tables[slot_of_row[rows].long(), entry // part.rows]
        data, scales = _entry_bytes(key, part, hadamard)
        put(pages, part, _dump(pages, page, closes), entry % part.rows, data, scales)
    later = torch.arange(len(positions), device=positions.device) + state.rows
    inside = later.clamp(max=len(positions) - 1)
    replaced = (later < len(positions)) & (slot_of_row[inside] == slot_of_row)
    replaced &= positions[inside] == positions + state.rows
    owner = _dump(slots, slot_of_row, (positions >= 0) & ~replaced)
    units = _state_units(slots, state, owner, live % state.rows)
    _units(slots, UNIT).index_copy_(0, units.flatten(), value.view(torch.uint8).view(-1, UNIT))


def _entry_bytes(key: Tensor, part: Part, hadamard: Tensor) -> tuple[Tensor, Tensor]:
    if part.data_bytes == DATA_BYTES:
        return quantise_keys_ref(key)
    codes, scale = ops.quantise_e4m3(key.float() @ hadamard, key.shape[1])
    return codes.view(torch.uint8), scale.contiguous().view(torch.uint8)


# -- attention -------------------------------------------------------------------------------------


def select(
    psi: Tensor,
    omega: Tensor,
    pages: Tensor,
    part: Part,
    slot_of_row: Tensor,
    positions: Tensor,
    tables: Tensor,
    hadamard: Tensor,
    top_k: int,
    most: int,
) -> tuple[Tensor, Tensor]:
    """Entries of each row by index score: int32 [R, top_k] ascending, and how many of them count.

    psi [R, heads, 128] rotated; omega [R, heads]. most: entries that any row can see (columns of
    the scores; the lower index wins ties)."""
    rows, heads, width = psi.shape
    codes, scale = ops.quantise_e4m3(psi.float() @ hadamard, width)
    q = codes.float() * scale
    most = max(most, top_k)
    entry = torch.arange(most, device=psi.device)
    visible = (positions + 1) // 4
    last = tables.shape[1] - 1
    chosen = []
    weight = omega.float() * (heads * width) ** -0.5
    for at in range(0, rows, ROWS_AT_ONCE):
        cut = slice(at, at + ROWS_AT_ONCE)
        page = tables[slot_of_row[cut].long()][:, (entry // part.rows).clamp(max=last)]
        row = (entry % part.rows).expand(page.shape)
        data, scales = gather(pages, part, page, row)
        key = data.view(torch.float8_e4m3fn).float() * scales.view(torch.float32)
        key = key.view(*page.shape, width)
        dots = torch.bmm(q[cut], key.transpose(1, 2)).relu_()
        score = (dots * weight[cut, :, None]).sum(1)
        score = score.masked_fill(entry >= visible[cut, None], float("-inf"))
        order = torch.sort(score, dim=-1, descending=True, stable=True).indices
        chosen.append(order[:, :top_k].sort(-1).values)
    return torch.cat(chosen).int(), visible.clamp(min=0, max=top_k).int()


def attend(
    q: Tensor,
    slots: Tensor,
    window: Part,
    pages: Tensor,
    part: Part | None,
    slot_of_row: Tensor,
    positions: Tensor,
    tables: Tensor,
    sink: Tensor,
    ratio: int,
    selected: Tensor | None,
    count: Tensor | None,
    most: int,
    valid_from: Tensor | None = None,
) -> Tensor:
    """See kernels/sparse_mla_decode.py; bf16 [R, H, 512]. most: entries that any row can see.
    valid_from: int32 [R], window keys of earlier positions are masked."""
    out = []
    for at in range(0, len(q), ROWS_AT_ONCE):
        cut = slice(at, at + ROWS_AT_ONCE)
        t, owner = positions[cut].long(), slot_of_row[cut].long()
        p = t[:, None] + torch.arange(1 - WINDOW, 1, device=q.device)
        valid = (p >= 0) & (t >= 0)[:, None]
        if valid_from is not None:
            valid &= p >= valid_from[cut, None]
        keys = [keys_at(slots, window, owner[:, None], p.clamp(min=0) % window.rows)]
        masks = [valid]
        if part is not None and (selected is not None or most):
            if selected is not None:
                assert count is not None
                entry = selected[cut].long().clamp(min=0)
                place = torch.arange(entry.shape[1], device=q.device)
                live = place < count[cut, None]
            else:
                entry = torch.arange(most, device=q.device).expand(len(t), -1)
                live = entry < ((t + 1) // ratio)[:, None]
            number = (entry // part.rows).clamp(max=tables.shape[1] - 1)
            page = tables[owner].gather(1, number)
            keys.append(keys_at(pages, part, page, entry % part.rows))
            masks.append(live)
        key, mask = torch.cat(keys, 1), torch.cat(masks, 1)
        key = key.masked_fill(~mask[..., None], 0)
        score = torch.bmm(q[cut].float(), key.transpose(1, 2)) * q.shape[2] ** -0.5
        score = score.masked_fill(~mask[:, None], float("-inf"))
        sinks = sink[None, :, None].expand(len(t), -1, 1)
        weight = torch.cat((score, sinks), 2).softmax(-1)[..., :-1]
        mixed = torch.bmm(weight, key)
        out.append(mixed.masked_fill((t < 0)[:, None, None], 0).bfloat16())
    return torch.cat(out)


def wo_a(o: Tensor, rope: Tensor, weight: w.Linear, groups: int) -> Tensor:
    """o [R, H, 512] rotated back, then one matrix per group of heads: bf16 [R, G * rank]."""
    x = rotate(o.float(), rope, -1.0).bfloat16().view(len(o), groups, -1)
    matrix = weight.dense().view(groups, -1, x.shape[2])
    return torch.bmm(x.transpose(0, 1), matrix.transpose(1, 2)).transpose(0, 1).flatten(1)


# -- experts ---------------------------------------------------------------------------------------


def route(
    x: Tensor, ffn: w.Experts, tokens: Tensor, top_k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Experts int32 [R, k] and weights float32 [R, k] (see kernels/gate.py)."""
    logits = x.float() @ ffn.gate.float().t()
    score = ops.stable_softplus(logits).sqrt()
    if ffn.table is not None:
        experts = ffn.table[tokens.long()].long()
    else:
        assert ffn.bias is not None
        order = torch.sort(score + ffn.bias, dim=-1, descending=True, stable=True).indices
        experts = order[:, :top_k]
    chosen = score.gather(1, experts)
    return experts.int(), chosen / chosen.sum(-1, keepdim=True) * scale


def tile_list(experts: Tensor, num_experts: int, block_t: int) -> TileList:
    """The work list of kernels/fp4_moe.py by sorting: any number of pairs, nothing on the host."""
    flat = experts.flatten().long()
    device = flat.device
    pairs = torch.sort(flat, stable=True).indices
    counts = (flat[:, None] == torch.arange(num_experts, device=device)).sum(0)
    starts = counts.cumsum(0) - counts
    tiles = (counts + block_t - 1) // block_t
    ends = tiles.cumsum(0)
    made = new_tile_list(len(flat), num_experts, block_t, device)
    number = torch.arange(len(made.expert), device=device)
    expert = torch.searchsorted(ends, number, right=True).clamp(max=num_experts - 1)
    within = (number - (ends - tiles)[expert]) * block_t
    made.pairs.copy_(pairs)
    made.expert.copy_(expert)
    made.start.copy_(starts[expert] + within)
    made.count.copy_((counts[expert] - within).clamp(min=0, max=block_t))
    made.num_tiles.copy_(ends[-1:])
    return made


def experts(x: Tensor, ffn: w.Experts, chosen: Tensor, weights: Tensor, limit: float) -> Tensor:
    """Routed experts, float32 [R, hidden]: every expert sees every row, weight 0 where not chosen.
    For few experts and for comparison only."""
    w13, w2 = ffn.dense()
    half = x.half().float()
    out = torch.zeros(len(x), x.shape[1], device=x.device)
    inner = w13.shape[1] // 2
    for e in range(len(w13)):
        hidden = half @ w13[e].t()
        g = ops.swiglu(hidden[:, :inner], hidden[:, inner:], limit).half().float()
        share = (weights * (chosen == e)).sum(1, keepdim=True)
        out += share * (g @ w2[e].t())
    return out
