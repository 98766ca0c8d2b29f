"""The step header: what every rank of a group starts a step from, in memory that all of them map.

Rank 0 writes a plan into it, once a step, and every rank, rank 0 included, runs what stands there:
bucket, tokens (a slot's last token and its drafts), positions, how many of a slot's rows are valid,
block tables as far as they changed, at most one prefill chunk. On a GPU the memory is pinned, so
that copies to the device do not wait. It also holds the abort word of the group.

Knows plans and numbers only; no torch.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from decant.engine.interface import I32, PrefillChunk, SlotRows, StepPlan
from decant.protocol.errors import ConfigError, EngineError

SHM = Path("/dev/shm")
MAGIC = 0x4445_4341_4E54_4844
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
WORDS = 64  # int32 words before the arrays
# Places among them; MAGIC takes two.
_MAGIC, _EPOCH, _ABORT = 0, 2, 4
_NUM, _SIZE, _LIVE, _TABLES, _WIDTH = 6, 7, 8, 9, 10
_CHUNK_SLOT, _CHUNK_START, _CHUNK_COUNT, _CHUNK_TABLE, _STEP = 11, 12, 13, 14, 15
_CHUNK_NEXT, _CHUNK_TOP = 16, 17


def bucket_of(sequences: int) -> int:
    """The smallest bucket that holds so many sequences."""
    for size in BUCKETS:
        if sequences <= size:
            return size
    return -(-sequences // BUCKETS[-1]) * BUCKETS[-1]


@dataclass(frozen=True)
class Sizes:
    """What a header has room for: sequences and rows of each, pages of a table, tokens of a
    chunk, slots."""

    sequences: int
    rows: int
    pages: int
    chunk: int
    slots: int

    @property
    def words(self) -> int:
        """int32 words of the header."""
        num = bucket_of(self.sequences)
        return WORDS + num + 3 * num * self.rows + self._table_words + self.chunk + self.pages

    @property
    def _table_words(self) -> int:
        return (self.slots + 1) * (1 + self.pages)


@dataclass(frozen=True)
class ChunkBody:
    slot: int
    start: int
    token_ids: I32
    table: I32
    next_token: int = -1  # as PrefillChunk has them
    num_top: int = -1


@dataclass(frozen=True)
class StepBody:
    """A step as it stands in the header: views, valid until the next one is written.

    num, size: bucket. counts [live sequences]: valid rows of each. tokens, positions (-1: padding)
    and slots [num * size], one after the other in inputs. table_slots [n] and tables [n, width]:
    block tables that changed."""

    epoch: int
    num: int
    size: int
    counts: I32
    inputs: I32  # [3 * num * size]
    table_slots: I32
    tables: I32
    chunk: ChunkBody | None

    @property
    def tokens(self) -> I32:
        return self.inputs[: self.num * self.size]

    @property
    def positions(self) -> I32:
        return self.inputs[self.num * self.size : 2 * self.num * self.size]

    @property
    def slots(self) -> I32:
        return self.inputs[2 * self.num * self.size :]

    @property
    def valid_rows(self) -> I32:
        """Places of all valid rows, in the order of the plan."""
        place = np.arange(len(self.counts) * self.size, dtype=np.int32)
        valid: I32 = place[place % self.size < np.repeat(self.counts, self.size)]
        return valid


class StepHeader:
    """One writer, any number of readers; a reader is told of a new step beside it (the command
    channel) and reads until it answers, then the writer may write again."""

    def __init__(self, memory: mmap.mmap | bytearray, sizes: Sizes, name: str = "") -> None:
        self.sizes, self.name = sizes, name
        self.memory = memory
        self._owner = 0  # the process that unlinks it
        words = np.frombuffer(memory, np.int32)
        self._words = words[:WORDS]
        num, at = bucket_of(sizes.sequences), WORDS
        self._counts, at = words[at : at + num], at + num
        rows = 3 * num * sizes.rows
        self._rows, at = words[at : at + rows], at + rows
        self._table_slots, at = words[at : at + sizes.slots + 1], at + sizes.slots + 1
        tables = (sizes.slots + 1) * sizes.pages
        self._tables, at = words[at : at + tables], at + tables
        self._chunk, at = words[at : at + sizes.chunk], at + sizes.chunk
        self._chunk_table = words[at : at + sizes.pages]
        self._known: dict[int, tuple[int, ...]] = {}

    # -- life --------------------------------------------------------------------------------------

    @classmethod
    def local(cls, sizes: Sizes) -> StepHeader:
        """Of a group of one."""
        return cls(bytearray(4 * sizes.words), sizes)

    @classmethod
    def create(cls, prefix: str, sizes: Sizes) -> StepHeader:
        """In shared memory, mode 0600; what a dead predecessor left is unlinked. Raises:
        ConfigError."""
        for old in SHM.glob(prefix + ".*"):
            with contextlib.suppress(FileNotFoundError):
                old.unlink()
        name = f"{prefix}.{secrets.token_hex(8)}"
        descriptor = os.open(SHM / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, 4 * sizes.words)
            memory = mmap.mmap(descriptor, 4 * sizes.words)
        except OSError as error:
            os.unlink(SHM / name)
            raise ConfigError(f"no shared memory for the step header: {error}") from error
        finally:
            os.close(descriptor)
        header = cls(memory, sizes, name)
        header._owner = os.getpid()
        header._words[_MAGIC : _MAGIC + 2].view(np.int64)[0] = MAGIC
        return header

    @classmethod
    def open(cls, name: str, sizes: Sizes) -> StepHeader:
        """Raises: ConfigError unless it is a header of these sizes."""
        try:
            descriptor = os.open(SHM / os.path.basename(name), os.O_RDWR)
        except OSError as error:
            raise ConfigError(f"step header {name} cannot be opened: {error}") from error
        try:
            if os.fstat(descriptor).st_size != 4 * sizes.words:
                raise ConfigError(f"step header {name} has another size")
            memory = mmap.mmap(descriptor, 4 * sizes.words)
        finally:
            os.close(descriptor)
        header = cls(memory, sizes, name)
        if header._words[_MAGIC : _MAGIC + 2].view(np.int64)[0] != MAGIC:
            raise ConfigError(f"{name} is not a step header")
        return header

    def close(self) -> None:
        if self._owner == os.getpid():  # ranks that were forked have it mapped too
            self._owner = 0
            with contextlib.suppress(FileNotFoundError):
                (SHM / self.name).unlink()

    # -- words -------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Steps written so far."""
        return int(self._words[_EPOCH : _EPOCH + 2].view(np.int64)[0])

    @property
    def is_aborted(self) -> bool:
        """Somebody asked the group to stop at the next boundary."""
        return bool(self._words[_ABORT])

    def abort(self) -> None:
        self._words[_ABORT] = 1

    # -- the writer --------------------------------------------------------------------------------

    def write(self, plan: StepPlan) -> StepBody:
        """Write a checked plan. Returns: what the readers will see.

        Raises: EngineError for a plan that is larger than the header."""
        decode = plan.decode
        size = max((len(s.token_ids) for s in decode), default=0)
        num = bucket_of(len(decode)) if decode else 0
        room = self.sizes
        if num > len(self._counts) or size > room.rows:
            raise EngineError(f"a step of {len(decode)} x {size} rows does not fit the header")
        tokens, positions, slots = self._views(num, size)
        tokens[:], positions[:], slots[:] = 0, -1, 0
        for i, s in enumerate(decode):
            n = len(s.token_ids)
            self._counts[i] = n
            tokens[i, :n] = s.token_ids
            positions[i, :n] = np.arange(s.start, s.start + n)
            slots[i] = s.slot
        words = self._words
        words[_NUM], words[_SIZE], words[_LIVE] = num, size, len(decode)
        self._write_tables(decode, plan.chunk)
        self._write_chunk(plan.chunk)
        words[_STEP] = plan.step & 0x7FFF_FFFF
        # the last store: x86 and the command channel keep the order for whoever looks only now
        words[_EPOCH : _EPOCH + 2].view(np.int64)[0] += 1
        return self.read()

    def _views(self, num: int, size: int) -> tuple[I32, I32, I32]:
        a, b, c = self._rows[: 3 * num * size].reshape(3, num, size)
        return a, b, c

    def _write_tables(self, decode: tuple[SlotRows, ...], chunk: PrefillChunk | None) -> None:
        tables = [(s.slot, s.block_table) for s in decode]
        if chunk is not None:
            tables.append((chunk.slot, chunk.block_table))
        changed = [(s, t) for s, t in tables if self._known.get(s) != t]
        width = max((len(t) for _, t in changed), default=0)
        if width > self.sizes.pages or len(changed) > len(self._table_slots):
            raise EngineError(f"block tables of {width} pages do not fit the header")
        rows = self._tables[: len(changed) * width].reshape(len(changed), width)
        rows[:] = 0  # entries past a table's end are never looked up
        for i, (slot, table) in enumerate(changed):
            self._table_slots[i] = slot
            rows[i, : len(table)] = table
            self._known[slot] = table
        self._words[_TABLES], self._words[_WIDTH] = len(changed) if width else 0, width

    def _write_chunk(self, chunk: PrefillChunk | None) -> None:
        words = self._words
        words[_CHUNK_COUNT] = 0
        if chunk is None:
            return
        count = len(chunk.token_ids)
        if count > len(self._chunk):
            raise EngineError(f"a chunk of {count} tokens does not fit the header")
        words[_CHUNK_SLOT], words[_CHUNK_START] = chunk.slot, chunk.start
        words[_CHUNK_COUNT], words[_CHUNK_TABLE] = count, len(chunk.block_table)
        words[_CHUNK_NEXT], words[_CHUNK_TOP] = chunk.next_token, chunk.num_top
        self._chunk[:count] = chunk.token_ids
        self._chunk_table[: len(chunk.block_table)] = chunk.block_table

    def forget_tables(self) -> None:
        """Send every block table anew (another runner took over)."""
        self._known.clear()

    # -- readers -----------------------------------------------------------------------------------

    def read(self, epoch: int = 0) -> StepBody:
        """The step that stands here. Raises: EngineError if it is not step ``epoch`` (0: any), or
        the group was told to stop."""
        if self.is_aborted:
            raise EngineError("the group was told to stop")
        if epoch and self.epoch != epoch:
            raise EngineError(f"the header holds step {self.epoch}, not {epoch}")
        words = self._words
        num, size = int(words[_NUM]), int(words[_SIZE])
        count, width = int(words[_TABLES]), int(words[_WIDTH])
        chunk = None
        if words[_CHUNK_COUNT]:
            chunk = ChunkBody(
                int(words[_CHUNK_SLOT]),
                int(words[_CHUNK_START]),
                self._chunk[: words[_CHUNK_COUNT]],
                self._chunk_table[: words[_CHUNK_TABLE]],
                int(words[_CHUNK_NEXT]),
                int(words[_CHUNK_TOP]),
            )
        return StepBody(
            self.epoch,
            num,
            size,
            self._counts[: words[_LIVE]],
            self._rows[: 3 * num * size],
            self._table_slots[:count],
            self._tables[: count * width].reshape(count, width),
            chunk,
        )
