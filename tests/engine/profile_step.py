"""Where a decode step of the CPU engine spends its time, with the demo model.

    python -P tests/engine/profile_step.py [--sequences 1,4,16] [--drafts 2] [--json FILE]

Sequences of 200 tokens, then steps of 1 + drafts rows each; every section's own time (without the
sections inside it) as the median over the steps, in processor time of the one thread, so that other
load matters little (it still shares caches). *products* are the matrix products, wherever they
stand; what a section shows beside them are elementwise functions, gathers and Python. ``calls``
counts torch operations of one step: divided into the step, the time that each may cost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from decant.engine.interface import Engine, PrefillChunk, SlotRows, StepPlan
from decant.engine.load import load_engine
from decant.engine.reference import moe, products
from decant.engine.reference.attention import AttentionRunner
from decant.engine.reference.model import Model
from decant.engine.reference.rows import RowPlanner
from decant.protocol.config import Config

PROMPT = 200
PARTS = (  # owner, attribute, section
    (RowPlanner, "plan", "plan of the rows"),
    (Model, "collapse", "hyper-connections"),
    (Model, "expand", "hyper-connections"),
    (AttentionRunner, "run", "attention"),
    (moe, "run", "experts"),
    (Model, "logits", "head"),
    (products, "mm", "products"),
    (products, "bmm", "products"),
    (products, "scores", "products"),
)
SECTIONS = (*dict.fromkeys(section for _, _, section in PARTS), "rest")


class Clock:
    """Exclusive processor time by section: entering one stops the clock of the one around it."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._open = ["rest"]
        self._since = time.thread_time()

    def _switch(self) -> None:
        now = time.thread_time()
        self.spent[self._open[-1]] += now - self._since
        self._since = now

    def wrap(self, function: Callable[..., Any], section: str) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            self._switch()
            self._open.append(section)
            try:
                return function(*args, **named)
            finally:
                self._switch()
                self._open.pop()

        return timed

    def take(self) -> dict[str, float]:
        self._switch()
        found = {name: self.spent[name] for name in SECTIONS}
        self.spent.clear()
        return found


def plan_of(engine: Engine, num: int, rows: int, step: int, at: int) -> StepPlan:
    """Decode rows of ``num`` sequences from position ``at`` on, two pages each."""
    tokens = tuple(3 + (step + i) % 500 for i in range(rows))
    slots = tuple(SlotRows(s, at, tokens, (2 * s, 2 * s + 1)) for s in range(num))
    return StepPlan(step, slots)


def measure(engine: Engine, clock: Clock, num: int, rows: int, steps: int) -> dict[str, Any]:
    """Medians in ms; acceptance is not simulated: every step repeats the same positions."""
    ids = np.arange(3, 3 + PROMPT, dtype=np.int32)
    for slot in range(num):
        engine.clear_slot(slot)
        for start in range(0, PROMPT, 64):
            part = ids[start : start + 64]
            pages = tuple(2 * slot + i for i in range((start + len(part) + 127) // 128))
            engine.step(StepPlan(0, (), PrefillChunk(slot, start, part, pages)))
    spent: list[dict[str, float]] = []
    whole: list[float] = []
    for step in range(steps + 3):
        plan = plan_of(engine, num, rows, step, PROMPT)
        clock.take()
        began = time.thread_time()
        engine.step(plan)
        took = time.thread_time() - began
        if step >= 3:
            whole.append(took)
            spent.append(clock.take())
    with profile(activities=[ProfilerActivity.CPU]) as found:
        engine.step(plan_of(engine, num, rows, 0, PROMPT))
    calls = sum(
        e.cpu_parent is None or not e.cpu_parent.name.startswith("aten::")
        for e in found.events() or ()
        if e.name.startswith("aten::")
    )
    return {
        "sequences": num,
        "rows": num * rows,
        "step_ms": statistics.median(whole) * 1e3,
        "sections_ms": {s: statistics.median(x[s] for x in spent) * 1e3 for s in SECTIONS},
        "calls": calls,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequences", default="1,4,16")
    parser.add_argument("--drafts", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    clock = Clock()
    for owner, name, section in PARTS:
        setattr(owner, name, clock.wrap(getattr(owner, name), section))
    engine = load_engine(Config(), "decode")
    found = []
    try:
        for num in map(int, args.sequences.split(",")):
            found.append(measure(engine, clock, num, 1 + args.drafts, args.steps))
    finally:
        engine.close()
    names = [str(f["sequences"]) for f in found]
    print(f"{'ms a step, sequences:':24}" + "".join(f"{n:>9}" for n in names))
    for section in SECTIONS:
        print(f"{section:24}" + "".join(f"{f['sections_ms'][section]:9.2f}" for f in found))
    print(f"{'whole step':24}" + "".join(f"{f['step_ms']:9.2f}" for f in found))
    print(f"{'torch calls':24}" + "".join(f"{f['calls']:9d}" for f in found))
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"torch": torch.__version__, "steps": args.steps, "runs": found}, file,
                      indent=1)  # fmt: skip
            file.write("\n")


if __name__ == "__main__":
    main()
