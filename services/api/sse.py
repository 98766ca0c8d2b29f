"""A response that streams server-sent events, and the rules of its beginning and end.

The status line waits for the first event, an error, or ``first_byte_s``: until then a failure is
still a real 4xx or 5xx. Later silence is filled with comments, later failures go in-band and close
the connection without a final marker. A reader that does not read is cut.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
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
    return b"%sdata: %s\n\n" % (name.encode(), msgspec.json.encode(value))


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
    try:
        with writer.filling_silence(config.first_byte_s, keep_alive):
            await _write_all(request, writer, events)
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
    return response


async def _write_all(request: web.Request, writer: Writer, events: AsyncIterator[bytes]) -> None:
    """Raises: what ``events`` raises, SlowReader, ConnectionError."""
    try:
        async for piece in events:
            await writer.write(piece)
            for generation in request.get(GENERATIONS, ()):
                generation.written(bool(piece))
        await writer.end()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if writer.failure is None or task is None or task.uncancel():
            raise  # somebody else's
        raise writer.failure from None
    finally:
        await events.aclose()  # type: ignore[attr-defined]


class Writer:
    """Writes with a deadline; the first write sends the status line.

    Attributes: failure: what a comment met while the writing task waited for an event; the task was
    cancelled for it."""

    def __init__(
        self, request: web.Request, response: web.StreamResponse, timeout_s: float
    ) -> None:
        self._request, self._response, self._timeout_s = request, response, timeout_s
        self._beginning = asyncio.Lock()
        self._written_s = asyncio.get_running_loop().time()
        self.failure: SlowReader | ConnectionError | None = None

    @contextmanager
    def filling_silence(self, first_s: float, comment: bytes) -> Iterator[None]:
        """Meanwhile ``comment`` is written whenever nothing else was for KEEP_ALIVE_S, for the
        first time after ``first_s``. One task a response, so that an event costs none."""
        filler = asyncio.create_task(self._fill_silence(first_s, comment, asyncio.current_task()))
        try:
            yield
        finally:
            filler.cancel()

    async def _fill_silence(
        self, first_s: float, comment: bytes, owner: asyncio.Task[object] | None
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            wait_s = KEEP_ALIVE_S if self._response.prepared else first_s
            silent_s = loop.time() - self._written_s
            if silent_s < wait_s:
                await asyncio.sleep(wait_s - max(0.0, silent_s))
                continue
            try:
                await self.write(comment)
            except (SlowReader, ConnectionError) as error:
                self.failure = error
                if owner is not None:
                    owner.cancel()
                return

    async def write(self, piece: bytes) -> None:
        """Raises: SlowReader, ConnectionError."""
        loop = asyncio.get_running_loop()
        self._written_s = math.inf  # no comment meanwhile
        if not self._response.prepared:
            async with self._beginning:
                if not self._response.prepared:
                    self._limit_buffers()
                    await self._response.prepare(self._request)
        if piece:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._response.write(piece)
            except TimeoutError as error:
                raise SlowReader("the client does not read") from error
        self._written_s = loop.time()

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
