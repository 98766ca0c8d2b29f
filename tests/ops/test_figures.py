"""README's table of figures is what the files of docs/measurements say."""

from __future__ import annotations

import importlib.util
import json
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from decant.loadgen import cli as loadgen

ROOT = Path(__file__).resolve().parents[2]


def script(name: str) -> ModuleType:
    """A script of .ci as a module."""
    loader = SourceFileLoader(name, str(ROOT / ".ci" / name))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    return script("figures")


def test_readme_has_the_table_of_the_files(figures: ModuleType) -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count(figures.BEGIN) == text.count(figures.END) == 1
    part = text.split(figures.BEGIN)[1].split(figures.END)[0]
    assert part.strip() == figures.table().strip(), "python -P .ci/figures table"


@pytest.mark.parametrize("name", ["scores", "fidelity", "same"])
def test_demo_page_has_what_the_files_say(figures: ModuleType, name: str) -> None:
    text = (ROOT / "docs" / "demo-model.md").read_text()
    begin, end = getattr(figures, f"{name.upper()}_BEGIN"), getattr(figures, f"{name.upper()}_END")
    assert text.count(begin) == text.count(end) == 1
    part = text.split(begin)[1].split(end)[0]
    assert part.strip() == getattr(figures, name)().strip(), "python -P .ci/figures table"


def test_scores_of_two_files(figures: ModuleType, tmp_path: Path) -> None:
    skill = {"num": 10, "right": 9, "share": 0.9, "drafted": 8, "accepted": 6,
             "completion_tokens": 30, "steps": 12}  # fmt: skip
    for name, more in (("essential", {}), ("bonus", {"drafted": 0, "steps": 0})):
        row = {"skill": name, **skill, **more, "positions": {"1": [len(name), 5]}}
        run = {"skills": [row], "acceptance_by_position": {"1": 0.75}}
        (tmp_path / f"eval-{name}.json").write_text(json.dumps(run))
    text = figures.scores(tmp_path)
    assert (
        "| essential | 9 | 10 | 90.0% | 75.0% | 2.50 |\n| bonus | 9 | 10 | 90.0% | - | - |" in text
    )
    assert "position 1: 75.0% (the others; `eval-bonus.json`)" in text
    assert (
        "On the mix of both files (rows that count by position): position 1: 71.4%." in text
    )  # 10 of 9 + 5
    assert text.endswith("Below their aim: essential (90.0%), bonus (90.0%).")


def test_runs_of_eval_are_merged(figures: ModuleType, tmp_path: Path) -> None:
    into, other = tmp_path / "a.json", tmp_path / "b.json"
    head = {"model": "m", "seed": 0}
    few, many = (
        {"skill": "add", "num": 50},
        {"skill": "add", "num": 200, "positions": {"1": [4, 3]}},
    )
    into.write_text(json.dumps({**head, "skills": [few], "acceptance_by_position": {"1": 0.5}}))
    sub = {"skill": "sub", "num": 10, "positions": {"1": [4, 1], "2": [2, 2]}}
    other.write_text(json.dumps({**head, "temperature": 0.0, "skills": [many, sub]}))
    figures.merge(into, [other])
    table = json.loads(into.read_text())
    assert table["skills"] == [many, sub]
    assert table["acceptance_by_position"] == {"1": 0.5, "2": 1.0}
    other.write_text(json.dumps({**head, "skills": [few]}))
    figures.merge(into, [other])  # fewer prompts: the larger count stays
    assert json.loads(into.read_text())["skills"] == [many, sub]
    other.write_text(json.dumps({**head, "seed": 1, "skills": [few]}))
    with pytest.raises(ValueError, match="b.json"):
        figures.merge(into, [other])


def test_fidelity_and_same_answers(figures: ModuleType, tmp_path: Path) -> None:
    row = {"answers": 20, "share": 0.95, "perplexity": 1.01, "perplexity_of_all_tokens": 7.5}
    skills = {"add": {"served": row, "simulated": {**row, "share": 0.9}}}
    (tmp_path / "fidelity.json").write_text(json.dumps({"skills": skills}))
    line = figures.fidelity(tmp_path).splitlines()[-1]
    assert line == "| add | 20 | 95.0%, 90.0%, - | 1.0100, 1.0100, - | 7.500, 7.500, - |"
    assert figures.same(tmp_path) == "Not measured yet."
    settings = {"two ranks": {"different": 0, "different_asked_again": 1,
                              "cached_tokens_asked_again": 2560}}  # fmt: skip
    (tmp_path / "same-answers.json").write_text(json.dumps({"prompts": 9, "settings": settings}))
    assert figures.same(tmp_path).splitlines()[-1] == "| two ranks | 0 | 1 | 9 | 2,560 |"


