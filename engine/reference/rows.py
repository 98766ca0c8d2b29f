"""The rows of one step and where their state lies: index arrays that all layers share.

A *segment* is a block of rows cut into groups of equal size; the rows of a group belong to one
sequence and share one buffer of window keys, in which the key of position p stands in column
``p % window_rows``. Decode rows form one segment (a group per sequence, keys straight from its
ring); a prefill chunk forms another (groups of 16 consecutive positions, keys from a chunk buffer:
the positions before the chunk out of the ring, then the chunk's own).

Padding rows have position -1: they see nothing, write nothing, and go to no expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decant.engine.interface import PrefillChunk, SlotRows
from decant.engine.kv_layout import KVLayout
from decant.engine.model_shape import WINDOW_SLACK
from decant.engine.reference.ops import ROW_TILE, round_up

I64 = NDArray[np.int64]
CHUNK_GROUP = WINDOW_SLACK  # queries of a chunk that share one key buffer
ENTRY_TILE = {4: 64, 128: 16}  # columns of one softmax tile
NEGATIVE = float("-inf")


def index(array: NDArray[np.int64] | list[int]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64).reshape(-1))


@dataclass(frozen=True)
class Entries:
    """Compressed entries that a segment's rows may see.

    columns: a multiple of the tile; num_shared: sequences in the segment (a chunk has one)."""

    index: dict[str, Tensor]  # part name -> [num_shared * columns] rows of the pool's matrix
    visible: Tensor  # [rows] int64: entries 0 .. visible - 1 may be seen
    bias: Tensor  # [rows, 1, columns]: 0 or -inf
    num_shared: int
    columns: int
    most: int  # largest number visible


@dataclass(frozen=True)
class Segment:
    first_row: int
    groups: int
    size: int  # rows per group
    is_chunk: bool
    window_index: Tensor  # [groups * window_rows]: rows of the ring's matrix, or of the buffer
    window_bias: Tensor  # [rows, 1, window_rows]
    entries: dict[int, Entries]  # by ratio

    @property
    def num_rows(self) -> int:
        return self.groups * self.size


@dataclass(frozen=True)
class Closing:
    """Windows that a row completes: each gives one entry.

    from_ring / from_chunk: [n * rows per window] indices into the state ring's matrix / the chunk's
    state buffer; ring windows come first. ``target``: part name -> [n] rows of the page matrix."""

    num: int  # windows that are written; padded to a multiple of ROW_TILE in the index arrays
    from_ring: dict[str, Tensor]
    from_chunk: Tensor
    is_first: Tensor  # [padded] bool: window 0, which has no previous window
    positions: Tensor  # [padded] int64: ratio * window
    target: dict[str, Tensor]


@dataclass(frozen=True)
class RowPlan:
    num: int  # rows, a multiple of ROW_TILE
    tokens: Tensor  # [num] int64, 0 for padding
    positions: Tensor  # [num] int64, 0 for padding
    valid: NDArray[np.bool_]  # [num]
    segments: list[Segment]
    chunk_rows: tuple[int, int]  # first row and number of the chunk's rows; (0, 0) without one
    chunk_old: dict[str, Tensor]  # part name -> ring rows of the positions before the chunk
    write_rows: dict[str, Tensor]  # part name -> rows whose state enters the ring ...
    write_to: dict[str, Tensor]  # ... and where
    closing: dict[int, Closing]  # by ratio


OLD_ROWS = {"csa_state": 8, "index_state": 8, "hca_state": 128}


class RowPlanner:
    """Makes row plans for one pool layout. mtp: plans for the MTP layer (its ring, no entries)."""

    def __init__(self, layout: KVLayout, num_heads: int, mtp: bool = False) -> None:
        self.layout, self.shape = layout, layout.shape
        self.window = "mtp_window" if mtp else "window"
        self.ratios = [] if mtp else sorted(set(self.shape.compress_ratios) - {0})
        # A product needs at least ROW_TILE rows: heads times rows of a group.
        self.min_group = -(-ROW_TILE // num_heads)
        self._ring: dict[str, tuple[int, int, int]] = {}  # slot stride in rows, rows, width
        for (name, _), part in layout.slot_parts.items():
            self._ring[name] = (layout.slot_stride // part.width, part.rows, part.width)
        self._page: dict[str, tuple[int, int]] = {}
        for (name, _), part in layout.page_parts.items():
            self._page[name] = (layout.page_stride // part.width, part.rows)

    def ring_rows(self, name: str, slots: I64, positions: I64) -> I64:
        """Row of each (slot, position) in a ring's matrix."""
        stride, rows, _ = self._ring[name]
        out: I64 = slots * stride + np.maximum(positions, 0) % rows
        return out

    def page_rows(self, name: str, tables: I64, entries: I64) -> I64:
        """Row of entry ``entries[..., i]`` of the sequences whose block tables are given."""
        stride, rows = self._page[name]
        page = np.take_along_axis(tables, entries // rows, axis=-1)
        return page * stride + entries % rows

    def plan(
        self,
        decode: Sequence[SlotRows],
        chunk: PrefillChunk | None = None,
        valid_from: Sequence[int] | None = None,
    ) -> RowPlan:
        """valid_from: per decode slot, window keys of earlier positions are masked (MTP holes)."""
        blocks: list[tuple[I64, I64, I64]] = []  # tokens, positions, slots per row
        segments: list[Segment] = []
        first = 0
        tables: list[tuple[int, ...]] = [s.block_table for s in decode]
        if decode:
            size = max(self.min_group, max(len(s.token_ids) for s in decode))
            tokens = np.zeros((len(decode), size), np.int64)
            positions = np.full((len(decode), size), -1, np.int64)
            for i, s in enumerate(decode):
                n = len(s.token_ids)
                tokens[i, :n] = s.token_ids
                positions[i, :n] = np.arange(s.start, s.start + n)
            slots = np.array([s.slot for s in decode], np.int64)
            segments.append(self._decode_segment(positions, slots, tables, valid_from))
            blocks.append((tokens, positions, np.broadcast_to(slots[:, None], tokens.shape)))
            first = tokens.size
        chunk_rows = (0, 0)
        if chunk is not None:
            count = len(chunk.token_ids)
            groups = -(-count // CHUNK_GROUP)
            tokens = np.zeros((groups, CHUNK_GROUP), np.int64)
            tokens.reshape(-1)[:count] = chunk.token_ids
            positions = np.full((groups, CHUNK_GROUP), -1, np.int64)
            positions.reshape(-1)[:count] = np.arange(chunk.start, chunk.start + count)
            segments.append(self._chunk_segment(positions, chunk, first))
            blocks.append((tokens, positions, np.full(tokens.shape, chunk.slot, np.int64)))
            chunk_rows = (first, count)
        tokens, positions, slots = (
            np.concatenate([b[i].reshape(-1) for b in blocks]) for i in range(3)
        )
        num = round_up(len(tokens), ROW_TILE)
        extra = num - len(tokens)
        if extra:
            tokens, slots = np.pad(tokens, (0, extra)), np.pad(slots, (0, extra))
            positions = np.pad(positions, (0, extra), constant_values=-1)
        valid = positions >= 0
        old: dict[str, Tensor] = {}
        if chunk is not None:
            for name, back in ((self.window, self._ring[self.window][1]), *OLD_ROWS.items()):
                if name in self._ring and (name == self.window or self.ratios):
                    before = np.arange(chunk.start - back, chunk.start)
                    old[name] = index(self.ring_rows(name, np.int64(chunk.slot), before))  # type: ignore[arg-type]
        write_rows, write_to = self._writes(positions, slots, chunk_rows)
        closing = {}
        for ratio in self.ratios:
            made = self._closing(ratio, positions, slots, decode, chunk, chunk_rows)
            if made is not None:
                closing[ratio] = made
        return RowPlan(
            num=num,
            tokens=torch.from_numpy(tokens),
            positions=torch.from_numpy(np.maximum(positions, 0)),
            valid=valid,
            segments=segments,
            chunk_rows=chunk_rows,
            chunk_old=old,
            write_rows=write_rows,
            write_to=write_to,
            closing=closing,
        )

    # -- segments ----------------------------------------------------------------------------------

    def _window_bias(self, positions: I64, last: I64, valid_from: I64) -> tuple[I64, Tensor]:
        """positions [groups, size], last [groups] -> position in each column [groups, rows] and the
        bias [groups * size, 1, rows]."""
        rows = self._ring[self.window][1]
        columns = np.arange(rows, dtype=np.int64)
        held = last[:, None] - (last[:, None] - columns) % rows  # largest p <= last in the column
        t, p = positions[:, :, None], held[:, None, :]
        seen = (p <= t) & (p > t - self.shape.sliding_window) & (p >= valid_from[:, None, None])
        bias = np.where(seen, np.float32(0), np.float32(NEGATIVE))
        return held, torch.from_numpy(bias.reshape(positions.size, 1, rows))

    def _decode_segment(
        self,
        positions: I64,
        slots: I64,
        tables: list[tuple[int, ...]],
        valid_from: Sequence[int] | None,
    ) -> Segment:
        rows = self._ring[self.window][1]
        start = np.zeros(len(slots), np.int64)
        if valid_from is not None:
            start = np.maximum(start, np.array(valid_from, np.int64))
        _, bias = self._window_bias(positions, positions.max(1), start)
        ring = self.ring_rows(self.window, slots[:, None], np.arange(rows)[None])
        entries = {r: e for r in self.ratios if (e := self._entries(r, positions, tables))}
        groups, size = positions.shape
        return Segment(0, groups, size, False, index(ring), bias, entries)

    def _chunk_segment(self, positions: I64, chunk: PrefillChunk, first: int) -> Segment:
        groups, size = positions.shape
        rows = self._ring[self.window][1]
        held, bias = self._window_bias(positions, positions.max(1), np.zeros(groups, np.int64))
        # Buffer: ``rows`` positions before the chunk, then the chunk's own.
        buffer = np.maximum(held - (chunk.start - rows), 0)
        flat = positions.reshape(1, -1)
        entries = {}
        for ratio in self.ratios:
            made = self._entries(ratio, flat, [chunk.block_table])
            if made is not None:
                entries[ratio] = made
        return Segment(first, groups, size, True, index(buffer), bias, entries)

    def _entries(self, ratio: int, positions: I64, tables: list[tuple[int, ...]]) -> Entries | None:
        """positions [sequences, rows each]."""
        visible = (positions + 1) // ratio  # 0 for padding
        most = int(visible.max())
        if most == 0:
            return None
        columns = round_up(most, ENTRY_TILE[ratio])
        names = ("csa", "index") if ratio == 4 else ("hca",)
        per_page = self.layout.page_tokens // ratio
        pages = -(-most // per_page)
        table = np.zeros((len(tables), pages), np.int64)
        for i, pages_of in enumerate(tables):
            n = min(len(pages_of), pages)
            table[i, :n] = pages_of[:n]
        # Columns past the visible ones point at entry 0: any finite row will do, they are masked.
        wanted = np.arange(columns)
        wanted = np.where(wanted[None] < visible.max(1)[:, None], wanted[None], 0)
        rows = {name: index(self.page_rows(name, table, wanted)) for name in names}
        flat = visible.reshape(-1)
        seen = np.arange(columns)[None] < flat[:, None]
        bias = np.where(seen, np.float32(0), np.float32(NEGATIVE))
        visible_rows, masked = torch.from_numpy(flat), torch.from_numpy(bias[:, None])
        return Entries(rows, visible_rows, masked, len(tables), columns, most)

    # -- state -------------------------------------------------------------------------------------

    def _writes(
        self, positions: I64, slots: I64, chunk_rows: tuple[int, int]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        names = [self.window]
        if not self.window.startswith("mtp"):
            names += [n for n in OLD_ROWS if n in self._ring]
        rows, to = {}, {}
        first, count = chunk_rows
        number = np.arange(len(positions))
        for name in names:
            keep = positions >= 0
            size = self._ring[name][1]
            if count > size:  # only a chunk's last rows enter the ring
                keep &= (number < first) | (number >= first + count - size)
            chosen = np.flatnonzero(keep)
            rows[name] = index(chosen)
            to[name] = index(self.ring_rows(name, slots[chosen], positions[chosen]))
        return rows, to

    def _closing(
        self,
        ratio: int,
        positions: I64,
        slots: I64,
        decode: Sequence[SlotRows],
        chunk: PrefillChunk | None,
        chunk_rows: tuple[int, int],
    ) -> Closing | None:
        closes = np.flatnonzero((positions >= 0) & ((positions + 1) % ratio == 0))
        if not len(closes):
            return None
        num = len(closes)
        last, owner = positions[closes], slots[closes]
        names = ("csa_state", "index_state") if ratio == 4 else ("hca_state",)
        targets = ("csa", "index") if ratio == 4 else ("hca",)
        back = 8 if ratio == 4 else 128
        first, count = chunk_rows
        in_chunk = (closes >= first) & (closes < first + count)
        ring, own = ~in_chunk, in_chunk
        span = last[:, None] + np.arange(1 - back, 1)[None]  # positions that the window needs
        from_ring = {
            n: self.ring_rows(n, np.repeat(owner[ring], back), span[ring].reshape(-1))
            for n in names
        }
        old = OLD_ROWS[names[0]]
        start = chunk.start if chunk is not None else 0
        from_chunk = (span[own] - start + old).reshape(-1)
        extra = round_up(num, ROW_TILE) - num  # padded by repeating row 0 of the last source
        if own.any():
            from_chunk = np.pad(from_chunk, (0, extra * back))
        else:
            from_ring = {n: np.pad(v, (0, extra * back)) for n, v in from_ring.items()}
        window = last // ratio
        tables = self._tables(closes, decode, chunk, first, count, positions)
        per_page = self.layout.page_tokens // ratio
        target = {}
        for name in targets:
            stride, rows = self._page[name]
            page = np.array(
                [t[w // per_page] for t, w in zip(tables, window, strict=True)], np.int64
            )
            target[name] = index(page * stride + window % rows)
        return Closing(
            num=num,
            from_ring={n: index(v) for n, v in from_ring.items()},
            from_chunk=index(from_chunk),
            is_first=torch.from_numpy(np.pad(window == 0, (0, extra))),
            positions=torch.from_numpy(np.pad(window * ratio, (0, extra))),
            target=target,
        )

    def _tables(
        self,
        closes: I64,
        decode: Sequence[SlotRows],
        chunk: PrefillChunk | None,
        first: int,
        count: int,
        positions: I64,
    ) -> list[tuple[int, ...]]:
        size = 1
        if decode:
            size = max(self.min_group, max(len(s.token_ids) for s in decode))
        out = []
        for row in closes:
            if chunk is not None and first <= row < first + count:
                out.append(chunk.block_table)
            else:
                out.append(decode[int(row) // size].block_table)
        return out
