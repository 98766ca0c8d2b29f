"""Compressor: keep (c, s) of every position in a ring and write the entry of a window that closes.

Data sheet
  state    fp32 rows [c, s + ape], ring row = position mod ring; one row a position, so forgetting
           rejected drafts is a smaller length
  CSA      ratio 4, eight slots: series a of the previous four positions, series b of these four
  HCA      ratio 128, one series
  entry    per-channel softmax, bf16, RMSNorm, rotation at the window's first position, then
           e4m3 page row (512 wide), or Hadamard and e4m3 with one scale (indexer, 128 wide)
  when     (position + 1) % ratio == 0, decided on the device: the same grid every step
  rows     positions of this launch are read from the projections, earlier ones from the ring: the
           launch does not depend on its own writes
  launches decode 1 (write and emit); prefill 2 (emit, then write the last rows of the chunk)
"""

import torch
import triton
import triton.language as tl

from decant.kernels.kv_store import norm_ref, rotate_last_64, store_key
from decant.kernels.layout import (
    CSA_RATIO,
    CSA_STATE_ROWS,
    DATA_BYTES,
    HCA_RATIO,
    INDEX_CHANNELS,
    KEY_CHANNELS,
    SCALE_BYTES,
    Part,
)
from decant.kernels.tiles import power_of_two_scale, to_bf16, to_e4m3

EPS = 1e-6
MAX_DECODE_ROWS = CSA_STATE_ROWS - 2 * CSA_RATIO  # rows of one sequence in a one-launch step


def entry_ref(c: torch.Tensor, s: torch.Tensor, norm: torch.Tensor, first: bool) -> torch.Tensor:
    """One window: c, s float [positions, width] with ape in s; CSA gives 8 positions of both
    series.

    first: window 0 of CSA, whose first four positions do not exist. Float64 [width / series].
    """
    c, s = c.double(), s.double()
    if c.shape[0] == 2 * CSA_RATIO:
        half = c.shape[1] // 2
        c = torch.cat((c[:4, :half], c[4:, half:]))
        s = torch.cat((s[:4, :half], s[4:, half:]))
        if first:
            c, s = c[4:], s[4:]
    mixed = (s.softmax(0) * c).sum(0)
    return norm_ref(mixed.bfloat16(), norm)


@triton.jit
def _load_state(
    projected, ape, state, slot_of_row, position_of_row, row, slot, position, back, series,
    channel, valid, p_stride, rows,
    SIZE: tl.constexpr, RATIO: tl.constexpr, RING: tl.constexpr, STRIDE_ROW: tl.constexpr,
):  # fmt: skip
    """c and s [J, W] of the positions ``position - back`` [J]: this launch's rows or the ring's."""
    p = position - back
    source = row - back
    inside = valid & (source >= 0)
    mine = tl.load(slot_of_row + source, mask=inside, other=-1) == slot
    here = inside & mine & (tl.load(position_of_row + source, mask=inside, other=-1) == p)
    old = valid & (here == 0)
    column = series[:, None] * (channel.shape[0]) + channel[None, :]
    new_c = projected + source.to(tl.int64)[:, None] * p_stride + column
    ring = state + (tl.maximum(p, 0) % RING)[:, None] * STRIDE_ROW + column
    c = tl.load(new_c, mask=here[:, None], other=0.0) + tl.load(ring, mask=old[:, None], other=0.0)
    s = tl.load(new_c + SIZE, mask=here[:, None], other=0.0)
    s += tl.load(
        ape + (tl.maximum(p, 0) % RATIO)[:, None] * SIZE + column, mask=here[:, None], other=0.0
    )
    s += tl.load(ring + SIZE, mask=old[:, None], other=0.0)
    return c, tl.where(valid[:, None], s, float("-inf"))


