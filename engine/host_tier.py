"""What the prefix cache of prefill evicted, kept in host memory and behind it in a file.

A *record* is the live rows of one page or one slot, by the same hash that names its prefix, so
nobody finds another tenant's. A *snapshot* says which records make a prefix, and with which
checksums: what comes back is copied into the pool and checked there like any cached entry, so a
record that changed is a miss and never a wrong text.

Both levels are bounded and lose what was used least recently. A record goes to memory, and a
thread of the tier writes it to the file as well; it is read back from wherever it still is. The
file has no name: with the process its blocks are free. Safe to use from several threads: the event
loop asks, the engine thread puts and gets.
"""

from __future__ import annotations

import os
import queue
import tempfile
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from decant.protocol.errors import ConfigError

BLOCK_TOKENS = 128  # as in prefix_cache.py
FILE_BLOCK = 256 << 10  # bytes; records take whole blocks of the file
MAX_UNWRITTEN = 256  # records that wait for the file; more are kept in memory only

SnapshotKey = tuple[bytes, bytes]  # hash of the whole blocks of 128 ids, ids after them


@dataclass(frozen=True)
class Snapshot:
    """A prefix that was in the pool. Names of its records, and what its rows must be."""

    key: SnapshotKey
    num_tokens: int
    pages: tuple[bytes, ...]  # of the full pages
    checksums: tuple[int, ...]
    open_checksum: int = 0
    slot_checksum: int = 0

    @property
    def open_page(self) -> bytes:
        """The record of the page that the prefix cuts, if it cuts one."""
        return b"open/" + b"/".join(self.key)

    @property
    def slot(self) -> bytes:
        """The record of its slot."""
        return b"slot/" + b"/".join(self.key)


@dataclass(frozen=True)
class Move:
    """A copy between pool and tier. page or slot: its number, the other is -1."""

    record: bytes
    num_tokens: int
    page: int = -1
    slot: int = -1
    is_restore: bool = False
    snapshot: Snapshot | None = None  # complete with this record


@dataclass
class _Record:
    data: bytes | None  # None: in the file only
    size: int
    blocks: list[int] = field(default_factory=list)  # of the file; empty: in memory only
    snapshot: Snapshot | None = None


@dataclass
class TierStats:
    """Bytes now; records ever."""

    memory_bytes: int = 0
    file_bytes: int = 0
    num_saved: int = 0
    num_restored: int = 0
    num_dropped: int = 0  # because a level was full
    num_failed: int = 0  # could not be written to the file or read from it


