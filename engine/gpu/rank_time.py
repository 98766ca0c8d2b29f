"""The time of one TP rank of the full model: decode steps as graphs, prompt chunks, mixed steps,
with every all-reduce in it. Random weights of the real width; the other ranks of the group are
helper processes that push rows of their own with the same protocol, and nothing else.

Under MPS the helpers' waiting programs run beside the rank's kernels, so a sum costs what it costs
among ranks that arrive together. One GPU; ``make gpu-report`` runs it, as a process of its own:
every phase has a deadline (``Watch``), and a phase that is late ends the process with the stacks
of its threads on stderr and what was measured in the file; the next process goes on after it.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decant.engine.gpu.communicator import Communicator, choose
from decant.engine.gpu.header import Sizes, StepHeader
from decant.engine.gpu.ipc import IpcCommunicator
from decant.engine.gpu.layout import GpuLayout
from decant.engine.gpu.model import GpuModel
from decant.engine.gpu.ops import Ops
from decant.engine.gpu.pool import GpuPool
from decant.engine.gpu.precompile import prepare
from decant.engine.gpu.runner import PEER_WAIT_S, Runner
from decant.engine.gpu.slice import make_slice
from decant.engine.interface import PrefillChunk, SlotRows, StepPlan
from decant.engine.model_shape import ModelShape, parse_shape
from decant.engine.synthetic import config_table
from decant.kernels import tuned

log = logging.getLogger("decant.engine.gpu")

Report = dict[str, Any]
END, CAPTURE, RUN = 0, 1, 2  # what helpers are told: [command, rows, chunk rows, times]
WARM = 3  # runs before the ones that count
DRAFTS = 3
MAX_ROWS = 512
HELPER_WAIT_S = 120.0  # of helpers and the rank for each other, but for captured steps
LATE = 4  # exit status after a phase that was late
# seconds that a phase may take; "ready" compiles
DEADLINES_S = {
    "ready": 200.0, "eager": 25.0, "capture": 25.0, "timed": 15.0, "mixed": 40.0, "prompt": 45.0,
    "overlap": 20.0, "profile": 30.0,
}  # fmt: skip


class Watch:
    """Says on stderr what runs since when, and ends the process if a phase is late. ended: called
    before that, from the watching thread, with what was late."""

    def __init__(self, ended: Callable[[str], None], scale: float = 1.0) -> None:
        self._ended, self._scale = ended, scale
        self._began = time.monotonic()
        self._now, self._until = "", float("inf")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:6.1f} s] {text}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def phase(self, kind: str, what: str) -> Iterator[None]:
        """kind: a key of DEADLINES_S."""
        began = time.monotonic()
        self._now = f"{what}: {kind}"
        self.say(self._now)
        self._until = began + DEADLINES_S[kind] * self._scale
        try:
            yield
        finally:
            self._until = float("inf")
            self.say(f"{what}: {kind} took {time.monotonic() - began:.1f} s")

    def _look(self) -> None:
        while not self._stop.wait(0.2):
            if time.monotonic() < self._until:
                continue
            text = f"{self._now} was not done in time"
            self.say(text)
            faulthandler.dump_traceback(all_threads=True)
            self._ended(text)
            os._exit(LATE)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


@dataclass(frozen=True)
class Case:
    """A step: sequences, rows of each (1 + k), context of each; tokens of a prompt chunk beside it
    (0: none, -1: each of CHUNKS)."""

    num: int
    size: int
    context: int
    chunk: int = 0

    @property
    def name(self) -> str:
        text = f"B={self.num} rows={self.size} context={self.context}"
        return text + (f" chunk={self.chunk}" if self.chunk else "")


# (sequences, context) -> bytes of a rank's step over the memory's rate, ms on an H200
# (2.90 GB dense weights, the experts touched, keys; no communication, no launches).
FLOORS_MS = {(1, 8192): 0.88, (8, 65536): 2.27, (64, 8192): 7.6, (64, 65536): 8.3}
ASKED = [Case(1, 1, 8192), Case(8, 1, 65536), Case(64, 1, 8192)]


def table_cases() -> list[Case]:
    """Batch, k and chunk: what a scheduling policy needs to know."""
    return [Case(num, size, 4096) for num in (1, 8, 32, 64, 128) for size in (1, 2, 3)]


CHUNKS = (256, 512, 1024, 2048, 4096)


# -- the other ranks -------------------------------------------------------------------------------


@torch.inference_mode()
def help_along(file: str, rank: int, world: int, device: torch.device, job: Report) -> None:
    """A helper's life: sums and gathers as the measured rank makes them."""
    rows = (job["rows"], job["hidden"])
    comm = choose(file, rank, world, device, rows, job["columns"], job["way"])
    comm.patience(HELPER_WAIT_S)
    sums, vocabulary = 2 * job["layers"], job["columns"]
    graphs: dict[int, Callable[[], None]] = {}

    def step(count: int, gathers: bool) -> None:
        x = torch.zeros(count, job["hidden"], device=device)
        for _ in range(sums):
            comm.all_reduce(x)
        if gathers:
            comm.all_gather(torch.zeros(count, vocabulary, device=device))

    while True:
        command, count, chunk, times = comm.host_gather([0] * 4)[0]
        if command == END:
            break
        if command == CAPTURE:
            graphs[count] = _capture(comm, device, count, step)
            continue
        for _ in range(times):
            if count:
                graphs.get(count, partial(step, count, True))()
            if chunk:
                step(chunk, False)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        comm.check()
    comm.close()


