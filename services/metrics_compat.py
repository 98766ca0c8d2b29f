"""Aliases: our metrics under the names that dashboards of vLLM and SGLang ask for.

Only where the meaning is the same; where another server's metric has no counterpart here, there is
no alias, so a panel stays empty rather than wrong. Source of the names: the servers' public
metrics pages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

# our sample name (without _bucket, _sum, _count) -> theirs
VLLM = {
    "decant_num_requests_running": "vllm:num_requests_running",
    "decant_queue_depth": "vllm:num_requests_waiting",
    "decant_kv_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "decant_prefix_cache_queries_total": "vllm:prefix_cache_queries_total",
    "decant_prefix_cache_hits_total": "vllm:prefix_cache_hits_total",
    "decant_preemptions_total": "vllm:num_preemptions_total",
    "decant_prompt_tokens_total": "vllm:prompt_tokens_total",
    "decant_generation_tokens_total": "vllm:generation_tokens_total",
    "decant_request_success_total": "vllm:request_success_total",
    "decant_request_prompt_tokens": "vllm:request_prompt_tokens",
    "decant_request_generation_tokens": "vllm:request_generation_tokens",
    "decant_request_params_n": "vllm:request_params_n",
    "decant_request_params_max_tokens": "vllm:request_params_max_tokens",
    "decant_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "decant_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "decant_request_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "decant_e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "decant_handoff_seconds": "vllm:nixl_xfer_time_seconds",
    "decant_handoff_failures_total": "vllm:nixl_num_failed_transfers_total",
    "decant_spec_decode_num_drafts_total": "vllm:spec_decode_num_drafts_total",
    "decant_spec_decode_num_draft_tokens_total": "vllm:spec_decode_num_draft_tokens_total",
    "decant_spec_decode_num_accepted_tokens_total": "vllm:spec_decode_num_accepted_tokens_total",
    "decant_spec_decode_num_accepted_tokens_per_pos_total": (
        "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    ),
}
VLLM_STAGES = {
    "queue": "vllm:request_queue_time_seconds",
    "prefill": "vllm:request_prefill_time_seconds",
    "decode": "vllm:request_decode_time_seconds",
}
SGLANG = {
    "decant_num_requests_running": "sglang:num_running_reqs",
    "decant_queue_depth": "sglang:num_queue_reqs",
    "decant_kv_cache_usage_perc": "sglang:token_usage",
    "decant_prefill_running": "sglang:num_prefill_inflight_queue_reqs",
    "decant_decode_waiting": "sglang:num_decode_transfer_queue_reqs",
    "decant_handoff_failures_total": "sglang:num_transfer_failed_reqs_total",
    "decant_requests_cancelled_total": "sglang:num_aborted_requests_total",
    "decant_prompt_tokens_total": "sglang:prompt_tokens_total",
    "decant_generation_tokens_total": "sglang:generation_tokens_total",
    "decant_cached_tokens_total": "sglang:cached_tokens_total",
    "decant_time_to_first_token_seconds": "sglang:time_to_first_token_seconds",
    "decant_inter_token_latency_seconds": "sglang:inter_token_latency_seconds",
    "decant_e2e_request_latency_seconds": "sglang:e2e_request_latency_seconds",
    "decant_http_requests_total": "sglang:http_requests_total",
    "decant_http_requests_active": "sglang:http_requests_active",
}
SGLANG_STAGES = {"queue": "sglang:queue_time_seconds"}
NAMES = ("vllm", "sglang")
_SAMPLE = re.compile(r"^(\w+?)(_bucket|_sum|_count)?\{(.*)\} (\S+)")
_STAGE = re.compile(r'(?:,|^)stage="(\w+)"')
_INSTANCE = re.compile(r'instance="[^"]*-(\d+)"')


def aliases(lines: Sequence[str], compat: str, model: str) -> list[str]:
    """Lines to append to a joined page. ``compat`` is one of ``NAMES``."""
    table, stages = (VLLM, VLLM_STAGES) if compat == "vllm" else (SGLANG, SGLANG_STAGES)
    model = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    kinds: dict[str, str] = {}
    found: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            kinds[name] = kind
            continue
        match = _SAMPLE.match(line)
        if match is None:
            continue
        name, suffix, labels, value = match[1], match[2] or "", match[3], match[4]
        kind = kinds.get(name, "untyped")
        if name == "decant_stage_seconds":
            stage = _STAGE.search(labels)
            theirs = stages.get(stage[1] if stage else "")
            labels = _STAGE.sub("", labels)
        else:
            theirs = table.get(name)
        if theirs is None:
            continue
        engine = _INSTANCE.search(labels)
        marks = f'model_name="{model}",engine="{engine[1] if engine else 0}"'
        head = found.setdefault(theirs, [f"# TYPE {theirs} {kind}"])
        head.append(f"{theirs}{suffix}{{{marks},{labels}}} {value}")
    if compat == "sglang":
        _ratios(lines, model, found)
    return [line for group in found.values() for line in group]


def _ratios(lines: Sequence[str], model: str, found: dict[str, list[str]]) -> None:
    """SGLang's gauges that are ratios of our counters."""
    sums: dict[str, float] = {}
    for line in lines:
        match = _SAMPLE.match(line)
        if match and not match[2]:
            sums[match[1]] = sums.get(match[1], 0.0) + float(match[4])

    def total(name: str) -> float:
        return sums.get(f"decant_{name}_total", 0.0)

    ratios: tuple[tuple[str, str, str, Callable[[float], float]], ...] = (
        ("cache_hit_rate", "prefix_cache_hits", "prefix_cache_queries", float),
        (
            "spec_accept_length",
            "spec_decode_num_accepted_tokens",
            "spec_decode_num_drafts",
            lambda ratio: 1 + ratio,
        ),
        (
            "spec_accept_rate",
            "spec_decode_num_accepted_tokens",
            "spec_decode_num_draft_tokens",
            float,
        ),
    )
    for name, above, below, finish in ratios:
        if total(below):
            value = finish(total(above) / total(below))
            found[name] = [
                f"# TYPE sglang:{name} gauge",
                f'sglang:{name}{{model_name="{model}"}} {value}',
            ]
