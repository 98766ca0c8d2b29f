"""Does a group of ranks serve what one rank serves? The demo model, split: teacher-forced against
the CPU reference, the same bits on all ranks, and the time of a step.

``python -P -m decant.engine.gpu.group_check --tp 4 --out DIR`` writes DIR/group.json. All ranks on
one GPU, or with ``--devices 0,1,2,3`` apart; without a GPU the engine's CPU twin runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decant.engine.gpu.selftest import (
    AGREEMENT,
    CONTEXT,
    PAGE,
    compare,
    configure,
    device_name,
    held_out,
    teacher_force,
)
from decant.engine.gpu.start import start_engine
from decant.engine.interface import PrefillChunk, SlotRows, StepPlan
from decant.engine.load import load_engine
from decant.engine.sampler import Row
from decant.protocol.config import Config, GpuConfig
from decant.protocol.errors import HandoffError
from decant.protocol.messages import Sampling

Report = dict[str, Any]


def split(tp: int, way: str, devices: str) -> Config:
    config = configure(device_name())
    small = device_name() == "cpu"
    return replace(
        config,
        gpu=GpuConfig(collectives=way),
        prefill=replace(config.prefill, tp=tp, devices=devices),
        decode=replace(config.decode, tp=tp, devices=devices, max_batch=2 if small else 16),
        draft=replace(config.draft, tp=tp, devices=devices),
    )


def ranks_are_equal(engine: Any, lengths: list[int]) -> list[Report]:
    """Every rank copies pages and slot within its own pool and checks them against *rank 0's*
    checksums: equal sums mean that all ranks hold the same bits."""
    engine.attach("ourselves", engine.pools())
    cases = []
    for total in lengths:
        ids = np.random.default_rng(total).integers(3, 2500, total).astype(np.int32)
        pages = list(range(-(-total // PAGE)))
        live = [min(PAGE, total - PAGE * i) for i in pages]
        engine.clear_slot(0)
        for at in range(0, total, 256):
            chunk = PrefillChunk(0, at, ids[at : min(total, at + 256)], tuple(pages))
            engine.step(StepPlan(0, (), chunk))
        sums = [engine.page_checksum(p, n) for p, n in zip(pages, live, strict=True)]
        equal, why = True, ""
        began = time.perf_counter()
        try:
            engine.pull_pages("ourselves", pages, [p + len(pages) for p in pages], live, sums)
            engine.pull_slot("ourselves", 0, 1, total, engine.slot_checksum(0, total))
        except HandoffError as error:
            equal, why = False, error.message
        took = (time.perf_counter() - began) * 1e3
        cases.append({"tokens": total, "equal": equal, "pull_ms": round(took, 2), "why": why})
    engine.detach("ourselves")
    return cases


def time_steps(engine: Any, buckets: list[tuple[int, int]], times: int) -> list[Report]:
    """Steps with draws, as decode runs them."""
    out = []
    for num, size in buckets:
        rows = tuple(
            SlotRows(i, 300, tuple(range(5, 5 + size)), (3 * i, 3 * i + 1)) for i in range(num)
        )
        sampling = Sampling(temperature=0.7, seed=1)
        drawn = [Row(sampling, 0, 300 + i, 0) for _ in range(num) for i in range(size)]
        took = []
        for _ in range(times + 3):
            began = time.perf_counter()
            engine.step_and_draw(StepPlan(0, rows), lambda drawn=drawn: drawn)
            took.append((time.perf_counter() - began) * 1e3)
        cut = [round(float(v), 3) for v in np.percentile(took[3:], [50, 10, 90])]
        out.append({"sequences": num, "rows": size, "step_ms": cut})
    return out


def run(tp: int, way: str, devices: str, num_prompts: int, save: Any) -> Report:
    cuda = device_name() == "cuda"
    config = split(tp, way, devices)
    report: Report = {"tp": tp, "device": device_name()}
    began = time.monotonic()
    # NOTE: the group forks: before this process touches CUDA itself
    decode = start_engine(config, "decode")
    report["decode_ready_s"] = round(time.monotonic() - began, 1)
    own: Any = getattr(decode, "_gpu", decode)
    report["sums_by"] = own.model.comm.kind if own.model.comm else "none"
    report["kernels"] = sorted(own.model.ops.enabled)
    report["graphs"] = len(own.runner._graphs)
    save(report)
    limit = CONTEXT if cuda else 80
    prompts = [p for p in held_out(2) if len(p[1]) <= limit][:num_prompts]
    ours = [teacher_force(decode, ids, begin) for _, ids, begin in prompts]
    reference = load_engine(configure("cpu"), "decode")
    theirs = [teacher_force(reference, ids, begin) for _, ids, begin in prompts]
    reference.close()
    report["teacher"] = compare(prompts, ours, theirs)
    save(report)
    report["ranks"] = ranks_are_equal(decode, [129, 300, 1023] if cuda else [129])
    buckets = [(1, 1), (1, 4), (8, 4), (16, 4)] if cuda else [(1, 1), (2, 4)]
    report["steps"] = time_steps(decode, buckets, 20 if cuda else 1)
    save(report)
    decode.close()
    equal = all(case["equal"] for case in report["ranks"])
    report["ok"] = equal and report["teacher"]["agreement"] >= AGREEMENT
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description="check and time a group of ranks")
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--way", default="auto", choices=("auto", "ipc", "nccl", "gloo"))
    parser.add_argument("--devices", default="0")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--out", default=".")
    args = parser.parse_args()
    torch.set_num_threads(2)
    path = Path(args.out) / "group.json"

    def save(report: Report) -> None:
        path.write_text(json.dumps(report, indent=1))

    report = run(args.tp, args.way, args.devices, args.prompts, save)
    save(report)
    print(json.dumps(report))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
