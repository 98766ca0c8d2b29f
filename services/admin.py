"""The router's two Unix sockets in the run directory (mode 0700).

``router.metrics``: ``GET /metrics`` and ``GET /state`` (JSON, ``router_state.state``), read only,
as each process has one.
``admin.sock``: what changes something, and what tells more. Every call needs the admin key, which
is no API key: ``Authorization: Bearer KEY`` with the content of ``admin.key`` in the run directory
(made at the first start, mode 0600) or of ``router.admin_key_file``::

    GET  /admin/state   GET  /admin/ledger        pages, slots and requests by holder
    POST /admin/drain/INSTANCE   POST /admin/undrain/INSTANCE
    POST /admin/flush_cache                       the prefix caches of all workers
    POST /admin/abort/REQUEST_ID                  with or without the API's prefix (chatcmpl-...)
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from decant.protocol.config import Config
from decant.protocol.errors import ConfigError
from decant.services.router_state import ledger, state

if TYPE_CHECKING:
    from decant.services.dispatch import Dispatcher
    from decant.services.router_metrics import RouterMetrics

MIN_KEY_CHARS = 16

log = structlog.get_logger()
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def read_key(config: Config) -> str:
    """The admin key; made if there is none in the run directory.

    Raises: ConfigError if the file cannot be read, is short, or others may read it."""
    path = Path(config.admin_key_path)
    if not config.router.admin_key_file:
        with suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
    try:
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"others may read the admin key: chmod 600 {path}")
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the admin key {path}: {error}") from error
    if len(key) < MIN_KEY_CHARS:
        raise ConfigError(f"the admin key in {path} is shorter than {MIN_KEY_CHARS} characters")
    return key


def pages(dispatcher: Dispatcher, metrics: RouterMetrics) -> web.Application:
    """What anybody who reaches the run directory may read."""

    async def get_metrics(request: web.Request) -> web.Response:
        page = generate_latest(metrics.registry)
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def get_state(request: web.Request) -> web.Response:
        return web.json_response(state(dispatcher))

    app = web.Application()
    app.add_routes([web.get("/metrics", get_metrics), web.get("/state", get_state)])
    return app


def application(dispatcher: Dispatcher, key: str) -> web.Application:
    """What the administrator may do."""
    digest = hashlib.sha256(key.encode()).digest()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every route, unknown ones too, asks for the key first."""
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer" or not given:
            return _error(401, "invalid_api_key", "The admin key is missing.")
        own = hashlib.sha256(given.strip().encode("utf-8", "surrogateescape")).digest()
        if not hmac.compare_digest(own, digest):
            log.warning("wrong admin key", path=request.path)
            return _error(403, "permission_denied", "That is not the admin key.")
        try:
            answer = await handler(request)
        except web.HTTPException as error:
            code = {404: "not_found", 405: "method_not_allowed"}.get(error.status, "http_error")
            return _error(error.status, code, error.reason)
        if request.method != "GET":
            log.info("admin", path=request.path, status=answer.status)
        return answer

    async def get_state(request: web.Request) -> web.Response:
        return web.json_response(state(dispatcher))

    async def get_ledger(request: web.Request) -> web.Response:
        return web.json_response(ledger(dispatcher))

    async def post_drain(request: web.Request) -> web.Response:
        return drain(request.match_info["instance"], True)

    async def post_undrain(request: web.Request) -> web.Response:
        return drain(request.match_info["instance"], False)

    def drain(instance: str, is_drained: bool) -> web.Response:
        if not dispatcher.drain(instance, is_drained):
            return _error(404, "not_found", f"No process is called {instance}.")
        return web.json_response({"instance": instance, "is_draining": is_drained})

    async def post_flush(request: web.Request) -> web.Response:
        return web.json_response({"flushed": dispatcher.flush()})

    async def post_abort(request: web.Request) -> web.Response:
        request_id = request.match_info["request_id"].rpartition("-")[2]
        if not dispatcher.abort(request_id):
            return _error(404, "not_found", f"No request {request_id} runs.")
        return web.json_response({"aborted": request_id})

    app = web.Application(middlewares=[guard])
    app.add_routes(
        [
            web.get("/admin/state", get_state),
            web.get("/admin/ledger", get_ledger),
            web.post("/admin/drain/{instance}", post_drain),
            web.post("/admin/undrain/{instance}", post_undrain),
            web.post("/admin/flush_cache", post_flush),
            web.post("/admin/abort/{request_id}", post_abort),
        ]
    )
    return app


def _error(status: int, code: str, message: str) -> web.Response:
    kind = {401: "authentication_error", 403: "permission_error"}.get(
        status, "invalid_request_error"
    )
    body: dict[str, Any] = {"message": message, "type": kind, "param": None, "code": code}
    return web.json_response({"error": body}, status=status)


async def serve(dispatcher: Dispatcher, metrics: RouterMetrics, config: Config) -> None:
    """Both sockets, until cancelled. Raises: ConfigError."""
    admin = application(dispatcher, read_key(config))
    apps = {
        config.metrics_path("router"): pages(dispatcher, metrics),
        config.admin_path: admin,
    }
    runners = []
    try:
        for path, app in apps.items():
            with suppress(FileNotFoundError):
                os.unlink(path)
            runners.append(web.AppRunner(app, access_log=None))
            await runners[-1].setup()
            await web.UnixSite(runners[-1], path).start()
            os.chmod(path, 0o600)
        await asyncio.Event().wait()
    finally:
        for runner in runners:
            await runner.cleanup()
        for path in apps:
            with suppress(FileNotFoundError):
                os.unlink(path)
