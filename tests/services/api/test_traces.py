"""Spans reach an OTLP collector over HTTP: a real exporter against a collector that reads them."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

import aiohttp
import pytest

from decant.services import tracing

MODEL = "test-model"
CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
EOS = "<｜end▁of▁sentence｜>"


class Collector:
    """Reads ``ExportTraceServiceRequest`` from POST /v1/traces."""

    def __init__(self, answer_s: float = 0.0) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        self.paths: list[str] = []
        self.spans: list[Any] = []
        self.resource: dict[str, str] = {}
        lock, collector = Lock(), self

        class Page(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    data = gzip.decompress(data)
                asked = ExportTraceServiceRequest.FromString(data)
                time.sleep(answer_s)
                with lock:
                    collector.paths.append(self.path)
                    for found in asked.resource_spans:
                        for pair in found.resource.attributes:
                            collector.resource[pair.key] = pair.value.string_value
                        for scope in found.scope_spans:
                            collector.spans.extend(scope.spans)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
        self._server.daemon_threads = True
        Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def wait(self, num: int) -> list[Any]:
        end = time.monotonic() + 30
        while len(self.spans) < num and time.monotonic() < end:
            time.sleep(0.05)
        assert len(self.spans) >= num, f"{len(self.spans)} spans came"
        return list(self.spans)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    found = Collector()
    monkeypatch.setenv(tracing.ENDPOINT, found.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    yield found
    found.close()


async def test_a_request_becomes_spans_at_the_collector(collector: Collector, start: Any) -> None:
    """The client's trace goes on: request below its span, stages below the request, one after the
    other, with the ids that decode's messages carried.
    """
    stage = await start()
    stage.say("one two" + EOS)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    headers = {"traceparent": CLIENT, "X-Request-Id": "mine"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(stage.base + "/v1/chat/completions", json=body, headers=headers) as answer,
    ):
        assert answer.status == 200, await answer.text()
    spans = await asyncio.to_thread(collector.wait, 4)
    assert set(collector.paths) == {"/v1/traces"}
    assert collector.resource["service.name"] == "decant"
    assert collector.resource["service.instance.id"] == "gateway-0"
    by_name = {span.name: span for span in spans}
    assert set(by_name) == {"request", "tokenize", "queue", "prefill"}
    _, trace, parent, _ = CLIENT.split("-")
    assert {span.trace_id.hex() for span in spans} == {trace}
    request = by_name["request"]
    assert request.parent_span_id.hex() == parent
    assert stage.traces == [f"00-{trace}-{request.span_id.hex()}-01"]
    at_ns = request.start_time_unix_nano
    for name in ("tokenize", "queue", "prefill"):
        assert by_name[name].parent_span_id == request.span_id
        assert by_name[name].start_time_unix_nano == at_ns
        at_ns = by_name[name].end_time_unix_nano
    attributes = {a.key: a.value for a in request.attributes}
    assert attributes["gen_ai.usage.output_tokens"].int_value == 3
    assert attributes["decant.request_id"].string_value == "mine"


def test_a_slow_collector_costs_spans_and_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter's queue is bounded: what it cannot hold is dropped, nobody waits for it."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    collector = Collector(answer_s=0.5)
    monkeypatch.setenv(tracing.ENDPOINT, collector.url)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "32")
    monkeypatch.setenv("OTEL_BSP_EXPORT_TIMEOUT", "2000")
    spans = tracing.Spans("gateway-0", "1")
    try:
        slowest = 0.0
        for _ in range(400):
            start = time.monotonic()
            spans.request(CLIENT, tracing.follow(CLIENT), 0, 10, 0.1, {"queue": 1.0}, {})
            slowest = max(slowest, time.monotonic() - start)
        assert slowest < 0.4, "a request waited for the collector"
    finally:
        spans.close()
        collector.close()
    assert 0 < len(collector.spans) < 3 * 400
