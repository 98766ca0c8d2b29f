"""Runs steps on the device as their header says (``header.py``): decode rows on static buffers per
bucket, captured as graphs on a GPU, and prefill chunks through a buffer for their window keys.

Block tables live in device memory, a row per slot; only rows that changed are sent. The same code
runs on a CPU, where nothing is captured.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decant.engine.gpu import plain
from decant.engine.gpu.header import BUCKETS, Sizes, StepBody, StepHeader, bucket_of
from decant.engine.gpu.model import GpuModel, chunk_bytes, chunk_part
from decant.engine.gpu.ops import Rows
from decant.engine.gpu.pool import GpuPool
from decant.engine.gpu.scoring import Block, score_rows, targets_of, to_host
from decant.engine.interface import PrefillChunk, Scores, SlotRows, StepPlan
from decant.kernels.layout import WINDOW, Part
from decant.protocol.errors import KernelError

log = logging.getLogger("decant.engine.gpu")

I32 = NDArray[np.int32]
PEER_WAIT_S = 10.0  # in a captured step, for another rank's sum
COMPILE_WAIT_S = 300.0  # before it: ranks compile at their own pace


@dataclass
class Graph:
    """One bucket: static inputs and outputs, and the captured step (on a CPU the calls)."""

    inputs: Tensor  # int32 [3 * rows]: tokens, positions, slots
    logits: Tensor
    streams: Tensor
    replay: Callable[[], None]


class Runner:
    """model, pool: of this rank. max_context bounds the width of block tables only. chunk_rows:
    rows of a chunk that go through the model at a time. header: the group's; without one the runner
    has its own."""

    def __init__(
        self,
        model: GpuModel,
        pool: GpuPool,
        max_context: int,
        chunk_rows: int = 2048,
        header: StepHeader | None = None,
    ) -> None:
        self.model, self.pool, self.chunk_rows = model, pool, chunk_rows
        self.device = pool.device
        sizes = sizes_of(pool, max_context)
        self.header = header or StepHeader.local(sizes)
        self.width = sizes.pages
        num = pool.handle.num_slots + 1
        self.tables = torch.zeros(num, self.width, dtype=torch.int32, device=self.device)
        self._graphs: dict[tuple[int, int], Graph] = {}
        self._graph_memory: Any = None  # of all graphs: they never run at once
        self._asked: set[tuple[int, int]] = set()  # buckets without a graph that have run
        self.captures_later = False  # buckets that were not captured at start, when they come again
        self.wait_s = COMPILE_WAIT_S  # for peers in uncaptured steps
        buffer = chunk_bytes(WINDOW + chunk_rows)
        self._buffer = torch.zeros(2, buffer, dtype=torch.uint8, device=self.device)

    # -- inputs ------------------------------------------------------------------------------------

    def _to_device(self, array: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _take_tables(self, body: StepBody) -> None:
        """Bring the block tables of slots up to date."""
        if len(body.table_slots):
            index = self._to_device(body.table_slots).long()
            width = body.tables.shape[1]
            self.tables[:, :width].index_copy_(0, index, self._to_device(body.tables))

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
        """Write a header of decode rows and run it."""
        return self.run_decode(self.header.write(StepPlan(0, tuple(decode))))

    def run_decode(self, body: StepBody) -> tuple[Tensor, Tensor]:
        """Logits float32 [rows, vocab] and streams bf16 [rows, 4, hidden] of the valid rows in the
        plan's order, good until the next step; streams enter the slots."""
        self._take_tables(body)
        num, size = body.num, body.size
        if self.captures_later and (num, size) not in self._graphs:
            self._capture_later(num, size)
        graph = self._graphs.get((num, size))
        if graph is not None:
            graph.inputs.copy_(torch.from_numpy(body.inputs), non_blocking=True)
            graph.replay()
            streams, logits = graph.streams, graph.logits
        else:
            rows = self.rows(body.tokens, body.positions, body.slots, size)
            streams, logits = self._step(rows)
        valid = body.valid_rows
        if len(valid) == num * size:
            return logits, streams
        index = self._to_device(valid)
        return logits.index_select(0, index), streams.index_select(0, index)

    def _step(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Streams and logits of all rows; keeps the streams in the slots."""
        streams, h = self.model.trunk(rows, self.pool)
        logits = self.model.logits(h)
        pool, layout = self.pool, self.pool.layout

        def read() -> Tensor:
            live = rows.positions >= 0
            recent = pool.read_recent(rows.slots, rows.positions)
            return torch.cat((recent[live], pool.read_streams(rows.slots[live])))

        self.model.ops.keep(
            rows, streams, pool.slots, layout.streams, layout.recent,
            lambda: pool.keep_streams(rows.slots, rows.positions, rows.per_sequence, streams), read,
        )  # fmt: skip
        return streams, logits

    def static_rows(self, num: int, size: int) -> tuple[Rows, Tensor]:
        """Buffers of a bucket, and its inputs [3 * rows] in one piece; all rows are padding until
        they are filled."""
        count = num * size
        inputs = torch.zeros(3 * count, dtype=torch.int32, device=self.device)
        tokens, positions, slots = inputs.view(3, count)
        positions.fill_(-1)
        rows = Rows(
            tokens=tokens,
            positions=positions,
            slots=slots,
            tables=self.tables,
            per_sequence=size,
            most=self.width * self.pool.layout.page_tokens // 4,
            ring_of_row=slots,
            rings=self.pool.slots,
            ring_tables=self.tables,
        )
        return rows, inputs

    def _capture_later(self, num: int, size: int) -> None:
        """The second time that a bucket comes. Ranks see the same steps, so they do it together."""
        if (num, size) not in self._asked:
            self._asked.add((num, size))
            return
        began = time.monotonic()
        self.capture(num, size)
        log.info(
            "graph of %d sequences x %d rows while serving, %.2f s",
            num, size, time.monotonic() - began,
        )  # fmt: skip

    def capture(self, num: int, size: int) -> None:
        """Make the step of a bucket ready: on a GPU a graph, on a CPU the same calls on the same
        static buffers. Raises: KernelError."""
        rows, inputs = self.static_rows(num, size)
        if self.device.type != "cuda":
            streams, logits = self._step(rows)

            def run() -> None:
                new_streams, new_logits = self._step(rows)
                streams.copy_(new_streams)
                logits.copy_(new_logits)

            self._graphs[num, size] = Graph(inputs, logits, streams, run)
            return
        try:
            side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):  # compiles, loads modules, makes scratch
                self._step(rows)
            torch.cuda.current_stream(self.device).wait_stream(side)
            torch.cuda.synchronize(self.device)
            comm = self.model.comm
            if comm is not None:  # everybody is here: from now on a late rank is a lost one
                comm.host_gather([0])
                comm.patience(PEER_WAIT_S)
            graph = torch.cuda.CUDAGraph()
            if self._graph_memory is None:
                self._graph_memory = torch.cuda.graph_pool_handle()
            # other threads of this process (copies) go on meanwhile: only ours is watched
            with torch.cuda.graph(
                graph, pool=self._graph_memory, capture_error_mode="thread_local"
            ):
                streams, logits = self._step(rows)
            if comm is not None:
                comm.patience(self.wait_s)
        except RuntimeError as error:
            raise KernelError(f"capture of {num} x {size} rows failed: {error}") from error
        self._graphs[num, size] = Graph(inputs, logits, streams, graph.replay)

    def capture_all(self, max_batch: int, max_rows: int, budget_s: float = 300.0) -> int:
        """Capture every bucket up to max_batch sequences with 1 .. max_rows rows each, within a
        time budget; what is left is captured when it comes the second time. Returns the number
        captured.

        Ranks of a group capture the same buckets: rank 0's clock decides for all."""
        comm = self.model.comm
        if comm is not None and not comm.can_capture:
            log.warning("sums by %s cannot be captured: steps run without graphs", comm.kind)
            return 0
        self.captures_later = True
        wanted = [
            (num, size)
            for num in BUCKETS
            for size in range(1, max_rows + 1)
            if num <= bucket_of(max_batch)
        ]
        began = time.monotonic()
        for i, (num, size) in enumerate(wanted):
            late = time.monotonic() - began > budget_s
            if comm is not None:
                late = bool(comm.host_gather([int(late)])[0][0])
            if late:
                log.info("%d of %d graphs; the others while serving", i, len(wanted))
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
        self._graph_memory = None

    # -- prefill -----------------------------------------------------------------------------------

    def prefill(self, chunk: PrefillChunk) -> None:
        """Write a header of one chunk and run it."""
        self.run_prefill(self.header.write(StepPlan(0, (), chunk)))

    def run_prefill(self, body: StepBody) -> Scores | None:
        """Positions of a chunk: entries, state and window keys, streams of the last position, and
        the MTP layer's window keys. Returns: scores, if the chunk asks for them."""
        chunk = body.chunk
        assert chunk is not None
        self._take_tables(body)
        is_scored, blocks = chunk.num_top >= 0, list[Block]()
        targets = targets_of(chunk) if is_scored else None
        for at in range(0, len(chunk.token_ids), self.chunk_rows):
            part = chunk.token_ids[at : at + self.chunk_rows]
            h = self._prefill_part(chunk.slot, chunk.start + at, part)
            if targets is not None:
                wanted = targets[at : at + self.chunk_rows]
                blocks += score_rows(h, wanted, chunk.num_top, self.model.logits)
        return to_host(blocks, chunk.num_top) if is_scored else None

    def _prefill_part(self, slot: int, start: int, ids: I32) -> Tensor:
        """Returns: the rows' inputs of the vocabulary, bf16 [rows, hidden]."""
        count = len(ids)
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

        streams, h = self.model.trunk(rows, self.pool, before, after)
        self._write_mtp_keys(slot, start, ids, streams)
        self.pool.write_streams(owner[None], streams[-1:])
        self.pool.write_recent(owner[None], rows.positions[-1:], streams[-1:])
        return h

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


def sizes_of(pool: GpuPool, max_context: int) -> Sizes:
    """The header that any plan for this pool fits into."""
    layout, num = pool.layout, pool.handle.num_slots
    pages = -(-max_context // layout.page_tokens)
    return Sizes(num, 1 + layout.max_drafts, pages, max_context, num)
