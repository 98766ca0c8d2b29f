"""W3C trace context, and spans for OpenTelemetry where it is installed and asked for.

The gateway continues the client's ``traceparent`` or starts one, and hands it on in the header of
its messages; logs carry the trace id. Spans are made in one place, the gateway, when a request is
over: it has the router's accounts of every stage by then, so no process waits for an exporter and
no clock is compared with another. ``OTEL_EXPORTER_OTLP_ENDPOINT`` turns the export on; the queue to
the exporter is bounded and drops what it cannot hold.

Source: W3C Trace Context, level 2, section 3.2.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import structlog

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_FORM = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

traceparent: ContextVar[str] = ContextVar("traceparent", default="")  # of the request in work

log = structlog.get_logger()


def parse(header: str) -> tuple[str, str, str] | None:
    """(trace id, parent span id, flags) of a traceparent header; None if it is not valid.

    Versions above 00 may have more at the end, version 00 not; ids of zeros are not valid.
    """
    match = _FORM.fullmatch(header.strip())
    if match is None or (match[1] == "00" and match[5]):
        return None
    if not int(match[2], 16) or not int(match[3], 16):
        return None
    return match[2], match[3], match[4]


def follow(header: str) -> str:
    """The traceparent to hand on: the client's trace with a span of ours, or a new trace that is
    not sampled.
    """
    found = parse(header)
    trace, _, flags = found or (secrets.token_hex(16), "", "00")
    return f"00-{trace}-{secrets.token_hex(8)}-{flags}"


def trace_id(header: str) -> str:
    """For logs; empty if there is none."""
    found = parse(header)
    return found[0] if found else ""


class Spans:
    """Hands finished requests to OpenTelemetry; without it, or without an endpoint, does nothing.

    exporter: for tests, in place of OTLP.
    """

    def __init__(self, instance: str, build: str, exporter: Any = None) -> None:
        self._tracer: Any = None
        if exporter is None and not os.environ.get(ENDPOINT):
            return
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ALWAYS_ON

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter()
        except ImportError:
            log.warning(f"{ENDPOINT} is set, but decant[otel] is not installed")
            return
        ids: Any = _Ids()  # has the methods of IdGenerator, which may not be installed
        resource = Resource.create(
            {"service.name": "decant", "service.version": build, "service.instance.id": instance}
        )
        self._provider = TracerProvider(ALWAYS_ON, resource, id_generator=ids)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("decant")

    @property
    def is_on(self) -> bool:
        return self._tracer is not None

    def request(
        self,
        header: str,
        own: str,
        start_ns: int,
        end_ns: int,
        encode_ms: float,
        stages_ms: Mapping[str, float],
        attributes: Mapping[str, Any],
        error: str = "",
    ) -> None:
        """One span for the request and one a stage, in their order.

        header: the client's traceparent. own: what ``follow`` made of it: its span id is the
        request's. Times are CLOCK_REALTIME; stages follow one another from the start.
        """
        if self._tracer is None:
            return
        from opentelemetry import trace
        from opentelemetry.trace import SpanKind, Status, StatusCode

        ids = parse(own)
        assert ids is not None
        client = parse(header)
        context = _context(client[0], client[1], client[2]) if client else None
        _Ids.next_trace, _Ids.next_span = int(ids[0], 16), int(ids[1], 16)
        root = self._tracer.start_span(
            "request", context, SpanKind.SERVER, dict(attributes), start_time=start_ns
        )
        _Ids.next_trace = 0  # not asked for where the client's trace goes on
        inside = trace.set_span_in_context(root)
        at_ns = start_ns
        for name, took_ms in (("tokenize", encode_ms), *stages_ms.items()):
            span = self._tracer.start_span(name, inside, start_time=at_ns)
            at_ns += round(took_ms * 1e6)
            span.end(min(at_ns, end_ns))
        if error:
            root.set_status(Status(StatusCode.ERROR, error))
        root.end(end_ns)

    def close(self) -> None:
        """Send what waits; bounded by the exporter's own time-out."""
        if self._tracer is not None:
            self._provider.shutdown()


def _context(trace: str, span: str, flags: str) -> Any:
    from opentelemetry.trace import (
        NonRecordingSpan,
        SpanContext,
        TraceFlags,
        set_span_in_context,
    )

    context = SpanContext(int(trace, 16), int(span, 16), True, TraceFlags(int(flags, 16)))
    return set_span_in_context(NonRecordingSpan(context))


class _Ids:
    """Span ids as OpenTelemetry asks for them; the request's own id was fixed before, when it went
    out with the first message.
    """

    next_trace = 0
    next_span = 0

    def generate_trace_id(self) -> int:
        found, _Ids.next_trace = _Ids.next_trace, 0
        return found or secrets.randbits(128)

    def generate_span_id(self) -> int:
        found, _Ids.next_span = _Ids.next_span, 0
        return found or secrets.randbits(64)

    def is_trace_id_random(self) -> bool:
        return True
