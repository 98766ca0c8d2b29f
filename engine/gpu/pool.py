"""The KV pool of one rank on a device: header, pages, slots, in one allocation that peers map.

Beside its pages and slots it has one *dump* page and slot: what padded rows of a captured step
write goes there. Copies move whole extents in pieces of at most 16 MB and look at the exporter's
epoch and liveness words between them; checksums cover the live rows only.
"""

from __future__ import annotations

import atexit
import logging
import secrets
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from decant.engine.gpu.layout import GpuLayout
from decant.engine.gpu.memory import Memory, create_memory, first_line, open_memory
from decant.kernels.layout import Part
from decant.kernels.page_copy import copy_pages
from decant.protocol.errors import HandoffError, KVPageError
from decant.protocol.messages import PoolHandle

log = logging.getLogger("decant.engine.gpu")

HEADER_BYTES = 4608  # two units of 2,304, so that pages keep their alignment
MAGIC = 0x4445_4341_4E54_4750
PIECE_BYTES = 16 << 20
_UNIT = 256  # bytes: divides every part, stride and row of streams


class GpuPool:
    """Attributes: handle, layout, device; pages, slots: uint8 [num + 1, bytes], the last is the
    dump."""

    def __init__(
        self, memory: Memory, handle: PoolHandle, layout: GpuLayout, device: torch.device
    ) -> None:
        self._memory: Memory | None = memory
        self.handle, self.layout, self.device = handle, layout, device
        data = memory.data
        self._header = data[:24].view(torch.int64)
        end = HEADER_BYTES + (handle.num_pages + 1) * layout.page_bytes
        self.pages = data[HEADER_BYTES:end].view(-1, layout.page_bytes)
        self.slots = data[end : end + (handle.num_slots + 1) * layout.slot_bytes]
        self.slots = self.slots.view(-1, layout.slot_bytes)
        self._is_owner = False
        self._words: dict[str, tuple[Tensor, Tensor]] = {}

    # -- life --------------------------------------------------------------------------------------

    @staticmethod
    def size(layout: GpuLayout, num_pages: int, num_slots: int) -> int:
        """Bytes of a pool."""
        pages, slots = (num_pages + 1) * layout.page_bytes, (num_slots + 1) * layout.slot_bytes
        return HEADER_BYTES + pages + slots

    @classmethod
    def create(
        cls,
        prefix: str,
        layout: GpuLayout,
        num_pages: int,
        num_slots: int,
        device: torch.device,
        rank: int = 0,
    ) -> GpuPool:
        """Raises: ConfigError if there is too little memory."""
        memory = create_memory(prefix, cls.size(layout, num_pages, num_slots), device)
        epoch = secrets.randbits(62) | 1
        handle = PoolHandle(
            kind=memory.kind, name=memory.name, epoch=epoch, num_pages=num_pages,
            page_bytes=layout.page_bytes, num_slots=num_slots, slot_bytes=layout.slot_bytes,
            layout_hash=layout.hash, rank=rank, device=device.index or 0,
        )  # fmt: skip
        pool = cls(memory, handle, layout, device)
        pool._is_owner = True
        pool._header.copy_(torch.tensor([MAGIC, epoch, 1]))
        atexit.register(pool.close)
        return pool

    @classmethod
    def open(cls, handle: PoolHandle, layout: GpuLayout, device: torch.device) -> GpuPool:
        """Map a peer's pool. Raises: HandoffError if it is gone or its layout differs."""
        if handle.layout_hash != layout.hash:
            raise HandoffError(f"KV layout {handle.layout_hash} differs from ours, {layout.hash}")
        if (handle.page_bytes, handle.slot_bytes) != (layout.page_bytes, layout.slot_bytes):
            raise HandoffError("page or slot size of the pool differs from the layout's")
        if handle.num_pages < 0 or handle.num_slots < 0:
            raise HandoffError("a pool of a negative number of pages or slots")
        size = cls.size(layout, handle.num_pages, handle.num_slots)
        memory = open_memory(handle.kind, handle.name, size, device)
        pool = cls(memory, handle, layout, device)
        pool.check()
        return pool

    def check(self) -> None:
        """Raises: HandoffError unless the exporter still owns what the handle names."""
        if self._memory is None:
            raise HandoffError(f"pool {self.handle.name[:24]} is closed")
        magic, epoch, alive = self._header.tolist()
        if magic != MAGIC or epoch != self.handle.epoch:
            raise HandoffError(f"pool {self.handle.name[:24]} has another epoch")
        if alive != 1:
            raise HandoffError(f"pool {self.handle.name[:24]} was closed by its owner")

    def close(self) -> None:
        """Unmap; the owner tells its peers and frees."""
        if self._memory is None:
            return
        if self._is_owner:
            atexit.unregister(self.close)
            try:
                self._header[2] = 0
            except RuntimeError as error:  # the device or its MPS server is lost: nobody reads it
                log.warning("pool %s ends without notice: %s", self.handle.name[:24],
                            first_line(error))  # fmt: skip
        self._words.clear()
        empty = torch.empty(0, dtype=torch.uint8)
        self._header = self.pages = self.slots = empty
        memory, self._memory = self._memory, None
        memory.close()

    # -- views -------------------------------------------------------------------------------------

    @property
    def dump_page(self) -> int:
        return self.handle.num_pages

    @property
    def dump_slot(self) -> int:
        return self.handle.num_slots

    def _page(self, page: int) -> Tensor:
        if not 0 <= page < self.handle.num_pages:
            raise KVPageError(f"page {page} is not in a pool of {self.handle.num_pages}")
        return self.pages[page]

    def _slot(self, slot: int) -> Tensor:
        if not 0 <= slot < self.handle.num_slots:
            raise KVPageError(f"slot {slot} is not in a pool of {self.handle.num_slots}")
        return self.slots[slot]

    def _stream_units(self, slots: Tensor, part: Part, rows: Tensor | None = None) -> Tensor:
        count = part.data_bytes // _UNIT
        first = (slots.long() * self.layout.slot_bytes + part.offset) // _UNIT
        if rows is not None:
            first = first + rows.long() % part.rows * count
        unit = torch.arange(count, device=slots.device)
        return (first[:, None] + unit).flatten()

    def _put_streams(self, at: Tensor, streams: Tensor) -> None:
        rows = streams.contiguous().view(torch.uint8).view(-1, _UNIT)
        self.slots.view(-1, _UNIT).index_copy_(0, at, rows)

    def _get_streams(self, at: Tensor) -> Tensor:
        shape = self.layout.shape
        rows = self.slots.view(-1, _UNIT).index_select(0, at)
        return rows.view(torch.bfloat16).view(-1, shape.hc_mult, shape.hidden_size)

    def write_streams(self, slots: Tensor, streams: Tensor) -> None:
        """Streams bf16 [n, S, hidden] of the last position into slots int [n]."""
        self._put_streams(self._stream_units(slots, self.layout.streams), streams)

    def keep_streams(
        self, slots: Tensor, positions: Tensor, per_sequence: int, streams: Tensor
    ) -> None:
        """What outlives a step, in plain torch: streams of all valid rows into the rings, those of
        a sequence's last valid row as the slot's."""
        live = (positions >= 0).view(-1, per_sequence)
        # valid, and the row after it is not
        follows = torch.cat((live[:, 1:], torch.zeros_like(live[:, :1])), 1)
        last = torch.where((live & ~follows).flatten(), slots, self.dump_slot)
        self.write_streams(last, streams)
        self.write_recent(slots, positions, streams)

    def read_streams(self, slots: Tensor) -> Tensor:
        """bf16 [n, S, hidden]."""
        return self._get_streams(self._stream_units(slots, self.layout.streams))

    def write_recent(self, slots: Tensor, positions: Tensor, streams: Tensor) -> None:
        """Streams of positions [n] into the rings of slots [n]; position -1 goes to the dump."""
        owner = torch.where(positions >= 0, slots, self.dump_slot)
        at = self._stream_units(owner, self.layout.recent, positions.clamp(min=0))
        self._put_streams(at, streams)

    def read_recent(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Streams [n, S, hidden] of positions [n]; of position -1 those of the dump."""
        owner = torch.where(positions >= 0, slots, self.dump_slot)
        return self._get_streams(
            self._stream_units(owner, self.layout.recent, positions.clamp(min=0))
        )

    # -- checksums and copies ----------------------------------------------------------------------

    def _checksums(self, kind: str, extents: list[Tensor], live: list[np.ndarray]) -> list[int]:
        """Sums of live 32-bit words, each times an odd number of its place, folded to 32 bits. One
        copy to the host for all extents."""
        if not extents:
            return []
        if kind not in self._words:
            groups = self.layout.page_groups if kind == "page" else self.layout.slot_groups
            row = torch.from_numpy(self.layout.word_rows(groups, extents[0].numel()))
            place = torch.arange(len(row)) * 0x9E37_79B1
            factor = torch.where(row >= 0, place | 1, 0)
            self._words[kind] = row.clamp(min=0).to(self.device), factor.to(self.device)
        row, factor = self._words[kind]
        is_live = torch.from_numpy(np.stack(live)).to(self.device)
        totals = [
            # a whole page, the common case, needs no look at its rows
            (e.view(torch.int32) * factor).sum()
            if rows.all()
            else (e.view(torch.int32) * factor * is_live[i][row]).sum()
            for i, (e, rows) in enumerate(zip(extents, live, strict=True))
        ]
        return [(t ^ (t >> 32)) & 0xFFFF_FFFF for t in torch.stack(totals).tolist()]

    def page_checksums(self, pages: Sequence[int], num_tokens: Sequence[int]) -> list[int]:
        """Of pages with so many live tokens each."""
        extents = [self._page(page) for page in pages]
        live = [self.layout.live_page_rows(n) for n in num_tokens]
        return self._checksums("page", extents, live)

    def page_checksum(self, page: int, num_tokens: int) -> int:
        return self.page_checksums([page], [num_tokens])[0]

    def slot_checksum(self, slot: int, num_tokens: int) -> int:
        live = self.layout.live_slot_rows(num_tokens)
        return self._checksums("slot", [self._slot(slot)], [live])[0]

    def _save(self, extent: Tensor) -> bytes:
        """A page's or slot's bytes in host memory."""
        return extent.cpu().numpy().tobytes()

    def _load(self, extent: Tensor, data: bytes) -> None:
        """The other way. Raises: KVPageError if the size is wrong."""
        if len(data) != extent.numel():
            raise KVPageError(f"{len(data)} bytes are not the {extent.numel()} of this extent")
        extent.copy_(torch.from_numpy(np.frombuffer(data, np.uint8).copy()))

    def save_page(self, page: int) -> bytes:
        return self._save(self._page(page))

    def save_slot(self, slot: int) -> bytes:
        return self._save(self._slot(slot))

    def load_page(self, page: int, data: bytes) -> None:
        self._load(self._page(page), data)

    def load_slot(self, slot: int, data: bytes) -> None:
        self._load(self._slot(slot), data)

    def clear_slot(self, slot: int) -> None:
        self._slot(slot).zero_()

    def pull_pages(
        self, source: GpuPool, pages: Sequence[int], targets: Sequence[int]
    ) -> None:
        """Copy pages of ``source`` (which may be this pool), gathered by one kernel a piece.
        Raises: HandoffError if the exporter went away meanwhile: what was copied is void then."""
        for page, target in zip(pages, targets, strict=True):
            source._page(page)
            self._page(target)
        at_once = max(1, PIECE_BYTES // self.layout.page_bytes)
        for at in range(0, len(pages), at_once):
            if source is not self:
                source.check()
            some, kept = pages[at : at + at_once], targets[at : at + at_once]
            if self.device.type == "cuda":
                index = torch.tensor([list(some), list(kept)], device=self.device)
                copy_pages(source.pages, self.pages, index[0], index[1])
            else:
                for page, target in zip(some, kept, strict=True):
                    self.pages[target].copy_(source.pages[page])
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        if source is not self:
            source.check()

    def pull_page(self, source: GpuPool, page: int, target: int) -> None:
        """Copy a page of ``source`` (which may be this pool). Raises: HandoffError."""
        self.pull_pages(source, [page], [target])

    def pull_slot(self, source: GpuPool, slot: int, target: int) -> None:
        """Copy a slot of ``source`` (which may be this pool). Raises: HandoffError."""
        self._pull(source, source._slot(slot), self._slot(target))

    def _pull(self, source: GpuPool, taken: Tensor, kept: Tensor) -> None:
        for at in range(0, taken.numel(), PIECE_BYTES):
            if source is not self:
                source.check()
            kept[at : at + PIECE_BYTES].copy_(taken[at : at + PIECE_BYTES], non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
