"""Seeing the real set run: metrics of every panel and rule, the load generator, top."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from real_set import RealSet, decant

from decant.protocol.config import ObservabilityConfig
from decant.services import grafana, observers, panels, preflight

pytestmark = pytest.mark.e2e
RULES = Path(__file__).parents[2] / "supervisord" / "prometheus" / "rules.yml"


def page(real_set: RealSet, query: str = "") -> str:
    status, text = real_set.api.call("GET", f"/metrics{query}")
    assert status == 200 and isinstance(text, str)
    return text


def names_of(text: str) -> set[str]:
    """Every name that a query may use. A counter that has counted nothing yet has no sample, but
    its head says that it exists.
    """
    found = set()
    for family in text_string_to_metric_families(text):
        found.add(family.name)
        if family.type == "counter":
            found.add(f"{family.name}_total")
        if family.type == "histogram":
            found |= {f"{family.name}_{part}" for part in ("bucket", "sum", "count")}
    return found


def test_every_metric_of_panels_and_rules_exists(real_set: RealSet) -> None:
    hello = [{"role": "user", "content": "hello"}]
    real_set.api.chat(hello, lambda *_: None, model=real_set.model, max_tokens=8)
    known = names_of(page(real_set)) | {"ALERTS"}
    asked = {
        name: metric
        for name in grafana.DASHBOARDS
        for panel in grafana.dashboard(name)["panels"]
        for target in panel["targets"]
        for metric in grafana.metrics_of(target["expr"])
    }
    missing = {f"{board}: {metric}" for board, metric in asked.items() if metric not in known}
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            for metric in grafana.metrics_of(rule["expr"]) - known:
                missing.add(f"{rule['alert']}: {metric}")
    assert missing == set()


@pytest.mark.parametrize("compat", ["vllm", "sglang"])
def test_pages_for_other_dashboards_are_valid(real_set: RealSet, compat: str) -> None:
    text = page(real_set, f"?compat={compat}")
    families = [f.name for f in text_string_to_metric_families(text)]
    assert len(families) == len(set(families))
    assert f"{compat}:time_to_first_token_seconds" in families


def test_bench_explains_the_run(real_set: RealSet, tmp_path: Path) -> None:
    """Counts, stages, acceptance, correctness under load and the page balance."""
    path = tmp_path / "run.json"
    done = decant(
        *("bench", "--run-dir", str(real_set.run_dir), "--num", "6", "--rate", "2"),
        *("--input-len", "60", "--output-len", "16", "--ignore-eos", "--content", "code,prose"),
        *("--cancel-share", "0.2", "--check", "2", "--json", str(path)),
        *("--html", str(tmp_path / "run.html")),
    )
    assert done.returncode == 0, done.stdout + done.stderr + real_set.logs()
    found: dict[str, Any] = json.loads(path.read_text())
    requests = found["requests"]
    assert requests["ok"] + requests["cancelled"] == 6 and requests["without_usage"] == 0
    assert found["output_tokens"]["min"] == found["output_tokens"]["max"] == 16
    assert {"queue", "reserve", "prefill", "handoff", "decode"} <= set(found["stages_ms"])
    assert found["handoff_share_of_ttft"]["count"] == requests["ok"]
    assert found["delivery_ms"]["count"] == requests["ok"] and found["delivery_ms"]["min"] > 0
    assert found["acceptance"]["all"]["length"] >= 1
    assert found["correctness"] == {"checked": 2, "different": 0, "examples": []}
    assert found["pages"]["leaked"] == 0


FAULT_PANELS = {  # by labels of what went wrong: no sample where nothing did
    "pd-pipeline: Hand-offs that failed",
    "services-faults: Alerts",
    "services-faults: Messages that came too late or wrong",
    "services-faults: Processes killed by the router",
    "services-faults: Requests failed in the router",
    "services-faults: Resumes",
}


@pytest.mark.skipif(not shutil.which("prometheus"), reason="prometheus is not on PATH")
def test_a_real_prometheus_answers_every_panel_and_rule(real_set: RealSet, tmp_path: Path) -> None:
    """Scrape the set under load with the shipped job, ask what Grafana would ask, draw it."""
    port = preflight.free_port("127.0.0.1")
    settings = ObservabilityConfig(prometheus="prometheus", prometheus_port=port)
    config = replace(real_set.config, run_dir=str(tmp_path), observability=settings)
    observers.write(config)
    job = tmp_path / "prometheus" / "prometheus.yml"
    job.write_text(job.read_text().replace("_interval: 5s", "_interval: 1s"))
    (program,) = observers.observers(config)
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(program.command, stderr=subprocess.DEVNULL) as process:
        try:
            began = time.time()
            while time.time() < began + 12:  # rates need several scrapes while tokens flow
                real_set.chat("Sort these numbers: 7, 3, 9")
            (up,) = panels.ask(url, "query", query='up{job="decant"}')["result"]
            assert up["value"][1] == "1"
            processes = panels.ask(url, "query", query="decant_up")["result"]
            assert {"gateway-0", "decode-0", "prefill-0"} <= {
                p["metric"]["instance"] for p in processes
            }
            text, empty = panels.page(
                url, panels.Range(began, time.time(), "10s"), list(grafana.DASHBOARDS)
            )
            rules = panels.ask(url, "rules")["groups"]
        finally:
            process.terminate()
            process.wait(20)
    assert all(rule["health"] == "ok" for group in rules for rule in group["rules"])
    assert "http://" not in text and "<script" not in text
    missing = sorted(set(empty) - FAULT_PANELS)
    assert not missing, f"no data: {', '.join(missing)}"


def test_logs_survive_a_foreign_rotation(real_set: RealSet) -> None:
    """logrotate renames a log and sends SIGUSR2 to supervisord: lines go on in a new file, none is
    lost between, and ``decant trace`` reads both.
    """
    log = real_set.run_dir / "logs" / "gateway-0.log"
    moved = log.with_name("gateway-0.log.1")

    def lines(path: Path) -> int:
        return path.read_text().count('"event":"request"') if path.exists() else 0

    before = lines(log)
    log.rename(moved)
    real_set.chat("hello", max_tokens=4)  # still into the renamed file
    pid = int((real_set.run_dir / "supervisord.pid").read_text())
    os.kill(pid, signal.SIGUSR2)
    end = time.monotonic() + 20
    while not log.exists() and time.monotonic() < end:
        time.sleep(0.05)
    real_set.chat("hello", max_tokens=4)
    while lines(moved) + lines(log) < before + 2 and time.monotonic() < end:
        time.sleep(0.05)
    assert (lines(moved), lines(log)) == (before + 1, 1)
    assert log.stat().st_mode & 0o077 == 0


def test_top_shows_the_set(real_set: RealSet) -> None:
    done = decant("top", "--run-dir", str(real_set.run_dir), "--once", "--json")
    found = json.loads(done.stdout)
    assert found["is_ready"], found["why"]
    instances = {p["instance"] for p in found["processes"]}
    assert {"gateway-0", "tokenizer-0", "router", "prefill-0", "decode-0"} <= instances
    assert sum(found["pages"]["decode-0"].values()) == real_set.config.decode.pages
    text = decant("top", "--run-dir", str(real_set.run_dir), "--once").stdout
    assert "decode-0" in text and "ready" in text
