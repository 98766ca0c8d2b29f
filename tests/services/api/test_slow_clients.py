"""Clients that send a byte now and then, or never finish: cut, and nobody else notices."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import pytest

from decant.services import gateway

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


async def dribble(stage: Any, first: bytes, drops: bytes) -> tuple[bytes, float]:
    """Send ``first``, then a drop every 0.1 s. Returns: the answer, and when the end came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stage.config.gateway.port)
    start_s = time.monotonic()

    async def send() -> None:
        writer.write(first)
        while True:
            writer.write(drops)
            await asyncio.sleep(0.1)

    sending = asyncio.create_task(send())
    try:
        async with asyncio.timeout(10):
            return await reader.read(), time.monotonic() - start_s
    except ConnectionResetError:
        return b"", time.monotonic() - start_s
    finally:
        sending.cancel()
        writer.transport.abort()


async def test_a_request_that_never_ends_is_cut(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many such clients one is no different: the head, a header, and the body have a limit."""
    monkeypatch.setattr(gateway, "KEEP_ALIVE_S", 1.5)
    monkeypatch.setattr(gateway, "BODY_TIMEOUT_S", 1.0)
    stage = await start()
    stage.say("ok<｜end▁of▁sentence｜>")
    slow = [
        (b"POST /v1/ch", b"a"),  # never a whole first line
        (HEAD, b"X-A: b\r\n"),  # never the end of the head
        (HEAD + b"Content-Length: 9000\r\n\r\n{", b" "),  # never a whole body
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    ]

    async def ask() -> int:
        body = {"model": "test-model", "messages": [{"role": "user", "content": "hi"}]}
        async with (
            aiohttp.ClientSession() as session,
            session.post(stage.base + "/v1/chat/completions", json=body) as response,
        ):
            return response.status

    attacks = asyncio.gather(*(dribble(stage, *s) for s in slow * 8))
    assert await ask() == 200
    found = await attacks
    for (first, _), (answer, took_s) in zip(slow * 8, found, strict=True):
        assert 0.5 < took_s < 6.0, (first, took_s)
        if first.endswith(b"{") or b"chunked" in first:
            assert answer.startswith(b"HTTP/1.1 408") and b"body_timeout" in answer
        else:
            assert b" 200 " not in answer
