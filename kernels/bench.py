"""Benchmarks of the kernels against the read floor and against peers, in one run on one GPU.

Every case is captured into a CUDA graph of several calls over rotating inputs that together exceed
the L2 cache; the figure is the median of replays divided by the calls. The floor of a case is what
a plain read of its bytes costs, taken from a read curve measured in the same run, or its
arithmetic at the measured bf16 matrix rate, whichever is larger.
"""

import bisect
import datetime
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

CALLS = 20
REPLAYS = 40
ROTATION_BYTES = 400 << 20
MAX_SETS = 24


@dataclass
class Problem:
    """One case, ready to run: ``run(i)`` launches the operation on input set i (no allocation, no
    host read).
    """

    op: str
    case: str
    sets: int
    run: Callable[[int], object]
    bytes: int
    flops: int = 0
    error: Callable[[], float] | None = None
    tolerance: float = 0.0
    peer: str = ""
    peer_run: Callable[[int], object] | None = None


@dataclass
class Ceilings:
    """Rates measured in this run: read curve [(bytes, us)], copy GB/s, bf16 TFLOP/s."""

    curve: list[tuple[int, float]] = field(default_factory=list)
    copy_gbs: float = 0.0
    bf16_tflops: float = 0.0

    def read_us(self, size: int) -> float:
        """Time of a plain read of ``size`` bytes: linear between the measured points, proportional
        past the last.
        """
        if size >= self.curve[-1][0]:
            return self.curve[-1][1] * size / self.curve[-1][0]
        i = bisect.bisect_left(self.curve, (size, 0.0))
        if i == 0:
            return self.curve[0][1]
        (x0, y0), (x1, y1) = self.curve[i - 1], self.curve[i]
        return y0 + (y1 - y0) * (size - x0) / (x1 - x0)

    def floor_us(self, size: int, flops: int) -> float:
        """The larger of the read time and the arithmetic time."""
        arithmetic = flops / (self.bf16_tflops * 1e6) if self.bf16_tflops else 0.0
        return max(self.read_us(size), arithmetic)


def sets_for(size: int) -> int:
    """Input sets so that a rotation passes well beyond the L2 cache."""
    return max(2, min(MAX_SETS, math.ceil(ROTATION_BYTES / max(size, 1))))


