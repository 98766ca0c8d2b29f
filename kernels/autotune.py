"""Measure implementations and sizes on this GPU, and write the table of the fastest right ones.

``python -P -m decant.kernels.autotune --out FOLDER [--seconds N] [OP...]`` compiles every candidate
in parallel, then measures them, one operation after another, in a worker process. A candidate that
is wrong, fails or hangs is noted and left out; a worker that dies is replaced and goes on behind
it. ``FOLDER/autotune.json`` holds every measurement and is rewritten after each, and
``FOLDER/tuned.json`` the table, as ``tuned.py`` reads it (``DECANT_TUNED``).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from decant.kernels import cuda, tuned
from decant.kernels.tuning import GROUPS, Job, Options, builds, candidates, is_triton, jobs, problem

Table = dict[tuple[str, str], list[tuple[int, tuned.Choice]]]
COMPILE_WORKERS = max(2, (os.cpu_count() or 4) - 2)
CANDIDATE_S = 45.0  # a candidate that has said nothing for so long hangs
GAIN = 0.98  # a candidate must be so much faster than what is there to be taken


@dataclass
class Tried:
    """One candidate: microseconds, or what was wrong."""

    options: Options
    implementation: str = "cuda"
    us: float | None = None
    error: float | None = None
    problem: str = ""
    earlier: bool = False  # taken from the report of an earlier run

    @property
    def is_default(self) -> bool:
        return self.implementation == "triton" and not self.options


@dataclass
class Outcome:
    job: Job
    tried: list[Tried] = field(default_factory=list)

    def best(self, is_default: bool) -> Tried | None:
        """The fastest of the candidates, or what runs without a line."""
        usable = [t for t in self.tried if t.us is not None and t.is_default == is_default]
        return min(usable, key=lambda t: t.us or 0.0, default=None)

    def line(self) -> tuple[int, tuned.Choice]:
        """The table's line: the fastest candidate, unless what is there is as fast."""
        ours, default = self.best(False), self.best(True)
        if ours is None or (default is not None and (ours.us or 0) > GAIN * (default.us or 0)):
            return self.job.bound, tuned.TRITON
        return self.job.bound, tuned.Choice(ours.implementation, ours.options)


def compile_all(
    todo: list[Job], arch: str, seconds: float, base: Table | None = None
) -> dict[str, str]:
    """Compile in parallel what the table names and the jobs may need; returns what could not be, by
    its name."""
    wanted: dict[str, tuple[str, Options]] = {}
    pairs = []
    for job in jobs([]) if base else []:
        choice = dict((base or {}).get((arch, job.op), ())).get(job.bound)
        pairs += [(job, dict(choice.options))] if choice and choice.is_cuda else []
    pairs += [(job, options) for job in todo for options in candidates(job)]
    for job, options in pairs:
        if not problem(job, options, arch):
            for name, constants in builds(job, options):
                words = [f"{k}={v}" for k, v in sorted(constants.items())]
                wanted[" ".join([name, *words])] = (name, constants)
    failed: dict[str, str] = {}
    pool = concurrent.futures.ThreadPoolExecutor(COMPILE_WORKERS)  # nvcc is a process of its own
    running = {
        pool.submit(cuda.compile_source, name, arch, constants): what
        for what, (name, constants) in wanted.items()
    }
    try:
        for done in concurrent.futures.as_completed(running, timeout=seconds):
            if done.exception() is not None:
                failed[running[done]] = str(done.exception())[:300]
    except concurrent.futures.TimeoutError:
        failed["time"] = f"{sum(not f.done() for f in running)} builds were not finished"
    pool.shutdown(wait=False, cancel_futures=True)
    print(f"compiled {len(wanted)} variants for {arch}, {len(failed)} failed", flush=True)
    return failed


# ---- the worker: measures candidates that come on its standard input -----------------------------


