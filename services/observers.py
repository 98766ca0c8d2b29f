"""Prometheus and Grafana as optional programs of a set, for whoever has them installed.

``observability.prometheus`` and ``observability.grafana`` name the commands; empty: not started.
Both listen on loopback only; their files are written into the run directory at every start, their
data stays there.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from decant.protocol.config import Config
from decant.protocol.errors import ConfigError

FOLDER = Path(__file__).resolve().parents[1] / "supervisord"
HOST = "127.0.0.1"
RETENTION = "15d"


@dataclass(frozen=True)
class Observer:
    """A program that is not ours."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


def find(setting: str, command: str) -> str:
    """The absolute path of a command. Raises: ConfigError."""
    found = shutil.which(command)
    if found is None:
        raise ConfigError(
            f"{setting} names {command!r}, which is not an executable: install it"
            " (Debian's package prometheus, a release of Grafana) or leave the setting empty"
        )
    return os.path.abspath(found)


def observers(config: Config) -> list[Observer]:
    """What is to be started beside the set. Raises: ConfigError for a command that is missing."""
    settings, run_dir = config.observability, config.run_dir
    result = []
    if settings.prometheus:
        command = (
            find("observability.prometheus", settings.prometheus),
            f"--config.file={run_dir}/prometheus/prometheus.yml",
            f"--storage.tsdb.path={run_dir}/prometheus/data",
            f"--storage.tsdb.retention.time={RETENTION}",
            f"--web.listen-address={HOST}:{settings.prometheus_port}",
            "--log.level=warn",
        )
        result.append(Observer("prometheus", command))
    if settings.grafana:
        program = find("observability.grafana", settings.grafana)
        home = settings.grafana_home or str(Path(program).resolve().parents[1])
        words = [program, *(["server"] if Path(program).name == "grafana" else [])]
        environment = {
            "GF_PATHS_PROVISIONING": f"{run_dir}/grafana/provisioning",
            "GF_PATHS_DATA": f"{run_dir}/grafana/data",
            "GF_PATHS_LOGS": f"{run_dir}/grafana/logs",
            "GF_SERVER_HTTP_ADDR": HOST,
            "GF_SERVER_HTTP_PORT": str(settings.grafana_port),
            "GF_AUTH_ANONYMOUS_ENABLED": "true",  # on loopback, to look only
            "GF_ANALYTICS_REPORTING_ENABLED": "false",
            "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
        }
        result.append(Observer("grafana", (*words, "--homepath", home), environment))
    return result


def write(config: Config) -> None:
    """Their files in the run directory."""
    settings, gateway = config.observability, config.gateway
    run_dir = Path(config.run_dir)
    if settings.prometheus:
        folder = run_dir / "prometheus"
        folder.mkdir(mode=0o700, exist_ok=True)
        host = {"0.0.0.0": HOST, "::": HOST}.get(gateway.host, gateway.host)
        host = f"[{host}]" if ":" in host else host
        text = (FOLDER / "prometheus" / "prometheus.yml").read_text()
        text = text.replace("{target}", f"{host}:{gateway.port}")
        if gateway.keys_file:
            key = folder / "key"
            words = Path(gateway.keys_file).read_text().split()
            key.unlink(missing_ok=True)
            key.touch(mode=0o600)
            key.write_text(words[0] if words else "")
            text += f'    authorization: {{credentials_file: "{key}"}}\n'
        (folder / "prometheus.yml").write_text(text)
        shutil.copy(FOLDER / "prometheus" / "rules.yml", folder / "rules.yml")
    if settings.grafana:
        url = f"http://{HOST}:{settings.prometheus_port}"
        for kind, name, value in (
            ("datasources", "datasource.yml", url),
            ("dashboards", "dashboards.yml", str(FOLDER / "grafana")),
        ):
            folder = run_dir / "grafana" / "provisioning" / kind
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            text = (FOLDER / "grafana" / "provisioning" / name).read_text()
            (folder / "decant.yml").write_text(
                text.replace("{url}", value).replace("{folder}", value)
            )
