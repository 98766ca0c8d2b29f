"""Connections of one worker: an asyncio protocol that carries one exchange at a time, and the pool
that keeps them open.

Callbacks, not tasks: at a thousand requests a second a task per request is what makes the next one
late.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from decant.loadgen import http1
from decant.loadgen.exchange import PATHS, Exchange
from decant.loadgen.plan import Target
from decant.protocol.errors import ProtocolError

Done = Callable[[Exchange], None]
MAX_ERROR_BODY = 64 << 10
NEVER = 1 << 62


class Connection(asyncio.Protocol):
    """One TCP (or TLS) connection. ``exchange`` is what it carries now."""

    def __init__(self, pool: Pool) -> None:
        self.exchange: Exchange | None = None
        self.transport: asyncio.Transport | None = None
        self._pool = pool
        self._response = http1.ResponseParser()
        self._events = http1.EventParser()
        self._plain = b""  # of an answer that is no stream

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def start(self, exchange: Exchange) -> None:
        """Send a request; the answer's events go to it."""
        assert self.transport is not None
        self.exchange = exchange
        self.transport.write(self._pool.head(len(exchange.body)) + exchange.body)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        if now >= self._pool.next_due_ns:
            # many answers may be ready at once; what is due does not queue behind all of them
            self._pool.on_due()
        exchange = self.exchange
        if exchange is None:
            self.close()  # bytes that nobody asked for
            return
        response = self._response
        try:
            body = response.feed(data)
            exchange.record.status = response.status
            if response.status == 200 and response.is_event_stream:
                for event in self._events.feed(body):
                    exchange.on_event(event, now)
            elif len(self._plain) < MAX_ERROR_BODY:
                self._plain += body
        except ProtocolError as error:
            exchange.finish("error", now, error.message)
            self._give_up()
            return
        if exchange.is_done:  # an error event
            self._give_up()
        elif exchange.is_to_cancel:
            exchange.finish("cancelled", now)
            self._give_up()
        elif response.is_complete:
            self._end(now)

    def _end(self, now_ns: int) -> None:
        exchange, response = self.exchange, self._response
        assert exchange is not None
        if response.status == 200 and response.is_event_stream:
            if exchange.saw_end:
                exchange.finish("ok", now_ns)
            else:
                exchange.finish("lost", now_ns, "the stream ended without [DONE]")
        elif response.status == 200:
            exchange.finish("error", now_ns, "the answer is not a stream")
        else:
            exchange.finish("error", now_ns, self._plain.decode("utf-8", "replace")[:400])
        self.exchange = None
        if response.is_reusable:
            response.reset()
            self._plain = b""
            self._events = http1.EventParser()
            self._pool.put(self)
        else:
            self.close()
        self._pool.done(exchange)

    def _give_up(self) -> None:
        exchange, self.exchange = self.exchange, None
        self.close()
        if exchange is not None:
            self._pool.done(exchange)

    def expire(self, now_ns: int) -> None:
        """The request's time is over."""
        if self.exchange is not None:
            self.exchange.finish("timeout", now_ns, "no end within the time limit")
            self._give_up()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        exchange, self.exchange = self.exchange, None
        if exchange is None:
            return
        now = time.monotonic_ns()
        if exchange.saw_end:  # the body ran until the connection's end
            exchange.finish("ok", now)
        else:
            exchange.finish("lost", now, f"connection closed: {exc or 'end of stream'}")
        self._pool.done(exchange)

    def close(self) -> None:
        """Close now, without waiting for what is unsent: the server sees the client go."""
        self._pool.forget(self)
        if self.transport is not None:
            self.transport.abort()


class Pool:
    """Opens connections as needed and reuses idle ones, the last used first."""

    def __init__(self, target: Target, on_done: Done, on_due: Callable[[], None]) -> None:
        self.next_due_ns = NEVER  # set by the owner; ``on_due`` is called soon after
        self.on_due = on_due
        self._origin = http1.origin(target.url)
        self._tls = ssl.create_default_context() if self._origin.is_tls else None
        self._on_done = on_done
        self._timeout_ns = target.timeout_ns
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._opening: dict[asyncio.Task[None], Exchange] = {}
        whole = http1.request(self._origin, PATHS[target.api], b"", target.key)
        self._head = whole.removesuffix(b"0\r\n\r\n")

    def head(self, length: int) -> bytes:
        """The bytes in front of a body of ``length``."""
        return b"%s%d\r\n\r\n" % (self._head, length)

    def send(self, exchange: Exchange) -> None:
        """Send now. ``record.sent_ns`` is set; opening a connection counts into the latency."""
        exchange.record.sent_ns = time.monotonic_ns()
        while self._idle:
            connection = self._idle.pop()
            if connection.transport is not None and not connection.transport.is_closing():
                connection.start(exchange)
                return
        task = asyncio.get_running_loop().create_task(self._open_and_send(exchange))
        self._opening[task] = exchange
        task.add_done_callback(lambda t: self._opening.pop(t, None))

    async def _open_and_send(self, exchange: Exchange) -> None:
        try:
            connection = await self._open()
        except OSError as error:
            exchange.finish("lost", time.monotonic_ns(), f"cannot connect: {error}")
            self._on_done(exchange)
            return
        if exchange.is_done:  # ran out of time meanwhile
            self.put(connection)
            return
        connection.start(exchange)

    async def _open(self) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(self),
            self._origin.host,
            self._origin.port,
            ssl=self._tls,
        )
        self._all.add(connection)
        return connection

    async def warm(self, num: int) -> None:
        """Have ``num`` idle connections, as far as the server allows."""
        with suppress(OSError):
            for _ in range(num - len(self._idle)):
                self._idle.append(await self._open())

    def put(self, connection: Connection) -> None:
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        self._all.discard(connection)
        with suppress(ValueError):
            self._idle.remove(connection)

    def done(self, exchange: Exchange) -> None:
        self._on_done(exchange)

    def expire(self, now_ns: int) -> None:
        """End what has waited longer than the time limit; call it now and then."""
        limit = now_ns - self._timeout_ns
        for connection in list(self._all):
            exchange = connection.exchange
            if exchange is not None and exchange.record.sent_ns < limit:
                connection.expire(now_ns)
        for exchange in list(self._opening.values()):
            if exchange.record.sent_ns < limit and not exchange.is_done:
                exchange.finish("timeout", now_ns, "no connection within the time limit")
                self._on_done(exchange)

    def close(self) -> None:
        for connection in list(self._all):
            connection.close()
        for task in list(self._opening):
            task.cancel()
