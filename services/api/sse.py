"""A response that streams server-sent events, and the rules of its beginning and end.

The status line waits for the first event, an error, or ``first_byte_s``: until then a failure is
still a real 4xx or 5xx. Later silence is filled with comments, later failures go in-band and close
the connection without a final marker. A reader that does not read is cut.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import structlog
from aiohttp import web

from decant.protocol.config import GatewayConfig
from decant.protocol.errors import DecantError
from decant.services.api.context import ERROR, GENERATIONS, REQUEST_ID

KEEP_ALIVE_S = 5.0
SEND_BUFFER = 64 << 10  # bytes, in the kernel and again in the transport
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

log = structlog.get_logger()


class SlowReader(DecantError):
    """The client did not read for too long."""

    code = "slow_reader"


def data(value: dict[str, Any], event: str = "") -> bytes:
    """One event. JSON never holds a raw newline."""
    name = f"event: {event}\n" if event else ""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return f"{name}data: {text}\n\n".encode()


async def respond(
    request: web.Request,
    config: GatewayConfig,
    events: AsyncIterator[bytes],
    on_error: Callable[[Exception], bytes],
    keep_alive: bytes = KEEP_ALIVE,
) -> web.StreamResponse:
    """Send ``events`` (whole events, several may be joined) until they end.

    on_error: the event that tells of a failure after the status line went out.
    Raises: what ``events`` raises before that."""
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
            "X-Request-Id": request[REQUEST_ID],
        }
    )
    writer = Writer(request, response, config.slow_reader_s)
    wait_s = config.first_byte_s
    step: asyncio.Task[bytes] = asyncio.ensure_future(_next(events))
    try:
        while True:
            done, _ = await asyncio.wait({step}, timeout=wait_s)
            wait_s = KEEP_ALIVE_S
            if not done:
                await writer.write(keep_alive)
                continue
            try:
                piece = step.result()
            except StopAsyncIteration:
                break
            await writer.write(piece)
            for generation in request.get(GENERATIONS, ()):
                generation.written(bool(piece))
            step = asyncio.ensure_future(_next(events))
        await writer.end()
    except SlowReader:
        log.warning("slow reader cut", rid=request[REQUEST_ID])
        writer.cut()
    except Exception as error:
        if not response.prepared:
            raise
        if not isinstance(error, DecantError | ConnectionError):
            log.exception("stream failed", rid=request[REQUEST_ID])
        request[ERROR] = error
        with suppress(SlowReader, ConnectionError):
            await writer.write(on_error(error))
            await writer.end()
        response.force_close()
    finally:
        step.cancel()
        with suppress(BaseException):
            await step
        await events.aclose()  # type: ignore[attr-defined]
    return response


async def _next(events: AsyncIterator[bytes]) -> bytes:
    return await anext(events)


class Writer:
    """Writes with a deadline; the first write sends the status line."""

    def __init__(
        self, request: web.Request, response: web.StreamResponse, timeout_s: float
    ) -> None:
        self._request, self._response, self._timeout_s = request, response, timeout_s

    async def write(self, piece: bytes) -> None:
        """Raises: SlowReader, ConnectionError."""
        if not self._response.prepared:
            self._limit_buffers()
            await self._response.prepare(self._request)
        if not piece:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._response.write(piece)
        except TimeoutError as error:
            raise SlowReader("the client does not read") from error

    async def end(self) -> None:
        await self.write(b"")
        async with asyncio.timeout(self._timeout_s):
            await self._response.write_eof()

    def cut(self) -> None:
        """Close the connection now; what is buffered is lost."""
        if self._request.transport is not None:
            self._request.transport.abort()

    def _limit_buffers(self) -> None:
        """Backpressure must reach us early: small buffers in the kernel and in the transport."""
        transport = self._request.transport
        if transport is None:
            return
        transport.set_write_buffer_limits(high=SEND_BUFFER)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
