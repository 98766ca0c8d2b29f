"""The router's page on a Unix socket in the run directory: metrics, state, drain, caches.

``GET /metrics``, ``GET /state`` (JSON: ``router_state.state``), ``POST /drain/INSTANCE``,
``POST /undrain/INSTANCE`` and ``POST /flush_cache`` (prefix caches of all workers). Only the user
who owns the run directory (mode 0700) reaches it.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from decant.services.router_state import state

if TYPE_CHECKING:
    from decant.services.dispatch import Dispatcher
    from decant.services.router_metrics import RouterMetrics


def application(dispatcher: Dispatcher, metrics: RouterMetrics) -> web.Application:
    async def get_metrics(request: web.Request) -> web.Response:
        page = generate_latest(metrics.registry)
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def get_state(request: web.Request) -> web.Response:
        return web.json_response(state(dispatcher))

    async def post_drain(request: web.Request) -> web.Response:
        return drain(request.match_info["instance"], True)

    async def post_undrain(request: web.Request) -> web.Response:
        return drain(request.match_info["instance"], False)

    def drain(instance: str, is_drained: bool) -> web.Response:
        if not dispatcher.drain(instance, is_drained):
            return web.json_response({"error": f"no process is called {instance}"}, status=404)
        return web.json_response({"instance": instance, "is_draining": is_drained})

    async def post_flush(request: web.Request) -> web.Response:
        return web.json_response({"flushed": dispatcher.flush()})

    app = web.Application()
    app.add_routes(
        [
            web.get("/metrics", get_metrics),
            web.get("/state", get_state),
            web.post("/drain/{instance}", post_drain),
            web.post("/undrain/{instance}", post_undrain),
            web.post("/flush_cache", post_flush),
        ]
    )
    return app


async def serve(dispatcher: Dispatcher, metrics: RouterMetrics, path: str) -> None:
    """Until cancelled."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    runner = web.AppRunner(application(dispatcher, metrics), access_log=None)
    await runner.setup()
    try:
        await web.UnixSite(runner, path).start()
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
        with suppress(FileNotFoundError):
            os.unlink(path)
