"""``decant status``: processes as supervisord sees them, readiness as the router does."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from decant.protocol.config import Config
from decant.services import rundir
from decant.services.cli import NOT_READY, NOT_RUNNING, OK
from decant.services.client import Api, ApiError, unix_get
from decant.services.exits import read_exits
from decant.services.supervisor import SupervisorClient
from decant.services.target import add_run_dir, key_of, run_dir_of, url_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def rss_bytes(pid: int) -> int:
    """Resident set of a process and its children; 0 if it is gone."""
    import psutil

    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        return sum(p.memory_info().rss for p in family)
    except psutil.Error:
        return 0


def collect(config: Config) -> dict[str, Any]:
    """Everything that ``--json`` prints. Raises: OSError if supervisord does not answer."""
    infos = SupervisorClient(config.run_dir).processes()
    exits = read_exits(config.run_dir)
    rows = [
        {
            "name": info["name"],
            "state": info["statename"].lower(),
            "pid": info["pid"],
            "up_s": max(0, info["now"] - info["start"]) if info["pid"] else 0,
            "rss_bytes": rss_bytes(info["pid"]) if info["pid"] else 0,
            "ends": sum(e.name == info["name"] for e in exits),
            "last_end": next((e.reason for e in reversed(exits) if e.name == info["name"]), ""),
        }
        for info in infos
    ]
    api = Api(url_of(config), key_of(config), timeout_s=5.0)
    result: dict[str, Any] = {
        "run_dir": config.run_dir,
        "profile": config.profile,
        "model": config.model.served_name,
        "url": url_of(config),
        "processes": rows,
        "is_ready": False,
        "ready": {},
    }
    with suppress(ApiError, ValueError):
        state = json.loads(unix_get(config.metrics_path("router"), "/state"))
        result["requests"], result["pages"] = state.get("requests"), state.get("pages")
    try:
        status, body = api.call("GET", "/ready")
        result["is_ready"], result["ready"] = status == 200, body
    except ApiError as error:
        result["ready"] = {"why": error.message}
    return result


def run(args: argparse.Namespace) -> int:
    run_dir = run_dir_of(args)
    config = rundir.read_config(run_dir) if (run_dir / "config.toml").exists() else None
    try:
        result = collect(config) if config else None
    except OSError:
        result = None
    if result is None:
        print(json.dumps({"run_dir": str(run_dir), "processes": [], "is_ready": False})
              if args.json else f"no set runs in {run_dir}")  # fmt: skip
        return NOT_RUNNING
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return OK if result["is_ready"] else NOT_READY


def show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("process", "state", "pid", "up", "memory", "ends", "last end"):
        table.add_column(
            name, justify="right" if name in ("pid", "up", "memory", "ends") else "left"
        )
    for row in result["processes"]:
        up = time.strftime("%H:%M:%S", time.gmtime(row["up_s"])) if row["pid"] else "-"
        memory = f"{row['rss_bytes'] / 1e6:.0f} MB"
        pid = str(row["pid"] or "-")
        table.add_row(row["name"], row["state"], pid, up, memory, str(row["ends"]), row["last_end"])
    console = Console()
    console.print(table)
    total = sum(row["rss_bytes"] for row in result["processes"])
    word = "ready" if result["is_ready"] else "not ready"
    print(f"\n{result['model']} at {result['url']}: {word}; {total / 1e6:.0f} MB in all")
    if not result["is_ready"]:
        why = result["ready"].get("why") if isinstance(result["ready"], dict) else result["ready"]
        print(f"missing: {why}")
    for name in ("requests", "pages"):
        if counts := {k: v for k, v in (result.get(name) or {}).items() if v}:
            print(f"{name}: " + ", ".join(f"{v:.0f} {k}" for k, v in counts.items()))
    print(f"logs: {Path(result['run_dir']) / 'logs'}")
