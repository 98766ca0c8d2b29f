"""Trace context through HTTP and the wire, spans, and ``decant trace``."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from decant.services import cli, tracing
from decant.services.commands import trace

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        CLIENT.upper(),
        CLIENT + "-more",  # version 00 has four parts
        "ff" + CLIENT[2:],
        "00-" + "0" * 32 + "-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01",
        CLIENT + "\r\nX: y",
    ],
)
def test_bad_headers_start_a_new_trace(header: str) -> None:
    assert tracing.parse(header) is None
    found = tracing.follow(header)
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-00", found)
    assert tracing.follow(header) != found


def test_a_good_header_goes_on_with_a_span_of_ours() -> None:
    found = tracing.parse(tracing.follow(CLIENT))
    assert found is not None
    assert (found[0], found[2]) == ("0af7651916cd43dd8448eb211c80319c", "01")
    assert found[1] != "b7ad6b7169203331"


def test_later_versions_may_have_more() -> None:
    assert tracing.parse("01" + CLIENT[2:] + "-what-comes") is not None


def test_spans() -> None:
    """One for the request, a child of the client's span, with the id that went out before; one a
    stage, one after the other.
    """
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    spans = tracing.Spans("gateway-0", "1.0", exporter)
    own = tracing.follow(CLIENT)
    stages = {"queue": 1.0, "prefill": 10.0, "decode": 20.0}
    spans.request(CLIENT, own, 1_000_000, 41_000_000, 2.0, stages, {"decant.resumes": 1})
    lone = tracing.follow("")
    spans.request("", lone, 0, 10, 0.0, {}, {}, "engine_error")
    spans.close()
    *children, root, tokenize, other = exporter.get_finished_spans()
    found = tracing.parse(own)
    assert found is not None
    context, parent = root.context, root.parent
    assert context is not None and parent is not None
    assert (f"{context.trace_id:032x}", f"{context.span_id:016x}") == found[:2]
    assert f"{parent.span_id:016x}" == "b7ad6b7169203331"
    assert [s.name for s in children] == ["tokenize", "queue", "prefill", "decode"]
    assert all(s.parent and s.parent.span_id == context.span_id for s in children)
    assert [s.start_time for s in children] == [1_000_000, 3_000_000, 4_000_000, 14_000_000]
    assert [s.end_time for s in children] == [3_000_000, 4_000_000, 14_000_000, 34_000_000]
    lone_ids = tracing.parse(lone)
    assert lone_ids is not None and other.context is not None and tokenize.name == "tokenize"
    assert f"{other.context.trace_id:032x}" == lone_ids[0] and other.parent is None
    assert not other.status.is_ok


def test_without_an_endpoint_nothing_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tracing.ENDPOINT, raising=False)
    spans = tracing.Spans("gateway-0", "1.0")
    assert not spans.is_on
    spans.request("", tracing.follow(""), 0, 1, 0.0, {}, {})
    spans.close()


# ---- decant trace --------------------------------------------------------------------------------


def line(ms: int, instance: str, event: str, **more: Any) -> str:
    head = {"ts": f"2026-01-02T03:04:05.{ms:03d}000Z", "instance": instance, "event": event}
    return json.dumps({**head, "level": "info", **more}) + "\n"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    logs = tmp_path / "logs"
    logs.mkdir()
    stages = {"queue": 2.0, "prefill": 8.0}
    (logs / "gateway-0.log").write_text(
        "not JSON\n"
        + line(90, "gateway-0", "request", rid="client-name", id="abcdef123", trace="t" * 32,
               stages_ms=stages, status=200)
        + line(95, "gateway-0", "request", rid="other", id="fedcba", trace="u" * 32)
    )  # fmt: skip
    (logs / "router-0.log").write_text(line(30, "router", "prefill", rid="abcdef123", lane=0))
    (logs / "router-0.log.1").write_text(
        line(20, "router", "generate", rid="abcdef123") + line(21, "router", "joined") + '{"ts": "'
    )
    return tmp_path


def lookup(run_dir: Path, rid: str, *more: str) -> int:
    parser = argparse.ArgumentParser()
    trace.add_arguments(parser)
    return trace.run(parser.parse_args(["--run-dir", str(run_dir), rid, *more]))


@pytest.mark.parametrize("rid", ["client-name", "abcdef123", "abcd", "t" * 32])
def test_any_name_finds_the_whole_request(
    run_dir: Path, rid: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lookup(run_dir, rid, "--json") == cli.OK
    found = [json.loads(text)["event"] for text in capsys.readouterr().out.splitlines()]
    assert found == ["generate", "prefill", "request"]


def test_timeline(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lookup(run_dir, "abcdef123") == cli.OK
    text = capsys.readouterr().out
    rows = [row.split() for row in text.splitlines()]
    assert ["0.0", "router", "generate"] in rows
    assert ["10.0", "router", "prefill", "lane=0"] in rows
    assert ["70.0", "gateway-0", "request", "status=200"] in rows
    assert "prefill        8.0 ms  " + "█" * 32 in text


@pytest.mark.parametrize("rid", ["nobody", ""])
def test_unknown_request(run_dir: Path, rid: str) -> None:
    assert lookup(run_dir, rid) == cli.FAILED
