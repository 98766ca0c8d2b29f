"""Dashboards and alert rules: current, in Grafana's conventions, and the rules do what they say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from decant.services import grafana

FOLDER = Path(__file__).parents[2] / "supervisord"
RULES = FOLDER / "prometheus" / "rules.yml"


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.mark.parametrize("name", grafana.DASHBOARDS)
def test_dashboards_are_current(name: str) -> None:
    path = FOLDER / "grafana" / f"{name}.json"
    assert path.read_text() == grafana.text(name), (
        "run: python -P -m decant.services.grafana supervisord/grafana"
    )


@pytest.mark.parametrize("name", grafana.DASHBOARDS)
def test_conventions(name: str) -> None:
    """No id of one Grafana, the data source by variable, a fixed schema, panels that do not
    overlap and that are told apart.
    """
    board = json.loads((FOLDER / "grafana" / f"{name}.json").read_text())
    assert "id" not in board and board["uid"] == f"decant-{name}"
    assert board["schemaVersion"] == grafana.SCHEMA_VERSION
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        assert panel["datasource"]["uid"] == "${DS_PROMETHEUS}"
        at = panel["gridPos"]
        own = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not own & cells and at["x"] + at["w"] <= grafana.WIDTH
        cells |= own
        for target in panel["targets"]:
            assert grafana.metrics_of(target["expr"])
    titles = [panel["title"] for panel in board["panels"]]
    assert len(titles) == len(set(titles))


def test_every_rule_says_what_to_do() -> None:
    for rule in rules():
        assert re.fullmatch(r"Decant[A-Z]\w+", rule["alert"])
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"] and rule["annotations"]["fix"]
        assert grafana.metrics_of(rule["expr"])


def test_every_rule_is_tested() -> None:
    """rules_test.yml names each alert; those that it names as firing do fire under promtool."""
    tests = yaml.safe_load((FOLDER / "prometheus" / "rules_test.yml").read_text())["tests"]
    named = {case["alertname"] for test in tests for case in test["alert_rule_test"]}
    assert {rule["alert"] for rule in rules()} == named


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not on PATH")
def test_rules_under_promtool() -> None:
    for words in (["check", "rules", "rules.yml"], ["test", "rules", "rules_test.yml"]):
        done = subprocess.run(
            ["promtool", *words], cwd=FOLDER / "prometheus", capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_brackets_of_queries_match() -> None:
    """What a parser would say first, where promtool is missing."""
    queries = [rule["expr"] for rule in rules()]
    for name in grafana.DASHBOARDS:
        for panel in grafana.dashboard(name)["panels"]:
            queries += [target["expr"] for target in panel["targets"]]
    for query in queries:
        bare = re.sub(r'"[^"]*"', '""', query)
        stack = []
        for sign in bare:
            if sign in "([{":
                stack.append(sign)
            elif sign in ")]}":
                assert stack and stack.pop() + sign in ("()", "[]", "{}"), query
        assert not stack, query


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd here")
def test_the_systemd_unit(tmp_path: Path) -> None:
    """systemd knows every line of it; only the command of the example is not there."""
    unit = tmp_path / "decant.service"
    text = (FOLDER / "decant.service").read_text()
    assert text.count("/srv/decant/.venv/bin/decant ") == 2
    unit.write_text(text.replace("/srv/decant/.venv/bin/decant ", "/bin/true "))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "decant.service" not in done.stderr, done.stderr
