"""One TP rank at real width with random weights: kernels against plain torch at the served shapes,
and the time of a decode step. Sections of ``selftest.py``; all-reduces are not in it.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from decant.engine.gpu.layout import GpuLayout
from decant.engine.gpu.model import GpuModel
from decant.engine.gpu.ops import Ops
from decant.engine.gpu.pool import GpuPool
from decant.engine.gpu.probe import probe
from decant.engine.gpu.runner import Runner
from decant.engine.gpu.slice import make_slice
from decant.engine.interface import SlotRows
from decant.engine.model_shape import ModelShape, parse_shape
from decant.engine.synthetic import config_table

TP = 4
DRAFTS = 3
Report = dict[str, Any]


def _shape(layers: int, device: torch.device) -> tuple[ModelShape, int]:
    """Real width on a GPU as a rank of four; the tiny width on a CPU."""
    if device.type == "cuda":
        return parse_shape(config_table(layers, "real")), TP
    return parse_shape(config_table(layers, "tiny")), 1


@torch.inference_mode()
def compare_kernels(device: torch.device, kernels: set[str] | None, prompt: int) -> Report:
    """Four layers, one of each kind: every kernel against plain torch on a prompt and on decode
    rows."""
    shape, tp = _shape(4, device)
    began = time.monotonic()
    model = GpuModel(shape, make_slice(shape, device, tp), Ops.create(shape, device, kernels))
    layout = GpuLayout(shape, 1024 if device.type == "cuda" else 128, DRAFTS)
    name = f"decant-measure-{os.getpid()}"
    seen = probe(model, layout, device, name, prompt, ((1, 1), (2, 1 + DRAFTS)))
    return {
        "enabled": sorted(model.ops.enabled),
        "operations": {
            n: {"worst": c.worst, "calls": c.calls, "failure": c.failure} for n, c in seen.items()
        },
        "seconds": round(time.monotonic() - began, 1),
        "ok": not any(c.failure for c in seen.values()),
    }


def _milliseconds(run: Any, device: torch.device, times: int) -> list[float]:
    took = []
    for _ in range(times + 3):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took.append((time.perf_counter() - began) * 1e3)
    took = sorted(took[3:])
    return [round(took[int(q * (len(took) - 1))], 3) for q in (0.5, 0.1, 0.9)]


@torch.inference_mode()
def time_rank(
    device: torch.device, kernels: set[str] | None, layers: int, context: int, budget_s: float
) -> Report:
    """Graph and eager time of a decode step of one rank, by sequences and rows; and of the same
    step under a small and a large max_context."""
    began = time.monotonic()
    shape, tp = _shape(layers, device)
    model = GpuModel(shape, make_slice(shape, device, tp), Ops.create(shape, device, kernels))
    cuda = device.type == "cuda"
    page = 1024 if cuda else 128
    layout = GpuLayout(shape, page, DRAFTS)
    each = -(-(context + 8) // page)
    name = f"decant-measure-{os.getpid()}"
    most = 64 if cuda else 2
    pool = GpuPool.create(name, layout, most * each, most, device)
    pool.pages.random_(0x38, 0x40)
    pool.slots.random_(0x38, 0x40)
    report: Report = {
        "layers": layers, "tp": tp, "context": context, "kernels": sorted(model.ops.enabled),
        "loaded_s": round(time.monotonic() - began, 1), "steps": [],
    }  # fmt: skip
    if cuda:
        report["allocated_gb"] = round(torch.cuda.memory_allocated(device) / 1e9, 2)

    def measure(runner: Runner, num: int, size: int, at: int, eager: bool) -> Report:
        tables = [tuple(range(i * each, (i + 1) * each)) for i in range(num)]
        rows = [SlotRows(i, at, tuple(range(9, 9 + size)), tables[i]) for i in range(num)]
        row: Report = {"sequences": num, "rows": size}
        try:
            if eager:
                row["eager_ms"] = _milliseconds(lambda: runner.decode(rows), device, 3)
            started = time.monotonic()
            runner.capture(num, size)
            row["capture_s"] = round(time.monotonic() - started, 2)
            runner.decode(rows)  # fills the buffers
            graph = runner.replay_of(num, size)
            row["graph_ms"] = _milliseconds(graph, device, 20 if cuda else 1)
            row["step_ms"] = _milliseconds(lambda: runner.decode(rows), device, 5 if cuda else 1)
            finite = runner.decode(rows)[0].isfinite().all()
            row["finite"] = bool(finite)
        except Exception as error:
            row["failure"] = f"{type(error).__name__}: {error}"[:300]
        runner.drop_graphs()
        return row

    try:
        runner = Runner(model, pool, each * page, 128)
        for num, size in ((1, 1), (8, 1), (64, 1), (1, 4), (8, 4), (64, 4)):
            if num > most or time.monotonic() - began > budget_s:
                break
            report["steps"].append(measure(runner, num, size, context - 8, num < 64))
        limits = {}
        for limit in (16 << 10, 1 << 20):
            if cuda and time.monotonic() - began < budget_s:
                wide = Runner(model, pool, limit, 128)
                limits[limit] = measure(wide, 1, 1, min(2048, context - 8), False)
        report["max_context"] = limits
    finally:
        pool.close()
    return report
