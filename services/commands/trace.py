"""``decant trace RID``: what happened to a request, from the logs of all processes.

RID is the X-Request-Id of the answer, the id in its body, or a W3C trace id.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from decant.services.cli import FAILED, OK
from decant.services.target import add_run_dir, run_dir_of

NAMES = ("rid", "id", "trace")
HIDDEN = {*NAMES, "ts", "svc", "instance", "event", "level", "pid", "incarnation", "stages_ms"}
BAR = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)
    parser.add_argument("rid", help="request id or trace id (its beginning is enough)")
    parser.add_argument("--json", action="store_true", help="the log lines as they are, in order")


def lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Every JSON line of every log, the rotated ones too."""
    for path in sorted(folder.glob("*.log*")):
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("{"):
                    try:
                        found = json.loads(line)
                    except ValueError:
                        continue  # cut off by rotation or by a crash
                    if isinstance(found, dict) and "ts" in found:
                        yield found


def find(folder: Path, rid: str) -> list[dict[str, Any]]:
    """Lines of a request in the order of time. Names that stand on one line are one request."""
    everything = [e for e in lines(folder) if any(e.get(n) for n in NAMES)]
    wanted = {str(e[n]) for e in everything for n in NAMES if str(e.get(n, "")).startswith(rid)}
    # the gateway's line links its own id, the router's and the trace
    for event in everything:
        names = {str(event[n]) for n in NAMES if event.get(n)}
        if names & wanted:
            wanted |= names
    found = [e for e in everything if wanted & {str(e.get(n, "")) for n in NAMES}]
    return sorted(found, key=lambda e: str(e["ts"]))


def when(event: dict[str, Any]) -> float:
    """Seconds since the epoch."""
    return datetime.fromisoformat(str(event["ts"]).replace("Z", "+00:00")).timestamp()


def show(events: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table("ms", "process", "what", "", box=None, pad_edge=False)
    start = when(events[0])
    for event in events:
        more = " ".join(f"{k}={v}" for k, v in event.items() if k not in HIDDEN)
        colour = {"warning": "yellow", "error": "red"}.get(str(event.get("level")), "")
        what = escape(str(event.get("event")))
        table.add_row(
            f"{(when(event) - start) * 1e3:,.1f}",
            str(event.get("instance", "")),
            f"[{colour}]{what}[/{colour}]" if colour else what,
            escape(more),
        )
    console.print(table)
    stages: dict[str, float] = next(
        (e["stages_ms"] for e in reversed(events) if e.get("stages_ms")), {}
    )
    total = sum(stages.values())
    if total > 0:
        console.print()
        for name, took in stages.items():
            console.print(f"{name:>8} {took:10,.1f} ms  {'█' * round(BAR * took / total)}")


def run(args: argparse.Namespace) -> int:
    folder = run_dir_of(args) / "logs"
    events = find(folder, args.rid) if folder.is_dir() and args.rid else []
    if not events:
        print(f"no log in {folder} names {args.rid!r}", file=sys.stderr)
        return FAILED
    if args.json:
        for event in events:
            print(json.dumps(event))
    else:
        show(events)
    return OK
