"""The KV pool of one rank in POSIX shared memory, behind the interface that CUDA IPC will share:
create, open by handle, pull. Knows pages and slots as extents; the layout says what is in them.

Owner: the process that created it. Peers map it, read (and the draft writes MTP rows of slots that
decode lent it), and check the epoch after every copy. A pool that is closed or whose epoch changed
is never read again by its peers.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import secrets
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decant.engine.kv_layout import KVLayout, LiveRows, Part
from decant.protocol.errors import ConfigError, HandoffError, KVPageError
from decant.protocol.messages import PoolHandle

SHM = Path("/dev/shm")  # where POSIX shared memory lives on Linux
HEADER_BYTES = 4096
MAGIC = 0x4445_4341_4E54_4B56
_MAGIC, _EPOCH, _ALIVE = 0, 1, 2  # uint64 words of the header


class Pool:
    """A mapped pool.

    Attributes: handle; array: float32 [elements], pages first, then slots."""

    def __init__(self, mapping: mmap.mmap, handle: PoolHandle, layout: KVLayout, owned: bool):
        self.handle, self.layout, self.is_owner = handle, layout, owned
        self._mapping: mmap.mmap | None = mapping
        self._header: NDArray[np.uint64] = np.frombuffer(mapping, np.uint64, HEADER_BYTES // 8)
        self.array: NDArray[np.float32] = np.frombuffer(mapping, np.float32, offset=HEADER_BYTES)
        self._data = torch.from_numpy(self.array)
        self._slot_base = handle.num_pages * layout.page_stride
        self._views: dict[tuple[str, int], Tensor] = {}

    # -- life --------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls, prefix: str, layout: KVLayout, num_pages: int, num_slots: int, rank: int = 0
    ) -> Pool:
        """A new zeroed pool, mode 0600. Older pools named ``prefix`` (of a dead predecessor whose
        lock the caller holds) are unlinked.

        Raises: ConfigError if shared memory is too small."""
        for old in SHM.glob(prefix + ".*"):
            with contextlib.suppress(FileNotFoundError):
                old.unlink()
        epoch = secrets.randbits(63) | 1
        name = f"{prefix}.{epoch:016x}"
        size = HEADER_BYTES + num_pages * layout.page_bytes + num_slots * layout.slot_bytes
        space = os.statvfs(SHM)
        free = space.f_bavail * space.f_frsize
        too_small = ConfigError(
            f"the KV pool needs {size >> 20} MB of shared memory but {SHM} has {free >> 20} MB "
            "free: enlarge it or lower the pages and slots of the profile"
        )
        if size > free:
            raise too_small
        descriptor = os.open(SHM / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Taken now, so that a full /dev/shm is an error here and not a SIGBUS in a step.
            os.posix_fallocate(descriptor, 0, size)
            mapping = mmap.mmap(descriptor, size)
        except OSError as error:
            os.unlink(SHM / name)
            raise too_small from error
        finally:
            os.close(descriptor)
        handle = PoolHandle(
            kind="shm", name=name, epoch=epoch, num_pages=num_pages, page_bytes=layout.page_bytes,
            num_slots=num_slots, slot_bytes=layout.slot_bytes, layout_hash=layout.hash, rank=rank,
        )  # fmt: skip
        pool = cls(mapping, handle, layout, owned=True)
        atexit.register(pool.close)  # a process that ends by an exception leaves nothing behind
        pool._header[_MAGIC], pool._header[_EPOCH], pool._header[_ALIVE] = MAGIC, epoch, 1
        return pool

    @classmethod
    def open(cls, handle: PoolHandle, layout: KVLayout) -> Pool:
        """Map a peer's pool. Raises: HandoffError if it is gone or its layout differs."""
        if handle.kind != "shm":
            raise HandoffError(f"a {handle.kind} pool cannot be mapped by the CPU engine")
        if handle.layout_hash != layout.hash:
            raise HandoffError(f"KV layout {handle.layout_hash} differs from ours, {layout.hash}")
        if (handle.page_bytes, handle.slot_bytes) != (layout.page_bytes, layout.slot_bytes):
            raise HandoffError(f"pool {handle.name}: page or slot size differs from the layout's")
        if os.path.basename(handle.name) != handle.name or handle.name.startswith("."):
            raise HandoffError(f"{handle.name!r} is not the name of a pool")
        size = HEADER_BYTES + handle.num_pages * layout.page_bytes
        size += handle.num_slots * layout.slot_bytes
        try:
            descriptor = os.open(SHM / handle.name, os.O_RDWR)
        except OSError as error:
            raise HandoffError(f"pool {handle.name} cannot be opened: {error}") from error
        try:
            if os.fstat(descriptor).st_size != size:
                raise HandoffError(f"pool {handle.name} has another size than its handle says")
            mapping = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        pool = cls(mapping, handle, layout, owned=False)
        pool.check()
        return pool

    def check(self) -> None:
        """Raises: HandoffError unless the exporter still owns what the handle names."""
        if self._mapping is None:
            raise HandoffError(f"pool {self.handle.name} is closed")
        words = self._header
        if words[_MAGIC] != MAGIC or words[_EPOCH] != self.handle.epoch:
            raise HandoffError(f"pool {self.handle.name} has another epoch")
        if words[_ALIVE] != 1:
            raise HandoffError(f"pool {self.handle.name} was closed by its owner")

    def close(self) -> None:
        """Unmap; the owner also tells its peers and unlinks. Views that are still held keep the
        memory mapped until they go."""
        if self._mapping is None:
            return
        if self.is_owner:
            atexit.unregister(self.close)
            self._header[_ALIVE] = 0
            with contextlib.suppress(FileNotFoundError):
                (SHM / self.handle.name).unlink()
        self._views.clear()
        mapping, self._mapping = self._mapping, None
        del self._header, self.array, self._data
        with contextlib.suppress(BufferError):
            mapping.close()

    # -- views -------------------------------------------------------------------------------------

    def rows(self, name: str, layer: int = -1) -> Tensor:
        """A part of all pages or slots as a matrix [rows, width] (see kv_layout)."""
        key = (name, layer)
        view = self._views.get(key)
        if view is None:
            if key in self.layout.page_parts:
                part, base, end = self.layout.page_parts[key], 0, self._slot_base
            else:
                part, base, end = self.layout.slot_parts[key], self._slot_base, len(self._data)
            start = base + part.offset
            count = max(0, (end - start) // part.width)
            view = self._data[start : start + count * part.width].view(count, part.width)
            self._views[key] = view
        return view

    def page_rows(self, name: str, layer: int, page: int) -> NDArray[np.float32]:
        """[rows, width] of one page."""
        part = self.layout.page_parts[name, layer]
        return self._extent(part, page * self.layout.page_stride)

    def slot_rows(self, name: str, layer: int, slot: int) -> NDArray[np.float32]:
        """[rows, width] of one slot."""
        part = self.layout.slot_parts[name, layer]
        return self._extent(part, self._slot_base + slot * self.layout.slot_stride)

    def _extent(self, part: Part, base: int) -> NDArray[np.float32]:
        start = base + part.offset
        return self.array[start : start + part.rows * part.width].reshape(part.rows, part.width)

    def _page_base(self, page: int) -> int:
        if not 0 <= page < self.handle.num_pages:
            raise KVPageError(f"page {page} is not in a pool of {self.handle.num_pages}")
        return page * self.layout.page_stride

    def _slot_start(self, slot: int) -> int:
        if not 0 <= slot < self.handle.num_slots:
            raise KVPageError(f"slot {slot} is not in a pool of {self.handle.num_slots}")
        return self._slot_base + slot * self.layout.slot_stride

    def _pieces(self, live: Iterable[LiveRows], base: int) -> Iterator[tuple[int, int]]:
        """Element ranges of live rows in position order; a ring that wraps gives two."""
        for rows in live:
            part, first, left = rows.part, rows.first, rows.count
            while left > 0:
                row = first % part.rows
                count = min(left, part.rows - row)
                start = base + part.offset + row * part.width
                yield start, start + count * part.width
                first, left = first + count, left - count

    # -- checksums and copies ----------------------------------------------------------------------

    def _crc(self, live: Iterable[LiveRows], base: int) -> int:
        value = 0
        for start, end in self._pieces(live, base):
            value = zlib.crc32(self.array[start:end].data, value)
        return value

    def page_checksum(self, page: int, num_tokens: int) -> int:
        return self._crc(self.layout.live_in_page(num_tokens), self._page_base(page))

    def slot_checksum(self, slot: int, num_tokens: int) -> int:
        return self._crc(self.layout.live_in_slot(num_tokens), self._slot_start(slot))

    def _save(self, live: Iterable[LiveRows], base: int) -> bytes:
        return b"".join(self.array[start:end].data for start, end in self._pieces(live, base))

    def _load(self, live: list[LiveRows], base: int, data: bytes) -> None:
        size = sum(4 * rows.count * rows.part.width for rows in live)
        if len(data) != size:
            raise KVPageError(f"{len(data)} bytes are not the {size} of these rows")
        source, at = np.frombuffer(data, np.float32), 0
        for start, end in self._pieces(live, base):
            self.array[start:end] = source[at : at + end - start]
            at += end - start

    def save_page(self, page: int, num_tokens: int) -> bytes:
        """Live rows, one after the other."""
        return self._save(self.layout.live_in_page(num_tokens), self._page_base(page))

    def save_slot(self, slot: int, num_tokens: int) -> bytes:
        """Live rows, one after the other."""
        return self._save(self.layout.live_in_slot(num_tokens), self._slot_start(slot))

    def load_page(self, page: int, num_tokens: int, data: bytes) -> None:
        """Raises: KVPageError if the size is wrong."""
        self._load(self.layout.live_in_page(num_tokens), self._page_base(page), data)

    def load_slot(self, slot: int, num_tokens: int, data: bytes) -> None:
        """Raises: KVPageError if the size is wrong."""
        self._load(self.layout.live_in_slot(num_tokens), self._slot_start(slot), data)

    def clear_slot(self, slot: int) -> None:
        base = self._slot_start(slot)
        self.array[base : base + self.layout.slot_stride] = 0

    def pull_page(self, source: Pool, page: int, target: int, num_tokens: int) -> None:
        """Copy the live rows of a page of ``source`` (which may be this pool)."""
        from_base, to_base = source._page_base(page), self._page_base(target)
        self._copy(source, self.layout.live_in_page(num_tokens), from_base, to_base)

    def pull_slot(self, source: Pool, slot: int, target: int, num_tokens: int) -> None:
        """Copy the live rows of a slot of ``source`` (which may be this pool)."""
        from_base, to_base = source._slot_start(slot), self._slot_start(target)
        self._copy(source, self.layout.live_in_slot(num_tokens), from_base, to_base)

    def _copy(self, source: Pool, live: list[LiveRows], from_base: int, to_base: int) -> None:
        shift = from_base - to_base
        for start, end in self._pieces(live, to_base):
            self.array[start:end] = source.array[start + shift : end + shift]
