"""One TP rank at real width with random weights: kernels against plain torch at the served shapes.
A section of ``selftest.py``; the rank's times are ``rank_time.py``'s.
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
from decant.engine.gpu.precompile import prepare
from decant.engine.gpu.probe import probe
from decant.engine.gpu.runner import Runner
from decant.engine.gpu.slice import make_slice
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
    pages = -(-prompt // layout.page_tokens)
    pool = GpuPool.create(name + "-dry", layout, pages, 1, device)
    rows = max(prompt, 128)
    prepare(model, lambda alone: Runner(alone, pool, rows, rows), [(1, 1), (2, 1 + DRAFTS)])
    pool.close()
    compiled = time.monotonic()
    seen = probe(model, layout, device, name, prompt, ((1, 1), (2, 1 + DRAFTS)))
    return {
        "enabled": sorted(model.ops.enabled),
        "operations": {
            n: {"worst": c.worst, "calls": c.calls, "failure": c.failure} for n, c in seen.items()
        },
        "seconds": round(time.monotonic() - began, 1),
        "compiled_s": round(compiled - began, 1),
        "ok": not any(c.failure for c in seen.values()),
    }
