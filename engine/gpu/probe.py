"""Every kernel against plain torch on the model's own weights, before anything is served.

A kernel that fails or is off by more than its tolerance is switched off: its operation runs in
plain torch, slower and right, and one warning says so.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from decant.engine.gpu.layout import GpuLayout
from decant.engine.gpu.model import GpuModel
from decant.engine.gpu.ops import Compared
from decant.engine.gpu.pool import GpuPool
from decant.engine.gpu.runner import Runner
from decant.engine.interface import PrefillChunk, SlotRows

log = logging.getLogger("decant.engine.gpu")

# Relative error that two correct paths may show: roundings to bf16 (2^-9) and to e4m3 (2^-4, where
# a value near the middle of two codes may go either way), and orders of sums.
TOLERANCES = {
    "mhc": 6e-3, "linear": 6e-3, "norm": 1e-2, "swiglu": 1e-2, "store": 1e-2, "compress": 2e-2,
    "rows": 2e-2, "index": 3e-2,
    "attention": 1e-2, "wo_a": 6e-3, "gate": 2e-2, "moe": 6e-3, "begin": 1e-5, "keep": 0.0,
}  # fmt: skip


PROBED = [(1, 1), (2, 3)]  # sequences and rows each of the decode steps that are compared


@torch.inference_mode()
def probe(
    model: GpuModel,
    layout: GpuLayout,
    device: torch.device,
    name: str,
    prompt: int = 300,
    buckets: Sequence[tuple[int, int]] = PROBED,
) -> dict[str, Compared]:
    """Prefill a prompt and decode some rows with both paths, on a small pool of its own; switches
    off the kernels that are wrong. name: prefix of the pool. buckets: (sequences, rows each).
    Returns what was seen by operation."""
    ops = model.ops
    if not ops.enabled:
        return {}
    tokens = np.random.default_rng(0).integers(0, model.shape.vocab_size, prompt + 64)
    ids = tokens.astype(np.int32)
    most = max(num for num, _ in buckets)
    pages = -(-(prompt + 64) // layout.page_tokens)
    pool = GpuPool.create(name, layout, pages * most, most, device)
    ops.comparing, ops.compared = True, {}
    try:
        runner = Runner(model, pool, pages * layout.page_tokens, chunk_rows=max(prompt, 128))
        tables = [tuple(range(i * pages, (i + 1) * pages)) for i in range(most)]
        starts = [max(1, prompt - 7 * i) for i in range(most)]
        for slot, (table, start) in enumerate(zip(tables, starts, strict=True)):
            runner.prefill(PrefillChunk(slot, 0, ids[:start], table))
        for num, size in buckets:
            rows = []
            for slot in range(num):
                begin = starts[slot]
                given = tuple(int(t) for t in ids[begin : begin + size])
                rows.append(SlotRows(slot, begin, given, tables[slot]))
                starts[slot] += size
            runner.decode(rows)
    finally:
        ops.comparing = False
        pool.close()
    for operation, seen in ops.compared.items():
        if seen.failure or seen.worst > TOLERANCES[operation]:
            ops.enabled.discard(operation)
            why = seen.failure or f"relative error {seen.worst:.2g} > {TOLERANCES[operation]}"
            log.warning("kernel %s is off, plain torch runs instead: %s", operation, why)
    return ops.compared
