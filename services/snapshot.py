"""What the dashboard and ``decant top`` show: one dict from the joined metrics page and the
router's state, with rates and quantiles over the last half minute.

Pure but for ``collect``; a missing metric is None or empty, never an error: processes come and go.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from decant.protocol.config import Config
from decant.services import metrics_page
from decant.services.serving_metrics import STAGES

WINDOW_S = 30.0
_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Labels = dict[str, str]
Samples = dict[str, list[tuple[Labels, float]]]


def parse(text: str) -> Samples:
    """A text page: name -> samples."""
    found: Samples = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match:
            labels = dict(_LABEL.findall(match[2] or ""))
            found.setdefault(match[1], []).append((labels, float(match[3])))
    return found


def total(samples: Samples, name: str, **where: str) -> float:
    """Sum over all samples whose labels include ``where``; 0 of none."""
    return sum(
        value
        for labels, value in samples.get(name, ())
        if all(labels.get(k) == v for k, v in where.items())
    )


def by_label(samples: Samples, name: str, label: str) -> dict[str, float]:
    """Sums by one label."""
    found: dict[str, float] = {}
    for labels, value in samples.get(name, ()):
        key = labels.get(label, "")
        found[key] = found.get(key, 0.0) + value
    return found


def quantile(buckets: Mapping[float, float], q: float) -> float | None:
    """The q-quantile of a histogram from cumulative counts by upper bound (+Inf included).

    Linear within a bucket, as in Prometheus; None of an empty histogram. In the last bucket: its
    lower bound.
    """
    count = buckets.get(float("inf"), 0.0)
    if count <= 0:
        return None
    rank = q * count
    low = below = 0.0
    for bound in sorted(buckets):
        if buckets[bound] >= rank:
            if bound == float("inf"):
                return low
            inside = buckets[bound] - below
            return low + (bound - low) * ((rank - below) / inside if inside else 1.0)
        low, below = bound, buckets[bound]
    return low


class Window:
    """Pages of the last ``WINDOW_S`` seconds; differences between the oldest and the newest."""

    def __init__(self) -> None:
        self._pages: deque[tuple[float, Samples]] = deque()

    def add(self, now_s: float, samples: Samples) -> None:
        self._pages.append((now_s, samples))
        while now_s - self._pages[0][0] > WINDOW_S:
            self._pages.popleft()

    @property
    def newest(self) -> Samples:
        return self._pages[-1][1] if self._pages else {}

    @property
    def span_s(self) -> float:
        return self._pages[-1][0] - self._pages[0][0] if self._pages else 0.0

    def grown(self, name: str, **where: str) -> float:
        """How much a counter grew; a restarted process counts from 0."""
        before, now = total(self._pages[0][1], name, **where), total(self.newest, name, **where)
        return now - before if now >= before else now

    def rate(self, name: str, **where: str) -> float | None:
        return self.grown(name, **where) / self.span_s if self.span_s > 0 else None

    def buckets(self, name: str, **where: str) -> dict[float, float]:
        """Growth of a histogram's cumulative buckets."""
        found = {}
        for bound in by_label(self.newest, f"{name}_bucket", "le"):
            found[float(bound)] = self.grown(f"{name}_bucket", le=bound, **where)
        return found

    def mean(self, name: str, **where: str) -> float | None:
        count = self.grown(f"{name}_count", **where)
        return self.grown(f"{name}_sum", **where) / count if count > 0 else None


def _ms(value: float | None) -> float | None:
    return None if value is None else round(value * 1e3, 3)


def _ratio(above: float, below: float) -> float | None:
    return above / below if below > 0 else None


