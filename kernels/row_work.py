"""Everything between the projections of a layer and its attention, for decode rows, in one launch:
queries and window key (``kv_store``), the compressor and the indexer's (``compressor``), the
indexer's queries (``indexer``).

Data sheet
  parts     a program has one row and one part; the parts do not read what another writes: window
            keys, states and entries of this launch come from the projections
  sizes     rows of one sequence at most MAX_DECODE_ROWS, as for the compressor's one launch
  arithmetic as in those files, whose functions run here
  launches  1
  floor     the projections read once, what they leave written once
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from decant.kernels.compressor import EPS, MAX_DECODE_ROWS, compress_row
from decant.kernels.indexer import HEAD_WEIGHT, index_query
from decant.kernels.kv_store import store_row
from decant.kernels.layout import (
    CSA_RATIO,
    DATA_BYTES,
    INDEX_CHANNELS,
    KEY_CHANNELS,
    SCALE_BYTES,
    Part,
)

HEADS_A_PART = 4  # query heads
INDEX_HEADS_A_PART = 16


@dataclass(frozen=True)
class Compression:
    """One compressor of a layer: projected fp32 [T, 2 * size], ape, norm, its ring in the slots and
    its rows in the pages (see ``compressor.compress``)."""

    projected: torch.Tensor
    ape: torch.Tensor
    norm: torch.Tensor
    state: Part
    part: Part


@dataclass(frozen=True)
class IndexQueries:
    """q bf16 [T, H, 128] (not rotated), head weights fp32 [T, H] with a stride; results codes e4m3
    [T, H, 128] and weights fp32 [T, H] (see ``indexer.index_queries``)."""

    q: torch.Tensor
    head_weights: torch.Tensor
    codes: torch.Tensor
    weights: torch.Tensor


@triton.jit(
    do_not_specialize=[
        "rows", "window_offset16", "state_offset16", "part_offset16", "i_state_offset16",
        "i_part_offset16",
    ]
)  # fmt: skip
def _row_kernel(
    q, out, k, k_norm, rope, entry_rope, slot_of_row, position_of_row, page_table, extents, pages,
    projected, ape, norm, i_projected, i_ape, i_norm, psi, omega, codes, weights,
    rows, stride16, page_stride16, table_stride, q_stride, out_stride, k_stride, p_stride,
    psi_stride, omega_stride,
    window_offset16, state_offset16, part_offset16, i_state_offset16, i_part_offset16,
    H: tl.constexpr, BLOCK_H: tl.constexpr, WINDOW_RING: tl.constexpr, RATIO: tl.constexpr,
    RING: tl.constexpr, ROWS: tl.constexpr, HAS_INDEX: tl.constexpr, I_RING: tl.constexpr,
    I_ROWS: tl.constexpr, HAS_QUERIES: tl.constexpr, INDEX_HEADS: tl.constexpr,
    BLOCK_I: tl.constexpr, FACTOR: tl.constexpr, DATA: tl.constexpr, SCALES: tl.constexpr,
    EPS: tl.constexpr,
):  # fmt: skip
    """Parts of a row: query heads, window key, compressor, indexer's compressor, its queries."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    KEY: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    if part <= KEY:
        store_row(
            row.to(tl.int64), part, q, out, k, k_norm, rope, slot_of_row, position_of_row, extents,
            stride16, window_offset16, q_stride, out_stride, k_stride, H, BLOCK_H, WINDOW_RING,
            DATA, SCALES, EPS,
        )  # fmt: skip
    if RATIO > 0:  # noqa: SIM102  a constant: what is behind it is not compiled
        if part == KEY + 1:
            position = tl.load(position_of_row + row)
            if position >= 0:
                compress_row(
                    row, position, projected, ape, norm, entry_rope, extents, pages, slot_of_row,
                    position_of_row, page_table, rows, p_stride, stride16, state_offset16,
                    page_stride16, part_offset16, table_stride, 512, RATIO, RING, ROWS, RATIO == 4,
                    False, True, True, 8 if RATIO == 4 else 16, DATA, SCALES, EPS,
                )  # fmt: skip
    if HAS_INDEX:  # noqa: SIM102
        if part == KEY + 2:
            position = tl.load(position_of_row + row)
            if position >= 0:
                compress_row(
                    row, position, i_projected, i_ape, i_norm, entry_rope, extents, pages,
                    slot_of_row, position_of_row, page_table, rows, p_stride, stride16,
                    i_state_offset16, page_stride16, i_part_offset16, table_stride, 128, 4, I_RING,
                    I_ROWS, True, True, True, True, 8, 128, 4, EPS,
                )  # fmt: skip
    if HAS_QUERIES:  # noqa: SIM102
        if part > KEY + 2:
            index_query(
                row.to(tl.int64), part - KEY - 3, psi, omega, rope, codes, weights, psi_stride,
                omega_stride, True, FACTOR, INDEX_HEADS, BLOCK_I,
            )  # fmt: skip


