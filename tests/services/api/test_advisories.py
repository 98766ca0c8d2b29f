"""What went wrong in other servers, by its public identifier, tried here.

Tested elsewhere: pickle and its kind (CVE-2024-50050, CVE-2025-32444, CVE-2025-10164,
CVE-2026-26220 and others; ``tests/ops/test_packaging.py``), ``tokenize`` and other template
arguments (CVE-2025-62426), ranges of all fields, deep JSON, and routes without a key
(CVE-2026-48746; ``test_http.py``), grammars that take too long (``test_grammars.py``), log lines,
open sockets and modes (``tests/chaos/test_security.py``).
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import zmq

from decant.protocol.config import Config
from decant.services.api import access

ROOT = Path(__file__).parent.parent.parent.parent
PATH = "/v1/chat/completions"
EOS = "<｜end▁of▁sentence｜>"
SERVING = ("services", "protocol")


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def ask(http: aiohttp.ClientSession, stage: Any, **more: Any) -> tuple[int, Any]:
    body = {"model": "test-model", "messages": [{"role": "user", "content": "hi"}], **more}
    async with http.post(stage.base + PATH, json=body) as response:
        return response.status, await response.json()


def sources(*rooms: str) -> list[tuple[str, str]]:
    found = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    assert len(found) > 20
    return [(str(path.relative_to(ROOT)), path.read_text()) for path in found]


def version(name: str) -> tuple[int, ...]:
    return tuple(int(x) for x in re.findall(r"\d+", importlib.metadata.version(name))[:3])


def test_libraries_are_not_known_to_be_open() -> None:
    """GLSA 202009-12 (libzmq); CVE-2025-69228, CVE-2025-69229, CVE-2026-22815 (aiohttp)."""
    assert zmq.zmq_version_info() >= (4, 3, 3)
    assert version("aiohttp") >= (3, 13, 4)


def test_every_socket_between_processes_is_a_file() -> None:
    """CVE-2025-30202: a socket that listened on all interfaces. Ours have no address at all."""
    config = Config(run_dir="/run/decant")
    for name in ("router", "tokenizer-0", "prefill-0", "decode-0", "draft-0"):
        assert config.endpoint(name).startswith("ipc:///run/decant/")
    found = [name for name, text in sources(*SERVING) if re.search(r"tcp://|\binproc://", text)]
    assert not found


def test_no_template_of_the_model_is_run() -> None:
    """CVE-2026-5760: code in a model file's Jinja template."""
    words = re.compile(
        r"^\s*(?:import|from)\s+jinja2|chat_template[\"']\]|apply_chat_template", re.M
    )
    assert not [name for name, text in sources(*SERVING, "engine") if words.search(text)]


def test_nothing_is_fetched_for_a_client() -> None:
    """CVE-2025-6242: a request that makes the server fetch a URL. No HTTP client is in it."""
    words = re.compile(r"aiohttp\.ClientSession|urllib\.request|^import requests|\bhttpx\b", re.M)
    spared = [f"services/{name}.py" for name in ("client", "observers", "panels", "tracing")]
    found = [name for name, text in sources(*SERVING) if words.search(text)]
    assert set(found) <= set(spared), found


def test_keys_are_compared_in_constant_time() -> None:
    """CVE-2025-59425."""
    text = Path(access.__file__).read_text()
    assert "compare_digest" in text and not re.search(r"==\s*(?:given|presented|token)\b", text)


HUGE: list[dict[str, Any]] = [
    {"n": 10**9}, {"n": -1}, {"n": 1e300}, {"max_tokens": 1 << 63}, {"max_tokens": -(1 << 63)},
    {"top_logprobs": 10**9, "logprobs": True}, {"top_k": 1 << 40}, {"seed": 10**30},
    {"min_tokens": 1 << 62}, {"priority": -(10**12)}, {"temperature": 10**400},
    {"stop": ["x"] * 100_000}, {"stop_token_ids": list(range(100_000))},
    {"logit_bias": {"5": 10**30}},
]  # fmt: skip


@pytest.mark.parametrize("more", HUGE, ids=lambda x: str(x)[:30])
async def test_huge_numbers_are_refused(
    more: dict[str, Any], stage: Any, http: aiohttp.ClientSession
) -> None:
    """CVE-2026-34756 (n), CVE-2026-21869 (negative counts), CVE-2026-9540."""
    status, body = await ask(http, stage, **more)
    assert status == 400 and body["error"]["param"], body
    assert not stage.generates


