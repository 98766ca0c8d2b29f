"""The page at ``/dashboard`` and its stream of snapshots.

The page is one file without outside assets and without data, so it is open; the stream asks for a
key like every route, and the page for the key where one is needed. Snapshots are collected once a
second for all viewers together, and only while somebody looks.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from aiohttp import web

from decant.protocol.config import Config
from decant.protocol.errors import QueueFull
from decant.services.snapshot import Watcher

PERIOD_S = 1.0
MAX_VIEWERS = 16
HISTORY = 120  # snapshots that a new viewer gets at once
WRITE_TIMEOUT_S = 5.0


class Dashboard:
    """Handlers for the gateway's routes."""

    def __init__(
        self, config: Config, own: Callable[[], Mapping[str, str]], model: str = ""
    ) -> None:
        self._watcher = Watcher(config, own, model)
        self._page = Path(__file__).with_name("dashboard.html").read_text()
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self._number = 0  # of the newest snapshot
        self._news = asyncio.Condition()
        self._num_viewers = 0
        self._collector: asyncio.Task[None] | None = None

    async def page(self, request: web.Request) -> web.StreamResponse:
        """The file. No inline data; the policy forbids it to load or send anything elsewhere."""
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        return web.Response(
            text=self._page,
            content_type="text/html",
            headers={
                "Content-Security-Policy": policy + "connect-src 'self'; frame-ancestors 'none'",
                "Cache-Control": "no-cache",
            },
        )

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Snapshots as server-sent events until the viewer leaves. Raises: QueueFull."""
        if self._num_viewers >= MAX_VIEWERS:
            raise QueueFull(f"{MAX_VIEWERS} viewers are looking already")
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )
        self._num_viewers += 1
        try:
            await response.prepare(request)
            seen = max(0, self._number - len(self._history))
            while True:
                if self._collector is None or self._collector.done():
                    self._collector = asyncio.create_task(self._collect())
                async with self._news:
                    if self._number == seen:
                        with suppress(TimeoutError):
                            async with asyncio.timeout(10 * PERIOD_S):
                                await self._news.wait()
                    fresh = min(self._number - seen, len(self._history))
                    items = list(self._history)[len(self._history) - fresh :]
                    seen = self._number
                text = "".join(f"data: {json.dumps(s)}\n\n" for s in items) or ": waiting\n\n"
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await response.write(text.encode())
        except (ConnectionResetError, TimeoutError):
            return response
        finally:
            self._num_viewers -= 1

    async def _collect(self) -> None:
        """Until nobody has looked for a while."""
        idle_since = time.monotonic()
        self._history.clear()
        while time.monotonic() - idle_since < 5 * PERIOD_S:
            if self._num_viewers:
                idle_since = time.monotonic()
            snapshot = await self._watcher.collect()
            async with self._news:
                self._history.append(snapshot)
                self._number += 1
                self._news.notify_all()
            await asyncio.sleep(PERIOD_S)