def row_work(
    q: torch.Tensor,
    k: torch.Tensor,
    k_norm: torch.Tensor,
    rope: torch.Tensor,
    slot_of_row: torch.Tensor,
    position_of_row: torch.Tensor,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
    window: Part,
    max_rows_per_sequence: int,
    ratio: int = 0,
    entry_rope: torch.Tensor | None = None,
    main: Compression | None = None,
    index: Compression | None = None,
    queries: IndexQueries | None = None,
    out: torch.Tensor | None = None,
) -> None:
    """One layer's rows: q [T, H, 512] bf16 normalised and rotated into out (as q; None: in place),
    k [T, 512] bf16 into the window rings of ``slots`` (uint8 [num, bytes]), compressors into slots
    and ``pages``.

    ratio: of ``main`` (4 or 128; 0: a layer without compressor); index and queries only with ratio
    4. rope fp32 [T, 64] of the rows, entry_rope at position + 1 - ratio. The projections of main
    and index are columns of one tensor. One launch. Raises ValueError for what does not fit.
    """
    rows, heads, width = q.shape
    if width != KEY_CHANNELS or q.stride(1) != width or q.stride(2) != 1 or k.stride(1) != 1:
        raise ValueError(f"q must be [rows, heads, {KEY_CHANNELS}] with contiguous heads")
    target = q if out is None else out
    if target.shape != q.shape or target.stride(1) != width or target.stride(2) != 1:
        raise ValueError(f"out must be [rows, heads, {KEY_CHANNELS}] with contiguous heads")
    if max_rows_per_sequence > MAX_DECODE_ROWS:
        raise ValueError(f"{max_rows_per_sequence} rows of a sequence take launches of their own")
    if (ratio > 0) != (main is not None) or (index is not None and ratio != CSA_RATIO):
        raise ValueError(f"ratio {ratio} does not fit the compressors")
    if queries is not None and index is None:
        raise ValueError("index queries come with the indexer's compressor")
    if main is not None and (entry_rope is None or main.projected.stride(1) != 1):
        raise ValueError("a compressor needs the entries' rope and rows of projections")
    if index is not None and (
        main is None
        or index.projected.stride() != main.projected.stride()
        or index.norm.numel() != INDEX_CHANNELS
    ):
        raise ValueError("the indexer's projections must lie beside the compressor's")
    stride, page_stride = slots.stride(0), pages.stride(0)
    used = [p for c in (main, index) if c is not None for p in (c.state, c.part)]
    if stride % 16 or page_stride % 16 or any(p.offset % 16 for p in (window, *used)):
        raise ValueError("strides and offsets must be multiples of 16 bytes")
    if queries is not None:
        _, index_heads, channels = queries.q.shape
        if channels != INDEX_CHANNELS or queries.q.stride()[1:] != (INDEX_CHANNELS, 1):
            raise ValueError(f"index queries must be [rows, heads, {INDEX_CHANNELS}] by rows")
        if queries.head_weights.stride(1) != 1:
            raise ValueError("a row's head weights must be contiguous")
    else:
        index_heads = 0
    block_i = min(INDEX_HEADS_A_PART, index_heads) if index_heads else 1
    parts = triton.cdiv(heads, HEADS_A_PART) + 1
    if main is not None:
        parts += 1
    if index is not None:
        parts += 1 + index_heads // block_i
    nothing = (None, None, None)
    first = nothing if main is None else (main.projected, main.ape, main.norm)
    second = nothing if index is None else (index.projected, index.ape, index.norm)
    _row_kernel[(rows, parts)](
        q, target, k, k_norm, rope, entry_rope, slot_of_row, position_of_row, page_table, slots,
        pages, *first, *second,
        None if queries is None else queries.q,
        None if queries is None else queries.head_weights,
        None if queries is None else queries.codes,
        None if queries is None else queries.weights,
        rows, stride // 16, page_stride // 16, page_table.stride(0), q.stride(0),
        target.stride(0), k.stride(0),
        0 if main is None else main.projected.stride(0),
        0 if queries is None else queries.q.stride(0),
        0 if queries is None else queries.head_weights.stride(0),
        window.offset // 16,
        0 if main is None else main.state.offset // 16,
        0 if main is None else main.part.offset // 16,
        0 if index is None else index.state.offset // 16,
        0 if index is None else index.part.offset // 16,
        H=heads, BLOCK_H=HEADS_A_PART, WINDOW_RING=window.rows, RATIO=ratio,
        RING=1 if main is None else main.state.rows, ROWS=1 if main is None else main.part.rows,
        HAS_INDEX=index is not None, I_RING=1 if index is None else index.state.rows,
        I_ROWS=1 if index is None else index.part.rows, HAS_QUERIES=queries is not None,
        INDEX_HEADS=index_heads, BLOCK_I=block_i, FACTOR=HEAD_WEIGHT, DATA=DATA_BYTES,
        SCALES=SCALE_BYTES, EPS=EPS, num_warps=8,
    )  # fmt: skip
