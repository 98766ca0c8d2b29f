"""The joined page is valid, complete and says who is missing; aliases carry the same values."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from decant.services import metrics, metrics_compat, metrics_page
from decant.services.serving_metrics import (
    DecodeMetrics,
    DraftMetrics,
    GatewayMetrics,
    PageGauge,
    PrefillMetrics,
)

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parse(page: str) -> Samples:
    """Every sample; fails if a metric's samples do not stand together or one comes twice."""
    found: Samples = {}
    names = set()
    for family in text_string_to_metric_families(page):
        assert family.name not in names, f"{family.name} stands in two places"
        names.add(family.name)
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    hits = [
        v for (n, own), v in samples.items() if n == name and labels.items() <= dict(own).items()
    ]
    assert len(hits) == 1, f"{name} {labels}: {len(hits)} samples"
    return hits[0]


def gateway_page() -> str:
    registry = CollectorRegistry()
    gateway = GatewayMetrics(registry)
    gateway.request(100, 2, 64)
    gateway.tokens(1, 0.2, is_first=True)
    gateway.tokens(3, 0.05, is_first=False)
    gateway.choice("stop", 4, 0.2, 0.25)
    gateway.closed(40, 3, 2, {"queue": 5.0, "prefill": 100.0, "nonsense": 1.0})
    gateway.http_requests.labels("/v1/chat/completions", "200").inc()
    return generate_latest(registry).decode()


def decode_page() -> str:
    registry = CollectorRegistry()
    decode = DecodeMetrics(registry, 2)
    decode.step(3, 7, 20_000_000)
    decode.verified(2, 1)
    decode.verified(2, 2)
    decode.verified(0, 0)
    decode.handed_off("shm", 4096, 1.5)
    PageGauge(registry, lambda: {"free": 6, "active": 3}, lambda: 10)
    return generate_latest(registry).decode()


def test_gateway_counts_what_happened() -> None:
    samples = parse(metrics_page.join({"gateway-0": gateway_page()}))
    assert value(samples, "decant_generation_tokens_total") == 4
    assert value(samples, "decant_time_to_first_token_seconds_sum") == 0.2
    assert value(samples, "decant_inter_token_latency_seconds_sum") == 0.05
    tpot = value(samples, "decant_request_time_per_output_token_seconds_sum")
    assert math.isclose(tpot, 0.05 / 3)
    assert value(samples, "decant_stage_seconds_sum", stage="prefill") == 0.1
    assert value(samples, "decant_stage_seconds_count", stage="handoff") == 0
    assert value(samples, "decant_request_acceptance_length_sum") == 2.5
    assert value(samples, "decant_cached_tokens_total", svc="gateway") == 40


def test_decode_counts_acceptance_by_position() -> None:
    samples = parse(metrics_page.join({"decode-0": decode_page()}))
    name = "decant_spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(samples, name, position=p) for p in "01"] == [2, 1]
    assert value(samples, "decant_spec_decode_num_drafts_total") == 2
    assert value(samples, "decant_handoff_bytes_total", transport="shm") == 4096


def test_a_ledger_that_does_not_sum_shows() -> None:
    samples = parse(metrics_page.join({"decode-0": decode_page()}))
    assert value(samples, "decant_ledger_mismatch") == 1
    assert value(samples, "decant_pages", state="quarantined") == 0
    assert value(samples, "decant_kv_cache_usage_perc") == 0.4


def test_same_metric_of_two_processes_stands_together() -> None:
    pages = {"decode-0": decode_page(), "gateway-0": gateway_page(), "decode-1": decode_page()}
    samples = parse(metrics_page.join(pages))
    for instance in ("decode-0", "decode-1"):
        assert value(samples, "decant_pages", instance=instance, state="free") == 6
        assert value(samples, "decant_up", svc="decode", instance=instance) == 1


def test_labels_about_others_are_kept() -> None:
    page = '# TYPE decant_age gauge\ndecant_age{svc="decode",instance="decode-0"} 3\n'
    samples = parse(metrics_page.join({"router-0": page}))
    assert value(samples, "decant_age", svc="decode", instance="decode-0") == 3


