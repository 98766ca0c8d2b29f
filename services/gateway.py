"""Gateway process: HTTP in front of everything. Routes, keys, limits, errors, metrics.

The API shapes live in ``api/``, the request's life in ``requests.py``. It knows no tensors, no
pages and no tokenizer.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from aiohttp import web
from prometheus_client import Gauge
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from decant.protocol.config import Config
from decant.protocol.errors import ConfigError, DecantError, NotReady, QueueFull
from decant.protocol.messages import Heartbeat
from decant.protocol.wire import Sender
from decant.services import metrics, metrics_page, model_folder, process, tracing
from decant.services.api import (
    chat,
    completions,
    errors,
    messages,
    models,
    responses,
    sse,
    tokenize,
)
from decant.services.api.access import Keys
from decant.services.api.checker import Checker
from decant.services.api.context import (
    ENTERED,
    ERROR,
    GENERATIONS,
    KEY,
    REQUEST_ID,
    START_S,
    TENANT,
    TRACE,
)
from decant.services.api.errors import ApiError
from decant.services.api.generation import Backend, Generation, Job
from decant.services.api.validate import parse_json
from decant.services.dashboard import Dashboard
from decant.services.requests import RequestClient, new_request_id
from decant.services.serving_metrics import GatewayMetrics

BODY_TIMEOUT_S = 30.0
KEEP_ALIVE_S = 75.0
LINGER_S = 2.0  # for the rest of a body that nobody waits for any more, so that the answer is read
LARGE_BODY_BYTES = 256 << 10  # parsed in a thread
BODIES_IN_FLIGHT = 4  # times the largest body
READY_WAIT_S = 30.0  # a worker that is started anew loads its model first
OPENAPI = Path(__file__).parent / "api" / "openapi.json"
# Routes of OpenAI's API that clients ask for, and that we say clearly not to have.
UNSERVED = (
    *("embeddings", "images", "audio", "files", "fine_tuning", "moderations", "batches"),
    *("assistants", "threads", "vector_stores", "realtime", "rerank", "score"),
)
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}\Z")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
log = structlog.get_logger()


class Gateway:
    """Handlers and what they share."""

    def __init__(self, config: Config, instance: str, client: RequestClient) -> None:
        self.registry = metrics.registry("gateway", instance)
        self.num_in_flight = 0
        self._entering: set[str] = set()  # past the door, and the router has not answered yet
        self.is_draining = False
        self._config, self._instance = config, instance
        self._client = client
        self._model = model_folder.read(config)
        self._metrics = GatewayMetrics(self.registry)
        self._metrics.parked.set_function(lambda: client.num_parked)
        self.checker = Checker(self._model.tokenizer_path, self._model.vocab_size)
        self._backend = Backend(config.gateway, self._model, client, self._metrics, self.checker)
        self._keys = Keys(config.gateway)
        self.spans = tracing.Spans(instance, process.build())
        self._openapi_page = json.loads(OPENAPI.read_text(encoding="utf-8"))
        schemas = self._openapi_page["components"]["schemas"]
        schemas["ModelName"] = {"enum": [self._model.name]}
        schemas["TokenId"]["maximum"] = self._model.vocab_size - 1
        Gauge("decant_ready", "Admission is open", registry=self.registry).set_function(
            lambda: client.is_ready
        )
        self._dashboard = Dashboard(config, self._own_page, self._model.name)
        self._body_bytes = 0
        self._open_routes: set[str] = set()

    def app(self) -> web.Application:
        app = web.Application(
            middlewares=[self._frame, self._admit],
            client_max_size=self._config.gateway.max_body_bytes,
        )
        add = app.router.add_route
        for prefix in ("/v1", "", "/beta", "/beta/v1", "/anthropic/v1"):
            add("POST", f"{prefix}/chat/completions", self._chat)
            add("POST", f"{prefix}/completions", self._completions)
            add("POST", f"{prefix}/responses", self._responses)
            add("POST", f"{prefix}/messages", self._messages)
            add("POST", f"{prefix}/messages/count_tokens", self._count_tokens)
            add("POST", f"{prefix}/tokenize", self._tokenize)
            add("POST", f"{prefix}/detokenize", self._detokenize)
            add("GET", f"{prefix}/models", self._models)
            add("GET", f"{prefix}/models/{{name:.+}}", self._models)
        for path, handler in (
            ("/health", self._health),
            ("/ready", self._ready),
            ("/version", self._version),
            ("/openapi.json", self._openapi),
            ("/dashboard", self._dashboard.page),
        ):
            self._open_routes.add(path)
            add("GET", path, handler)
        add("GET", "/metrics", self._metrics_page)
        add("GET", "/dashboard/events", self._dashboard.events)
        return app

    # ---- around every request ----------------------------------------------------------------

    @web.middleware
    async def _frame(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Request id, error bodies, one line of log and the counters."""
        given = request.headers.get("X-Request-Id", "")
        request[REQUEST_ID] = given if _REQUEST_ID.match(given) else new_request_id()
        request[START_S] = time.monotonic()
        request[TRACE] = tracing.follow(request.headers.get("traceparent", ""))
        tracing.traceparent.set(request[TRACE])
        status = 499
        try:
            try:
                response = await handler(request)
            except web.HTTPException as error:
                response = self._failure(request, _from_http(error, request.path))
                if "Allow" in error.headers:
                    response.headers["Allow"] = error.headers["Allow"]
            except Exception as error:
                error = _inner(error)
                if not isinstance(error, DecantError):
                    log.exception("request failed", rid=request[REQUEST_ID])
                response = self._failure(request, error)
            status = response.status
            if not response.prepared:
                for name in ("X-Request-Id", "request-id"):  # OpenAI's and Anthropic's clients
                    response.headers[name] = request[REQUEST_ID]
            return response
        except asyncio.CancelledError:
            self._metrics.cancels.inc()
            raise
        finally:
            self._account(request, status)

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Deny by the resolved route: only those on the list are open without a key."""
        resource = request.match_info.route.resource
        if resource is None or resource.canonical not in self._open_routes:
            key = request[KEY] = self._keys.find(request)
            request[TENANT] = key.name
        return await handler(request)

    def _failure(self, request: web.Request, error: Exception) -> web.Response:
        request[ERROR] = error
        status = getattr(error, "status", 500)
        resource = request.match_info.route.resource
        is_anthropic = resource is not None and "/messages" in resource.canonical
        body = messages.explain(error) if is_anthropic else errors.body(error)
        response = web.json_response(body, status=status, headers=errors.headers(error))
        if "Content-Encoding" in request.headers:
            # NOTE: aiohttp unpacks what nobody reads; if that fails, the next request on this
            # connection would never be answered.
            response.force_close()
        return response

    def _account(self, request: web.Request, status: int) -> None:
        resource = request.match_info.route.resource
        route = resource.canonical if resource else "none"
        self._metrics.http_requests.labels(route, str(status)).inc()
        now, start_s = time.monotonic(), request[START_S]
        facts: dict[str, Any] = {}
        for generation in request.get(GENERATIONS, ()):
            usage = generation.usage
            if generation.first_s:
                facts["ttft_ms"] = round((generation.first_s - start_s) * 1e3, 2)
            for name, value in vars(usage).items():
                facts[name] = facts.get(name, 0) + value
            facts["id"] = generation.request_id
            if generation.closed is not None:
                facts["resumes"] = generation.closed.num_resumes
                facts["stages_ms"] = generation.closed.stages_ms
        error = request.get(ERROR)
        if error is not None:
            facts["error"] = getattr(error, "code", type(error).__name__)
            if status != 499:
                self._metrics.failures.labels(facts["error"]).inc()
        if facts or (status >= 400 and route != "/ready"):  # 503 while it is polled at start
            log.info(
                "request",
                rid=request[REQUEST_ID],
                trace=tracing.trace_id(request[TRACE]),
                route=route,
                status=status,
                ms=round((now - start_s) * 1e3, 2),
                **facts,
            )
        if self.spans.is_on and "id" in facts:
            end_ns = time.time_ns()
            self.spans.request(
                request.headers.get("traceparent", ""),
                request[TRACE],
                end_ns - round((now - start_s) * 1e9),
                end_ns,
                max(g.encode_ms for g in request[GENERATIONS]),
                facts.get("stages_ms", {}),
                {
                    "gen_ai.request.model": self._model.name,
                    "gen_ai.usage.input_tokens": facts["prompt_tokens"],
                    "gen_ai.usage.output_tokens": facts["completion_tokens"],
                    "http.route": route,
                    "http.response.status_code": status,
                    "decant.request_id": request[REQUEST_ID],
                    "decant.resumes": facts.get("resumes", 0),
                },
                facts.get("error", ""),
            )

    # ---- bodies ------------------------------------------------------------------------------

    async def _json(self, request: web.Request) -> Any:
        """The body as JSON, within the limits of size and time."""
        if request.content_type != "application/json":
            raise ApiError(
                415, "unsupported_media_type", "The body must have Content-Type application/json."
            )
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise ApiError(415, "unsupported_media_type", "A compressed body is not accepted.")
        limit = self._config.gateway.max_body_bytes
        size = request.content_length or 0
        if size > limit:
            raise ApiError(413, "body_too_large", f"The body is larger than {limit} bytes.")
        held = size or min(limit, 1 << 20)
        if self._body_bytes + held > BODIES_IN_FLIGHT * limit:
            raise QueueFull("too many large requests at once")
        self._body_bytes += held
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                data = await request.read()
            if len(data) > LARGE_BODY_BYTES:
                return await asyncio.to_thread(parse_json, data)
            return parse_json(data)
        except TimeoutError as error:
            raise ApiError(408, "body_timeout", "The body did not arrive in time.") from error
        finally:
            self._body_bytes -= held

    async def _wait_ready(self) -> None:
        """An outage of a restart's length is waited for, but no longer than for a place in the
        queue. A full queue is not waited for: ``has_chain``. Raises: NotReady.
        """
        if self.is_draining:
            raise NotReady("the server is shutting down")
        wait_s = min(READY_WAIT_S, self._config.gateway.queue_timeout_s)
        deadline = time.monotonic() + wait_s
        while not self._client.has_chain:
            if time.monotonic() > deadline or not self._client.peers.peers:
                raise NotReady(f"not ready: {self._client.why}")
            await asyncio.sleep(0.05)

    # ---- the model's routes ------------------------------------------------------------------

    async def _running(
        self, request: web.Request, work: Callable[[], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Count a model request. Raises: QueueFull."""
        if self.num_in_flight >= self._config.gateway.max_requests:
            raise QueueFull(f"{self.num_in_flight} requests are running; try later")
        key, peers = request[KEY], self._client.peers
        # Who is on its way takes the places that the router told us of: a newcomer that finds none
        # left would be encoded only to be refused.
        is_full = peers.is_full or 0 <= peers.num_free <= len(self._entering)
        if is_full and self._client.has_chain and key.num_running == self.num_in_flight > 0:
            # All others are of this key too: the router would not put one of them out for it.
            raise QueueFull("the queue is full; try later", max(1.0, peers.retry_after_s))
        token = new_request_id()  # the request's own id is the client's choice
        self._entering.add(token)
        request[ENTERED] = partial(self._entering.discard, token)
        self.num_in_flight += 1
        self._metrics.http_active.set(self.num_in_flight)
        try:
            with key.running():
                await self._wait_ready()
                return await work()
        finally:
            for generation in request.get(GENERATIONS, ()):
                usage = generation.usage
                key.spend(usage.prompt_tokens + usage.completion_tokens)
            request[ENTERED]()
            self.num_in_flight -= 1
            self._metrics.http_active.set(self.num_in_flight)

    def _generation(self, request: web.Request, job: Job, keeps: bool) -> Generation:
        generation = Generation(self._backend, job, keeps, request[START_S], request[ENTERED])
        request[GENERATIONS] = [generation]
        return generation

    async def _send(
        self,
        request: web.Request,
        events: AsyncIterator[bytes],
        on_error: Callable[[Exception], bytes] = lambda e: sse.data(errors.body(e)),
        keep_alive: bytes = sse.KEEP_ALIVE,
    ) -> web.StreamResponse:
        return await sse.respond(request, self._config.gateway, events, on_error, keep_alive)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        parsed = chat.parse(await self._json(request), self._backend, request[TENANT])

        async def work() -> web.StreamResponse:
            async with self._generation(request, parsed.job, not parsed.is_streamed) as generation:
                if parsed.is_streamed:
                    return await self._send(request, chat.stream(parsed, generation))
                return web.json_response(await chat.complete(parsed, generation))

        return await self._running(request, work)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        parsed = completions.parse(await self._json(request), self._backend, request[TENANT])

        async def work() -> web.StreamResponse:
            given = request[START_S], request[ENTERED]
            async with completions.Run(self._backend, parsed, *given) as run:
                request[GENERATIONS] = run.generations
                if parsed.is_streamed:
                    return await self._send(request, run.stream())
                return web.json_response(await run.complete())

        return await self._running(request, work)

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        parsed = responses.parse(await self._json(request), self._backend, request[TENANT])

        async def work() -> web.StreamResponse:
            async with self._generation(request, parsed.chat.job, False) as generation:
                answer = responses.Answer(parsed, generation)
                if parsed.chat.is_streamed:
                    return await self._send(request, answer.stream(), answer.failure)
                return web.json_response(await answer.complete())

        return await self._running(request, work)

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        parsed = messages.parse(await self._json(request), self._backend, request[TENANT])

        async def work() -> web.StreamResponse:
            async with self._generation(request, parsed.chat.job, False) as generation:
                answer = messages.Answer(parsed, generation)
                if parsed.chat.is_streamed:
                    return await self._send(request, answer.stream(), answer.failure, messages.PING)
                return web.json_response(await answer.complete())

        return await self._running(request, work)

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        data = await self._json(request)
        parsed = messages.parse(data, self._backend, request[TENANT], is_counted=True)
        return web.json_response(await messages.count(parsed, self._backend))

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(await tokenize.tokenize(await self._json(request), self._backend))

    async def _detokenize(self, request: web.Request) -> web.StreamResponse:
        data = await self._json(request)
        return web.json_response(await tokenize.detokenize(data, self._backend))

    async def _models(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info.get("name")
        value = models.one(self._model, name) if name else models.listing(self._model)
        return web.json_response(value)

    # ---- operations --------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.StreamResponse:
        """This process's loop runs; nothing else is asked."""
        return web.json_response({"status": "ok"})

    async def _ready(self, request: web.Request) -> web.StreamResponse:
        """Admission: a whole chain of processes is there and open."""
        is_ready = self._client.is_ready and not self.is_draining
        why = "the server is shutting down" if self.is_draining else self._client.why
        body = {"ready": is_ready, "why": "" if is_ready else why}
        headers = {} if is_ready else {"Retry-After": "1"}
        return web.json_response(body, status=200 if is_ready else 503, headers=headers)

    async def _version(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"version": process.build(), "model": self._model.name})

    def _own_page(self) -> dict[str, str]:
        return {self._instance: generate_latest(self.registry).decode()}

    async def _openapi(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self._openapi_page)

    async def _metrics_page(self, request: web.Request) -> web.StreamResponse:
        compat = request.query.get("compat", self._config.observability.metrics_compat)
        if compat not in ("", "vllm", "sglang"):
            raise ApiError(400, "invalid_request", "compat is vllm or sglang.", "compat")
        run_dir, own = self._config.run_dir, self._own_page()
        text = await metrics_page.collect(run_dir, own, compat, self._model.name)
        return web.Response(text=text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


def _inner(error: Exception) -> Exception:
    """The first cause in a group that a TaskGroup raised."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _from_http(error: web.HTTPException, path: str) -> Exception:
    """aiohttp's own errors in our shape."""
    unserved = next((name for name in UNSERVED if name in path.split("/")), "")
    if error.status == 404 and unserved:
        message = f"decant serves a model that reads and writes text; it has no {unserved}."
        return ApiError(404, "not_found", message)
    texts = {
        404: ("not_found", "There is no such route."),
        405: ("method_not_allowed", "This route does not serve that method."),
        413: ("body_too_large", "The body is too large."),
    }
    code, message = texts.get(error.status, ("http_error", error.reason))
    return ApiError(error.status, code, message)


async def main(config: Config, instance: str) -> None:
    """Serve until told to stop and every running request has ended."""
    stop = process.stop()
    gateway: Gateway

    def heartbeat() -> Heartbeat:
        # NOTE: a gateway has no steps of its own; requests that wait elsewhere do not make it a
        # stalled process, so every heartbeat counts as one.
        return Heartbeat(
            step=time.monotonic_ns(),
            is_busy=gateway.num_in_flight > 0,
            loop_lag_ms=process.loop_lag_ms(),
            stats={"in_flight": float(gateway.num_in_flight)},
            is_draining=stop.is_set(),
        )

    host, port = config.gateway.host, config.gateway.port
    client = RequestClient(
        config, Sender(instance), process.build(), heartbeat, f"http://{host}:{port}"
    )
    gateway = Gateway(config, instance, client)
    runner = web.AppRunner(
        gateway.app(),
        handler_cancellation=True,
        keepalive_timeout=KEEP_ALIVE_S,
        lingering_time=LINGER_S,
        access_log=None,
        shutdown_timeout=1.0,
    )
    await runner.setup()
    try:
        # Of several, the kernel gives each new connection to one that listens.
        is_shared = config.gateway.instances > 1
        await web.TCPSite(runner, host, port, reuse_port=is_shared or None).start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    log.info("listening", host=host, port=port)
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(client.run()),
                tasks.create_task(metrics.serve(gateway.registry, config.metrics_path(instance))),
            ]
            await stop.wait()
            gateway.is_draining = True
            deadline = time.monotonic() + config.router.drain_s
            while gateway.num_in_flight and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
            for task in running:
                task.cancel()
    finally:
        await runner.cleanup()
        await gateway.checker.close()
        await asyncio.to_thread(gateway.spans.close)


if __name__ == "__main__":
    process.run("gateway", main)
