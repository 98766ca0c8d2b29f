"""What the terminal shows: live progress while a run lasts, then a table. Only formatting."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from decant.loadgen import metrics
from decant.loadgen import plan as messages

LATENCIES = (
    ("ttft", "TTFT"),
    ("ttft_from_due", "TTFT from due time"),
    ("tpot", "TPOT"),
    ("itl", "ITL"),
    ("e2e", "E2E"),
    ("longest_stall", "longest stall"),
    ("lateness", "own lateness"),
)
DELIVERY = "each token batch: step to socket"  # medians of the requests
RECENT = 2000


class Live:
    """A progress line; ``update`` takes a worker's report. Without a terminal: silent."""

    def __init__(self, num: int, console: Console, label: str = "") -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[line]}"),
            console=console,
            refresh_per_second=4,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(label or "load", total=num, line="")
        self._latest: dict[int, messages.Progress] = {}
        self._ttft: deque[int] = deque(maxlen=RECENT)
        self._late: deque[int] = deque(maxlen=RECENT)
        self._tokens: deque[tuple[float, int]] = deque(maxlen=20)

    def __enter__(self) -> Live:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def update(self, number: int, progress: messages.Progress) -> None:
        self._latest[number] = progress
        self._ttft.extend(progress.ttft_ns)
        self._late.extend(progress.late_ns)
        all_ = self._latest.values()
        tokens = sum(p.num_tokens for p in all_)
        now = time.monotonic()
        self._tokens.append((now, tokens))
        then, before = self._tokens[0]
        rate = (tokens - before) / (now - then) if now > then else 0.0
        ttft = metrics.percentile(self._ttft, 50)
        late = metrics.percentile(self._late, 99)
        parts = [f"{sum(p.num_in_flight for p in all_)} in flight", f"{rate:,.0f} tok/s"]
        if ttft is not None:
            parts.append(f"TTFT p50 {ttft / 1e6:,.1f} ms")
        if late is not None:
            parts.append(f"late p99 {late / 1e6:.2f} ms")
        if failed := sum(p.num_failed for p in all_):
            parts.append(f"[red]{failed} failed[/red]")
        self._bar.update(self._task, completed=sum(p.num_done for p in all_), line="  ".join(parts))


def number(value: float | None, digits: int = 1) -> str:
    """A figure for people; a dash for none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def short(value: float) -> str:
    """About four digits, so that a row fits into 80 columns."""
    return number(value, 2 if value < 100 else 1 if value < 1000 else 0)


def show(summary: dict[str, Any], console: Console) -> None:
    """The run's tables."""
    requests = summary["requests"]
    counts = Table(title="decant bench", show_header=False, title_justify="left")
    rows: list[tuple[str, str]] = [
        (
            "requests",
            ", ".join(f"{count} {name}" for name, count in requests.items() if count),
        ),
        ("duration", f"{summary['duration_s']:.2f} s"),
        ("offered load", f"{number(summary['offered_rate'], 2)} requests/s"),
        ("throughput", f"{number(summary['request_throughput'], 2)} requests/s"),
        ("output tokens", f"{number(summary['output_token_throughput'])} tok/s"),
        ("all tokens", f"{number(summary['total_token_throughput'])} tok/s"),
        ("mean in flight", number(summary["mean_concurrency"], 2)),
        ("prompt tokens", _range(summary["prompt_tokens"])),
        ("output tokens each", _range(summary["output_tokens"])),
    ]
    if summary["offered_rate"] is None:
        rows = [r for r in rows if r[0] != "offered load"]
    if "goodput" in summary:
        rows.append(("goodput", f"{number(summary['goodput'], 2)} requests/s within the SLO"))
        for name, slo in summary["slo"].items():
            share = number(100 * slo["attainment"] if slo["attainment"] is not None else None, 2)
            bounds = ", ".join(f"{k} {v:g}" for k, v in slo["bounds"].items())
            rows.append((f"SLO {name}", f"{share} % of {slo['requests']} ({bounds})"))
    for name, found in summary.get("acceptance", {}).items():
        rows.append(
            (
                f"acceptance, {name}",
                f"length {number(found['length'], 3)}, rate {number(found['rate'], 3)}",
            )
        )
    if "correctness" in summary:
        found = summary["correctness"]
        colour = "red" if found["different"] else "green"
        rows.append(
            (
                "correctness",
                f"[{colour}]{found['different']} of {found['checked']} answers differ from the "
                f"fault-free ones[/{colour}]",
            )
        )
    if "pages" in summary:
        leaked = summary["pages"]["leaked"]
        rows.append(
            ("page balance", "even" if leaked <= 0 else f"[red]{leaked:g} pages leaked[/red]")
        )
    for name, value in rows:
        counts.add_row(name, value)
    console.print(counts)
    columns = ("mean", "p50", "p90", "p95", "p99", "max")
    latency = Table("ms", *columns, title_justify="left")
    for key, title in LATENCIES:
        found = summary["latency_ms"].get(key)
        if found and found["count"]:
            latency.add_row(title, *(short(found[c]) for c in columns))
    for stage, found in summary.get("stages_ms", {}).items():
        latency.add_row(f"stage: {stage}", *(short(found[c]) for c in columns))
    delivery = summary.get("delivery_ms", {"count": 0})
    if delivery["count"]:
        latency.add_row(DELIVERY, *(short(delivery[c]) for c in columns))
    console.print(latency)
    for error in summary["errors"]:
        console.print(f"[red]{error['count']} x[/red] {error['error']}", markup=True)


def _range(found: dict[str, float]) -> str:
    if not found["count"]:
        return "no usage"
    return f"mean {found['mean']:.1f}, {found['min']:.0f} to {found['max']:.0f}"


def show_sweep(steps: list[dict[str, Any]], best: float, console: Console) -> None:
    """One line a step of the sweep."""
    table = Table(
        "requests/s", "attainment", "goodput", "TTFT p50", "TTFT p99", "TPOT p50", "tok/s", ""
    )
    for step in steps:
        found = step["summary"]
        latency = found["latency_ms"]
        table.add_row(
            f"{step['rate']:.3g}",
            number(found["slo_attainment"], 4),
            number(found["goodput"], 2),
            number(latency["ttft"].get("p50")),
            number(latency["ttft"].get("p99")),
            number(latency["tpot"].get("p50")),
            number(found["output_token_throughput"]),
            "within" if step["is_within"] else "beyond",
        )
    console.print(table)
    console.print(f"highest load within the SLO: [bold]{best:.3g}[/bold] requests/s")
