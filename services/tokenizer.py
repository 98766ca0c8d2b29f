"""Tokenizer process: prompts to ids for the gateways, ids of every decode step back to text.

One ROUTER socket; gateways and decode processes connect to it. Streams are deterministic in the
ids (``chat/stream.py``), so a stream may be opened anew here or elsewhere at any position. Knows no
HTTP and no scheduling.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from decant.protocol import messages as m
from decant.protocol.config import Config
from decant.protocol.errors import (
    CheckpointError,
    ConfigError,
    DecantError,
    InvalidRequest,
    QueueFull,
    RequestError,
)
from decant.protocol.wire import Envelope, Sender, pack_ids, unpack_ids
from decant.services import failpoints, metrics, model_folder, process
from decant.services.chat.encoding import Prompt, render
from decant.services.chat.markers import BOS, FIM_BEGIN, FIM_END, FIM_HOLE
from decant.services.chat.stream import ChoiceStream
from decant.services.chat.vocabulary import Vocabulary
from decant.services.link import RouterLink
from decant.services.sockets import Outbox, RouterSocket

INLINE_BYTES = 4096  # a longer prompt is encoded in a thread (4 KiB take about 1 ms)
REPLAY_IDS = 256  # ids replayed between two looks at the event loop
ASK_AGAIN_S = 1.0
MAX_WAITING = 256  # long encodes
NEWS_S = 10.0  # the router's news of a new process may come so late
IDLE_S = 1800.0  # a stream without tokens for so long was forgotten by its gateway

log = structlog.get_logger()


class Peer:
    """A gateway or decode process that is connected. Its identity changes when it reconnects."""

    def __init__(self, socket: RouterSocket, incarnation: str) -> None:
        self.incarnation, self.service, self.identity = incarnation, "", b""
        self.born_s = time.monotonic()
        self._socket = socket
        self.outbox = Outbox(self._send)
        self.task = asyncio.create_task(self.outbox.run())

    async def _send(self, body: m.Message, blobs: Sequence[bytes] = ()) -> None:
        await self._socket.send(self.identity, body, blobs)


class Request:
    """The output streams of one request's choices."""

    def __init__(
        self, vocabulary: Vocabulary, gateway: Peer, attempt: int, output: m.Output
    ) -> None:
        self.gateway, self.attempt = gateway, attempt
        self.choices = [ChoiceStream(vocabulary, output) for _ in range(output.num_choices)]
        self.asked_s = [0.0] * output.num_choices  # last ReplayFrom
        self.is_awaited = [False] * output.num_choices  # ask again until tokens arrive
        self.used_s = time.monotonic()


class Metrics:
    def __init__(self, registry: CollectorRegistry, streams: dict[str, Request]) -> None:
        self.prompts = Counter(
            "decant_tokenizer_prompts", "Prompts encoded", ["kind"], registry=registry
        )
        self.encode = Histogram(
            "decant_tokenizer_encode_seconds",
            "Time to render and encode a prompt",
            buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0),
            registry=registry,
        )
        self.tokens = Counter("decant_tokenizer_tokens", "Output tokens", registry=registry)
        self.step = Histogram(
            "decant_tokenizer_step_seconds",
            "Time to turn one step's tokens into text",
            buckets=(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05),
            registry=registry,
        )
        self.stale = Counter(
            "decant_tokenizer_stale_runs", "Token runs of another attempt", registry=registry
        )
        self.replays = Counter(
            "decant_tokenizer_replays", "ReplayFrom messages sent", registry=registry
        )
        Gauge("decant_tokenizer_streams", "Output streams open", registry=registry).set_function(
            lambda: len(streams)
        )


