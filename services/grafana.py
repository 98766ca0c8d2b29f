"""The Grafana dashboards under supervisord/grafana, from a short description of their panels.

    python -P -m decant.services.grafana supervisord/grafana

Rates and quantiles are over ``$__rate_interval``; every query can be narrowed to an instance. The
files carry no ids, name their data source by variable and pin the schema version, so that they can
be provisioned or imported. A test compares the files with what this makes, and asks a running set
whether every metric exists.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 39
WIDTH = 24  # Grafana's grid
WHERE = 'instance=~"$instance"'
METRIC = re.compile(r"\b(?:decant_[a-z0-9_]+|process_[a-z0-9_]+|ALERTS)\b")


@dataclass(frozen=True)
class Panel:
    """``queries`` are (expression, legend). ``kind``: timeseries, stat, bargauge or table."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    text: str = ""
    kind: str = "timeseries"
    width: int = 8
    is_stacked: bool = False


def rate(metric: str, by: str = "") -> str:
    """Growth per second, summed."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}{{{WHERE}}}[$__rate_interval]))"


def quantiles(metric: str, by: str = "") -> tuple[tuple[str, str], ...]:
    """p50, p90 and p99 of a histogram."""
    le = f"le, {by}" if by else "le"
    suffix = f" {{{{{by}}}}}" if by else ""
    return tuple(
        (f"histogram_quantile({q}, {rate(metric + '_bucket', le)})", f"p{round(q * 100)}{suffix}")
        for q in (0.5, 0.9, 0.99)
    )


def mean(metric: str, by: str = "") -> str:
    """Sum / count of a histogram."""
    return f"{rate(metric + '_sum', by)} / {rate(metric + '_count', by)}"


def gauge(metric: str, by: str = "", how: str = "sum") -> str:
    grouped = f" by ({by})" if by else ""
    return f"{how}{grouped} ({metric}{{{WHERE}}})"


SPEC = "decant_spec_decode_num"

DASHBOARDS: dict[str, tuple[str, tuple[Panel, ...]]] = {
    "overview": (
        "decant: overview",
        (
            Panel("Ready", "bool_yes_no", ((gauge("decant_ready", how="min"), ""),), kind="stat",
                  width=4),
            Panel("Output tokens/s", "short", ((rate("decant_generation_tokens_total"), ""),),
                  kind="stat", width=5),
            Panel("Requests/s", "reqps", ((rate("decant_request_success_total"), ""),),
                  kind="stat", width=5),
            Panel("TTFT p50", "s", (quantiles("decant_time_to_first_token_seconds")[0],),
                  kind="stat", width=5),
            Panel("TPOT p50", "s",
                  (quantiles("decant_request_time_per_output_token_seconds")[0],), kind="stat",
                  width=5),
            Panel("Tokens per second", "short", (
                (rate("decant_generation_tokens_total"), "output"),
                (rate("decant_prompt_tokens_total"), "prompt"),
                (rate("decant_cached_tokens_total"), "prompt, from the cache"),
            )),
            Panel("TTFT", "s", quantiles("decant_time_to_first_token_seconds"),
                  "Request received to first token sent."),
            Panel("ITL", "s", quantiles("decant_inter_token_latency_seconds"),
                  "Gap between two arrivals of tokens; tokens of one step arrive together."),
            Panel("E2E", "s", quantiles("decant_e2e_request_latency_seconds")),
            Panel("Requests by state", "short",
                  ((gauge("decant_requests", "state"), "{{state}}"),), is_stacked=True),
            Panel("Ends by reason", "reqps", (
                (rate("decant_request_success_total", "finished_reason"), "{{finished_reason}}"),
                (rate("decant_request_errors_total", "code"), "error {{code}}"),
                (rate("decant_requests_cancelled_total"), "client gone"),
            )),
            Panel("HTTP by status", "reqps",
                  ((rate("decant_http_requests_total", "status"), "{{status}}"),)),
            Panel("Prompt length", "short", quantiles("decant_request_prompt_tokens")),
            Panel("Output length", "short", quantiles("decant_request_generation_tokens")),
        ),
    ),
    "pd-pipeline": (
        "decant: prefill to decode",
        (
            Panel("Stages, mean", "s", ((mean("decant_stage_seconds", "stage"), "{{stage}}"),),
                  "Where a request's time goes, one after the other.", is_stacked=True, width=12),
            Panel("Stages, p99", "s", ((
                f"histogram_quantile(0.99, {rate('decant_stage_seconds_bucket', 'le, stage')})",
                "{{stage}}",
            ),), width=12),
            Panel("Waiting for a reservation", "short",
                  ((gauge("decant_queue_depth"), "lanes"),)),
            Panel("Prefill: lanes", "short", (
                (gauge("decant_prefill_waiting"), "waiting"),
                (gauge("decant_prefill_running"), "under way"),
                (gauge("decant_prefill_unreleased"), "published, not released"),
            ), is_stacked=True),
            Panel("Prefill tokens per second", "short",
                  ((rate("decant_prefill_tokens_total", "instance"), "{{instance}}"),)),
            Panel("Prefill chunk", "s", quantiles("decant_prefill_chunk_seconds")),
            Panel("Hand-off time", "s", quantiles("decant_handoff_seconds"),
                  "First pull of a lane to its verification."),
            Panel("Hand-off bytes per second", "Bps",
                  ((rate("decant_handoff_bytes_total", "transport"), "{{transport}}"),)),
            Panel("Hand-offs that failed", "short",
                  ((rate("decant_handoff_failures_total", "reason"), "{{reason}}"),)),
            Panel("Decode: sequences", "short", (
                (gauge("decant_num_requests_running"), "in the batch"),
                (gauge("decant_decode_waiting"), "waiting for their hand-off"),
                (gauge("decant_decode_parked"), "parked, slow reader"),
            ), is_stacked=True),
            Panel("Decode step", "s", quantiles("decant_step_seconds")),
            Panel("Sequences in a step", "short", ((mean("decant_step_sequences"), "mean"),)),
            Panel("Delivery: step's end to the client's socket", "s",
                  quantiles("decant_token_delivery_seconds"),
                  "What tokenizer and gateway add to a token batch."),
            Panel("Tokenizer: step to text", "s", quantiles("decant_tokenizer_step_seconds")),
            Panel("Tokenizer: prompt to ids", "s", quantiles("decant_tokenizer_encode_seconds")),
        ),
    ),
    "speculation": (
        "decant: speculation",
        (
            Panel("Acceptance length", "short", ((
                f"1 + {rate(SPEC + '_accepted_tokens_total')} / {rate(SPEC + '_drafts_total')}",
                "tokens per verify step",
            ),), "Tokens per verify step, bonus token included.", width=12),
            Panel("Acceptance rate by position", "percentunit", ((
                f"{rate(SPEC + '_accepted_tokens_per_pos_total', 'position')} / "
                f"{rate(SPEC + '_draft_tokens_per_pos_total', 'position')}",
                "position {{position}}",
            ),), width=12),
            Panel("Draft tokens per second", "short", (
                (rate(f"{SPEC}_draft_tokens_total"), "verified"),
                (rate(f"{SPEC}_accepted_tokens_total"), "accepted"),
            )),
            Panel("Acceptance length of requests", "short",
                  quantiles("decant_request_acceptance_length")),
            Panel("Planned k", "short", ((gauge("decant_draft_tokens_planned", how="max"), "k"),)),
            Panel("A step waits for drafts", "s", quantiles("decant_draft_wait_seconds")),
            Panel("Steps without drafts", "short",
                  ((rate("decant_draft_timeouts_total"), "time-outs/s"),)),
            Panel("A proposal", "s", quantiles("decant_draft_step_seconds")),
            Panel("Sequences in a proposal", "short",
                  ((mean("decant_draft_sequences"), "mean"),)),
            Panel("Drafted tokens per second", "short",
                  ((rate("decant_draft_tokens_total"), "proposed"),)),
        ),
    ),
    "kv-cache": (
        "decant: KV pages and prefix cache",
        (
            Panel("Pages by state: decode", "short", ((
                f'sum by (state) (decant_pages{{{WHERE},svc="decode"}})', "{{state}}",
            ),), is_stacked=True, width=12),
            Panel("Pages by state: prefill", "short", ((
                f'sum by (state) (decant_pages{{{WHERE},svc="prefill"}})', "{{state}}",
            ),), is_stacked=True, width=12),
            Panel("Pool in use", "percentunit",
                  ((gauge("decant_kv_cache_usage_perc", "instance", "max"), "{{instance}}"),)),
            Panel("Pool size", "short",
                  ((gauge("decant_pool_pages", "instance", "max"), "{{instance}}"),)),
            Panel("Ledger mismatch", "short",
                  ((gauge("decant_ledger_mismatch", "instance", "max"), "{{instance}}"),),
                  "Pages of the pool - sum over the states. Anything but 0 is a bug."),
            Panel("Prefix cache: tokens per second", "short", (
                (rate("decant_prefix_cache_queries_total"), "looked up"),
                (rate("decant_prefix_cache_hits_total"), "found"),
            )),
            Panel("Prefix cache: hit rate", "percentunit", ((
                f"{rate('decant_prefix_cache_hits_total')} / "
                f"{rate('decant_prefix_cache_queries_total')}",
                "of tokens",
            ),)),
            Panel("Decode: full pages of hand-offs per second", "short", (
                (rate("decant_page_cache_hits_total"), "kept"),
                (rate("decant_page_cache_misses_total"), "pulled"),
            )),
            Panel("Prefix cache: trouble", "short", (
                (gauge("decant_prefix_cache_useless", "instance", "max"), "useless: {{instance}}"),
                (rate("decant_prefix_cache_corrupt_total"), "changed at prefill"),
                (rate("decant_page_cache_corrupt_total"), "changed at decode"),
            ), "useless is 1 while prompts repeat prefixes and none is found."),
            Panel("Prefix cache: tier, bytes", "bytes",
                  ((gauge("decant_tier_bytes", "level"), "{{level}}"),),
                  "What was evicted from the pool and is kept; nothing unless it is switched on.",
                  is_stacked=True),
            Panel("Prefix cache: tier, pages and slots", "short", (
                (rate("decant_tier_records_total", "event"), "{{event}}"),
                (rate("decant_tier_restored_tokens_total"), "tokens restored"),
            )),
            Panel("Put out of the full pool", "short", (
                (rate("decant_preemptions_total"), "preempted"),
                (rate("decant_refused_reservations_total", "reason"), "refused: {{reason}}"),
                (rate("decant_lease_expired_total"), "reservations expired"),
            )),
        ),
    ),
    "services-faults": (
        "decant: services and faults",
        (
            Panel("Processes that answer", "short",
                  ((gauge("decant_up", "instance", "min"), "{{instance}}"),), kind="bargauge"),
            Panel("Since the last heartbeat", "s",
                  ((gauge("decant_heartbeat_age_seconds", "instance", "max"), "{{instance}}"),)),
            Panel("Event loop lag", "s",
                  ((gauge("decant_loop_lag_seconds", "instance", "max"), "{{instance}}"),)),
            Panel("Resident memory", "bytes", ((
                gauge("process_resident_memory_bytes", "instance", "max"), "{{instance}}",
            ),)),
            Panel("Processor", "short",
                  ((rate("process_cpu_seconds_total", "instance"), "{{instance}}"),)),
            Panel("Open files", "short",
                  ((gauge("process_open_fds", "instance", "max"), "{{instance}}"),)),
            Panel("Resumes", "short",
                  ((rate("decant_resumes_total", "cause, stage"), "{{cause}} in {{stage}}"),),
                  "Requests that lost a process and went on elsewhere."),
            Panel("Processes killed by the router", "short",
                  ((rate("decant_fenced_total"), "fenced"),)),
            Panel("Requests failed in the router", "short",
                  ((rate("decant_requests_failed_total", "code"), "{{code}}"),)),
            Panel("Messages that came too late or wrong", "short", (
                (rate("decant_stale_messages_total", "type"), "stale {{type}}"),
                (rate("decant_unexpected_messages_total", "type"), "unexpected {{type}}"),
                (rate("decant_unsent_messages_total", "type"), "unsent {{type}}"),
            )),
            Panel("Slow readers", "short", ((gauge("decant_slow_reader_parked"), "parked"),)),
            Panel("Canary", "short", ((rate("decant_canary_total", "result"), "{{result}}"),)),
            Panel("Tokenizer: late runs, replays", "short", (
                (rate("decant_tokenizer_stale_runs_total"), "stale runs"),
                (rate("decant_tokenizer_replays_total"), "replays asked for"),
                (rate("decant_decode_replays_total"), "replays sent"),
            )),
            Panel("Alerts", "short",
                  (('ALERTS{alertname=~"Decant.*",alertstate="firing"}', "{{alertname}}"),),
                  kind="table", width=16),
        ),
    ),
}  # fmt: skip


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    custom: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never"}
    if panel.is_stacked:
        custom |= {"stacking": {"mode": "normal"}, "fillOpacity": 40}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    options: dict[str, Any] = {}
    if panel.kind == "timeseries":
        defaults["custom"] = custom
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    is_instant = panel.kind in ("bargauge", "table")
    return {
        "id": number,
        "title": panel.title,
        "description": panel.text,
        "type": panel.kind,
        "datasource": {"type": "prometheus", "uid": "${DS_PROMETHEUS}"},
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": 4 if panel.kind == "stat" else 8},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(65 + i),
                "expr": expression,
                "legendFormat": legend or "__auto",
                "instant": is_instant,
                "datasource": {"type": "prometheus", "uid": "${DS_PROMETHEUS}"},
            }
            for i, (expression, legend) in enumerate(panel.queries)
        ],
    }


def dashboard(name: str) -> dict[str, Any]:
    """One dashboard as Grafana reads it."""
    title, panels = DASHBOARDS[name]
    found, x, y, height = [], 0, 0, 0
    for number, panel in enumerate(panels, 1):
        if x + panel.width > WIDTH:
            x, y, height = 0, y + height, 0
        found.append(_panel(panel, number, x, y))
        height = max(height, found[-1]["gridPos"]["h"])
        x += panel.width
    source = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
    return {
        "uid": f"decant-{name}",
        "title": title,
        "tags": ["decant"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "graphTooltip": 1,
        "links": [
            {
                "type": "dashboards",
                "title": "decant",
                "tags": ["decant"],
                "asDropdown": True,
                "keepTime": True,
            }
        ],
        "templating": {
            "list": [
                {
                    "name": "DS_PROMETHEUS",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                },
                {
                    "name": "instance",
                    "label": "Process",
                    "type": "query",
                    "datasource": source,
                    "query": "label_values(decant_up, instance)",
                    "definition": "label_values(decant_up, instance)",
                    "multi": True,
                    "includeAll": True,
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                    "refresh": 2,
                },
            ]
        },
        "panels": found,
    }


def text(name: str) -> str:
    return json.dumps(dashboard(name), indent=1) + "\n"


def metrics_of(expression: str) -> set[str]:
    """Names of metrics in a query."""
    return set(METRIC.findall(expression))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for one in DASHBOARDS:
        (folder / f"{one}.json").write_text(text(one))
