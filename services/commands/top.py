"""``decant top``: the running set in the terminal, once a second."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from decant.services import rundir
from decant.services.cli import NOT_RUNNING, OK
from decant.services.snapshot import Watcher
from decant.services.target import add_run_dir, run_dir_of

if TYPE_CHECKING:
    from rich.console import Group

BLOCKS = " ▁▂▃▄▅▆▇█"
COLOURS = {
    "active": "blue",
    "published": "magenta",
    "reserved": "yellow",
    "cached": "green",
    "quarantined": "red",
    "free": "bright_black",
}
WIDTH = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)
    add = parser.add_argument
    add("--once", action="store_true", help="print one picture and end")
    add("--json", action="store_true", help="one JSON object a line instead of a picture")
    add("--every", type=float, default=1.0, metavar="S", help="seconds between two pictures")


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def sparkline(values: list[float]) -> str:
    """Values as blocks of eight heights, the highest one full."""
    top = max(values, default=0.0)
    return "".join(BLOCKS[min(8, round(8 * v / top))] if top > 0 else " " for v in values)


def bar(parts: list[tuple[str, float]], width: int = WIDTH) -> str:
    """Coloured shares of a bar, in rich's markup."""
    sum_ = sum(v for _, v in parts) or 1.0
    cells, drawn, reached = [], 0, 0.0
    for name, value in parts:
        reached += value
        end = round(width * reached / sum_)
        cells.append(f"[{COLOURS.get(name, 'cyan')}]{'█' * (end - drawn)}[/]")
        drawn = end
    return "".join(cells)


def picture(s: dict[str, Any], tokens: list[float]) -> Group:
    """One screen."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    ready = "[green]ready[/]" if s["is_ready"] else f"[red]not ready[/] {escape(s['why'])}"
    clock = time.strftime("%H:%M:%S", time.localtime(s["at_s"]))
    rates, accepted = s["rates"], s["acceptance"]
    lines = [
        f"[bold]decant[/] {escape(s['model'])}  {ready}  {clock}",
        f"tokens/s [bold]{number(rates['output_tokens'])}[/] [cyan]{sparkline(tokens)}[/]",
        f"requests/s {number(rates['requests'], 2)}   open {number(s['http_active'], 0)}   "
        f"in the batch {number(s['running'], 0)}   queued {number(s['queued'], 0)}   "
        f"step {number(s['step_ms'])} ms   acceptance {number(accepted['length'], 2)} "
        + " ".join("-" if r is None else f"{100 * r:.0f}%" for r in accepted["by_position"]),
    ]
    latency = Table("ms", "p50", "p90", "p99", box=None, pad_edge=False)
    for name, q in s["latency_ms"].items():
        latency.add_row(name.upper(), *(number(q[f"p{p}"]) for p in (50, 90, 99)))
    stages = Table("stage", "mean ms", box=None, pad_edge=False)
    for name, value in s["stages_ms"].items():
        stages.add_row(name, number(value))
    faults = Table("since start", "", box=None, pad_edge=False)
    for name, value in s["faults"].items():
        faults.add_row(name, f"[red]{value:.0f}[/]" if value else "0")
    side = Table.grid(padding=(0, 4))
    side.add_row(latency, stages, faults)
    pages = Table.grid(padding=(0, 1))
    for instance, states in s["pages"].items():
        parts = [(n, states[n]) for n in COLOURS if states.get(n)]
        pages.add_row(instance, bar(parts), "  ".join(f"{v:.0f} {n}" for n, v in parts))
    processes = Table(
        *("process", "health", "pid", "up", "beat", "memory", "lag", ""), box=None, pad_edge=False
    )
    for p in s["processes"]:
        colour = "green" if p["health"] in ("healthy", "up") else "red"
        memory, lag, age = p.get("memory_bytes"), p.get("loop_lag_ms"), p.get("heartbeat_age_s")
        processes.add_row(
            p["instance"],
            f"[{colour}]{escape(p['health'])}[/]",
            str(p.get("pid") or "-"),
            "-" if p.get("uptime_s") is None else f"{p['uptime_s']:.0f} s",
            "-" if age is None else f"{age:.1f} s",
            "-" if memory is None else f"{memory / 1e6:.0f} MB",
            "-" if lag is None else f"{lag:.1f} ms",
            escape(p["why"]),
        )
    return Group(*lines, "", side, "", pages, "", processes)


async def watch(args: argparse.Namespace, watcher: Watcher) -> None:
    """Until interrupted, or once."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    tokens: deque[float] = deque(maxlen=WIDTH)

    async def next_snapshot() -> dict[str, Any]:
        snapshot = await watcher.collect()
        tokens.append(snapshot["rates"]["output_tokens"] or 0.0)
        return snapshot

    snapshot = await next_snapshot()
    if args.once:
        # rates need two looks
        await asyncio.sleep(min(args.every, 1.0))
        snapshot = await next_snapshot()
    if args.json:
        while True:
            print(json.dumps(snapshot), flush=True)
            if args.once:
                return
            await asyncio.sleep(args.every)
            snapshot = await next_snapshot()
    if args.once:
        console.print(picture(snapshot, list(tokens)))
        return
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            live.update(picture(snapshot, list(tokens)), refresh=True)
            await asyncio.sleep(args.every)
            snapshot = await next_snapshot()


def run(args: argparse.Namespace) -> int:
    run_dir = run_dir_of(args)
    if not (run_dir / "config.toml").exists() or not any(run_dir.glob("*.metrics")):
        print(f"no set runs in {run_dir}", file=sys.stderr)
        return NOT_RUNNING
    args.every = max(0.1, args.every)
    try:
        asyncio.run(watch(args, Watcher(rundir.read_config(run_dir))))
    except KeyboardInterrupt:
        return OK
    return OK