class Tokenizer:
    """The process's state; ``run`` is its reader."""

    def __init__(
        self, config: Config, instance: str, vocabulary: Vocabulary, vocab_size: int, sender: Sender
    ) -> None:
        self.streams: dict[str, Request] = {}
        self.registry = metrics.registry("tokenizer", instance)
        self._metrics = Metrics(self.registry, self.streams)
        self._config = config
        self._vocabulary, self._vocab_size = vocabulary, vocab_size
        self._socket = RouterSocket(sender, config.endpoint(instance))
        self._peers: dict[str, Peer] = {}  # by incarnation
        self._threads = ThreadPoolExecutor(1, "encode")
        self._jobs: dict[str, asyncio.Task[None]] = {}  # long encodes and replays, by request

    @property
    def num_streams(self) -> int:
        return len(self.streams)

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                envelope = await self._socket.receive()
                if failpoints.IS_ON:
                    failpoints.hit(f"tokenizer.before_{envelope.body.__struct_config__.tag}")
                try:
                    self._handle(envelope)
                except DecantError as error:  # a malformed blob: the sender's bug, not our end
                    log.warning("bad message", source=envelope.header.source, error=error.message)
                if failpoints.IS_ON:  # answers are queued, not sent
                    failpoints.hit(f"tokenizer.after_{envelope.body.__struct_config__.tag}")
        finally:
            for peer in self._peers.values():
                peer.task.cancel()
            for job in list(self._jobs.values()):
                job.cancel()
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._socket.close()

    def _handle(self, envelope: Envelope) -> None:
        body, peer = envelope.body, self._peer(envelope)
        match body:
            case m.Tokens():
                self._tokens(body, envelope.blobs)
            case m.Encode():
                self._encode(peer, body)
            case m.OpenStream():
                self._open(peer, body, envelope.blobs)
            case m.CloseStream():
                self._close(body.request_id)
            case m.Detokenize():
                ids = unpack_ids(envelope.blobs[0] if envelope.blobs else b"")
                self._job(body.request_id, self._detokenize(peer, body, ids))
            case m.Hello():
                peer.service = body.service
                if body.service == "decode":
                    self._ask_all()
            case _:
                log.debug("unexpected message", type=type(body).__name__)

    def _peer(self, envelope: Envelope) -> Peer:
        peer = self._peers.get(envelope.header.incarnation)
        if peer is None:
            peer = Peer(self._socket, envelope.header.incarnation)
            self._peers[envelope.header.incarnation] = peer
            peer.service = envelope.header.source.rpartition("-")[0]
        peer.identity = envelope.identity
        return peer

    async def on_peers(self, peers: m.Peers) -> None:
        """Forget processes that the router knows to be dead, and their streams."""
        live = {p.incarnation for p in peers.peers}
        for incarnation, peer in list(self._peers.items()):
            if incarnation in live:
                continue
            # NOTE: a process may reach us before the router's news of it does.
            if time.monotonic() - peer.born_s < NEWS_S:
                continue
            peer.task.cancel()
            del self._peers[incarnation]
            for request_id, request in list(self.streams.items()):
                if request.gateway is peer:
                    self._close(request_id)

    # ---- prompts -----------------------------------------------------------------------------

    def _encode(self, peer: Peer, body: m.Encode) -> None:
        if not body.count_only and len(self.streams) >= self._config.tokenizer.max_streams:
            self._fail(peer, body.request_id, body.attempt, QueueFull("too many open streams"))
        elif len(body.prompt) <= INLINE_BYTES:
            self._encoded(peer, body, self._try_ids(body))
        elif len(self._jobs) >= MAX_WAITING:
            self._fail(peer, body.request_id, body.attempt, QueueFull("too many long prompts"))
        else:
            self._job(body.request_id, self._encode_in_thread(peer, body))

    async def _encode_in_thread(self, peer: Peer, body: m.Encode) -> None:
        loop = asyncio.get_running_loop()
        ids = await loop.run_in_executor(self._threads, self._try_ids, body)
        self._encoded(peer, body, ids)

    def _try_ids(self, body: m.Encode) -> bytes | DecantError:
        """Ids as a blob, or why there are none. Runs in a thread for long prompts."""
        start = time.monotonic()
        try:
            ids = self._ids(body.kind, json.loads(body.prompt))
        except DecantError as error:
            return error
        except Exception:
            log.exception("encoding failed", rid=body.request_id)
            return DecantError("the prompt could not be encoded")
        self._metrics.encode.observe(time.monotonic() - start)
        return pack_ids(ids)

    def _ids(self, kind: str, prompt: Any) -> list[int]:
        if kind == "chat":
            return self._vocabulary.encode(render(Prompt.from_json(prompt)))
        if kind == "text":
            return self._vocabulary.encode_text(prompt)
        if kind == "document":
            return self._vocabulary.encode([BOS, prompt])
        if kind == "fim":
            pieces = [BOS, FIM_BEGIN, prompt["prompt"], FIM_HOLE, prompt["suffix"], FIM_END]
            return self._vocabulary.encode(pieces)
        if kind == "ids":
            for token_id in prompt:
                if not 0 <= token_id < self._vocab_size:
                    raise InvalidRequest(
                        f"token id {token_id} is not in 0..{self._vocab_size - 1}", "prompt"
                    )
            return list(prompt)
        raise InvalidRequest(f"unknown kind of prompt {kind!r}")

    def _encoded(self, peer: Peer, body: m.Encode, ids: bytes | DecantError) -> None:
        if isinstance(ids, DecantError):
            self._fail(peer, body.request_id, body.attempt, ids)
            return
        if not body.count_only:
            self.streams[body.request_id] = Request(
                self._vocabulary, peer, body.attempt, body.output
            )
        self._metrics.prompts.labels(body.kind).inc()
        log.info("encoded", rid=body.request_id, tokens=len(ids) // 4)
        answer = m.Encoded(body.request_id, body.attempt, len(ids) // 4)
        peer.outbox.post(answer, (ids,))

    async def _detokenize(self, peer: Peer, body: m.Detokenize, ids: array[int]) -> None:
        def decode() -> tuple[str, list[str]]:
            pieces = [self._vocabulary.bytes_of(i) for i in ids]
            text = b"".join(pieces).decode("utf-8", "replace")
            return text, [p.decode("utf-8", "replace") for p in pieces]

        loop = asyncio.get_running_loop()
        text, parts = await loop.run_in_executor(self._threads, decode)
        peer.outbox.post(m.Text(body.request_id, text, parts))

    def _fail(self, peer: Peer, request_id: str, attempt: int, error: DecantError) -> None:
        peer.outbox.post(
            m.Failed(
                request_id,
                attempt,
                error.code,
                error.message,
                error.status,
                getattr(error, "param", None) or "",
                getattr(error, "retry_after_s", 0.0),
                is_retryable=not isinstance(error, RequestError),
            )
        )

    def _job(self, request_id: str, work: Any) -> None:
        """Run a long piece of work; CloseStream of its request ends it."""
        self._drop_job(request_id)
        task = asyncio.create_task(work)
        self._jobs[request_id] = task

        def done(task: asyncio.Task[None]) -> None:
            if self._jobs.get(request_id) is task:
                del self._jobs[request_id]
            if not task.cancelled() and task.exception():
                log.error("a job failed", rid=request_id, error=repr(task.exception()))

        task.add_done_callback(done)

    def _drop_job(self, request_id: str) -> None:
        task = self._jobs.pop(request_id, None)
        if task is not None:
            task.cancel()

    # ---- streams -----------------------------------------------------------------------------

    def _open(self, peer: Peer, body: m.OpenStream, blobs: Sequence[bytes]) -> None:
        old = self.streams.get(body.request_id)
        if old is not None and old.attempt > body.attempt:
            self._metrics.stale.inc()
            return
        ids = unpack_ids(blobs[0] if blobs else b"")
        if sum(c.num_ids for c in body.choices) != len(ids):
            log.warning("OpenStream with a wrong number of ids", rid=body.request_id)
            return
        self._job(body.request_id, self._replay(peer, body, ids))

    async def _replay(self, peer: Peer, body: m.OpenStream, ids: array[int]) -> None:
        """Bring fresh streams to where the client is, silently, then ask for what follows."""
        request = Request(self._vocabulary, peer, body.attempt, body.output)
        begin = 0
        for state in body.choices:
            if not 0 <= state.choice < len(request.choices):
                continue
            choice, end = request.choices[state.choice], begin + state.num_ids
            for i in range(begin, end, REPLAY_IDS):
                choice.push(ids[i : min(i + REPLAY_IDS, end)])
                await asyncio.sleep(0)
            begin = end
            if state.is_finished:
                choice.finish_reason = choice.finish_reason or "stop"
        self.streams[body.request_id] = request
        for i, choice in enumerate(request.choices):
            request.is_awaited[i] = not choice.finish_reason
            if request.is_awaited[i]:
                self._ask(body.request_id, request, i)

    def _close(self, request_id: str) -> None:
        self._drop_job(request_id)
        self.streams.pop(request_id, None)

    def _ask(self, request_id: str, request: Request, choice: int) -> None:
        """Ask whoever decodes this choice for the tokens from our end."""
        now = time.monotonic()
        if now - request.asked_s[choice] < ASK_AGAIN_S:
            return
        request.asked_s[choice] = now
        start = request.choices[choice].num_ids
        ask = m.ReplayFrom(request_id, request.attempt, choice, start)
        self._metrics.replays.inc()
        for peer in self._peers.values():
            if peer.service == "decode":
                peer.outbox.post(ask)

    def _ask_all(self) -> None:
        for request_id, request in self.streams.items():
            for i, is_awaited in enumerate(request.is_awaited):
                if is_awaited:
                    self._ask(request_id, request, i)

    async def sweep(self) -> None:
        """Ask again for tokens that do not come; drop forgotten streams."""
        while True:
            await asyncio.sleep(ASK_AGAIN_S / 2)
            self._ask_all()
            now = time.monotonic()
            for request_id, request in list(self.streams.items()):
                if now - request.used_s > IDLE_S:
                    self._close(request_id)

    # ---- tokens ------------------------------------------------------------------------------

    def _tokens(self, body: m.Tokens, blobs: Sequence[bytes]) -> None:
        """One step of a decode process: one message to each gateway."""
        start_s = time.monotonic()
        ids = unpack_ids(blobs[0] if blobs else b"")
        out: dict[Peer, tuple[list[m.TextDelta], array[int]]] = {}
        begin = 0
        for run in body.runs:
            run_ids = ids[begin : begin + run.num_ids]
            begin += run.num_ids
            request = self.streams.get(run.request_id)
            if (
                request is None
                or run.attempt != request.attempt
                or not 0 <= run.choice < len(request.choices)
                or len(run_ids) != run.num_ids
            ):
                self._metrics.stale.inc()
                continue
            delta = self._run(request, run, run_ids)
            if delta is not None:
                items, taken = out.setdefault(request.gateway, ([], array("i")))
                items.append(delta)
                taken.extend(run_ids[delta.start - run.start :][: delta.num_ids])
        for gateway, (items, taken) in out.items():
            gateway.outbox.post(m.TextDeltas(items, body.drawn_ns), (pack_ids(taken),))
        self._metrics.tokens.inc(len(ids))
        self._metrics.step.observe(time.monotonic() - start_s)

    def _run(self, request: Request, run: m.TokenRun, ids: array[int]) -> m.TextDelta | None:
        """One choice's tokens of a step to its delta; None if there is nothing to say."""
        request.used_s = time.monotonic()
        choice = request.choices[run.choice]
        if choice.finish_reason:
            return None
        start = choice.num_ids
        if run.start > start:
            request.is_awaited[run.choice] = True
            self._ask(run.request_id, request, run.choice)
            return None
        known = start - run.start  # ids that the stream already has
        if known > len(ids) or (known == len(ids) and known and not run.finish_reason):
            return None
        request.is_awaited[run.choice] = False
        piece = choice.push(ids[known:], run.finish_reason, run.stop_token_id, run.logprobs[known:])
        return m.TextDelta(
            run.request_id,
            run.attempt,
            run.choice,
            start,
            piece.num_ids,
            piece.content,
            piece.reasoning,
            piece.tools,
            piece.finish_reason,
            piece.matched_stop,
            piece.logprobs,
            piece.num_reasoning_ids,
        )


async def main(config: Config, instance: str) -> None:
    """Load the vocabulary, then serve until told to stop and no stream is left."""
    model = model_folder.read(config)
    try:
        vocabulary = await asyncio.to_thread(Vocabulary, model.tokenizer_path)
    except CheckpointError as error:
        raise ConfigError(error.message) from error
    sender = Sender(instance)
    tokenizer = Tokenizer(config, instance, vocabulary, model.vocab_size, sender)
    stop = process.stop()

    def heartbeat() -> m.Heartbeat:
        return m.Heartbeat(
            loop_lag_ms=process.loop_lag_ms(),
            stats={"streams": float(tokenizer.num_streams)},
            is_draining=stop.is_set(),
        )

    async def handle(envelope: Envelope) -> None:
        if isinstance(envelope.body, m.Drain):
            stop.set()

    hello = m.Hello(
        "tokenizer",
        instance,
        os.getpid(),
        process.build(),
        endpoint=config.endpoint(instance),
        limits={"vocab_size": model.vocab_size, "max_streams": config.tokenizer.max_streams},
    )
    link = RouterLink(config, sender, hello, handle, heartbeat, tokenizer.on_peers)
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(work)
            for work in (
                tokenizer.run(),
                tokenizer.sweep(),
                link.run(),
                metrics.serve(tokenizer.registry, config.metrics_path(instance)),
            )
        ]
        await stop.wait()
        link.beat()
        deadline = time.monotonic() + config.router.drain_s
        while tokenizer.streams and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        for task in running:
            task.cancel()
    link.close()


if __name__ == "__main__":
    process.run("tokenizer", main)