def worker() -> int:
    """Read {"case", "arguments", "op", "implementation", "options"} lines, answer each with one."""
    import gc

    import torch

    from decant.kernels import bench, cases
    from decant.kernels.config import architecture

    arch = architecture()
    cached: tuple[str, Any] = ("", None)
    for text in sys.stdin:
        ask = json.loads(text)
        answer: dict[str, Any] = {}
        try:
            with tuned.overridden(arch, ask["op"], ask["implementation"], ask["options"]):
                build = partial(getattr(cases, ask["case"]), arch, **ask["arguments"])
                # a problem can be kept where nothing that it prepares depends on the options
                key = json.dumps([ask["case"], ask["arguments"]])
                if ask["op"] in ("moe", "logits") or key != cached[0]:
                    cached = ("", None)
                    gc.collect()
                    torch.cuda.empty_cache()
                    cached = (key, build())
                p = cached[1]
                if ask.get("warm"):
                    p.run(0)
                    torch.cuda.synchronize()
                    print("{}", flush=True)
                    continue
                error = p.error() if p.error else 0.0
                answer["error"] = error
                if error <= p.tolerance:
                    times = bench.time_graph(p.run, p.sets, replays=12)
                    answer["us"] = statistics.median(times)
                else:
                    answer["problem"] = f"error {error:.2e} > {p.tolerance:.0e}"
        except Exception as failure:
            answer["problem"] = f"{type(failure).__name__}: {str(failure).strip()[-300:]}"
            cached = ("", None)
        print(json.dumps(answer), flush=True)
        is_fatal = any(w in answer.get("problem", "") for w in ("CUDA error", "illegal", "launch"))
        if is_fatal:  # the context is lost: a new worker goes on
            return 3
    return 0