def test_label_values_with_braces_and_quotes_survive() -> None:
    page = '# TYPE decant_x counter\ndecant_x_total{reason="a{b}\\"c,svc"} 3\n'
    samples = parse(metrics_page.join({"router-0": page}))
    assert value(samples, "decant_x_total", reason='a{b}"c,svc', svc="router") == 3


@pytest.mark.parametrize("compat", metrics_compat.NAMES)
def test_aliases_have_our_values(compat: str) -> None:
    pages = {"decode-0": decode_page(), "gateway-0": gateway_page()}
    samples = parse(metrics_page.join(pages, compat, 'a "model"'))
    ttft = f"{compat}:time_to_first_token_seconds"
    assert value(samples, f"{ttft}_sum", model_name='a "model"') == 0.2
    ours = {k: v for k, v in samples.items() if k[0].startswith(ttft + "_bucket")}
    assert len(ours) == 23 and max(ours.values()) == 1
    assert value(samples, f"{compat}:prompt_tokens_total") == 100
    if compat == "vllm":
        assert value(samples, "vllm:request_queue_time_seconds_sum") == 0.005
        assert value(samples, "vllm:spec_decode_num_accepted_tokens_total") == 3
        assert value(samples, "vllm:request_success_total", finished_reason="stop") == 1
    else:
        assert value(samples, "sglang:spec_accept_length") == 2.5
        assert value(samples, "sglang:spec_accept_rate") == 0.75
        assert value(samples, "sglang:token_usage") == 0.4


def test_without_compat_there_are_no_aliases() -> None:
    assert "vllm:" not in metrics_page.join({"gateway-0": gateway_page()})


def test_every_alias_has_a_source() -> None:
    """Names on the left of the tables are names that a service registers."""
    registry = CollectorRegistry()
    GatewayMetrics(registry)
    PrefillMetrics(registry)
    DecodeMetrics(registry, 3)
    DraftMetrics(registry)
    PageGauge(registry, dict, lambda: 0)
    names = {
        line.split(" ")[2]
        for line in generate_latest(registry).decode().splitlines()
        if line.startswith("# TYPE ")
    }
    router = {"decant_queue_depth", "decant_preemptions_total"}
    assert {*metrics_compat.VLLM, *metrics_compat.SGLANG} <= names | router


async def test_page_from_sockets(tmp_path: Path) -> None:
    """One process answers, one hangs, one is dead: the page has the first, and says so."""
    registry = metrics.registry("decode", "decode-0")
    server = asyncio.create_task(metrics.serve(registry, str(tmp_path / "decode-0.metrics")))
    (tmp_path / "prefill-0.metrics").touch()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(30)
        writer.close()

    stuck = await asyncio.start_unix_server(hang, str(tmp_path / "draft-0.metrics"))
    await asyncio.sleep(0.05)
    async with asyncio.timeout(metrics_page.TARGET_TIMEOUT_S + 2):
        page = await metrics_page.collect(tmp_path, {"gateway-0": gateway_page()})
    samples = parse(page)
    ups = [
        value(samples, "decant_up", instance=i)
        for i in ("gateway-0", "decode-0", "prefill-0", "draft-0")
    ]
    assert ups == [1, 1, 0, 0]
    assert value(samples, "decant_loop_lag_seconds", instance="decode-0") >= 0
    assert value(samples, "process_resident_memory_bytes", svc="decode") > 0
    server.cancel()
    stuck.close()


async def test_chunked_pages_are_read(tmp_path: Path) -> None:
    """The router's page comes from a web framework."""
    from aiohttp import web

    async def page(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        for line in ("# TYPE decant_ready gauge\n", "decant_ready 1\n"):
            await response.write(line.encode())
        return response

    app = web.Application()
    app.router.add_get("/metrics", page)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "router-0.metrics")).start()
    samples = parse(await metrics_page.collect(tmp_path, {}))
    assert value(samples, "decant_ready", svc="router", instance="router-0") == 1
    await runner.cleanup()