def test_the_commands_are_valid(figures: ModuleType) -> None:
    """Every command of a file parses, and needs no file of its own."""
    import argparse

    for name, (kind, words) in figures.COMMANDS.items():
        assert kind in figures.UP, name
        parser = argparse.ArgumentParser()
        loadgen.add_arguments(parser)
        args = parser.parse_args(words.split())
        loadgen._options(args)


def test_what_the_server_did_meanwhile(figures: ModuleType) -> None:
    """Two steps of 10 ms on average and half a core for 4 s; what stood still is left out."""
    step, draft = "decant_step_seconds", "decant_draft_wait_seconds"
    cpu = f"{figures.CPU} decode-0"
    before = {"time": 10.0, f"{step}_sum": 1.0, f"{step}_count": 50.0, cpu: 3.0,
              f"{draft}_sum": 0.5, f"{draft}_count": 9.0}  # fmt: skip
    after = {**before, "time": 14.0, f"{step}_sum": 1.02, f"{step}_count": 52.0, cpu: 5.0}
    assert figures.served(before, after) == {
        "times": {"engine_step": {"count": 2, "mean_ms": 10.0}},
        "busy_cores": {"decode-0": 0.5},
    }


def test_table_of_a_measured_machine(figures: ModuleType, tmp_path: Path) -> None:
    machine = {"cores": 2, "cpu": "C", "torch": "2", "date": "2026-01-02T03:04+00:00",
               "commit": "abc"}  # fmt: skip
    runs: dict[str, dict[str, Any]] = {
        "one-stream": {"output_token_throughput": 61.4, "delivery_ms": {"p50": 1.44}},
        "sixteen-streams": {"output_token_throughput": 300, "delivery_ms": {"p50": 2.66}},
        "ttft": {"latency_ms": {"ttft": {"p50": 123.4}}},
        "idle": {"rss_bytes": 1_250_000_000, "idle_cores": 0.041},
        "eval-essential": {
            "num": 10,
            "skills": [
                {"skill": "add", "num": 10, "share": 1.0},
                {"skill": "sub", "num": 10, "share": 0.9},
            ],
            "acceptance_by_position": {"2": 0.8, "1": 0.9},
        },
    }
    for name, run in runs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"machine": machine, **run}))
    table = figures.table(tmp_path)
    assert table.startswith("On 2 cores of C, torch 2, 2026-01-02, commit abc:")
    cells = {row.split("|")[1].strip(): row.split("|")[2].strip() for row in table.splitlines()
             if row.startswith("| ")}  # fmt: skip
    assert cells["one stream, two drafts a step"] == "61 tok/s"
    assert cells["one stream without speculation"] == figures.NONE
    assert cells["TTFT p50, prompts of 100 tokens"] == "123 ms"
    name = "tokenizer and gateway add to a token batch, p50: one stream, 16 streams"
    assert cells[name] == "1.4 ms, 2.7 ms"
    (tmp_path / "sixteen-streams.json").unlink()
    runs["sixteen-streams"]["machine"] = {**machine, "other_cores": 1.25}
    (tmp_path / "sixteen-streams-busy.json").write_text(json.dumps(runs["sixteen-streams"]))
    assert "1.4 ms, 2.7 ms (other work kept 1.2 cores busy)" in figures.table(tmp_path)
    assert cells["memory of all processes"] == "1.25 GB"
    assert cells["processor time when idle"] == "4.1% of a core"
    assert cells["drafts accepted at position 1, 2"] == "90.0%, 80.0%"
    assert cells["right answers"].startswith("95.0% of 2 skills")
    assert "worst 90.0% (sub)" in cells["right answers"]


def test_plots_of_the_report_are_those_of_the_files() -> None:
    """Each is there, current, shown in the report, and needs nothing from outside."""
    plots = script("plots")
    report = (ROOT / "docs" / "report.md").read_text()
    assert plots.with_tables(report) == report, "python -P .ci/plots"
    for name in plots.PLOTS:
        if f"plots/{name}.svg" not in report:
            continue
        path = ROOT / "docs" / "plots" / f"{name}.svg"
        made = plots.text(name)
        assert made, f"{name}: measurements are missing"
        assert path.read_text(encoding="utf-8") == made, "python -P .ci/plots"
        assert f"plots/{name}.svg" in report
        ElementTree.fromstring(made)
        assert "http" not in made.replace("http://www.w3.org/2000/svg", "")
