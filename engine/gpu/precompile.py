"""Compile the kernels of a rank's steps in parallel, before anything waits for them.

A kernel is compiled when it is launched first, one after the other: minutes at real width. Here the
steps run *dry* first (no kernel is compiled or launched, only noted), then worker processes compile
what was noted into the caches on disk (Triton's, and that of ``kernels/cuda.py``), where the
launches find it. Nothing here runs a kernel.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton import knobs

from decant.engine.gpu.model import GpuModel
from decant.engine.gpu.runner import Runner
from decant.engine.interface import PrefillChunk
from decant.kernels import cuda

log = logging.getLogger("decant.engine.gpu")

BUDGET_S = 240.0
CHUNKS = (1, 17, 65, 130, 300, 600, 1100)  # rows of a prompt's pieces: a kernel's configurations


class Target:
    """A driver that knows its architecture and has no device: enough to compile."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def without_device(arch: int) -> Iterator[None]:
    """Triton compiles for ``arch`` (90, 120) whatever this machine has."""
    from triton.runtime.driver import driver

    before = driver._active
    driver.set_active(Target(arch))
    try:
        yield
    finally:
        driver._active = before


def note(run: Callable[[], object], launched: Counter[str] | None = None) -> list[dict[str, str]]:
    """Run something dry. Returns: {module, name, data, source} of every kernel that it would
    compile; source: hash of its text. Of CUDA C++, module is "" and data its constants. launched:
    counts the launches by kernel."""
    counts = Counter[str]() if launched is None else launched
    found: dict[str, dict[str, str]] = {}

    def hook(**given: Any) -> bool:
        data = given["compile"]["specialization_data"]
        function = given["fn"].jit_function
        name = function.fn.__qualname__
        counts[name] += 1
        module = function.fn.__module__
        found[name + data] = {
            "module": module, "name": name, "data": data, "source": function.cache_key,
        }  # fmt: skip
        return True  # neither compiled nor launched

    def function(name: str, kernel: str, arch: str, **defines: int) -> cuda.Function:
        data = json.dumps(defines, sort_keys=True)
        found[name + data] = {
            "module": "", "name": name, "data": data, "source": cuda.cache_key(name, arch, defines),
        }  # fmt: skip
        return cuda.Function(kernel, 0)

    def launch_none(target: cuda.Function, *args: Any, **more: Any) -> None:
        counts[target.name] += 1

    before, launch, load = knobs.runtime.jit_cache_hook, cuda.launch, cuda.function
    knobs.runtime.jit_cache_hook = hook
    cuda.launch = launch_none
    cuda.function = function
    try:
        run()
    finally:
        knobs.runtime.jit_cache_hook = before
        cuda.launch, cuda.function = launch, load
    return list(found.values())


def compile_all(
    wanted: Sequence[dict[str, str]], arch: int, workers: int = 0, budget_s: float = BUDGET_S
) -> int:
    """Compile in worker processes. Returns: kernels compiled; what fails or is late is compiled
    when it is launched, which says what is wrong with it."""
    if not wanted:
        return 0
    # Starting the workers costs seconds even if all is there: remember that it is.
    names = sorted(kernel["source"] + kernel["data"] for kernel in wanted)
    text = f"{arch} {triton.__version__} {''.join(names)}"
    marker = Path(knobs.cache.dir) / f"decant-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
    if marker.exists():
        return len(wanted)
    workers = min(len(wanted), workers or max(1, (os.cpu_count() or 2) - 1))
    command = [sys.executable, "-P", "-m", "decant.engine.gpu.precompile"]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    running = []
    for i in range(workers):
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps({"arch": arch, "kernels": list(wanted[i::workers])}))
        process.stdin.close()
        process.stdin = None  # else communicate() would flush what is closed
        running.append(process)
    deadline, done = time.monotonic() + budget_s, 0
    for process in running:
        try:
            out, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            done += int(out.strip().splitlines()[-1]) if out.strip() else 0
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
    if done == len(wanted):
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    return done


@torch.inference_mode()
def dry_steps(
    model: GpuModel,
    runner: Runner,
    buckets: Sequence[tuple[int, int]],
    chunks: Sequence[int] = CHUNKS,
) -> None:
    """Decode steps of ``buckets`` (sequences, rows each) and pieces of a prompt: none, or of
    ``chunks`` rows and of the longest piece."""
    for num, size in buckets:
        rows, _ = runner.static_rows(num, size)
        runner._step(rows)
    length = runner.width * runner.pool.layout.page_tokens
    most = runner.chunk_rows
    for count in sorted({min(c, most, length) for c in (*chunks, most)} if chunks else ()):
        pages = -(-count // runner.pool.layout.page_tokens)
        ids = np.zeros(count, np.int32)
        runner.prefill(PrefillChunk(0, 0, ids, tuple(range(pages))))


def prepare(
    model: GpuModel,
    make_runner: Callable[[GpuModel], Runner],
    buckets: Sequence[tuple[int, int]],
    chunks: Sequence[int] = CHUNKS,
) -> tuple[int, int]:
    """Fill the caches for a rank's steps. make_runner: a runner of a model on a pool that
    nobody uses yet. chunks: rows of a prompt's pieces. Needs no kernel that is right: a wrong one
    is found by the probe. Returns: kernels compiled, and how many there are."""
    if model.ops.device.type != "cuda" or not model.ops.enabled:
        return 0, 0
    began = time.monotonic()
    alone = replace(model, comm=None)  # the other ranks are not asked
    runner = make_runner(alone)
    wanted = note(lambda: dry_steps(alone, runner, buckets, chunks))
    noted = time.monotonic() - began
    arch = int(model.ops.arch.removeprefix("sm_"))
    done = compile_all(wanted, arch)
    log.info(
        "%d of %d kernels compiled in %.1f s (noted in %.1f s)",
        done, len(wanted), time.monotonic() - began, noted,
    )  # fmt: skip
    return done, len(wanted)


def compile_one(kernel: dict[str, str], arch: int) -> None:
    """One of what ``note`` found, for the GPU that ``without_device`` stands for."""
    name, data = kernel["name"], kernel["data"]
    if kernel["module"]:
        getattr(importlib.import_module(kernel["module"]), name).preload(data)
    else:
        cuda.compile_source(name, f"sm_{arch}", json.loads(data))


def main() -> int:
    """A worker: {arch, kernels} on stdin, the number compiled on stdout."""
    job = json.load(sys.stdin)
    done = 0
    with without_device(job["arch"]):
        for kernel in job["kernels"]:
            try:
                compile_one(kernel, job["arch"])
                done += 1
            except Exception as error:  # noqa: BLE001  the launch will say it again
                print(f"{kernel['name']}: {error}"[:300], file=sys.stderr)
    print(done)
    return 0


if __name__ == "__main__":
    sys.exit(main())
