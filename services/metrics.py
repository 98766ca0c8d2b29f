"""Prometheus in every process: an own registry, served on a Unix socket in the run directory.

The gateway collects all sockets into one ``/metrics`` page; nothing here knows of it. Names start
with ``decant_``; a metric never carries a request id.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

from prometheus_client import CollectorRegistry, Gauge, Info, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from decant.services import process

READ_TIMEOUT_S = 2.0
MAX_REQUEST_BYTES = 16 << 10


def registry(service: str, instance: str) -> CollectorRegistry:
    """A fresh registry with what every process exports: memory, files, build, event loop lag."""
    result = CollectorRegistry()
    ProcessCollector(registry=result)
    Info("decant_build", "Version of the build", registry=result).info(
        {"version": process.build(), "service": service, "instance": instance}
    )
    Gauge(
        "decant_loop_lag_seconds",
        "How late the event loop ran lately: largest delay of the last seconds",
        registry=result,
    ).set_function(lambda: process.loop_lag_ms() / 1e3)
    return result


async def serve(registry: CollectorRegistry, path: str) -> None:
    """Answer HTTP GET on the Unix socket ``path`` with the registry's page, until cancelled."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # NOTE: one request per connection; a scraper that stalls is cut after READ_TIMEOUT_S.
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            try:
                async with asyncio.timeout(READ_TIMEOUT_S):
                    await reader.readuntil(b"\r\n\r\n")
                    page = generate_latest(registry)
                    head = (
                        f"HTTP/1.1 200 OK\r\nContent-Type: {CONTENT_TYPE_PLAIN_0_0_4}\r\n"
                        f"Content-Length: {len(page)}\r\nConnection: close\r\n\r\n"
                    )
                    writer.write(head.encode() + page)
                    await writer.drain()
            except TimeoutError:
                pass
            finally:
                writer.close()

    with suppress(FileNotFoundError):
        os.unlink(path)
    server = await asyncio.start_unix_server(answer, path, limit=MAX_REQUEST_BYTES)
    try:
        await server.serve_forever()
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path)