def _capture(
    comm: Communicator, device: torch.device, count: int, step: Callable[[int, bool], None]
) -> Callable[[], None]:
    """In step with Runner.capture."""
    step(count, True)
    if device.type != "cuda":
        return lambda: step(count, True)
    torch.cuda.synchronize(device)
    comm.host_gather([0])
    comm.patience(PEER_WAIT_S)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(count, True)
    comm.patience(HELPER_WAIT_S)
    return graph.replay


# -- the measured rank -----------------------------------------------------------------------------


@dataclass
class Bench:
    """One rank with its helpers. Attributes: report: what was measured so far; profiled: cases
    whose kernels are timed one by one, after all else (the profiler stays in the process)."""

    device: torch.device
    layers: int
    world: int
    kernels: set[str] | None
    way: str
    cases: Sequence[Case]
    budget_s: float
    profiled: int = 0
    report: Report = field(default_factory=dict)
    helpers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    save: Callable[[Report], None] = lambda report: None

    def __post_init__(self) -> None:
        self._comm: Communicator | None = None
        self._watch = Watch(self._late)

    def shape(self) -> tuple[ModelShape, int]:
        """Real width as a rank of four on a GPU; the tiny width, unsplit, on a CPU."""
        if self.device.type == "cuda":
            return parse_shape(config_table(self.layers, "real")), 4
        return parse_shape(config_table(self.layers, "tiny")), 1

    def _late(self, what: str) -> None:
        """A phase was late: keep what there is, end the waits of all ranks, then the helpers."""
        self.report["late"] = what
        self.save(self.report)
        comm = self._comm
        if comm is not None:

            def look() -> None:
                if isinstance(comm, IpcCommunicator):
                    self._watch.say(f"sums of the rank: {json.dumps(comm.words())}")

            for act in (look, comm.abort):  # a device that hangs may not answer
                acting = threading.Thread(target=act, daemon=True)
                acting.start()
                acting.join(2)
        for helper in self.helpers:
            helper.terminate()

    @torch.inference_mode()
    def run(self, save: Callable[[Report], None], prompts: Sequence[int] = ()) -> Report:
        """All cases, then prompts of so many tokens. save: called after each."""
        began = time.monotonic()
        self.save = save
        chunk = max([CHUNKS[-1] if self.device.type == "cuda" else 128,
                     *(c.chunk for c in self.cases)])  # fmt: skip
        self.report |= {"steps": [], "prompts": []}
        with self._watch.phase("ready", "rank"):
            pool, runner, comm = self._ready(chunk, prompts)
        self.report["ready_s"] = round(time.monotonic() - began, 1)
        save(self.report)

        def late() -> bool:
            if time.monotonic() - began > self.budget_s:
                self.report["cut"] = f"after {self.budget_s:.0f} s"
            return "cut" in self.report

        try:
            for case in self.cases:
                if late():
                    break
                self._step(runner, comm, case)
                save(self.report)
            for tokens in prompts:
                if late():
                    break
                with self._watch.phase("prompt", f"prompt of {tokens}"):
                    self.report["prompts"].append(self._prompt(runner, comm, tokens, chunk))
                save(self.report)
            for row, case in list(zip(self.report["steps"], self.cases, strict=False)):
                if self.profiled > 0 and comm is None and not late() and "graph_ms" in row:
                    with self._watch.phase("overlap", case.name):
                        self._overlap(runner, case, row)
                    save(self.report)
            for row, case in list(zip(self.report["steps"], self.cases, strict=False)):
                if self.profiled <= 0 or comm is not None or late() or "graph_ms" not in row:
                    continue
                self.profiled -= 1
                with self._watch.phase("profile", case.name):
                    row["profile"] = self._profile(runner.replay_of(case.num, case.size))
                save(self.report)
        finally:
            self._tell(comm, END, 0, 0, 0)
            for helper in self.helpers:
                helper.wait(30)
            self._watch.close()
            pool.close()
        return self.report

    def _ready(
        self, chunk: int, prompts: Sequence[int]
    ) -> tuple[GpuPool, Runner, Communicator | None]:
        """Helpers, weights, pool, compiled kernels."""
        shape, tp = self.shape()
        cuda = self.device.type == "cuda"
        page = 1024 if cuda else 128
        longest = max([*(c.num * (c.context + page) for c in self.cases), *prompts, page])
        slots = max([1, *(c.num for c in self.cases)])
        comm = self._comm = self._join(shape, tp)
        self._watch.say(f"{len(self.helpers)} helpers, sums by {comm.kind if comm else 'nobody'}")
        ops = Ops.create(shape, self.device, self.kernels, tp)
        model = GpuModel(shape, make_slice(shape, self.device, tp), ops, comm)
        layout = GpuLayout(shape, page, DRAFTS)
        pages = -(-(longest + chunk) // page) + 1
        pool = GpuPool.create(f"decant-rank-{os.getpid()}", layout, pages, slots, self.device)
        pool.pages.random_(0x38, 0x40)
        pool.slots.random_(0x38, 0x40)
        self._watch.say("weights and pages are there")
        context = max([page, *(c.context + page for c in self.cases), *(p + page for p in prompts)])
        sizes = Sizes(slots, 1 + DRAFTS, -(-context // page), context, slots)
        runner = Runner(model, pool, context, chunk, StepHeader.local(sizes))
        buckets = sorted({(c.num, c.size) for c in self.cases})
        chunks = (chunk,) if prompts or any(c.chunk for c in self.cases) else ()
        done, wanted = prepare(
            model, lambda alone: Runner(alone, pool, context, chunk), buckets, chunks
        )
        self._watch.say(f"{done} of {wanted} kernels compiled")
        self.report |= {
            "layers": self.layers, "tp": tp, "helpers": len(self.helpers),
            "sums_by": "none" if comm is None else comm.kind,
            "kernels": sorted(ops.enabled), "compiled": [done, wanted],
        }  # fmt: skip
        if cuda:
            self.report["allocated_gb"] = round(torch.cuda.memory_allocated(self.device) / 1e9, 2)
        return pool, runner, comm

    def _join(self, shape: ModelShape, tp: int) -> Communicator | None:
        if self.world == 1:
            return None
        tuned.use_shared()  # the helpers' waiting blocks are on this GPU
        file = Path(tempfile.mkdtemp()) / "rendezvous"
        columns = shape.vocab_size // tp
        job = {
            "rows": MAX_ROWS, "hidden": shape.hidden_size, "columns": columns,
            "layers": self.layers, "way": self.way, "device": str(self.device),
        }  # fmt: skip
        command = [sys.executable, "-P", "-m", "decant.engine.gpu.rank_time", "--world"]
        command += [str(self.world), "--file", str(file), "--job", json.dumps(job), "--rank"]
        self.helpers = [subprocess.Popen([*command, str(r)]) for r in range(1, self.world)]
        rows = (MAX_ROWS, shape.hidden_size)
        comm = choose(str(file), 0, self.world, self.device, rows, columns, self.way)
        comm.patience(HELPER_WAIT_S)
        return comm

    def _tell(self, comm: Communicator | None, *words: int) -> None:
        if comm is not None:
            comm.host_gather(list(words))

    def _timed(
        self, comm: Communicator | None, rows: int, chunk: int, times: int,
        run: Callable[[], object],
    ) -> list[float]:  # fmt: skip
        """Median, 10th and 90th percentile in ms; helpers run along."""
        self._tell(comm, RUN, rows, chunk, times + WARM)
        took = []
        for _ in range(times + WARM):
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            began = time.perf_counter()
            run()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            took.append((time.perf_counter() - began) * 1e3)
        if comm is not None:
            comm.check()
        return [round(float(v), 3) for v in np.percentile(took[WARM:], [50, 10, 90])]

    def _step(self, runner: Runner, comm: Communicator | None, case: Case) -> None:
        """Measure a case into the report, figure by figure."""
        row: Report = {"case": case.name, **vars(case)}
        self.report["steps"].append(row)
        floor = FLOORS_MS.get((case.num, case.context))
        page = runner.pool.layout.page_tokens
        each = -(-(case.context + 8) // page)
        tables = [tuple(range(i * each, (i + 1) * each)) for i in range(case.num)]
        at = case.context - 8
        ids = tuple(range(9, 9 + case.size))
        decode = tuple(SlotRows(i, at, ids, tables[i]) for i in range(case.num))
        rows = case.num * case.size
        cuda = self.device.type == "cuda"
        times = 20 if cuda else 1
        watch = self._watch
        try:
            body = runner.header.write(StepPlan(0, decode))
            with watch.phase("eager", case.name):
                row["eager_ms"] = self._timed(comm, rows, 0, 3 if cuda else 1,
                                              lambda: runner.run_decode(body))  # fmt: skip
            with watch.phase("capture", case.name):
                self._tell(comm, CAPTURE, rows, 0, 0)
                runner.capture(case.num, case.size)
            with watch.phase("timed", case.name):
                graph = runner.replay_of(case.num, case.size)
                row["step_ms"] = self._timed(comm, rows, 0, times, lambda: runner.run_decode(body))
                row["graph_ms"] = self._timed(comm, rows, 0, times, graph)
                watch.say(f"{case.name}: {row['graph_ms'][0]} ms a step")
                if floor and case.size == 1:
                    row["floor_ms"] = floor
                    row["share_of_floor"] = round(floor / row["graph_ms"][0], 3)
                self._tell(comm, RUN, rows, 0, 1)
                row["finite"] = bool(runner.run_decode(body)[0].isfinite().all())
            self.save(self.report)
            row["mixed_ms"] = {}
            for chunk in CHUNKS if case.chunk < 0 else (case.chunk,) if case.chunk else ():
                prompt = PrefillChunk(0, 0, np.full(chunk, 7, np.int32), tables[0])
                # another slot than those that decode would need pages of its own: time is the same
                mixed = runner.header.write(StepPlan(0, decode, prompt))

                def both(mixed: Any = mixed) -> None:
                    runner.run_decode(mixed)
                    runner.run_prefill(mixed)

                with watch.phase("mixed", f"{case.name} chunk={chunk}"):
                    row["mixed_ms"][chunk] = self._timed(comm, rows, chunk, 3 if cuda else 1, both)
            row["done"] = True
        except Exception as error:
            row["failure"] = f"{type(error).__name__}: {error}"[:300]
            self.save(self.report)
            raise  # ranks that do not know of each other any more: the process ends

    def _overlap(self, runner: Runner, case: Case, row: Report) -> None:
        """The step with what may run side by side on two streams: its time, and whether it has the
        same bits. A device that refuses it keeps the other graph."""
        key = (case.num, case.size)
        graph, ops = runner._graphs[key], runner.model.ops
        graph.replay()
        wanted = graph.logits.clone()
        ops.overlap = True
        try:
            runner.capture(*key)
            other = runner._graphs[key]
            other.inputs.copy_(graph.inputs)
            row["overlap_ms"] = self._timed(None, case.num * case.size, 0, 20, other.replay)
            row["overlap_same"] = bool(torch.equal(other.logits, wanted))
        except Exception as error:  # noqa: BLE001  a result too
            row["overlap_failure"] = f"{type(error).__name__}: {error}"[:300]
        finally:
            ops.overlap = False
            runner._graphs[key] = graph

    def _profile(self, run: Callable[[], object]) -> list[Report]:
        """One step, kernel by kernel: {kernel, launches, us}, the longest first."""
        if self.device.type != "cuda":
            run()
            return []
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            run()
            torch.cuda.synchronize(self.device)
        rows = [
            {"kernel": e.key[:80], "launches": e.count, "us": round(e.self_device_time_total, 1)}
            for e in seen.key_averages()
        ]
        return sorted(rows, key=lambda row: -float(row["us"]))[:48]

    def _prompt(self, runner: Runner, comm: Communicator | None, tokens: int, chunk: int) -> Report:
        """A whole prompt, chunk by chunk; its first chunk once before that, uncounted."""
        page = runner.pool.layout.page_tokens
        ids = np.random.default_rng(0).integers(0, 500, tokens).astype(np.int32)
        took: list[float] = []
        for at in (0, *range(0, tokens, chunk)):
            part = ids[at : at + chunk]
            table = tuple(range(-(-(at + len(part)) // page)))
            body = runner.header.write(StepPlan(0, (), PrefillChunk(0, at, part, table)))
            self._tell(comm, RUN, 0, len(part), 1)
            began = time.perf_counter()
            runner.run_prefill(body)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            took.append(time.perf_counter() - began)
        del took[0]
        return {
            "tokens": tokens, "chunk": chunk, "seconds": round(sum(took), 4),
            "tokens_per_s": round(tokens / sum(took)),
            "first_and_last_chunk_ms": [round(took[0] * 1e3, 2), round(took[-1] * 1e3, 2)],
        }  # fmt: skip


def measure(job: Report, out: Path) -> None:
    """A process that measures: job {world, layers, way, cases, prompts, budget_s, profiled}."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)

    def save(report: Report) -> None:
        partial = out.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(report))
        partial.replace(out)

    cases = [Case(*case) for case in job["cases"]]
    bench = Bench(device, job["layers"], job["world"], None if device.type == "cuda" else set(),
                  job["way"], cases, job["budget_s"], job["profiled"])  # fmt: skip
    bench.run(save, job["prompts"])


def after_failure(job: Report, report: Report) -> Report:
    """What is left of a job whose process ended early: all behind what it was at."""
    steps, prompts = report.get("steps", []), report.get("prompts", [])
    if not steps and not prompts:
        return job | {"cases": [], "prompts": []}  # it never was ready: it would not be again
    cases = job["cases"][len(steps) :]
    in_step = bool(cases) or bool(steps and not steps[-1].get("done"))
    skipped = len(prompts) + (0 if in_step else 1)
    return job | {"cases": cases, "prompts": job["prompts"][skipped:], "profiled": 0}


def main() -> int:
    """A helper process, or (``--measure FILE``) the one that measures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--file", default="")
    parser.add_argument("--job", type=json.loads, required=True)
    parser.add_argument("--measure", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)  # where it was ended
    if args.measure is not None:
        measure(args.job, args.measure)
        return 0
    device = torch.device(args.job["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    help_along(args.file, args.rank, args.world, device, args.job)
    return 0


if __name__ == "__main__":
    sys.exit(main())
