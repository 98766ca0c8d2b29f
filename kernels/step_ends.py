"""The two ends of a decode step: what all layers read is made before the first, what outlives the
step is kept after the last.

Data sheet
  begin     streams: the token's embedding four times; rope rows (see ``kv_store.rope_rows``) of the
            plain and the compressed frequencies, and of the entries that a row completes (shifts
            1 - 4 and 1 - 128)
  keep      streams of every valid row into the slot's ring of recent positions, those of a
            sequence's last valid row into the slot too
  rows      a row with a negative position is padding: its rope is that of position 0, nothing of it
            is kept
  launches  1 each
  floor     bytes of the rows, read once, written four times (begin) or once to twice (keep)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from decant.kernels.layout import CSA_RATIO, HCA_RATIO, Part

STREAMS = 4
BLOCK = 1024  # channels a program copies
KINDS = 4  # plain, compressed, entries of ratio 4, entries of ratio 128


@triton.jit(do_not_specialize=["rows"])
def _begin_kernel(
    tokens, positions, embedding, plain, compressed, streams, ropes, rows,
    D: tl.constexpr, BLOCK: tl.constexpr, SHIFT_4: tl.constexpr, SHIFT_128: tl.constexpr,
):  # fmt: skip
    """Parts of a row: pieces of the embedding, then its ropes."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    PIECES: tl.constexpr = (D + BLOCK - 1) // BLOCK
    if part < PIECES:
        d = part * BLOCK + tl.arange(0, BLOCK)
        inside = d < D
        token = tl.load(tokens + row).to(tl.int64)
        value = tl.load(embedding + token * D + d, mask=inside)
        at = streams + row.to(tl.int64) * 4 * D + d
        for stream in tl.static_range(4):
            tl.store(at + stream * D, value, mask=inside)
    else:
        kind = part - PIECES
        shift = tl.where(kind == 2, SHIFT_4, tl.where(kind == 3, SHIFT_128, 0))
        i = tl.arange(0, 32)
        position = tl.maximum(tl.load(positions + row) + shift, 0)
        own = tl.load(plain + i)
        other = tl.load(compressed + i)
        angle = position.to(tl.float32) * tl.where(kind == 0, own, other)
        out = ropes + (kind * rows + row) * 64 + i
        tl.store(out, tl.cos(angle))
        tl.store(out + 32, tl.sin(angle))


@triton.jit(do_not_specialize=["rows"])
def _keep_kernel(
    streams, slot_of_row, position_of_row, extents, stride16, last16, recent16, rows,
    SIZE: tl.constexpr, RECENT: tl.constexpr, PER_SEQUENCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A piece of a row's streams, SIZE values in all."""
    row = tl.program_id(0)
    position = tl.load(position_of_row + row)
    if position >= 0:
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = i < SIZE
        value = tl.load(streams + row.to(tl.int64) * SIZE + i, mask=inside)
        slot = tl.load(slot_of_row + row).to(tl.int64)
        base = extents + (slot * stride16 + recent16) * 16
        ring = base.to(tl.pointer_type(tl.bfloat16)) + (position % RECENT).to(tl.int64) * SIZE
        tl.store(ring + i, value, mask=inside)
        is_end = row % PER_SEQUENCE == PER_SEQUENCE - 1
        following = tl.load(position_of_row + row + 1, mask=row + 1 < rows, other=-1)
        if is_end | (following < 0):
            last = (extents + (slot * stride16 + last16) * 16).to(tl.pointer_type(tl.bfloat16))
            tl.store(last + i, value, mask=inside)


def begin(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    embedding: torch.Tensor,
    plain: torch.Tensor,
    compressed: torch.Tensor,
    streams: torch.Tensor,
    ropes: torch.Tensor,
) -> None:
    """tokens, positions int32 [T]; embedding bf16 [vocab, D]; frequencies fp32 [32]; streams bf16
    [T, 4, D] and ropes fp32 [4, T, 64] (plain, compressed, entries of 4, entries of 128) are
    filled. Raises ValueError for shapes that do not fit."""
    rows, width = len(tokens), embedding.shape[1]
    if streams.shape != (rows, STREAMS, width) or ropes.shape != (KINDS, rows, 64):
        raise ValueError(f"streams {tuple(streams.shape)} or ropes {tuple(ropes.shape)}")
    block = min(BLOCK, triton.next_power_of_2(width))
    _begin_kernel[(rows, triton.cdiv(width, block) + KINDS)](
        tokens, positions, embedding, plain, compressed, streams, ropes, rows, D=width,
        BLOCK=block, SHIFT_4=1 - CSA_RATIO, SHIFT_128=1 - HCA_RATIO, num_warps=4,
    )  # fmt: skip


def keep(
    streams: torch.Tensor,
    slot_of_row: torch.Tensor,
    position_of_row: torch.Tensor,
    slots: torch.Tensor,
    last: Part,
    recent: Part,
    per_sequence: int,
) -> None:
    """streams bf16 [T, 4, D] into slots uint8 [num, bytes]: parts ``recent`` (a ring of positions)
    and ``last``. Rows of a sequence stand together, ``per_sequence`` each, valid ones first.
    Raises ValueError for what does not fit."""
    rows, size = len(streams), streams[0].numel()
    if not streams.is_contiguous() or recent.data_bytes != 2 * size or last.data_bytes != 2 * size:
        raise ValueError(f"streams {tuple(streams.shape)} do not fit {recent.data_bytes} bytes")
    stride = slots.stride(0)
    if stride % 16 or recent.offset % 16 or last.offset % 16 or rows % per_sequence:
        raise ValueError("strides and offsets must be multiples of 16 bytes")
    block = min(4 * BLOCK, triton.next_power_of_2(size))
    _keep_kernel[(rows, triton.cdiv(size, block))](
        streams, slot_of_row, position_of_row, slots, stride // 16, last.offset // 16,
        recent.offset // 16, rows, SIZE=size, RECENT=recent.rows, PER_SEQUENCE=per_sequence,
        BLOCK=block, num_warps=4,
    )  # fmt: skip


def begin_ref(
    tokens: torch.Tensor, positions: torch.Tensor, embedding: torch.Tensor,
    plain: torch.Tensor, compressed: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Plain torch: streams [T, 4, D] and ropes fp32 [4, T, 64] (angles in fp32, the rest in
    float64)."""
    ropes = []
    for frequencies, shift in (
        (plain, 0), (compressed, 0), (compressed, 1 - CSA_RATIO), (compressed, 1 - HCA_RATIO),
    ):  # fmt: skip
        angle = (positions + shift).clamp_min(0).float()[:, None] * frequencies
        ropes.append(torch.cat((angle.double().cos(), angle.double().sin()), -1).float())
    streams = embedding[tokens.long()][:, None].expand(-1, STREAMS, -1)
    return streams, torch.stack(ropes)
