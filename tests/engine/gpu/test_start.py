"""Starts and ends of GPU workers, as far as they need no GPU: what one start leaves for the next,
graphs captured while serving, phases of a measurement that are late, pools whose device is lost."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triton import knobs

from decant.engine.checkpoint import Checkpoint
from decant.engine.gpu import start_record
from decant.engine.gpu.communicator import Unasked
from decant.engine.gpu.draft import GpuDraftEngine
from decant.engine.gpu.engine import GpuEngine
from decant.engine.gpu.layout import GpuLayout
from decant.engine.gpu.model import GpuModel
from decant.engine.gpu.ops import Ops
from decant.engine.gpu.pool import GpuPool
from decant.engine.gpu.rank_time import LATE, after_failure
from decant.engine.gpu.runner import Runner
from decant.engine.gpu.weights import load_weights
from decant.engine.interface import DraftSlot, SlotRows

CPU = torch.device("cpu")
MakeTwin = Callable[..., GpuEngine]


def test_a_record_is_of_its_code_model_and_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "cache"))
    path = start_record.path_of(CPU, {"model": "a", "tp": 4})
    assert start_record.read(path) is None
    start_record.write(path, {"moe", "linear"})
    assert start_record.read(path) == {"moe", "linear"}
    assert path == start_record.path_of(CPU, {"tp": 4, "model": "a"})
    others = [{"model": "b", "tp": 4}, {"model": "a", "tp": 1}]
    assert path not in [start_record.path_of(CPU, facts) for facts in others]
    monkeypatch.setattr(start_record, "sources", lambda: "other code")
    assert path != start_record.path_of(CPU, {"model": "a", "tp": 4})


@pytest.mark.parametrize("text", ["", "{}", '{"kernels": ["no such kernel"]}', '{"kernels": 3}'])
def test_a_damaged_record_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    assert start_record.read(path) is None


def test_a_bucket_that_comes_again_gets_its_graph(make_twin: MakeTwin) -> None:
    runner: Runner = make_twin().runner
    runner.drop_graphs()
    assert runner.capture_all(1, 1, budget_s=-1.0) == 0 and runner.captures_later
    rows = [SlotRows(0, 0, (5,), (0,))]
    seen = []
    for _ in range(3):
        logits, _ = runner.decode(rows)
        seen.append(logits.clone())
        assert ((1, 1) in runner._graphs) == (len(seen) > 1)
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[1], seen[2])
    runner.captures_later = False
    runner.drop_graphs()


CASES = [[1, 1, 8192, 0], [8, 1, 65536, 0], [64, 1, 8192, 0]]


@pytest.mark.parametrize(
    ("steps", "prompts", "cases_left", "prompts_left"),
    [
        ([], [], [], []),  # never ready
        ([{"failure": "late"}], [], CASES[1:], [10, 20]),
        ([{"done": True}, {}], [], CASES[2:], [10, 20]),
        ([{"done": True}, {"done": True}, {}], [], [], [10, 20]),
        ([{"done": True}] * 3, [], [], [20]),
        ([{"done": True}] * 3, [{}], [], []),
    ],
)
def test_what_is_left_after_a_failure(
    steps: list[Any], prompts: list[Any], cases_left: list[Any], prompts_left: list[int]
) -> None:
    job = {"cases": CASES, "prompts": [10, 20], "profiled": 2}
    left = after_failure(job, {"steps": steps, "prompts": prompts})
    assert (left["cases"], left["prompts"]) == (cases_left, prompts_left)
    assert not cases_left and not prompts_left or left["profiled"] == 0


def test_a_late_phase_ends_the_process_and_says_where() -> None:
    text = (
        "import time\n"
        "from decant.engine.gpu.rank_time import Watch\n"
        "watch = Watch(lambda what: print('kept', what, flush=True), scale=0.01)\n"
        "with watch.phase('eager', 'B=1'):\n"
        "    pass\n"
        "def stuck():\n"
        "    time.sleep(60)\n"
        "with watch.phase('timed', 'B=8'):\n"
        "    stuck()\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", text], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == LATE
    assert done.stdout == "kept B=8: timed was not done in time\n"
    assert "B=1: eager took" in done.stderr and "in stuck" in done.stderr


class Lost:
    """A header on a device that is gone."""

    def __setitem__(self, at: int, value: int) -> None:
        raise RuntimeError("CUDA error: the remote procedural call failed\nSearch for ...")


def test_a_pool_of_a_lost_device_is_closed_with_one_line(
    make_twin: MakeTwin, caplog: pytest.LogCaptureFixture
) -> None:
    layout = make_twin().pool.layout
    pool = GpuPool.create("decant-lost-test", layout, 1, 1, CPU)
    pool._header = Lost()  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING, "decant.engine.gpu"):
        pool.close()
        pool.close()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and said[0].endswith("RuntimeError: CUDA error: the remote procedural "
                                               "call failed")  # fmt: skip


def test_the_job_is_plain_data() -> None:
    job = {"cases": CASES, "prompts": [10], "profiled": 0}
    assert json.loads(json.dumps(after_failure(job, {}))) == {**job, "cases": [], "prompts": []}


def test_a_rank_proposes_alone_in_a_dry_run(tmp_path: Path) -> None:
    """The draft of one-gpu-tp4 did not start: alone, its logits were a rank's share, and drawing
    refused them."""
    checkpoint = Checkpoint(Path(__file__).resolve().parents[3] / "engine" / "demo")
    shape = checkpoint.shape
    weights = load_weights(checkpoint, CPU, False, "full", 4)
    checkpoint.close()
    model = GpuModel(shape, weights, Ops.create(shape, CPU, set(), 4), Unasked(4))
    layout = GpuLayout(shape, 128, 3)
    engine = GpuDraftEngine(model, layout, CPU, 3, "")
    pool = GpuPool.create(f"dry-{tmp_path.name}", layout, 1, 2, CPU)
    engine._peers.attach_pool("a", pool)
    try:
        streams = np.zeros((1, shape.hc_mult, 0), np.float32)
        (drafts,) = engine.propose("a", [DraftSlot(0, 5, (7,), streams, 3)])
        assert len(drafts) == 3 and all(0 <= d < shape.vocab_size for d in drafts)
    finally:
        engine.detach("a")
