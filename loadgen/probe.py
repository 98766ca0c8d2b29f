"""What is asked of the server before and after the load, one request at a time: the model's name,
how it counts tokens, fault-free answers, and its metrics page.

Synchronous and small; nothing here is timed.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from random import Random
from typing import Any

import msgspec

from decant.loadgen import content, http1
from decant.loadgen.exchange import PATHS, Exchange, body
from decant.loadgen.plan import Record, Request, Target
from decant.loadgen.workload import Scale
from decant.protocol.errors import DecantError, NotReady

TIMEOUT_S = 120.0
MAX_PAGE = 32 << 20
Page = dict[str, float]
HELD_STATES = ("reserved", "active", "published")


class ServerError(NotReady):
    """The server under test does not answer as it should."""


def _call(target: Target, path: str, data: bytes | None = None) -> bytes:
    at = http1.origin(target.url)
    scheme = "https" if at.is_tls else "http"
    headers = {"Content-Type": "application/json"}
    if target.key:
        headers["Authorization"] = f"Bearer {target.key}"
    call = urllib.request.Request(f"{scheme}://{at.authority}{at.prefix}{path}", data, headers)
    try:
        with urllib.request.urlopen(call, timeout=TIMEOUT_S) as answer:
            return bytes(answer.read(MAX_PAGE))
    except urllib.error.HTTPError as error:
        text = error.read(400).decode("utf-8", "replace")
        raise ServerError(f"{path} answers {error.code}: {text}", status=error.code) from error
    except (OSError, ValueError) as error:
        raise ServerError(f"{path} does not answer: {error}") from error


def first_model(target: Target) -> str:
    """The first id of /v1/models. Raises: ServerError."""
    try:
        return str(json.loads(_call(target, "/v1/models"))["data"][0]["id"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ServerError("/v1/models lists no model; name one with --model") from error


def scale(target: Target, kind: str) -> Scale:
    """How the server counts a class's tokens: two prompts, a line through both.

    Uses ``usage.prompt_tokens`` of one-token answers, which every server has. Raises: ServerError.
    """
    counts = []
    sizes = (200, 1000)
    for size in sizes:
        request = Request(0, user=content.text(kind, size, Random(f"scale {kind}")), max_tokens=1)
        fields: dict[str, Any] = json.loads(body(target, request))
        fields.pop("stream_options", None)
        fields["stream"] = False
        answer = _call(target, PATHS[target.api], json.dumps(fields).encode())
        try:
            counts.append(int(json.loads(answer)["usage"]["prompt_tokens"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError("the server's answers have no usage.prompt_tokens") from error
    per_char = (counts[1] - counts[0]) / (sizes[1] - sizes[0])
    if per_char <= 0:
        raise ServerError(f"the server counts {counts[0]} and {counts[1]} tokens for 200 and 1000")
    return Scale(1 / per_char, max(0.0, counts[0] - sizes[0] * per_char))


def fault_free(target: Target, request: Request) -> Exchange:
    """The request's answer, alone on the server. Raises: ServerError if it fails."""
    at = http1.origin(target.url)
    record = Record(request.index, sent_ns=time.monotonic_ns())
    exchange = Exchange(request, record, body(target, request))
    scheme = "https" if at.is_tls else "http"
    headers = {"Content-Type": "application/json"}
    if target.key:
        headers["Authorization"] = f"Bearer {target.key}"
    call = urllib.request.Request(
        f"{scheme}://{at.authority}{at.prefix}{PATHS[target.api]}", exchange.body, headers
    )
    events = http1.EventParser()
    try:
        with urllib.request.urlopen(call, timeout=TIMEOUT_S) as answer:
            while data := answer.read1(1 << 16):
                for event in events.feed(data):
                    exchange.on_event(event, time.monotonic_ns())
    except (OSError, ValueError, DecantError) as error:
        raise ServerError(f"the fault-free answer failed: {error}") from error
    exchange.finish("ok" if exchange.saw_end else "lost", time.monotonic_ns(), "no [DONE]")
    if record.outcome != "ok":
        raise ServerError(f"the fault-free answer failed: {record.error}")
    return exchange


_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*(?:\{.*\})?)\s+(\S+)")


def parse_page(text: str) -> Page:
    """A Prometheus text page: ``name{labels}`` as written -> value. Comments are skipped."""
    page: Page = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match:
            try:
                page[match[1]] = float(match[2])
            except ValueError:
                continue
    return page


def metrics_page(target: Target) -> Page:
    """The server's /metrics; empty if it has none."""
    try:
        return parse_page(_call(target, "/metrics").decode("utf-8", "replace"))
    except ServerError:
        return {}


def pages_by_state(page: Page) -> dict[str, float]:
    """``service/state`` -> KV pages, from ``decant_pages{svc=...,state=...}``."""
    found: dict[str, float] = {}
    for name, value in page.items():
        if not name.startswith("decant_pages{"):
            continue
        labels = dict(re.findall(r'(\w+)="([^"]*)"', name))
        service = labels.get("instance") or labels.get("svc") or ""
        key = f"{service}/{labels.get('state', '')}"
        found[key] = found.get(key, 0.0) + value
    return found


class PageBalance(msgspec.Struct, frozen=True):
    """KV pages before and after a run. ``leaked`` = pages of the states that a request holds
    (reserved, active, published), after - before; 0 on a healthy server that went idle again.
    """

    before: dict[str, float]
    after: dict[str, float]
    leaked: float


def balance(before: dict[str, float], after: dict[str, float]) -> PageBalance:
    def held(pages: dict[str, float]) -> float:
        return sum(v for k, v in pages.items() if k.rpartition("/")[2] in HELD_STATES)

    return PageBalance(before, after, held(after) - held(before))


def settled_pages(target: Target, before: dict[str, float], wait_s: float = 10.0) -> PageBalance:
    """The balance after a run; waits, bounded, until cancelled requests have let go."""
    end = time.monotonic() + wait_s
    while True:
        found = balance(before, pages_by_state(metrics_page(target)))
        if found.leaked <= 0 or time.monotonic() > end:
            return found
        time.sleep(0.25)
