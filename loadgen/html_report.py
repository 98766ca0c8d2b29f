"""The self-contained HTML report of a run or a sweep: figures first, then plots, then the plan.

One file without outside assets; reads well on a phone and on paper.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from decant.loadgen import charts, metrics
from decant.loadgen.charts import Series
from decant.loadgen.plan import Record
from decant.loadgen.table import DELIVERY, LATENCIES, number

STYLE = """
:root{color-scheme:light dark;--ink:#1c2126;--dim:#67717b;--line:#d9dee3;--card:#f5f7f9}
@media(prefers-color-scheme:dark){:root{--ink:#e4e8ec;--dim:#97a1ab;--line:#3a4149;--card:#20252a}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);max-width:1200px;margin:2rem auto;
padding:0 1rem;background:Canvas}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:.6rem}
.cards div{background:var(--card);border-radius:8px;padding:.6rem .8rem}
.cards b{display:block;font-size:1.25rem;font-variant-numeric:tabular-nums}
.cards span,figcaption,.note{color:var(--dim);font-size:.85rem}
.cards .bad b{color:#c33}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;display:block;overflow-x:auto}
td,th{padding:.25rem .7rem;text-align:right;border-bottom:1px solid var(--line)}
td:first-child,th:first-child{text-align:left}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,420px),1fr));gap:1rem}
figure{margin:0;break-inside:avoid}svg{width:100%;height:auto}
svg text{font-size:10px;fill:var(--dim)}svg .grid{stroke:var(--line);stroke-width:.7}
.legend span{font-size:.8rem;margin-right:.9rem}
.legend i{display:inline-block;width:.7rem;height:.7rem;border-radius:2px;margin-right:.3rem}
pre{background:var(--card);padding:.8rem;overflow-x:auto;border-radius:8px;font-size:.8rem}
"""


def render(
    title: str,
    summary: dict[str, Any],
    records: Sequence[Record],
    settings: dict[str, Any],
    sweep: Sequence[dict[str, Any]] = (),
) -> str:
    """The page. ``sweep`` holds steps of {rate, is_within, summary}; the run is its best step."""
    parts = [f"<h1>{escape(title)}</h1>", _cards(summary)]
    if sweep:
        parts += ["<h2>Sweep</h2>", _sweep(sweep)]
    parts += ["<h2>Latency</h2>", _latency(summary)]
    if summary["errors"]:
        rows = "".join(
            f"<tr><td>{escape(e['error'])}</td><td>{e['count']}</td></tr>"
            for e in summary["errors"]
        )
        parts += ["<h2>Errors</h2>", f"<table><tr><th>what</th><th>times</th></tr>{rows}</table>"]
    plots = "".join(_plots(summary, records))
    parts += ["<h2>Plots</h2>", f'<div class="plots">{plots}</div>']
    parts += ["<h2>Command</h2>", f"<pre>{escape(json.dumps(settings, indent=1))}</pre>"]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _cards(summary: dict[str, Any]) -> str:
    requests = summary["requests"]
    failed = requests["error"] + requests["timeout"] + requests["lost"]
    latency = summary["latency_ms"]
    cards: list[tuple[str, str, bool]] = [
        ("requests ended well", f"{requests['ok']:,}", False),
        ("failed", f"{failed:,}", failed > 0),
        ("requests/s", number(summary["request_throughput"], 2), False),
        ("output tokens/s", number(summary["output_token_throughput"]), False),
        ("TTFT p50, ms", number(latency["ttft"].get("p50")), False),
        ("TTFT p99, ms", number(latency["ttft"].get("p99")), False),
        ("TPOT p50, ms", number(latency["tpot"].get("p50"), 2), False),
        ("longest stall p99, ms", number(latency["longest_stall"].get("p99")), False),
    ]
    if "goodput" in summary:
        cards.append(("goodput, requests/s", number(summary["goodput"], 2), False))
        share = summary["slo_attainment"]
        cards.append(("within SLO, %", number(None if share is None else 100 * share), False))
    if "acceptance" in summary:
        cards.append(
            ("acceptance length", number(summary["acceptance"]["all"]["length"], 3), False)
        )
    if "correctness" in summary:
        found = summary["correctness"]
        cards.append(
            (f"of {found['checked']} answers differ", str(found["different"]), found["different"])
        )
    if "pages" in summary:
        leaked = summary["pages"]["leaked"]
        cards.append(("pages leaked", f"{max(0, leaked):g}", leaked > 0))
    if "lateness" in latency:
        cards.append(("own lateness p99, ms", number(latency["lateness"].get("p99"), 2), False))
    return (
        '<div class="cards">'
        + "".join(
            f'<div class="{"bad" if is_bad else ""}"><b>{value}</b><span>{escape(name)}</span>'
            "</div>"
            for name, value, is_bad in cards
        )
        + "</div>"
    )


def _latency(summary: dict[str, Any]) -> str:
    columns = ("count", "mean", "p50", "p90", "p95", "p99", "max")
    rows = [(title, summary["latency_ms"].get(key)) for key, title in LATENCIES]
    rows += [(f"stage: {k}", v) for k, v in summary.get("stages_ms", {}).items()]
    rows.append((DELIVERY, summary.get("delivery_ms")))
    head = "".join(f"<th>{c}</th>" for c in columns)
    body = "".join(
        f"<tr><td>{escape(title)}</td>"
        + f"<td>{found['count']:,.0f}</td>"
        + "".join(f"<td>{number(found[c], 2)}</td>" for c in columns[1:])
        + "</tr>"
        for title, found in rows
        if found and found["count"]
    )
    return f"<table><tr><th>ms</th>{head}</tr>{body}</table>"


def _sweep(steps: Sequence[dict[str, Any]]) -> str:
    ordered = sorted(steps, key=lambda s: float(s["rate"]))

    def points(pick: str, part: str = "") -> list[tuple[float, float]]:
        found = []
        for step in ordered:
            value = step["summary"]["latency_ms"][pick].get(part) if part else None
            if not part:
                value = step["summary"][pick]
            if value is not None:
                found.append((step["rate"], value))
        return found

    plots = [
        charts.plot(
            "Goodput and throughput",
            [
                Series("goodput", points("goodput")),
                Series("requests that ended well", points("request_throughput")),
            ],
            "offered requests/s",
            "requests/s",
        ),
        charts.plot(
            "TTFT over load",
            [Series("p50", points("ttft", "p50")), Series("p99", points("ttft", "p99"))],
            "offered requests/s",
            "ms",
        ),
        charts.plot(
            "Share within the SLO",
            [Series("attainment", points("slo_attainment"))],
            "offered requests/s",
            "share",
        ),
    ]
    return f'<div class="plots">{"".join(plots)}</div>'


def _plots(summary: dict[str, Any], records: Sequence[Record]) -> list[str]:
    sent = [r for r in records if r.sent_ns]
    if not sent:
        return []
    start = min(r.sent_ns for r in sent)
    ok = [r for r in sent if r.outcome == "ok"]

    def values(function: Any) -> list[float]:
        return [v / 1e6 for r in sent if (v := function(r)) is not None]

    gaps = [gap / 1e6 for r in sent for gap in metrics.itl_ns(r)]
    plots = [
        charts.plot(
            "Latency distributions",
            [
                charts.cdf(name, found)
                for name, found in (
                    ("TTFT", values(metrics.ttft_ns)),
                    ("TPOT", values(metrics.tpot_ns)),
                    ("ITL", gaps),
                    ("longest stall", values(metrics.longest_stall_ns)),
                    ("E2E", values(metrics.e2e_ns)),
                )
                if found
            ],
            "ms (logarithmic)",
            "share at or below",
            log_x=True,
        ),
        charts.plot(
            "TTFT over the run",
            [
                Series(
                    name,
                    [
                        ((r.sent_ns - start) / 1e9, (r.chunk_ns[0] - r.sent_ns) / 1e6)
                        for r in sent
                        if r.chunk_ns and (r.content or "") == name
                    ],
                    is_dots=True,
                )
                for name in sorted({r.content or "" for r in sent})
            ],
            "seconds",
            "ms",
        ),
        charts.plot(
            "Requests in flight",
            [Series("in flight", in_flight(sent, start))],
            "seconds",
            "requests",
        ),
        charts.plot(
            "Output tokens per second",
            [Series("tokens/s", tokens_per_second(ok, start))],
            "seconds",
            "tokens/s",
        ),
    ]
    if "lateness" in summary["latency_ms"]:
        late = [max(metrics.lateness_ns(r), 1000) / 1e6 for r in sent]
        plots.append(
            charts.plot(
                "Own lateness (sent - due)",
                [charts.cdf("lateness", late)],
                "ms (logarithmic)",
                "share at or below",
                log_x=True,
            )
        )
    stages = summary.get("stages_ms", {})
    if stages:
        plots.append(
            charts.stacked(
                "Stages of a request",
                list(stages),
                [(q, [s[q] for s in stages.values()]) for q in ("mean", "p50", "p90", "p99")],
                "ms",
            )
        )
    if "acceptance" in summary:
        plots.append(
            charts.stacked(
                "Acceptance length by content class",
                ["tokens per verify step"],
                [(n, [f["length"] or 0.0]) for n, f in summary["acceptance"].items()],
                "tokens",
            )
        )
    if summary.get("pages"):
        pages = summary["pages"]
        both = (pages["before"], pages["after"])
        states = sorted({s for side in both for s, value in side.items() if value})
        plots.append(
            charts.stacked(
                "KV pages before and after",
                states,
                [(w, [pages[w].get(s, 0.0) for s in states]) for w in ("before", "after")],
                "pages",
            )
        )
    return [p for p in plots if p]


def in_flight(records: Sequence[Record], start_ns: int) -> list[tuple[float, float]]:
    """Requests sent and not ended, at every change."""
    events = sorted([(r.sent_ns, 1) for r in records] + [(r.end_ns, -1) for r in records])
    level, points = 0, []
    for at, change in events:
        level += change
        points.append(((at - start_ns) / 1e9, float(level)))
    return points


def tokens_per_second(records: Sequence[Record], start_ns: int) -> list[tuple[float, float]]:
    """Tokens by second; a request's tokens are spread evenly over its chunks."""
    buckets: dict[int, float] = {}
    for r in records:
        if r.num_output_tokens <= 0 or not r.chunk_ns:
            continue
        share = r.num_output_tokens / len(r.chunk_ns)
        for at in r.chunk_ns:
            second = (at - start_ns) // 1_000_000_000
            buckets[second] = buckets.get(second, 0.0) + share
    if not buckets:
        return []
    return [(s + 0.5, buckets.get(s, 0.0)) for s in range(max(buckets) + 1)]