def build(window: Window, state: Mapping[str, Any], model: str) -> dict[str, Any]:
    """The snapshot. ``state`` is the router's /state, empty if it does not answer."""
    now = window.newest
    prefix = "decant_spec_decode_num"
    drafts, drafted, accepted = (
        window.grown(f"{prefix}_{n}_total") for n in ("drafts", "draft_tokens", "accepted_tokens")
    )
    positions = sorted(by_label(now, f"{prefix}_draft_tokens_per_pos_total", "position"))
    pages: dict[str, dict[str, float]] = {}
    for labels, value in now.get("decant_pages", ()):
        pages.setdefault(labels.get("instance", ""), {})[labels.get("state", "")] = value
    return {
        "at_s": time.time(),
        "model": model,
        "is_ready": bool(state.get("is_ready")),
        "why": str(state.get("why", "")) if state else "the router does not answer",
        "processes": _processes(now, state),
        "requests": dict(state.get("requests", {})),
        "queued": state.get("queued"),
        "http_active": total(now, "decant_http_requests_active"),
        "running": total(now, "decant_num_requests_running"),
        "rates": {
            "output_tokens": window.rate("decant_generation_tokens_total"),
            "prompt_tokens": window.rate("decant_prompt_tokens_total"),
            "requests": window.rate("decant_request_success_total"),
            "errors": window.rate("decant_request_errors_total"),
            "handoff_bytes": window.rate("decant_handoff_bytes_total"),
        },
        "latency_ms": {
            name: {f"p{q}": _ms(quantile(window.buckets(metric), q / 100)) for q in (50, 90, 99)}
            for name, metric in (
                ("ttft", "decant_time_to_first_token_seconds"),
                ("itl", "decant_inter_token_latency_seconds"),
                ("e2e", "decant_e2e_request_latency_seconds"),
            )
        },
        "stages_ms": {s: _ms(window.mean("decant_stage_seconds", stage=s)) for s in STAGES},
        "step_ms": _ms(window.mean("decant_step_seconds")),
        "batch": window.mean("decant_step_sequences"),
        "acceptance": {
            "length": 1 + accepted / drafts if drafts else None,
            "rate": _ratio(accepted, drafted),
            "by_position": [
                _ratio(
                    window.grown(f"{prefix}_accepted_tokens_per_pos_total", position=p),
                    window.grown(f"{prefix}_draft_tokens_per_pos_total", position=p),
                )
                for p in positions
            ],
        },
        "cache_hit_rate": _ratio(
            window.grown("decant_prefix_cache_hits_total"),
            window.grown("decant_prefix_cache_queries_total"),
        ),
        "pages": pages,
        "faults": {
            "resumes": total(now, "decant_resumes_total"),
            "preemptions": total(now, "decant_preemptions_total"),
            "fenced": total(now, "decant_fenced_total"),
            "failed hand-offs": total(now, "decant_handoff_failures_total"),
            "draft time-outs": total(now, "decant_draft_timeouts_total"),
            "stale messages": total(now, "decant_stale_messages_total"),
            "ledger mismatch": total(now, "decant_ledger_mismatch"),
        },
    }


def _processes(now: Samples, state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The router's members, and who has a metrics socket without being one (or the other way)."""
    up = by_label(now, "decant_up", "instance")
    memory = by_label(now, "process_resident_memory_bytes", "instance")
    cpu = by_label(now, "process_cpu_seconds_total", "instance")
    lag = by_label(now, "decant_loop_lag_seconds", "instance")
    rows = {}
    for member in state.get("processes", ()):
        name = str(member.get("instance", ""))
        rows[name] = {
            "instance": name,
            "service": str(member.get("service", "")),
            "health": str(member.get("health", "")),
            "pid": member.get("pid"),
            "uptime_s": member.get("uptime_s"),
            "heartbeat_age_s": member.get("heartbeat_age_s"),
            "is_busy": bool(member.get("is_busy")),
            "is_draining": bool(member.get("is_draining")),
            "why": str(member.get("why", "")),
        }
    for name, answers in up.items():
        row = rows.setdefault(
            name,
            {
                "instance": name,
                "service": metrics_page.service_of(name),
                "health": "up" if answers else "gone",
                "why": "" if answers else "its metrics page does not answer",
            },
        )
        row["memory_bytes"] = memory.get(name)
        row["cpu_s"] = cpu.get(name)
        row["loop_lag_ms"] = _ms(lag.get(name))
    return [rows[name] for name in sorted(rows)]


async def read_state(config: Config) -> dict[str, Any]:
    """The router's /state; empty if it does not answer within a second."""
    text = await metrics_page.read(Path(config.metrics_path("router")), "/state")
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class Watcher:
    """Collects snapshots, one at a time. ``own`` gives pages that need no socket (the gateway's
    own).
    """

    def __init__(
        self, config: Config, own: Callable[[], Mapping[str, str]] = dict, model: str = ""
    ) -> None:
        self._config, self._own = config, own
        self._model = model or config.model.served_name
        self._window = Window()

    async def collect(self) -> dict[str, Any]:
        """Read everything, bounded by the pages' time-outs; parsing happens in a thread."""
        page, state = await asyncio.gather(
            metrics_page.collect(self._config.run_dir, self._own()), read_state(self._config)
        )
        return await asyncio.to_thread(self._digest, page, state)

    def _digest(self, page: str, state: dict[str, Any]) -> dict[str, Any]:
        self._window.add(time.monotonic(), parse(page))
        return build(self._window, state, self._model)