def time_graph(
    run: Callable[[int], object], sets: int, calls: int = CALLS, replays: int = REPLAYS
) -> list[float]:
    """Microseconds per call of graph replays, sorted. The first calls compile and warm up outside
    the graph.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(min(sets, 3)):
            run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    calls = max(calls, sets)
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            run(i % sets)
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    graph.reset()
    return sorted(times)


@triton.jit
def _read_kernel(source, sink, total, STEP: tl.constexpr):
    """Read ``total`` int32 words and keep one xor per program, so that nothing is optimised
    away.
    """
    i = tl.arange(0, STEP)
    acc = tl.zeros([STEP], dtype=tl.int32)
    for start in range(tl.program_id(0) * STEP, total, tl.num_programs(0) * STEP):
        acc ^= tl.load(source + start + i, mask=start + i < total, other=0)
    tl.store(sink + tl.program_id(0), tl.xor_sum(acc, axis=0))


def measure_ceilings(
    sizes_mb: tuple[float, ...] = (0.5, 1.65, 3.1, 6.3, 8.4, 16.8, 26, 64, 148, 300, 668),
) -> Ceilings:
    """Read curve (best of several grids), copy rate of 2 GiB, bf16 8192^3 rate."""
    out = Ceilings()
    source = torch.randint(-(2**31), 2**31 - 1, (512 << 20,), dtype=torch.int32, device="cuda")
    sink = torch.empty(4096, dtype=torch.int32, device="cuda")
    for mb in sizes_mb:
        words = int(mb * 1e6) // 4
        sets = max(1, min(source.numel() // words, sets_for(words * 4)))
        best = math.inf
        for programs, step in ((132, 4096), (264, 4096), (528, 2048), (1056, 2048)):

            def run(i: int, programs: int = programs, step: int = step, words: int = words) -> None:
                _read_kernel[(programs,)](source[i * words :], sink, words, STEP=step, num_warps=8)

            best = min(best, statistics.median(time_graph(run, sets, replays=15)))
        out.curve.append((words * 4, best))
    target = torch.empty_like(source)
    times = time_graph(lambda i: target.copy_(source), 1, calls=2, replays=10)
    out.copy_gbs = 2 * source.numel() * 4 / statistics.median(times) / 1e3
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    times = time_graph(lambda i: torch.mm(a, b, out=c), 1, calls=4, replays=10)
    out.bf16_tflops = 2 * 8192**3 / statistics.median(times) / 1e6
    return out


def commit() -> str:
    """Short commit of the working tree (``DECANT_COMMIT`` where there is no git), or "unknown"."""
    if named := os.environ.get("DECANT_COMMIT"):
        return named
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def measure(problem: Problem, ceilings: Ceilings, arch: str) -> dict[str, Any]:
    """Check the result, time the case and its peer, and return one record."""
    error = problem.error() if problem.error else math.nan
    times = time_graph(problem.run, problem.sets)
    us = statistics.median(times)
    floor = ceilings.floor_us(problem.bytes, problem.flops)
    record: dict[str, Any] = {
        "op": problem.op,
        "case": problem.case,
        "arch": arch,
        "us": us,
        "us_p10": times[len(times) // 10],
        "us_p90": times[-1 - len(times) // 10],
        "bytes": problem.bytes,
        "flops": problem.flops,
        "floor_us": floor,
        "share_of_floor": floor / us,
        "peer": problem.peer,
        "peer_us": None,
        "error": error,
        "tolerance": problem.tolerance,
        "hardware": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
    }
    if problem.peer_run is not None:
        try:
            record["peer_us"] = statistics.median(time_graph(problem.peer_run, problem.sets))
        except Exception as failure:  # a peer that does not run here must not hide our own figure
            record["peer"] = f"{problem.peer}: {type(failure).__name__}: {str(failure)[:80]}"
    return record


def line(record: dict[str, Any]) -> str:
    """One line of the printed table."""
    us, size, flops = record["us"], record["bytes"], record["flops"]
    if flops / 2 > 60 * size:
        rate = f"{flops / us / 1e6:7.1f} TFLOP/s"
    else:
        rate = f"{size / us / 1e3:7.0f} GB/s   "
    peer = record["peer"]
    if record["peer_us"]:
        peer = f"{record['peer_us'] / us:5.2f}x {peer}"
    bad = "" if not record["error"] > record["tolerance"] else " WRONG"
    return (
        f"{record['op']:<12} {record['case']:<34} {record['us']:8.2f} us {rate} "
        f"{100 * record['share_of_floor']:5.1f}% err {record['error']:.1e}{bad} {peer}"
    )


def write_json(records: list[dict[str, Any]], path: Path) -> None:
    """Write the records as a JSON list."""
    path.write_text(json.dumps(records, indent=1) + "\n")


def main(argv: list[str]) -> int:
    """``decant bench-kernels [OP...] [--json FILE]``. Exit status 1 if a result was wrong."""
    import argparse

    from decant.kernels.cases import cases
    from decant.kernels.config import architecture

    parser = argparse.ArgumentParser(prog="decant bench-kernels", description=main.__doc__)
    named = "operations, or moe:mxfp4, linear:64, to run in this order; all if none is named"
    parser.add_argument("op", nargs="*", help=named)
    parser.add_argument(
        "--most", type=int, default=1 << 30, help="skip cases of more tokens or rows"
    )
    parser.add_argument("--json", type=Path, help="write the records to this file")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after this")
    arguments = parser.parse_args(argv)
    known = {case.op for case in cases()}
    unknown = {op.partition(":")[0] for op in arguments.op} - known
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}")
    if not torch.cuda.is_available():
        parser.error("there is no GPU here")
    until = time.monotonic() + arguments.seconds
    arch = architecture()
    ceilings = measure_ceilings()
    curve = ", ".join(f"{size / 1e6:.3g} MB {us:.1f} us" for size, us in ceilings.curve)
    print(f"{torch.cuda.get_device_name()} ({arch}); reads: {curve}")
    print(f"copy {ceilings.copy_gbs:.0f} GB/s, bf16 8192^3 {ceilings.bf16_tflops:.0f} TFLOP/s")
    records: list[dict[str, Any]] = []
    failed = 0
    wanted = [c for op in arguments.op for c in cases() if c.answers(op)] or list(cases())
    wanted = [c for c in wanted if c.rows <= arguments.most]
    for case in wanted:
        if time.monotonic() > until:
            print(f"time is up before {case.op}")
            break
        try:
            records.append(measure(case.build(arch), ceilings, arch))
        except Exception as failure:  # one case must not hide the others' figures
            failed += 1
            text = str(failure).strip().replace("\n", " ")[-200:]
            print(f"{case.op}: {type(failure).__name__}: {text}", flush=True)
            continue
        print(line(records[-1]), flush=True)
        if arguments.json:
            write_json(records, arguments.json)
        torch.cuda.empty_cache()
    wrong = any(not record["error"] <= record["tolerance"] for record in records)
    return int(wrong or failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
