"""A streamed response by itself: comments in its silence, and what ends it."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import web

from decant.protocol.config import GatewayConfig
from decant.services.api import sse
from decant.services.api.context import REQUEST_ID

Events = Callable[[], AsyncIterator[bytes]]


async def serve(events: Events, first_byte_s: float) -> tuple[web.AppRunner, int]:
    config = GatewayConfig(first_byte_s=first_byte_s, slow_reader_s=5.0)

    async def handler(request: web.Request) -> web.StreamResponse:
        request[REQUEST_ID] = "a"
        return await sse.respond(request, config, events(), lambda error: b"")

    app = web.Application()
    app.router.add_get("/", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, runner.addresses[0][1]


async def test_a_client_found_gone_by_a_comment_ends_the_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """aiohttp tells a handler of its client's end by cancelling it only if it is asked to."""
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.05)
    ended = asyncio.Event()

    async def silent() -> AsyncIterator[bytes]:
        try:
            yield b"data: 1\n\n"
            await asyncio.sleep(60)
        finally:
            ended.set()

    runner, port = await serve(silent, 0.05)
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await asyncio.sleep(0.1)
    assert not ended.is_set()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()  # a reset, not an end
    await asyncio.wait_for(ended.wait(), 3)
    await runner.cleanup()


async def test_comments_only_fill_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.3)

    async def talk() -> AsyncIterator[bytes]:
        await asyncio.sleep(0.25)  # the first comment
        for _ in range(12):
            yield b"data: 1\n\n"
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.75)  # two comments more
        yield b"data: 2\n\n"

    runner, port = await serve(talk, 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")[2]
    writer.close()
    await runner.cleanup()
    before, between, after = body.partition(b"data: 1")[0], body, body.rpartition(b"data: 1")[2]
    assert before.count(sse.KEEP_ALIVE) == 1
    assert after.count(sse.KEEP_ALIVE) in (2, 3)
    assert between.count(sse.KEEP_ALIVE) == 1 + after.count(sse.KEEP_ALIVE)


def test_an_event_is_one_line_of_json() -> None:
    value = {"text": "a\nb\u2028\u00e4 </script>", "p": -0.25, "none": None}
    line = sse.data(value, "ping")
    assert line.startswith(b"event: ping\ndata: ") and line.endswith(b"\n\n")
    assert line.count(b"\n") == 3
    assert json.loads(line.partition(b"data: ")[2]) == value
