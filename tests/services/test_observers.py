"""Prometheus and Grafana beside a set: files, commands, and a real Prometheus if there is one."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from decant.protocol.config import Config, GatewayConfig, ObservabilityConfig
from decant.protocol.errors import ConfigError
from decant.services import observers, preflight, supervisor


def config_of(run_dir: Path, **settings: Any) -> Config:
    return Config(run_dir=str(run_dir), observability=ObservabilityConfig(**settings))


@pytest.fixture
def tool(tmp_path: Path) -> str:
    path = tmp_path / "share" / "bin" / "grafana"
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_nothing_is_started_unasked(tmp_path: Path) -> None:
    assert observers.observers(config_of(tmp_path)) == []
    observers.write(config_of(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_missing_command_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"observability\.grafana names 'nowhere'"):
        observers.observers(config_of(tmp_path, grafana="nowhere"))


def test_files(tmp_path: Path, tool: str) -> None:
    """The scrape job keeps the page's labels and has the key; Grafana finds source and boards."""
    keys = tmp_path / "keys"
    keys.write_text("secret-one\nsecret-two\n")
    config = replace(
        config_of(tmp_path, prometheus=tool, grafana=tool),
        gateway=GatewayConfig(host="0.0.0.0", port=8123, keys_file=str(keys)),
    )
    observers.write(config)
    (job,) = yaml.safe_load((tmp_path / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert job["honor_labels"] is True
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8123"]}]
    key = Path(job["authorization"]["credentials_file"])
    assert key.read_text() == "secret-one" and key.stat().st_mode & 0o077 == 0
    folder = tmp_path / "grafana/provisioning"
    (source,) = yaml.safe_load((folder / "datasources/decant.yml").read_text())["datasources"]
    assert source["url"] == "http://127.0.0.1:9090"
    (boards,) = yaml.safe_load((folder / "dashboards/decant.yml").read_text())["providers"]
    assert len(list(Path(boards["options"]["path"]).glob("*.json"))) == 5


def test_programs(tmp_path: Path, tool: str) -> None:
    config = config_of(tmp_path, grafana=tool, grafana_port=3456)
    program = supervisor.programs(config)[-1]
    home = str(Path(tool).parents[1])
    assert program.command == (tool, "server", "--homepath", home)
    assert program.environment["GF_SERVER_HTTP_PORT"] == "3456"
    assert program.environment["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    text = supervisor.render(config, "password")
    assert f"command={tool} server --homepath {home}" in text
    assert 'GF_SERVER_HTTP_PORT="3456"' in text


def test_files_are_in_the_package() -> None:
    names = {p.name for p in (observers.FOLDER / "prometheus").iterdir()}
    assert {"prometheus.yml", "rules.yml"} <= names
    assert preflight.profiles()


@pytest.mark.skipif(not shutil.which("prometheus"), reason="prometheus is not on PATH")
def test_a_real_prometheus_scrapes_the_page(tmp_path: Path) -> None:
    """It loads the rules, keeps svc and instance, and sends the key."""
    asked: list[str] = []

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers.get("Authorization", ""))
            text = b'# TYPE decant_up gauge\ndecant_up{svc="decode",instance="decode-0"} 1\n'
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            pass

    page = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    Thread(target=page.serve_forever, daemon=True).start()
    keys = tmp_path / "keys"
    keys.write_text("secret-one\n")
    port = preflight.free_port("127.0.0.1")
    config = replace(
        config_of(tmp_path, prometheus="prometheus", prometheus_port=port),
        gateway=GatewayConfig(port=page.server_port, keys_file=str(keys)),
    )
    observers.write(config)
    (program,) = observers.observers(config)

    def ask(path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}", timeout=5) as answer:
            return json.load(answer)["data"]

    with subprocess.Popen(program.command, stderr=subprocess.DEVNULL) as process:
        try:
            found: list[Any] = []
            end = time.monotonic() + 40
            while not found and time.monotonic() < end:
                time.sleep(0.5)
                try:
                    found = ask("query?query=decant_up")["result"]
                except OSError:
                    continue
            assert found, "nothing was scraped"
            metric = found[0]["metric"]
            assert (metric["svc"], metric["instance"]) == ("decode", "decode-0")
            rules = [r["name"] for g in ask("rules")["groups"] for r in g["rules"]]
            assert "DecantProcessDown" in rules
            assert set(asked) == {"Bearer secret-one"}
        finally:
            process.terminate()
            process.wait(20)
            page.shutdown()
