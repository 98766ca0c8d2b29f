"""Runs plans of a step on the device: decode rows on static buffers per bucket, captured as graphs
on a GPU, and prefill chunks through a buffer for their window keys.

Block tables live in device memory, a row per slot; only rows that changed are sent. The same code
runs on a CPU, where nothing is captured.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decant.engine.gpu import plain
from decant.engine.gpu.model import GpuModel, chunk_bytes, chunk_part
from decant.engine.gpu.ops import Rows
from decant.engine.gpu.pool import GpuPool
from decant.engine.interface import PrefillChunk, SlotRows
from decant.kernels.layout import WINDOW, Part
from decant.protocol.errors import KernelError

log = logging.getLogger("decant.engine.gpu")

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
I32 = NDArray[np.int32]


def bucket_of(sequences: int) -> int:
    """The smallest bucket that holds so many sequences."""
    for size in BUCKETS:
        if sequences <= size:
            return size
    return -(-sequences // BUCKETS[-1]) * BUCKETS[-1]


@dataclass
class Graph:
    """One bucket: static inputs and outputs, and the captured step (None on a CPU)."""

    rows: Rows
    logits: Tensor
    streams: Tensor
    replay: Callable[[], None]


class Runner:
    """model, pool: of this rank. max_context bounds the width of block tables only. chunk_rows:
    rows of a chunk that go through the model at a time."""

    def __init__(
        self, model: GpuModel, pool: GpuPool, max_context: int, chunk_rows: int = 2048
    ) -> None:
        self.model, self.pool, self.chunk_rows = model, pool, chunk_rows
        self.device = pool.device
        layout = pool.layout
        self.width = -(-max_context // layout.page_tokens)
        num = pool.handle.num_slots + 1
        self.tables = torch.zeros(num, self.width, dtype=torch.int32, device=self.device)
        self._known: dict[int, tuple[int, ...]] = {}
        self._graphs: dict[tuple[int, int], Graph] = {}
        buffer = chunk_bytes(WINDOW + chunk_rows)
        self._buffer = torch.zeros(2, buffer, dtype=torch.uint8, device=self.device)

    # -- inputs ------------------------------------------------------------------------------------

    def _to_device(self, array: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _send_tables(self, tables: Iterable[tuple[int, tuple[int, ...]]]) -> None:
        """Bring the block tables of slots up to date."""
        changed = [(s, t) for s, t in tables if self._known.get(s) != t]
        if not changed:
            return
        # All rows to one width: entries past a table's end are never looked up.
        most = max(len(t) for _, t in changed)
        if most == 0:
            return
        host = np.zeros((len(changed), most), np.int32)
        for i, (slot, table) in enumerate(changed):
            host[i, : len(table)] = table
            self._known[slot] = table
        index = torch.tensor([s for s, _ in changed], device=self.device)
        self.tables[:, :most].index_copy_(0, index, self._to_device(host))

    def _layout(self, decode: Sequence[SlotRows], num: int, size: int) -> tuple[I32, I32, I32]:
        """tokens, positions (-1: padding) and slots, each [num * size]."""
        tokens = np.zeros((num, size), np.int32)
        positions = np.full((num, size), -1, np.int32)
        slots = np.zeros((num, size), np.int32)
        for i, s in enumerate(decode):
            n = len(s.token_ids)
            tokens[i, :n] = s.token_ids
            positions[i, :n] = np.arange(s.start, s.start + n)
            slots[i] = s.slot
        return tokens.reshape(-1), positions.reshape(-1), slots.reshape(-1)

    def rows(
        self,
        tokens: I32,
        positions: I32,
        slots: I32,
        per_sequence: int,
        valid_from: I32 | None = None,
        pool: GpuPool | None = None,
    ) -> Rows:
        """Rows that run once, uncaptured: what the host knows of them shortens the work."""
        held = self._to_device(slots)
        return Rows(
            tokens=self._to_device(tokens),
            positions=self._to_device(positions),
            slots=held,
            tables=self.tables,
            per_sequence=per_sequence,
            most=int(positions.max() + 1) // 4,
            ring_of_row=held,
            rings=(pool or self.pool).slots,
            ring_tables=self.tables,
            emit=self._emit(positions),
            valid_from=None if valid_from is None else self._to_device(valid_from),
        )

    def _emit(self, positions: I32) -> dict[int, Tensor]:
        closes = {r: (positions >= 0) & ((positions + 1) % r == 0) for r in (4, 128)}
        return {r: torch.from_numpy(np.flatnonzero(c)).to(self.device) for r, c in closes.items()}

    # -- decode ------------------------------------------------------------------------------------

    def decode(self, decode: Sequence[SlotRows]) -> tuple[Tensor, Tensor]:
        """Logits float32 [rows, vocab] and streams bf16 [rows, 4, hidden] of the rows in the plan's
        order; the streams of each slot's last row enter its slot."""
        size = max(len(s.token_ids) for s in decode)
        num = bucket_of(len(decode))
        self._send_tables((s.slot, s.block_table) for s in decode)
        tokens, positions, slots = self._layout(decode, num, size)
        graph = self._graphs.get((num, size))
        if graph is not None:
            for target, array in (
                (graph.rows.tokens, tokens),
                (graph.rows.positions, positions),
                (graph.rows.slots, slots),
            ):
                target.copy_(torch.from_numpy(array))
            graph.replay()
            streams, logits = graph.streams, graph.logits
        else:
            streams, h = self.model.trunk(self.rows(tokens, positions, slots, size), self.pool)
            logits = self.model.logits(h)
        counts = [len(s.token_ids) for s in decode]
        wanted = np.concatenate([i * size + np.arange(n) for i, n in enumerate(counts)])
        last = np.array([i * size + n - 1 for i, n in enumerate(counts)])
        index = torch.from_numpy(np.concatenate([wanted, last])).to(self.device)
        kept = streams.index_select(0, index)
        own = torch.tensor([s.slot for s in decode], device=self.device)
        self.pool.write_streams(own, kept[len(wanted) :])
        return logits.index_select(0, index[: len(wanted)]), kept[: len(wanted)]

    def static_rows(self, num: int, size: int) -> Rows:
        """Buffers of a bucket; all rows are padding until they are filled."""
        count = num * size

        def ints(value: int) -> Tensor:
            return torch.full((count,), value, dtype=torch.int32, device=self.device)

        slots = ints(0)
        return Rows(
            tokens=ints(0),
            positions=ints(-1),
            slots=slots,
            tables=self.tables,
            per_sequence=size,
            most=self.width * self.pool.layout.page_tokens // 4,
            ring_of_row=slots,
            rings=self.pool.slots,
            ring_tables=self.tables,
        )

    def capture(self, num: int, size: int) -> None:
        """Make the step of a bucket ready: on a GPU a graph, on a CPU the same calls on the same
        static buffers. Raises: KernelError."""
        rows = self.static_rows(num, size)

        def step() -> tuple[Tensor, Tensor]:
            streams, h = self.model.trunk(rows, self.pool)
            return streams, self.model.logits(h)

        if self.device.type != "cuda":
            streams, logits = step()

            def run() -> None:
                new_streams, new_logits = step()
                streams.copy_(new_streams)
                logits.copy_(new_logits)

            self._graphs[num, size] = Graph(rows, logits, streams, run)
            return
        try:
            side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):  # compiles, loads modules, makes scratch
                step()
            torch.cuda.current_stream(self.device).wait_stream(side)
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                streams, logits = step()
        except RuntimeError as error:
            raise KernelError(f"capture of {num} x {size} rows failed: {error}") from error
        self._graphs[num, size] = Graph(rows, logits, streams, graph.replay)

    def capture_all(self, max_batch: int, max_rows: int, budget_s: float = 300.0) -> int:
        """Capture every bucket up to max_batch sequences with 1 .. max_rows rows each, within a
        time budget; what is left runs uncaptured. Returns the number captured."""
        wanted = [
            (num, size)
            for num in BUCKETS
            for size in range(1, max_rows + 1)
            if num <= bucket_of(max_batch)
        ]
        began = time.monotonic()
        for i, (num, size) in enumerate(wanted):
            if time.monotonic() - began > budget_s:
                log.warning("time for graphs is over: %d of %d buckets", i, len(wanted))
                return i
            self.capture(num, size)
            log.info(
                "graph %d of %d: %d sequences x %d rows, %.1f s",
                i + 1, len(wanted), num, size, time.monotonic() - began,
            )  # fmt: skip
        return len(wanted)

    def replay_of(self, num: int, size: int) -> Callable[[], None]:
        """The captured step of a bucket on what its buffers hold, for measuring."""
        return self._graphs[num, size].replay

    def drop_graphs(self) -> None:
        self._graphs.clear()

    # -- prefill -----------------------------------------------------------------------------------

    def prefill(self, chunk: PrefillChunk) -> None:
        """Positions of a chunk: entries, state and window keys, streams of the last position, and
        the MTP layer's window keys."""
        ids = np.asarray(chunk.token_ids, np.int32)
        for at in range(0, len(ids), self.chunk_rows):
            part = ids[at : at + self.chunk_rows]
            self._prefill_part(chunk, chunk.start + at, part)

    def _prefill_part(self, chunk: PrefillChunk, start: int, ids: I32) -> None:
        count, slot = len(ids), chunk.slot
        self._send_tables([(slot, chunk.block_table)])
        positions = np.arange(start, start + count, dtype=np.int32)
        rows = self.rows(ids, positions, np.full(count, slot, np.int32), count)
        rows.rings, rows.ring_of_row = self._buffer, torch.zeros_like(rows.slots)
        rows.ring_tables = self.tables[slot : slot + 1]
        slots = self.pool.layout.slots
        held = chunk_part(self._buffer.shape[1])
        old = self._span(max(0, start - WINDOW + 1), start)
        new = self._span(max(start, start + count - slots.ring_rows), start + count)
        owner, zero = torch.tensor(slot, device=self.device), torch.tensor(0, device=self.device)

        def move(
            positions: Tensor, source: Tensor, taken: Part, a: Tensor, target: Tensor, kept: Part,
            b: Tensor,
        ) -> None:  # fmt: skip
            if len(positions):
                data = plain.gather(
                    source, taken, a.expand(positions.shape), positions % taken.rows
                )
                plain.put(target, kept, b.expand(positions.shape), positions % kept.rows, *data)

        def before(number: int) -> None:
            move(old, self.pool.slots, slots.window[number], owner, self._buffer, held, zero)

        def after(number: int) -> None:
            move(new, self._buffer, held, zero, self.pool.slots, slots.window[number], owner)

        streams, _ = self.model.trunk(rows, self.pool, before, after)
        self._write_mtp_keys(slot, start, ids, streams)
        self.pool.write_streams(owner[None], streams[-1:])

    def _span(self, first: int, end: int) -> Tensor:
        return torch.arange(first, end, device=self.device)

    def _write_mtp_keys(self, slot: int, start: int, ids: I32, streams: Tensor) -> None:
        """Window keys of positions start - 1 .. end - 2 that a later query can see; that of
        end - 1 waits for its token."""
        if self.model.weights.mtp is None:
            return
        before, tokens = streams[:-1], ids
        if start > 0:
            old = self.pool.read_streams(torch.tensor([slot], device=self.device))
            before, start = torch.cat([old, before]), start - 1
        else:
            tokens = ids[1:]
        keep = min(len(tokens), WINDOW)
        if keep == 0:
            return
        first = start + len(tokens) - keep
        positions = np.arange(first, first + keep, dtype=np.int32)
        rows = self.rows(tokens[-keep:], positions, np.full(keep, slot, np.int32), keep)
        self.model.write_mtp_keys(rows, before[-keep:].contiguous(), self.pool)
