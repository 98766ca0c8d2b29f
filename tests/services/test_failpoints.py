"""The grammar of failpoints, and that each fires when it should."""

from __future__ import annotations

from pathlib import Path

import pytest

from decant.services import failpoints
from decant.services.failpoints import Action, parse, parse_action


def test_actions() -> None:
    assert parse_action("kill") == Action("kill")
    assert parse_action("sleep=0.5@3") == Action("sleep", 0.5, 3)
    assert parse_action("exit?77") == Action("exit", mark=77)
    assert parse("a.b:kill@2 c:raise") == {"a.b": Action("kill", number=2), "c": Action("raise")}
    with pytest.raises(ValueError, match="no known action"):
        parse_action("explode")


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(failpoints, "IS_ON", True)
    failpoints._passed.clear()
    return monkeypatch


def test_the_nth_pass_and_the_mark(on: pytest.MonkeyPatch) -> None:
    on.setattr(failpoints, "_points", parse("a:raise@2 b:raise?7"))
    failpoints.hit("a")
    with pytest.raises(RuntimeError):
        failpoints.hit("a")
    failpoints.hit("a")
    failpoints.hit("b", [1, 2])
    with pytest.raises(RuntimeError):
        failpoints.hit("b", [1, 7])


def test_a_file_fires_once(on: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on.setattr(failpoints, "_folder", str(tmp_path))
    failpoints.hit("a")
    (tmp_path / "a").write_text("raise@2")
    failpoints.hit("a")
    with pytest.raises(RuntimeError):
        failpoints.hit("a")
    assert not (tmp_path / "a").exists()
    failpoints.hit("a")
    (tmp_path / "a").write_text("nonsense")
    failpoints.hit("a")


def test_messages_are_lost_or_held(on: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on.setattr(failpoints, "_points", parse("all:drop=1 none:drop=0 held:stall=1"))
    assert failpoints.fate("all") is None and failpoints.fate("none") == 0.0
    assert failpoints.fate("else") == 0.0
    held_s = failpoints.fate("held")
    assert held_s is not None and 0.2 <= held_s <= 2.0
    on.setattr(failpoints, "_folder", str(tmp_path))
    on.setattr(failpoints, "_seen", {})
    (tmp_path / "link.send").write_text("drop=1")
    assert [failpoints.fate("link.send") for _ in range(3)] == [None] * 3
    (tmp_path / "link.send").unlink()
    on.setattr(failpoints, "_seen", {})
    assert failpoints.fate("link.send") == 0.0
