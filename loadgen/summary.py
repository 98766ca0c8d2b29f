"""A run's figures as one nested dict: what the table, the JSON file and the HTML report show.

Names end with their unit; latencies are in ms here and only here.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from decant.loadgen import metrics
from decant.loadgen.metrics import Slo
from decant.loadgen.plan import Record
from decant.loadgen.probe import PageBalance

QUANTILES = (50, 90, 95, 99)
MAX_ERRORS = 8
MAX_MISMATCHES = 5
Stats = dict[str, float]
STAGES = ("queue", "reserve", "prefill", "handoff", "decode")


def stats(values: Iterable[float | None], scale: float = 1.0) -> Stats:
    """count, mean, min, p50 ... p99, max of the values that are there, each times ``scale``."""
    there = sorted(v for v in values if v is not None)
    if not there:
        return {"count": 0}
    found: Stats = {"count": len(there), "mean": (metrics.mean(there) or 0.0) * scale}
    found["min"] = there[0] * scale
    for q in QUANTILES:
        found[f"p{q}"] = (metrics.percentile(there, q) or 0.0) * scale
    found["max"] = there[-1] * scale
    return found


def summarise(
    records: Sequence[Record],
    slos: Sequence[Slo] = (),
    *,
    pages: PageBalance | None = None,
    is_open_loop: bool = True,
    cpu_s: float = 0.0,
) -> dict[str, Any]:
    """Every figure of a run."""
    by_name = {s.name: s for s in slos}
    sent = [r for r in records if r.sent_ns]
    ok = [r for r in records if r.outcome == "ok"]
    ms = 1e-6
    latency: dict[str, Stats] = {}
    each: tuple[tuple[str, Callable[[Record], float | None]], ...] = (
        ("ttft", metrics.ttft_ns),
        ("tpot", metrics.tpot_ns),
        ("e2e", metrics.e2e_ns),
        ("longest_stall", metrics.longest_stall_ns),
    )
    for name, function in each:
        latency[name] = stats((function(r) for r in sent), ms)
    latency["itl"] = stats((gap for r in sent for gap in metrics.itl_ns(r)), ms)
    if is_open_loop:
        latency["ttft_from_due"] = stats((metrics.due_ttft_ns(r) for r in sent), ms)
        latency["lateness"] = stats((metrics.lateness_ns(r) for r in sent), ms)
    found: dict[str, Any] = {
        "requests": {
            "planned": len(records),
            **{
                name: sum(r.outcome == name for r in records)
                for name in ("ok", "cancelled", "error", "timeout", "lost")
            },
            "without_usage": sum(r.num_output_tokens < 0 for r in ok),
        },
        "duration_s": metrics.duration_s(records),
        "offered_rate": metrics.offered_rate(sent) if is_open_loop else None,
        "request_throughput": metrics.request_throughput(records),
        "output_token_throughput": metrics.output_throughput(records),
        "total_token_throughput": metrics.total_throughput(records),
        "mean_concurrency": metrics.concurrency(records),
        "latency_ms": latency,
        "prompt_tokens": stats(r.num_prompt_tokens for r in ok if r.num_prompt_tokens >= 0),
        "output_tokens": stats(r.num_output_tokens for r in ok if r.num_output_tokens >= 0),
        "cached_tokens": sum(r.num_cached_tokens for r in ok),
        "finish_reasons": dict(Counter(r.finish_reason for r in ok)),
        "errors": [
            {"error": text, "count": count}
            for text, count in Counter(
                f"{r.outcome} {r.status or ''}: {r.error}"
                for r in records
                if r.outcome not in ("ok", "cancelled")
            ).most_common(MAX_ERRORS)
        ],
        "generator": {"cpu_s": cpu_s, "is_open_loop": is_open_loop},
    }
    if slos:
        found["goodput"] = metrics.goodput(records, by_name)
        found["slo_attainment"] = metrics.attainment(records, by_name)
        found["slo"] = {s.name: _slo(records, s) for s in slos}
    _add_acceptance(found, ok)
    _add_stages(found, ok)
    if any(r.turn for r in records):
        found["turns"] = [_turn(ok, turn) for turn in range(1 + max(r.turn for r in records))]
    checked = [r for r in records if r.is_checked]
    if checked:
        wrong = [r for r in checked if not r.is_match]
        found["correctness"] = {
            "checked": len(checked),
            "different": len(wrong),
            "examples": [{"index": r.index, "text": r.text} for r in wrong[:MAX_MISMATCHES]],
        }
    if pages is not None and (pages.before or pages.after):
        found["pages"] = msgspec.to_builtins(pages)
    return found


def _turn(ok: Sequence[Record], turn: int) -> dict[str, Any]:
    """What one turn of the sessions cost."""
    mine = [r for r in ok if r.turn == turn]
    return {
        "turn": turn,
        "requests": len(mine),
        "ttft_ms": stats((metrics.ttft_ns(r) for r in mine), 1e-6),
        "prompt_tokens": stats(r.num_prompt_tokens for r in mine if r.num_prompt_tokens >= 0),
        "cached_tokens": stats(r.num_cached_tokens for r in mine),
    }


def _slo(records: Sequence[Record], slo: Slo) -> dict[str, Any]:
    mine = [r for r in records if r.slo == slo.name]
    bounds = {
        name: value / 1e6
        for name, value in (
            ("ttft_ms", slo.ttft_ns),
            ("tpot_ms", slo.tpot_ns),
            ("e2e_ms", slo.e2e_ns),
            ("stall_ms", slo.stall_ns),
        )
        if value
    }
    by_name = {slo.name: slo}
    return {
        "bounds": bounds,
        "requests": len(mine),
        "good": metrics.num_good(mine, by_name),
        "attainment": metrics.attainment(mine, by_name),
    }


def _add_acceptance(found: dict[str, Any], ok: Sequence[Record]) -> None:
    """Only of servers that give drafts per request."""
    counted = [r for r in ok if r.num_steps]
    if not counted:
        return
    groups = {"all": counted}
    for record in counted:
        groups.setdefault(record.content or "none", []).append(record)
    found["acceptance"] = {
        name: {
            "requests": len(group),
            "length": metrics.acceptance_length(group),
            "rate": metrics.acceptance_rate(group),
        }
        for name, group in groups.items()
    }
    found["resumes"] = sum(r.num_resumes for r in ok)


def _add_stages(found: dict[str, Any], ok: Sequence[Record]) -> None:
    counted = [r for r in ok if r.stages_ms]
    if not counted:
        return
    names = [s for s in STAGES if any(s in r.stages_ms for r in counted)]
    names += sorted({s for r in counted for s in r.stages_ms} - set(names))
    found["stages_ms"] = {
        name: stats(r.stages_ms[name] for r in counted if name in r.stages_ms) for name in names
    }
    found["delivery_ms"] = stats(r.delivery_ms for r in counted if r.delivery_ms >= 0)
    found["handoff_share_of_ttft"] = stats(metrics.handoff_share(r) for r in counted)


COLUMNS = [
    "index",
    "content",
    "slo",
    "outcome",
    "status",
    "due_ms",
    "sent_ms",
    "ttft_ms",
    "tpot_ms",
    "e2e_ms",
    "longest_stall_ms",
    "delivery_ms",
    "num_prompt_tokens",
    "num_output_tokens",
    "num_cached_tokens",
    "num_drafted",
    "num_accepted",
    "num_steps",
    "finish_reason",
    "is_checked",
    "is_match",
    "error",
]


def to_csv(records: Sequence[Record]) -> str:
    """One line a request; times in ms since the first due time."""
    start = min((r.due_ns for r in records if r.due_ns), default=0)
    stages = sorted({s for r in records for s in r.stages_ms})
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow([*COLUMNS, *(f"{s}_ms" for s in stages)])

    def ms(value: float | None) -> str:
        return "" if value is None else f"{value / 1e6:.3f}"

    for r in records:
        computed = {
            "due_ms": ms(r.due_ns - start if r.due_ns else None),
            "sent_ms": ms(r.sent_ns - start if r.sent_ns else None),
            "ttft_ms": ms(metrics.ttft_ns(r)),
            "tpot_ms": ms(metrics.tpot_ns(r)),
            "e2e_ms": ms(metrics.e2e_ns(r)),
            "longest_stall_ms": ms(metrics.longest_stall_ns(r)),
            "delivery_ms": "" if r.delivery_ms < 0 else r.delivery_ms,
        }
        writer.writerow(
            [
                *(computed[c] if c in computed else getattr(r, c) for c in COLUMNS),
                *(r.stages_ms.get(s, "") for s in stages),
            ]
        )
    return out.getvalue()