@triton.jit(do_not_specialize=["rows"])
def _compress_kernel(
    projected, ape, norm, rope, extents, pages, slot_of_row, position_of_row, page_table,
    rows, p_stride, stride16, state_offset16, page_stride16, part_offset16, table_stride,
    WIDTH: tl.constexpr, RATIO: tl.constexpr, RING: tl.constexpr, ROWS: tl.constexpr,
    OVERLAP: tl.constexpr, INDEX: tl.constexpr, WRITE: tl.constexpr, EMIT: tl.constexpr,
    POSITIONS: tl.constexpr, DATA: tl.constexpr, SCALES: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """See ``compress_row``; a padded row does nothing."""
    row = tl.program_id(0)
    position = tl.load(position_of_row + row)
    if position >= 0:
        compress_row(
            row, position, projected, ape, norm, rope, extents, pages, slot_of_row,
            position_of_row, page_table, rows, p_stride, stride16, state_offset16, page_stride16,
            part_offset16, table_stride, WIDTH, RATIO, RING, ROWS, OVERLAP, INDEX, WRITE, EMIT,
            POSITIONS, DATA, SCALES, EPS,
        )  # fmt: skip


@triton.jit
def compress_row(
    row, position, projected, ape, norm, rope, extents, pages, slot_of_row, position_of_row,
    page_table, rows, p_stride, stride16, state_offset16, page_stride16, part_offset16,
    table_stride,
    WIDTH: tl.constexpr, RATIO: tl.constexpr, RING: tl.constexpr, ROWS: tl.constexpr,
    OVERLAP: tl.constexpr, INDEX: tl.constexpr, WRITE: tl.constexpr, EMIT: tl.constexpr,
    POSITIONS: tl.constexpr, DATA: tl.constexpr, SCALES: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """One row: write its state, and its window's entry if it completes one."""
    slot32 = tl.load(slot_of_row + row)
    slot = slot32.to(tl.int64)
    SERIES: tl.constexpr = 2 if OVERLAP else 1
    SIZE: tl.constexpr = WIDTH * SERIES
    state = (extents + (slot * stride16 + state_offset16) * 16).to(tl.pointer_type(tl.float32))
    if WRITE:
        # of a long chunk only the last RING positions enter the ring
        later = row + RING
        replaced = tl.load(slot_of_row + later, mask=later < rows, other=-1) == slot32
        replaced = replaced & (
            tl.load(position_of_row + later, mask=later < rows, other=-1) == position + RING
        )
        keep = replaced == 0
        i = tl.arange(0, SIZE)
        target = state + (position % RING) * (2 * SIZE) + i
        mine = projected + row.to(tl.int64) * p_stride + i
        score = tl.load(mine + SIZE) + tl.load(ape + (position % RATIO) * SIZE + i)
        tl.store(target, tl.load(mine), mask=keep & (i >= 0))
        tl.store(target + SIZE, score, mask=keep & (i >= 0))
    if EMIT and (position + 1) % RATIO == 0:
        channel = tl.arange(0, WIDTH)
        COUNT: tl.constexpr = RATIO * SERIES
        peak = tl.full([WIDTH], float("-inf"), dtype=tl.float32)
        total = tl.zeros([WIDTH], dtype=tl.float32)
        acc = tl.zeros([WIDTH], dtype=tl.float32)
        for start in range(0, COUNT, POSITIONS):
            j = start + tl.arange(0, POSITIONS)
            back = COUNT - 1 - j
            series = j // RATIO
            c, s = _load_state(
                projected, ape, state, slot_of_row, position_of_row, row, slot32, position, back,
                series, channel, position >= back, p_stride, rows, SIZE, RATIO, RING, 2 * SIZE,
            )  # fmt: skip
            new_peak = tl.maximum(peak, tl.max(s, axis=0))
            safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weight = tl.exp(s - safe[None, :])
            alpha = tl.exp(peak - safe)
            total = total * alpha + tl.sum(weight, axis=0)
            acc = acc * alpha + tl.sum(weight * c, axis=0)
            peak = new_peak
        e = to_bf16(acc / total).to(tl.float32)
        e = (
            e
            * tl.rsqrt(tl.sum(e * e, axis=0) / WIDTH + EPS)
            * tl.load(norm + channel).to(tl.float32)
        )
        e = rotate_last_64(tl.reshape(e, [1, WIDTH]), rope + row * 64, 1.0)
        entry = position // RATIO
        page = tl.load(page_table + slot * table_stride + entry // ROWS).to(tl.int64)
        base = pages + (page * page_stride16 + part_offset16) * 16
        entry_row = (entry % ROWS).to(tl.int64)
        data = base + entry_row * DATA
        scale = base + ROWS * DATA + entry_row * SCALES
        rounded = to_bf16(e).to(tl.float32)
        if INDEX:
            bits = channel[:, None] & channel[None, :]
            bits ^= bits >> 4
            bits ^= bits >> 2
            bits ^= bits >> 1
            sign = (1 - 2 * (bits & 1)).to(tl.float32)
            y = tl.sum(rounded * sign, axis=1) * 0.08838834764831845
            factor, inverse, _ = power_of_two_scale(tl.max(tl.abs(y), axis=0))
            tl.store(data + channel, to_e4m3(y * inverse).to(tl.uint8, bitcast=True))
            tl.store(scale.to(tl.pointer_type(tl.float32)), factor)
        else:
            store_key(rounded, data, scale)


def compress(
    projected: torch.Tensor,
    ape: torch.Tensor,
    norm: torch.Tensor,
    rope: torch.Tensor,
    extents: torch.Tensor,
    stride: int,
    state: Part,
    pages: torch.Tensor,
    page_stride: int,
    part: Part,
    slot_of_row: torch.Tensor,
    position_of_row: torch.Tensor,
    page_table: torch.Tensor,
    ratio: int,
    max_rows_per_sequence: int,
) -> None:
    """Update one compressor of one layer with T rows.

    projected fp32 [T, 2 * size]: c then s of each row (size 1,024 CSA, 512 HCA, 256 indexer);
    ape fp32 [ratio, size]; norm bf16 [512 or 128]; rope fp32 [T, 64] at position + 1 - ratio;
    extents, state: slot extents and this layer's ring; pages, part: this layer's page rows.
    Rows of one sequence stand next to each other in ascending position order.
    max_rows_per_sequence (a property of the bucket) chooses one launch (at most 8) or two.
    """
    rows = projected.shape[0]
    width = norm.numel()
    overlap = ratio == CSA_RATIO
    size = width * (2 if overlap else 1)
    index = part.data_bytes == INDEX_CHANNELS
    if ratio not in (CSA_RATIO, HCA_RATIO) or projected.shape[1] != 2 * size:
        raise ValueError(
            f"projections {tuple(projected.shape)} do not fit ratio {ratio}, width {width}"
        )
    if width != (INDEX_CHANNELS if index else KEY_CHANNELS) or state.data_bytes != 8 * size:
        raise ValueError(f"width {width} does not fit the page row or the state row")
    if stride % 16 or page_stride % 16 or state.offset % 16 or part.offset % 16:
        raise ValueError("strides and offsets must be multiples of 16 bytes")
    steps = (
        ((True, True),)
        if max_rows_per_sequence <= MAX_DECODE_ROWS
        else ((False, True), (True, False))
    )
    for write, emit in steps:
        _compress_kernel[(rows,)](
            projected,
            ape,
            norm,
            rope,
            extents,
            pages,
            slot_of_row,
            position_of_row,
            page_table,
            rows,
            projected.stride(0),
            stride // 16,
            state.offset // 16,
            page_stride // 16,
            part.offset // 16,
            page_table.stride(0),
            WIDTH=width,
            RATIO=ratio,
            RING=state.rows,
            ROWS=part.rows,
            OVERLAP=overlap,
            INDEX=index,
            WRITE=write,
            EMIT=emit,
            POSITIONS=8 if overlap else 16,
            DATA=INDEX_CHANNELS if index else DATA_BYTES,
            SCALES=4 if index else SCALE_BYTES,
            EPS=EPS,
            num_warps=8 if not index else 4,
        )