class Worker:
    """A worker process, replaced when it dies or hangs."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "decant.kernels.autotune", "--worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        lines: queue.Queue[str] = queue.Queue()
        self._lines = lines

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.put(line)
            lines.put("")

        threading.Thread(target=read, daemon=True).start()
        return process

    def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer, or {"problem"} after a death or ``seconds`` of silence."""
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
            seconds += 30  # imports and the context
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=seconds)
        except (queue.Empty, OSError):
            self.close()
            return {"problem": f"no answer within {seconds:.0f} s"}
        if not line:
            status = self._process.wait()
            self._process = None
            return {"problem": f"the worker died (status {status})"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


# ---- the whole -----------------------------------------------------------------------------------


def warm_triton(todo: list[Job], seconds: float) -> None:
    """Let Triton compile its candidates in parallel workers; what fails is found when measured."""
    questions = [
        {"case": job.case, "arguments": job.arguments, "op": job.op, "implementation": "triton",
         "options": options, "warm": True}
        for job in todo for options in candidates(job) if is_triton(options)
    ]  # fmt: skip
    until = time.monotonic() + seconds
    place = threading.local()
    started: list[Worker] = []

    def ask(question: dict[str, Any]) -> None:
        if not hasattr(place, "worker"):
            place.worker = Worker()
            started.append(place.worker)
        left = until - time.monotonic()
        if left > 1:
            place.worker.ask(question, left)

    with concurrent.futures.ThreadPoolExecutor(min(8, COMPILE_WORKERS)) as pool:
        list(pool.map(ask, questions))
    for worker in started:
        worker.close()


def earlier_results(reports: list[Path], arch: str) -> dict[str, Tried]:
    """What reports of earlier runs say of Triton with the table beside the kernel, by line."""
    found: dict[str, Tried] = {}
    for path in reports:
        for job in json.loads(path.read_text())["jobs"]:
            for t in job["tried"] if job["arch"] == arch else []:
                if t["implementation"] == "triton" and not t["options"] and t["us"] is not None:
                    found[job["label"]] = Tried({}, "triton", t["us"], t["error"], "", True)
    return found


def measure_job(
    job: Job,
    ask: Worker,
    arch: str,
    until: float,
    current: tuned.Choice | None = None,
    known: Tried | None = None,
) -> Outcome:
    """Triton first (or what an earlier run found of it), then what the table has now, then the
    stages; later stages build on the best so far."""
    outcome = Outcome(job)

    def one(options: Options) -> None:
        if time.monotonic() > until:
            return
        implementation = "cuda" if options and not is_triton(options) else "triton"
        tried = Tried(options, implementation)
        if implementation == "cuda" and (reason := problem(job, options, arch)):
            tried.problem = reason
        else:
            question = {"case": job.case, "arguments": job.arguments, "op": job.op}
            question |= {"implementation": implementation, "options": options}
            answer = ask.ask(question, CANDIDATE_S)
            tried.us, tried.error = answer.get("us"), answer.get("error")
            tried.problem = answer.get("problem", "")
        outcome.tried.append(tried)

    if known is None:
        one({})
    else:
        outcome.tried.append(known)
    if current is not None and current.options:
        one(dict(current.options))
    for i, stage in enumerate(job.stages):
        best = outcome.best(False)
        if i and best is None:
            break
        base = {} if best is None else best.options
        for options in stage:
            wanted = options if i == 0 else base | options
            if all(wanted != t.options for t in outcome.tried):
                one(wanted)
    return outcome


def table(outcomes: list[Outcome], arch: str) -> Table:
    """Lines by operation, ascending; an operation that is Triton everywhere is left out."""
    out: Table = {}
    for outcome in outcomes:
        out.setdefault((arch, outcome.job.op), []).append(outcome.line())
    return {
        key: sorted(lines, key=lambda line: line[0])
        for key, lines in out.items()
        if any(choice != tuned.TRITON for _, choice in lines)
    }


def write(
    outcomes: list[Outcome], failed: dict[str, str], arch: str, folder: Path, base: Table
) -> None:
    """Both files, each replaced at once. base: lines of operations that were not measured."""
    records = [
        {"label": o.job.label, "op": o.job.op, "bound": o.job.bound, "arch": arch,
         "tried": [vars(t) for t in o.tried]}
        for o in outcomes
    ]  # fmt: skip
    measured = {(arch, o.job.op) for o in outcomes}
    kept = {key: list(found) for key, found in base.items() if key not in measured}
    lines = kept | table(outcomes, arch)
    texts = {
        "autotune.json": json.dumps({"jobs": records, "not_compiled": failed}, indent=1),
        "tuned.json": tuned.dump(lines) if lines else "{}\n",
    }
    for name, text in texts.items():
        partial_file = folder / f"{name}.new"
        partial_file.write_text(text)
        partial_file.replace(folder / name)


def join(old: Path, new: Path) -> None:
    """Write into ``new`` its own lines and those of ``old``, line by line: where both have the same
    operation and size, the new one stays."""
    merged: dict[tuple[str, str], dict[int, tuned.Choice]] = {}
    for path in (old, new):
        for key, lines in tuned.parse(path.read_text()).items():
            merged.setdefault(key, {}).update(dict(lines))
    table = {key: sorted(lines.items()) for key, lines in merged.items()}
    new.write_text(tuned.dump(table) if table else "{}\n")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="decant.kernels.autotune", description=__doc__)
    groups = f"of {', '.join(GROUPS)}, or operations; all if none is named"
    parser.add_argument("group", nargs="*", help=groups)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the results")
    parser.add_argument("--seconds", type=float, default=300.0, help="for measuring")
    parser.add_argument("--compile-seconds", type=float, default=150.0)
    parser.add_argument("--compile-only", metavar="ARCH", help="compile for it and stop")
    parser.add_argument("--base", type=Path, help="table whose other operations are kept")
    text = "reports (autotune.json): Triton's times of lines there are not measured again"
    parser.add_argument("--known", type=Path, nargs="*", default=[], help=text)
    parser.add_argument("--join", nargs=2, type=Path, metavar=("OLD", "NEW"), help="see join")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.worker:
        return worker()
    if arguments.join:
        join(*arguments.join)
        return 0
    known = set(GROUPS) | {job.op for job in jobs([])}
    known |= {f"{job.op}:{job.bound}" for job in jobs([])}
    if unknown := set(arguments.group) - known:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}")
    todo = jobs(arguments.group)
    base: Table = {}
    if arguments.base is not None and arguments.base.exists():
        base = {key: list(found) for key, found in tuned.parse(arguments.base.read_text()).items()}
    if arguments.compile_only:
        failed = compile_all(todo, arguments.compile_only, arguments.compile_seconds, base)
        for what, why in failed.items():
            print(what, why)
        return int(bool(failed))
    from decant.kernels.config import architecture

    arch = architecture()
    arguments.out.mkdir(parents=True, exist_ok=True)
    failed = compile_all(todo, arch, arguments.compile_seconds)
    known_times = earlier_results(arguments.known, arch)
    warm_triton(todo, arguments.compile_seconds)
    until, asker, outcomes = time.monotonic() + arguments.seconds, Worker(), []
    with contextlib.closing(asker):
        for job in todo:
            if time.monotonic() > until:
                print(f"time is up before {job.label}")
                break
            now = dict(base.get((arch, job.op), ())).get(job.bound)
            old = known_times.get(job.label)
            outcomes.append(measure_job(job, asker, arch, until, now, old))
            write(outcomes, failed, arch, arguments.out, base)
            print(summary(outcomes[-1]), flush=True)
    return 0


def summary(outcome: Outcome) -> str:
    """One line: the time of what is there, the three fastest candidates, and the first problem."""

    def text(tried: Tried | None) -> str:
        return "-" if tried is None else f"{tried.us:.2f}"

    ours = sorted(
        (t for t in outcome.tried if t.us is not None and not t.is_default),
        key=lambda t: t.us or 0.0,
    )
    best = " ".join(f"{t.us:.2f}({','.join(str(v) for v in t.options.values())})" for t in ours[:3])
    wrong = next((t.problem for t in outcome.tried if t.problem), "")[:100]
    return f"{outcome.job.label} | now {text(outcome.best(True))} | {best} | {wrong}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