async def test_huge_headers_are_refused(stage: Any, http: aiohttp.ClientSession) -> None:
    """CVE-2025-48956. The connection ends; the next request is served."""
    for headers in ({"X": "a" * 100_000}, {f"X-{i}": "a" * 900 for i in range(200)}):
        try:
            async with http.get(stage.base + "/health", headers=headers) as response:
                assert response.status in (400, 431)
        except aiohttp.ClientError:
            pass  # cut while it was still sending
    async with http.get(stage.base + "/health") as response:
        assert response.status == 200


BOMBS: list[tuple[str, dict[str, Any]]] = [
    ("deep", {"x": "deep"}),
    ("large", {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(4000)}}),
    ("cycle", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    ("type", {"type": "object", "properties": {"x": {"type": "wibble"}}}),
    ("type is a number", {"type": 7}),
    ("pattern", {"type": "string", "pattern": "(((("}),
    ("pattern is a number", {"type": "string", "pattern": 7}),
    ("repetition", {"type": "string", "pattern": "(((a{1,900}){1,900}){1,900}){1,900}"}),
    ("choice", {"oneOf": "choice"}),
]


def bomb(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    if name == "deep":
        schema = {"type": "object"}
        for _ in range(60):
            schema = {"type": "object", "properties": {"x": schema}}
    if name == "choice":
        schema = {"type": "string"}
        for i in range(14):
            schema = {"oneOf": [schema, {"type": "array", "items": schema, "maxItems": i}]}
    return schema


@pytest.mark.parametrize(("name", "schema"), BOMBS, ids=[name for name, _ in BOMBS])
async def test_schema_bombs_hurt_nobody(
    name: str, schema: dict[str, Any], stage: Any, http: aiohttp.ClientSession
) -> None:
    """CVE-2025-48944 (pattern, type of a tool) and explosions at compile time: an answer within the
    limit of time, never a 5xx, and the event loop serves others meanwhile.
    """
    given = bomb(name, schema)
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": given}}
    tool = {"type": "function", "function": {"name": "f", "parameters": given}}
    stage.say("{}" + EOS)
    began = time.monotonic()
    answers = asyncio.gather(
        ask(http, stage, response_format=wanted), ask(http, stage, tools=[tool])
    )
    slowest_s = 0.0
    while not answers.done():
        before = time.monotonic()
        async with http.get(stage.base + "/health") as response:
            assert response.status == 200
        slowest_s = max(slowest_s, time.monotonic() - before)
        await asyncio.sleep(0.02)
    (status, body), (tool_status, _) = await answers
    assert status in (200, 400) and tool_status in (200, 400), body
    if name not in ("large", "choice", "repetition"):
        assert status == 400 and body["error"]["message"], body
    assert time.monotonic() - began < 30.0 and slowest_s < 2.0  # on a busy machine


@pytest.mark.parametrize("kind", ["multipart/form-data; boundary=x", "text/plain", ""])
async def test_only_json_is_read(kind: str, stage: Any, http: aiohttp.ClientSession) -> None:
    """Multipart bodies, trailers and compressed bodies have been ways to fill memory."""
    data = b"--x\r\n" + b"A: b\r\n" * 1000
    headers = {"Content-Type": kind} if kind else {}
    async with http.post(stage.base + PATH, data=data, headers=headers) as response:
        assert response.status == 415
    for coding in ("gzip", "deflate", "br", "zstd", "gzip, gzip"):
        headers = {"Content-Type": "application/json", "Content-Encoding": coding}
        async with http.post(stage.base + PATH, data=b"{}", headers=headers) as response:
            assert response.status in (400, 415), coding
    assert not stage.generates


async def test_a_chunked_body_has_the_same_limit(start: Any, http: aiohttp.ClientSession) -> None:
    """Without a Content-Length nobody promises how much comes."""
    stage = await start(max_body_bytes=100_000)
    stage.say("ok" + EOS)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield b" " * 10_000

    headers = {"Content-Type": "application/json"}
    try:
        async with http.post(stage.base + PATH, data=pieces(), headers=headers) as response:
            assert response.status == 413
    except aiohttp.ClientError:
        pass  # cut while it was still sending
    status, _ = await ask(http, stage, messages=[{"role": "user", "content": json.dumps("x")}])
    assert status == 200
