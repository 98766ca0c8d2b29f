"""The panels of the Grafana dashboards, drawn from a Prometheus without Grafana.

    python -P -m decant.services.panels --prometheus http://127.0.0.1:9090 --out panels.html

Asks Prometheus what Grafana would ask and draws the answers where Grafana would put them: shows
that each query is valid and what a panel looks like with real data, not how Grafana looks. The page
is one file without outside assets.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from decant.loadgen import charts
from decant.loadgen.charts import Series
from decant.services import grafana

POINTS = 120  # of a panel's width
TIMEOUT_S = 20.0
STYLE = """
body{font:13px/1.4 system-ui,sans-serif;margin:16px auto;max-width:1500px;color:#1c2126}
h1{font-size:19px;margin:26px 0 8px}
.board{display:grid;grid-template-columns:repeat(24,1fr);gap:8px}
.board>div{border:1px solid #d9dee3;border-radius:5px;padding:6px 8px;min-width:0}
h2{font-size:12.5px;margin:0 0 3px;font-weight:600}.stat{font-size:24px;text-align:center}
.none{color:#67717b}figure{margin:0}figcaption{display:none}svg{width:100%;height:auto}
svg text{font-size:12px;fill:#67717b}svg .grid{stroke:#e3e7eb;stroke-width:.7}
.legend span{font-size:11px;margin-right:9px;color:#67717b}
.legend i{display:inline-block;width:8px;height:8px;border-radius:2px;margin-right:3px}
td{padding:1px 8px 1px 0;font-variant-numeric:tabular-nums}
"""
UNITS = {  # Grafana's unit: (factor, what stands behind the figure)
    "s": (1e3, "ms"),
    "percentunit": (100.0, "%"),
    "bytes": (1 / (1 << 20), "MiB"),
    "Bps": (1e-6, "MB/s"),
    "reqps": (1.0, "a second"),
}


class QueryFailed(Exception):
    """Prometheus did not answer, or refused the query; the text says which and why."""


@dataclass(frozen=True)
class Range:
    """Seconds since the epoch, and the window of rates."""

    start: float
    end: float
    window: str

    @property
    def step(self) -> float:
        return max(1.0, (self.end - self.start) / POINTS)


def query_of(expression: str, window: str) -> str:
    """A panel's expression with Grafana's variables filled in: all instances."""
    return expression.replace("$__rate_interval", window).replace("$instance", ".*")


def ask(prometheus: str, path: str, **fields: str | float) -> Any:
    """``data`` of an answer of Prometheus' HTTP API. Raises: QueryFailed."""
    url = f"{prometheus.rstrip('/')}/api/v1/{path}?{urllib.parse.urlencode(fields)}"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        text = error.read().decode("utf-8", "replace")[:400]
        raise QueryFailed(f"{fields.get('query', path)}: {error.code} {text}") from error
    except (OSError, ValueError, KeyError) as error:
        raise QueryFailed(f"{prometheus} does not answer: {error}") from error


def legend(form: str, labels: Mapping[str, str]) -> str:
    """Grafana's legend: ``{{label}}`` filled in; ``__auto`` names the labels, if there are any."""
    if form == "__auto":
        return ", ".join(v for k, v in labels.items() if k != "__name__")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), form)


def series_of(prometheus: str, target: Mapping[str, Any], when: Range) -> list[Series]:
    """The lines of one query; NaN (a rate of nothing) is left out. Raises: QueryFailed."""
    query = query_of(target["expr"], when.window)
    found = ask(
        prometheus, "query_range", query=query, start=when.start, end=when.end, step=when.step
    )
    result = []
    for line in found["result"]:
        points = [(float(t) - when.start, float(v)) for t, v in line["values"]]
        points = [p for p in points if math.isfinite(p[1])]
        if points:
            result.append(Series(legend(target["legendFormat"], line["metric"]), points))
    return result


def _panel(panel: Mapping[str, Any], lines: Sequence[Series]) -> str:
    factor, unit = UNITS.get(panel["fieldConfig"]["defaults"]["unit"], (1.0, ""))
    lines = [Series(s.name, [(x, y * factor) for x, y in s.points]) for s in lines]
    at = panel["gridPos"]
    if not lines:
        inside = '<div class="none">no such event in this time</div>'
    elif panel["type"] == "stat":
        inside = f'<div class="stat">{lines[0].points[-1][1]:,.4g} {unit}</div>'
    elif panel["type"] in ("bargauge", "table"):
        cells = (
            f"<tr><td>{escape(s.name)}</td><td>{s.points[-1][1]:,.4g} {unit}</td></tr>"
            for s in lines
        )
        inside = f"<table>{''.join(cells)}</table>"
    else:
        inside = charts.plot(panel["title"], lines[: len(charts.COLOURS)], "seconds", unit)
    return (
        f'<div style="grid-column:{at["x"] + 1}/span {at["w"]}">'
        f"<h2>{escape(panel['title'])}</h2>{inside}</div>"
    )


def page(prometheus: str, when: Range, names: Sequence[str]) -> tuple[str, list[str]]:
    """The HTML page, and the titles of panels without data. Raises: QueryFailed."""
    parts, empty = [], []
    for name in names:
        board = grafana.dashboard(name)
        cells = []
        for panel in board["panels"]:
            lines = [s for t in panel["targets"] for s in series_of(prometheus, t, when)]
            cells.append(_panel(panel, lines))
            if not lines:
                empty.append(f"{name}: {panel['title']}")
        parts.append(f'<h1>{escape(board["title"])}</h1><div class="board">{"".join(cells)}</div>')
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>decant: panels</title>'
        f"<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    ), empty


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add = parser.add_argument
    add("--prometheus", default="http://127.0.0.1:9090", help="its address")
    add("--out", type=Path, required=True, help="the HTML page")
    add("--minutes", type=float, default=5.0, help="how far back")
    add("--window", default="1m", help="of rates; Grafana takes four scrape intervals")
    add("--board", action="append", choices=list(grafana.DASHBOARDS), help="default: all")
    args = parser.parse_args(words)
    now = time.time()
    when = Range(now - 60 * args.minutes, now, args.window)
    try:
        text, empty = page(args.prometheus, when, args.board or list(grafana.DASHBOARDS))
    except QueryFailed as error:
        print(error, file=sys.stderr)
        return 1
    args.out.write_text(text, encoding="utf-8")
    print(f"{args.out}; no data for {len(empty)} panels: {', '.join(empty) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