class HostTier:
    """Records and snapshots. memory_bytes, file_bytes: most that each level holds."""

    def __init__(self, memory_bytes: int, file_bytes: int = 0, folder: str = "") -> None:
        """folder: where the file goes. Raises: ConfigError if it cannot be made."""
        self.stats = TierStats()
        self._max_memory = memory_bytes
        self._lock = threading.Lock()
        self._records: dict[bytes, _Record] = {}
        # The same records by level, least recently used first.
        self._in_memory: OrderedDict[bytes, _Record] = OrderedDict()
        self._in_file: OrderedDict[bytes, _Record] = OrderedDict()
        self._tails: dict[bytes, dict[bytes, Snapshot]] = {}
        self._free = list(range(file_bytes // FILE_BLOCK))  # blocks of the file
        self._unwritten: queue.Queue[bytes | None] = queue.Queue(MAX_UNWRITTEN)
        self._writer: threading.Thread | None = None
        self._file = -1
        if self._free:
            try:
                with tempfile.TemporaryFile(dir=folder or None) as file:
                    self._file = os.dup(file.fileno())
            except OSError as error:
                raise ConfigError(f"the prefix cache's file in {folder!r}: {error}") from error
            self._writer = threading.Thread(target=self._write_forever, daemon=True)
            self._writer.start()

    def __len__(self) -> int:
        return len(self._records)

    # ---- prefixes: asked by the scheduler --------------------------------------------------------

    def find(
        self, digests: Sequence[bytes], ids: array[int], page_tokens: int, known: int
    ) -> Snapshot | None:
        """The longest prefix of a prompt of which everything is here, longer than the ``known``
        tokens that the pool has (the full pages of those are not needed here)."""
        with self._lock:
            for num_blocks in range(len(digests) - 1, known // BLOCK_TOKENS - 1, -1):
                tails = self._tails.get(digests[num_blocks])
                if not tails:
                    continue
                at = num_blocks * BLOCK_TOKENS
                rest = ids[at : at + BLOCK_TOKENS].tobytes()
                for tail in sorted(tails, key=len, reverse=True):
                    snapshot = tails[tail]
                    if snapshot.num_tokens <= known or not rest.startswith(tail):
                        continue
                    names = [*snapshot.pages[known // page_tokens :], snapshot.slot]
                    if snapshot.num_tokens % page_tokens:
                        names.append(snapshot.open_page)
                    if all(name in self._records for name in names):
                        for name in reversed(names):  # the first page is the most recent
                            self._touch(name)
                        return snapshot
                    self._discard(snapshot.slot)  # of no use without the others
        return None

    def forget(self, snapshot: Snapshot) -> None:
        """Its content is not what it was: drop all its records."""
        with self._lock:
            for name in (*snapshot.pages, snapshot.open_page, snapshot.slot):
                self._discard(name)

    def clear(self) -> int:
        """Drop everything. Returns: number of records."""
        with self._lock:
            num = len(self._records)
            for name in list(self._records):
                self._discard(name)
            return num

    # ---- bytes: in the engine thread -------------------------------------------------------------

    def touch(self, name: bytes) -> bool:
        """Whether a record is here; it is the most recent one then."""
        with self._lock:
            if name not in self._records:
                return False
            self._touch(name)
            return True

    def put(self, name: bytes, data: bytes, snapshot: Snapshot | None = None) -> None:
        """Keep a record; with it ``snapshot`` can be found. What does not fit is dropped."""
        with self._lock:
            self._discard(name)
            if len(data) > self._max_memory:
                self.stats.num_dropped += 1
                return
            found = _Record(data, len(data), snapshot=snapshot)
            self._records[name] = self._in_memory[name] = found
            self.stats.memory_bytes += found.size
            self.stats.num_saved += 1
            if snapshot is not None:
                self._tails.setdefault(snapshot.key[0], {})[snapshot.key[1]] = snapshot
            if self._writer is not None:
                try:
                    self._unwritten.put_nowait(name)
                except queue.Full:
                    self.stats.num_failed += 1
            self._shrink()

    def get(self, name: bytes) -> bytes | None:
        """The bytes of a record; None: it is not here (any more)."""
        with self._lock:
            found = self._records.get(name)
            if found is None:
                return None
            data = found.data
            if data is None:
                # Under the lock: else the blocks could be another record's meanwhile.
                data = self._read(found)
                if data is None:
                    self.stats.num_failed += 1
                    self._discard(name)
                    return None
                found.data = data  # it is in use again
                self._in_memory[name] = found
                self.stats.memory_bytes += found.size
                self._shrink()
            self.stats.num_restored += 1
            return data

    # ---- levels ----------------------------------------------------------------------------------

    def _touch(self, name: bytes) -> None:
        for level in (self._in_memory, self._in_file):
            if name in level:
                level.move_to_end(name)

    def _shrink(self) -> None:
        """Down to the memory's size. What is in the file stays there."""
        while self.stats.memory_bytes > self._max_memory:
            name, found = self._in_memory.popitem(last=False)
            self.stats.memory_bytes -= found.size
            found.data = None
            if not found.blocks:
                self.stats.num_dropped += 1
                self._discard(name)

    def _discard(self, name: bytes) -> None:
        found = self._records.pop(name, None)
        if found is None:
            return
        if self._in_memory.pop(name, None) is not None:
            self.stats.memory_bytes -= found.size
        found.data = None
        self._leave_file(name, found)
        if found.snapshot is not None:
            digest, tail = found.snapshot.key
            del self._tails[digest][tail]
            if not self._tails[digest]:
                del self._tails[digest]

    def _leave_file(self, name: bytes, found: _Record) -> None:
        self._in_file.pop(name, None)
        self.stats.file_bytes -= len(found.blocks) * FILE_BLOCK
        self._free += found.blocks
        found.blocks = []

    def _take_blocks(self, size: int) -> list[int]:
        """Blocks of the file for a record, if need be those of what was used least recently; []:
        the whole file is too small."""
        num = max(1, -(-size // FILE_BLOCK))  # an open page may have no row yet
        while len(self._free) < num and self._in_file:
            name, found = next(iter(self._in_file.items()))
            self._leave_file(name, found)
            if found.data is None:
                self.stats.num_dropped += 1
                self._discard(name)
        if len(self._free) < num:
            return []
        return [self._free.pop() for _ in range(num)]

    def _write_forever(self) -> None:
        while (name := self._unwritten.get()) is not None:
            self._write(name)
            self._unwritten.task_done()

    def _write(self, name: bytes) -> None:
        """Write a record, if it is still there."""
        with self._lock:
            found = self._records.get(name)
            if found is None or found.data is None or found.blocks:
                return
            data, blocks = found.data, self._take_blocks(found.size)
        is_written = bool(blocks)
        try:
            for i, block in enumerate(blocks):
                part = data[i * FILE_BLOCK : (i + 1) * FILE_BLOCK]
                is_written &= os.pwrite(self._file, part, block * FILE_BLOCK) == len(part)
        except OSError:
            is_written = False
        with self._lock:
            self.stats.num_failed += not is_written
            # It may have gone, or another of its name may have come, while it was written.
            if is_written and self._records.get(name) is found:
                found.blocks, self._in_file[name] = blocks, found
                self.stats.file_bytes += len(blocks) * FILE_BLOCK
            else:
                self._free += blocks

    def _read(self, found: _Record) -> bytes | None:
        data = bytearray()
        try:
            for block in found.blocks:
                num = min(found.size - len(data), FILE_BLOCK)
                data += os.pread(self._file, num, block * FILE_BLOCK)
        except OSError:
            return None
        return bytes(data) if len(data) == found.size else None

    def wait_written(self, timeout_s: float = 10.0) -> None:
        """Until the file has what was put. Raises: TimeoutError."""
        end = time.monotonic() + timeout_s
        while self._unwritten.unfinished_tasks:
            if time.monotonic() > end:
                raise TimeoutError("the tier's file is not written")
            time.sleep(0.002)

    def close(self) -> None:
        """Let go of everything."""
        self.clear()
        if self._writer is not None:
            self._unwritten.put(None)
            self._writer.join()
            os.close(self._file)
            self._writer = None


def page_names(digests: Iterable[bytes]) -> tuple[bytes, ...]:
    """Records of full pages, by the hash of all ids up to each page's end."""
    return tuple(b"page/" + digest for digest in digests)
