"""The table of what is fastest: candidates exist, lines follow from measurements, files are read
back, and a worker's death is an answer."""

import json
from pathlib import Path
from typing import Any

import pytest

from decant.kernels import autotune, tuned, tuning
from decant.kernels.autotune import Outcome, Tried
from decant.kernels.config import Config
from decant.kernels.tuning import Job


@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
def test_every_line_has_candidates(arch: str) -> None:
    todo = tuning.jobs([])
    assert len({(job.op, job.bound) for job in todo}) == len(todo)
    for job in todo:
        fitting = [o for o in job.stages[0] if not tuning.problem(job, o, arch)]
        # the gate of 64 tokens takes more shared memory than sm_120 has: Triton serves it
        assert fitting or (arch == "sm_120" and job.op == "gate" and job.bound == 64), job.label
        for options in fitting:
            assert tuning.builds(job, options) or tuning.is_triton(options)


def outcome(bound: int, triton: float | None, *ours: float | None) -> Outcome:
    job = Job("mhc", bound, "boundary", {"tokens": bound}, ())
    tried = [Tried({}, "triton", triton)]
    tried += [Tried({"cluster": i + 1}, "cuda", us) for i, us in enumerate(ours)]
    return Outcome(job, tried)


def test_lines_follow_from_measurements() -> None:
    assert outcome(1, 10.0, 9.0, 5.0, None).line() == (1, tuned.Choice("cuda", {"cluster": 2}))
    assert outcome(8, 10.0, 9.9).line() == (8, tuned.TRITON)  # within the spread
    assert outcome(8, 10.0, None).line() == (8, tuned.TRITON)
    assert outcome(8, None, 9.0).line() == (8, tuned.Choice("cuda", {"cluster": 1}))
    assert outcome(8, None, None).line() == (8, tuned.TRITON)
    config = {"block_n": 64, "num_warps": 4, "num_stages": 3}
    other = Outcome(Job("logits", 8, "index", {}, ()), [Tried({}, "triton", 5.0)])
    other.tried.append(Tried(config, "triton", 4.0))
    assert other.line() == (8, tuned.Choice("triton", config))
    assert other.line()[1].config() == Config(block_n=64, num_warps=4, num_stages=3)


def test_files_are_read_back_and_other_operations_are_kept(tmp_path: Path) -> None:
    kept = tuned.Choice("cuda", {"tokens": 8})
    base: autotune.Table = {("sm_90", "gate"): [(8, kept)], ("sm_90", "mhc"): [(4, kept)]}
    done = [outcome(8, 10.0, 5.0), outcome(1, 10.0, 20.0)]
    autotune.write(done, {"a": "b"}, "sm_90", tmp_path, base)
    read = tuned.parse((tmp_path / "tuned.json").read_text())
    assert read["sm_90", "gate"] == ((8, kept),)
    ours = tuned.Choice("cuda", {"cluster": 1})
    assert read["sm_90", "mhc"] == ((1, tuned.TRITON), (8, ours))
    report = json.loads((tmp_path / "autotune.json").read_text())
    assert report["jobs"][0]["tried"][1]["us"] == 5.0
    assert "20.00(1)" in autotune.summary(done[1])


def test_tables_are_joined_line_by_line(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    a, b = tuned.Choice("cuda", {"tokens": 8}), tuned.Choice("cuda", {"tokens": 16})
    old.write_text(tuned.dump({("sm_90", "x"): [(1, a), (8, a)], ("sm_90", "y"): [(1, a)]}))
    new.write_text(tuned.dump({("sm_90", "x"): [(8, b), (64, b)]}))
    autotune.join(old, new)
    read = tuned.parse(new.read_text())
    assert read["sm_90", "x"] == ((1, a), (8, b), (64, b))
    assert read["sm_90", "y"] == ((1, a),)


class Answers:
    """A worker that measures nothing."""

    def __init__(self, us: dict[str, float]) -> None:
        self.us, self.asked = us, list[dict[str, Any]]()

    def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        self.asked.append(question)
        return {"us": self.us.get(str(question["options"].get("tokens")), 50.0), "error": 0.0}


def test_what_is_known_is_not_measured_again(tmp_path: Path) -> None:
    stages = (
        {"cluster": 16, "tokens": 1, "fn_shared": 1},
        {"cluster": 16, "tokens": 2, "fn_shared": 1},
    )
    job = Job("mhc", 8, "boundary", {"tokens": 8}, (stages,))
    autotune.write([Outcome(job, [Tried({}, "triton", 12.5)])], {}, "sm_90", tmp_path, {})
    known = autotune.earlier_results([tmp_path / "autotune.json"], "sm_90")
    assert autotune.earlier_results([tmp_path / "autotune.json"], "sm_120") == {}
    worker = Answers({"1": 9.0, "2": 13.0})
    now = tuned.Choice("cuda", {"cluster": 8, "tokens": 1, "fn_shared": 0})
    found = autotune.measure_job(job, worker, "sm_90", 1e18, now, known[job.label])  # type: ignore[arg-type]
    assert [q["options"] for q in worker.asked] == [now.options, *stages]  # what is in use first
    assert found.tried[0].earlier and found.tried[0].us == 12.5
    assert found.line() == (8, tuned.Choice("cuda", now.options))


def test_lines_are_chosen_by_name() -> None:
    labels = [(j.op, j.bound) for j in tuning.jobs(["mhc:8", "gate", "mhc:1"])]
    assert labels[0] == ("mhc", 8) and labels[-1] == ("mhc", 1)
    assert {op for op, _ in labels[1:-1]} == {"gate"}


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="the worker would live")
def test_a_worker_that_dies_is_an_answer() -> None:
    worker = autotune.Worker()
    try:
        answer = worker.ask({"case": "boundary"}, 60.0)
        assert "died" in answer["problem"]
    finally:
        worker.close()


def test_a_table_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.json"
    path.write_text(tuned.dump({("sm_90", "gate"): [(8, tuned.Choice("cuda", {"tokens": 8}))]}))
    monkeypatch.setenv(tuned.ENVIRONMENT, str(path))
    tuned._table.cache_clear()
    try:
        assert tuned.choice("sm_90", "gate", 8).is_cuda
        assert tuned.choice("sm_90", "gate", 9) == tuned.TRITON
        assert tuned.choice("sm_120", "gate", 8) == tuned.TRITON
    finally:
        tuned._table.cache_clear()


def test_the_shared_table_leaves_room_for_blocks_that_wait() -> None:
    """A cluster of 16 beside waiting ranks never got its place: eight rows hung on an H200."""
    shared = tuned.parse(tuned.SHARED.read_text())
    fastest = tuned.parse(tuned.PATH.read_text())
    assert {k: [b for b, _ in v] for k, v in shared.items()} == {
        k: [b for b, _ in v] for k, v in fastest.items()
    }
    blocks = {
        (op, bound): tuned.cluster_blocks(op, c.options)
        for (_, op), lines in shared.items()
        for bound, c in lines
        if c.is_cuda
    }
    assert blocks and max(blocks.values()) <= tuned.SHARED_BLOCKS
    assert tuned.cluster_blocks("linear_4096", {"kb": 2, "tokens": 16}) == 16
    assert tuned.cluster_blocks("gate", {"tokens": 8, "few": 1}) == 16


def test_a_process_can_take_the_shared_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuned.ENVIRONMENT, "shared")  # and restored after the test
    monkeypatch.delenv(tuned.ENVIRONMENT)
    try:
        tuned.use_shared()
        assert tuned.choice("sm_90", "gate", 1) == tuned.TRITON
    finally:
        monkeypatch.undo()
        tuned._table.cache_clear()
