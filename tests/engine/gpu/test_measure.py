"""What measures the GPU, as far as it runs without one: helper ranks in step with the measured one,
kernels noted and compiled without a device, the report's pieces and records."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from decant.engine.gpu.rank_time import Bench, Case, table_cases

ROOT = Path(__file__).resolve().parents[3]
NOTE = """
import json, os, time, torch
from decant.engine.gpu import precompile
from decant.engine.gpu.layout import GpuLayout
from decant.engine.gpu.model import GpuModel
from decant.engine.gpu.ops import ALL, Ops
from decant.engine.gpu.pool import GpuPool
from decant.engine.gpu.runner import Runner
from decant.engine.gpu.slice import make_slice
from decant.engine.model_shape import parse_shape
from decant.engine.synthetic import config_table
cpu = torch.device("cpu")
shape = parse_shape(config_table(4, "tiny"))
model = GpuModel(shape, make_slice(shape, cpu, 1), Ops.create(shape, cpu, set(ALL)))
layout = GpuLayout(shape, 128, 3)
pool = GpuPool.create(f"gpu-note-test-{os.getpid()}", layout, 2, 1, cpu)
runner = Runner(model, pool, 256, 128)
with precompile.without_device(90):
    found = precompile.note(lambda: precompile.dry_steps(model, runner, [(1, 1), (2, 4)]))
pool.close()
done = precompile.compile_all(found[:1], 90, 1)
began = time.monotonic()
again = precompile.compile_all(found[:1], 90, 1)
took = time.monotonic() - began
names = [f["name"] for f in found]
done += precompile.compile_all([f for f in found if not f["module"]][:1], 90, 1)
print(json.dumps({"names": names, "done": done, "again": again, "again_s": took}))
"""

# launches of a TP4 rank, by kind of layer and for the rest of a step, one row and 64
BOUNDS = {"window": 21, "CSA": 25, "HCA": 22, "step": 8}
BOUNDS_64 = {"window": 22, "CSA": 29, "HCA": 24, "step": 8}


@pytest.fixture(scope="module")
def report() -> Any:
    """The script as a module."""
    loader = importlib.machinery.SourceFileLoader("gpu_report", str(ROOT / ".ci" / "gpu-report"))
    spec = importlib.util.spec_from_loader("gpu_report", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.slow
def test_kernels_are_noted_and_compiled_without_a_device(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", NOTE],
        capture_output=True, text=True, timeout=300, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout.strip().splitlines()[-1])
    assert {"attention", "_linear_kernel", "_gate_up_kernel", "_compress_kernel"} <= set(
        seen["names"]
    )
    assert seen["again"] == 1 and seen["again_s"] < 0.5  # no worker is started for nothing
    assert seen["done"] == 2 and any(tmp_path.iterdir())  # one of Triton, one of CUDA C++


@pytest.mark.slow
def test_helpers_sum_in_step_with_the_rank() -> None:
    cases = [Case(1, 1, 200), Case(2, 2, 200, 40)]
    bench = Bench(torch.device("cpu"), 3, 2, set(), "ipc", cases, 200.0)
    saved: list[int] = []
    seen = bench.run(lambda r: saved.append(len(r["steps"])), [130])
    assert seen["sums_by"] == "ipc" and seen["helpers"] == 1 and saved[-1] == 2
    assert all(step["finite"] and step["graph_ms"][0] > 0 for step in seen["steps"])
    assert list(seen["steps"][1]["mixed_ms"]) == [40]
    assert seen["prompts"][0]["tokens_per_s"] > 0
    assert all(helper.returncode == 0 for helper in bench.helpers)


def test_the_table_has_every_step_that_was_asked_for() -> None:
    cases = {(c.num, c.size) for c in table_cases()}
    assert cases == {(num, 1 + k) for num in (1, 8, 32, 64, 128) for k in (0, 1, 2)}


def test_records_of_the_pieces(report: Any) -> None:
    seen = {
        "steps": [{"case": "B=1", "graph_ms": [2.0, 1, 3], "eager_ms": [20.0, 1, 3],
                   "floor_ms": 0.88, "mixed_ms": {"256": [5.0, 4, 6]}}],
        "prompts": [{"tokens": 8192, "tokens_per_s": 25000}],
        "runs": [{"way": "ipc", "world": 4, "sum_us": {"1": [3.0, 2, 4]}}, {"failure": "late"}],
        "ends": [{"how": "fence", "worker": "draft-0", "text_again_s": 0.5}],
    }  # fmt: skip
    stamp = {"command": "c", "hardware": "h", "date": "d", "commit": "x"}
    found = {r["name"]: r for r in report.records("rank", seen, stamp)}
    step = found["rank step B=1"]
    assert (step["value"], step["share_of_floor"], step["ratio"]) == (2.0, 0.44, 0.1)
    assert found["rank mixed B=1 chunk=256"]["value"] == 5.0
    assert found["sum ipc ranks=4 rows=1"]["unit"] == "us"
    assert {"rank prompt 8192", "rank fence draft-0 text again"} <= set(found)
    for record in found.values():
        assert set(record) == {
            "name", "value", "unit", "floor", "share_of_floor", "baseline", "ratio", "command",
            "hardware", "date", "commit",
        }  # fmt: skip


def test_pieces_are_short_resumable_and_leave_what_they_had(
    report: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, (limit, _, text) in {**report.PIECES, **report.EIGHT}.items():
        assert limit < 540 and text and hasattr(report, "piece_" + name.replace("-", "_"))
    ran: list[str] = []

    def command_of(
        words: list[str], limit_s: float, log: Path | None = None
    ) -> tuple[int, str, str]:
        if "--piece" not in words:
            return 0, "", ""
        name = words[words.index("--piece") + 1]
        ran.append(name)
        (tmp_path / f"gpu-{name}.part").write_text("{}")
        return (1 if name == "rank" else 0), "", "a fault"

    monkeypatch.setattr(report, "command_of", command_of)
    monkeypatch.setattr(sys, "argv", ["x", "--out", str(tmp_path), "--only", "sums,rank"])
    assert report.main() == 1 and ran == ["sums", "rank"]
    assert (tmp_path / "gpu-sums.json").exists()
    assert (tmp_path / "gpu-rank.cut.json").exists() and not (tmp_path / "gpu-rank.json").exists()
    assert report.main() == 1 and ran == ["sums", "rank", "rank"]  # what is there is not run again
    assert "sums: gpu-sums.json is there" in capsys.readouterr().out


def test_launches_a_layer() -> None:
    """Counted without a GPU. Between the kernels of a layer stands nothing of torch but the
    product of the compressors' bf16 weights."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "decant.engine.gpu.launches", "1", "64"],
        capture_output=True, text=True, timeout=200, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    one, many = [json.loads(line) for line in done.stdout.strip().splitlines()]
    assert (one["rows"], many["rows"]) == (1, 64)
    for bound, seen in ((BOUNDS, one["totals"]), (BOUNDS_64, many["totals"])):
        assert all(seen[kind] <= bound[kind] for kind in bound), seen
        assert set(bound) == set(seen)
    layers = [kernel for kind in ("window", "CSA", "HCA") for kernel in one["launches"][kind]]
    assert not [kernel for kernel in layers if kernel.startswith("torch")]
