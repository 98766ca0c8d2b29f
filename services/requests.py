"""The gateway's side of a request: what the client has, and how it goes on when a process is lost.

The gateway is the authority on what was sent (docs/architecture.md). ``RequestClient`` submits
requests, applies text in order, keeps what re-creates a request, and after the death of the router
or of a tokenizer it puts the stream back together; its user sees a pause. It knows nothing of HTTP
and nothing of what the text means. Use::

    client = RequestClient(config, Sender("gateway-0"))       # run client.run() as a task
    prompt = await client.encode(new_request_id(), "chat", prompt_json, output)
    async with await client.generate(prompt, sampling, ...) as stream:
        async for event in stream:                             # Delta ... then one Failed or Closed
            ...

Leaving the ``async with`` (client gone, error, end) cancels whatever still runs.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from array import array
from collections.abc import Callable, Sequence

import structlog

from decant.protocol import messages as m
from decant.protocol.config import Config
from decant.protocol.errors import NotReady, ProtocolError
from decant.protocol.wire import Envelope, Sender, pack_ids, unpack_ids
from decant.services import tracing
from decant.services.link import RouterLink
from decant.services.prompt_scores import PromptScores
from decant.services.sockets import Outbox
from decant.services.streams import (
    IDLE_S,
    MAX_IDLE_S,
    Delta,
    Event,
    Prompt,
    RequestFailed,
    Stream,
)
from decant.services.tokenizer_links import TokenizerLink, TokenizerLinks

__all__ = [
    "Delta",
    "Event",
    "Prompt",
    "RequestClient",
    "RequestFailed",
    "Stream",
    "new_request_id",
]

ENCODE_TIMEOUT_S = 30.0
ROUTER_AWAY_S = 30.0  # after that, requests in flight fail
SWEEP_S = 0.25
RESEND_S = 1.0  # Generate without an answer, Cancel without Closed
REOPEN_S = 0.5  # between two attempts to close a gap in a stream
CLOSE_WAIT_S = 3.0  # for the accounts after the last token
MAX_BUFFERED_HARD = 65536  # then the request is cancelled

log = structlog.get_logger()


def new_request_id() -> str:
    """32 hex digits, random."""
    return secrets.token_hex(16)


class RequestClient:
    """All requests of one gateway process. ``run()`` is its only task; all methods belong to the
    same event loop.
    """

    def __init__(
        self,
        config: Config,
        sender: Sender,
        build: str = "",
        heartbeat: Callable[[], m.Heartbeat] | None = None,
        endpoint: str = "",
    ) -> None:
        """endpoint: where the gateway's HTTP listens, shown in ``decant status``."""
        self._config, self._sender = config, sender
        service, _, _ = sender.source.rpartition("-")
        self._hello = m.Hello(service, sender.source, os.getpid(), build, endpoint=endpoint)
        self._link = RouterLink(
            config,
            sender,
            self._hello,
            self._handle,
            heartbeat or m.Heartbeat,
            self._on_peers,
            self._on_router,
        )
        self._outbox = Outbox(self._link.send)
        self._tokenizers = TokenizerLinks(sender, self._hello, self._heard, self._on_tokenizer_gone)
        self._streams: dict[str, Stream] = {}  # encoded or generating
        self._cancels: dict[str, tuple[int, str, float]] = {}  # request: attempt, reason, since
        self._lost_router_s = 0.0
        self.num_stale = 0  # deltas and answers of older attempts
        self.num_reopened = 0  # streams moved or reopened

    # ---- for the gateway

    @property
    def is_ready(self) -> bool:
        """The router lives, a complete chain exists and admission is open."""
        return bool(self._link.router) and self._link.peers.is_ready

    @property
    def has_chain(self) -> bool:
        """As ``is_ready``, but a full queue counts as well: submitting gives 429 at once."""
        return bool(self._link.router) and (self._link.peers.is_ready or self._link.peers.is_full)

    @property
    def why(self) -> str:
        """If not ready: one sentence."""
        if self._link.refused:
            return self._link.refused
        if not self._link.router:
            return "the router does not answer"
        return self._link.peers.why

    @property
    def peers(self) -> m.Peers:
        """The membership that the router sent last."""
        return self._link.peers

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    @property
    def num_parked(self) -> int:
        """Streams whose client does not read; decode was told to wait."""
        return sum(stream.is_parked for stream in self._streams.values())

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._link.run())
                tasks.create_task(self._outbox.run())
                tasks.create_task(self._sweep())
        finally:
            self._tokenizers.close()
            for stream in self._streams.values():
                stream.end()
            self._link.close()

    async def encode(
        self,
        request_id: str,
        kind: str,
        prompt: bytes,
        output: m.Output,
        count_only: bool = False,
        timeout_s: float = ENCODE_TIMEOUT_S,
    ) -> Prompt:
        """Render and encode a prompt (``Encode`` in messages.py says what kind and prompt are) and
        open its output stream. Goes to another tokenizer if one dies over it.

        Raises: RequestFailed with what the tokenizer says, NotReady after ``timeout_s``. Follow it
        with ``generate`` or ``discard``.
        """
        encode = m.Encode(request_id, 1, kind, prompt, output, count_only)
        trace = tracing.traceparent.get()
        envelope, tokenizer = await self._tokenizers.ask(request_id, encode, (), timeout_s, trace)
        if isinstance(envelope.body, m.Failed):
            raise RequestFailed(envelope.body)
        ids = unpack_ids(envelope.blobs[0] if envelope.blobs else b"")
        result = Prompt(request_id, ids, output, trace)
        if not count_only:
            self._streams[request_id] = stream = Stream(self, result, tokenizer)
            tokenizer.num_streams += 1
            if tokenizer not in self._tokenizers:
                stream.tokenizer = None  # died meanwhile; the sweep opens it elsewhere
        return result

    def discard(self, prompt: Prompt) -> None:
        """Close the stream of a prompt that will not be generated. Idempotent."""
        stream = self._streams.get(prompt.request_id)
        if stream is not None:
            stream.cancel()

    async def detokenize(self, ids: Sequence[int], timeout_s: float = ENCODE_TIMEOUT_S) -> m.Text:
        """Text of ids, and its pieces. Raises: RequestFailed, NotReady."""
        request_id = new_request_id()
        body = m.Detokenize(request_id)
        envelope, _ = await self._tokenizers.ask(request_id, body, (pack_ids(ids),), timeout_s)
        if isinstance(envelope.body, m.Failed):
            raise RequestFailed(envelope.body)
        assert isinstance(envelope.body, m.Text)
        return envelope.body

    async def generate(
        self,
        prompt: Prompt,
        sampling: m.Sampling,
        *,
        deadline_ms: int = 0,
        grammar: m.Grammar | None = None,
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> Stream:
        """Submit; returns once the router has accepted or queued the request.

        deadline_ms: CLOCK_MONOTONIC, 0 = none. Raises: RequestFailed (429, 503, 400 ... from
        admission), NotReady if no router answers for ``ROUTER_AWAY_S``.
        """
        stream = self._streams.get(prompt.request_id)
        if stream is None or stream.generate is not None:
            raise NotReady("the prompt's stream is closed")
        stream.generate = m.Generate(
            prompt.request_id,
            stream.attempt,
            len(prompt.ids),
            sampling,
            stream.tokenizer.peer.instance if stream.tokenizer else "",
            prompt.output.num_choices,
            deadline_ms,
            grammar,
            [],
            tenant,
            cache_salt,
            priority,
        )
        if sampling.prompt_logprobs >= 0:
            stream.scores = PromptScores(len(prompt.ids), sampling.prompt_logprobs)
        stream.accepted = asyncio.get_running_loop().create_future()
        stream.delta_s = time.monotonic()
        self._submit(stream)
        try:
            async with asyncio.timeout(ROUTER_AWAY_S):
                failed = await stream.accepted
        except TimeoutError as error:
            stream.cancel()
            raise NotReady("the router does not answer") from error
        except asyncio.CancelledError:
            stream.cancel()
            raise
        if failed is not None:
            stream.cancel()
            raise RequestFailed(failed)
        return stream

    # ---- requests

    def _submit(self, stream: Stream) -> None:
        """(Re)send Generate with what the client has."""
        assert stream.generate is not None
        states, blob = stream.choices()
        is_fresh = not any(map(len, stream.ids)) and not any(stream.is_finished)
        given = stream.generate
        body = m.Generate(
            given.request_id,
            stream.attempt,
            given.num_prompt_tokens,
            given.sampling,
            stream.tokenizer.peer.instance if stream.tokenizer else given.tokenizer,
            given.num_choices,
            given.deadline_ms,
            given.grammar,
            [] if is_fresh else states,
            given.tenant,
            given.cache_salt,
            given.priority,
        )
        stream.sent_s = time.monotonic()
        ids = pack_ids(stream.prompt.ids)
        self._post(body, (ids, b"" if is_fresh else blob), stream.prompt.traceparent)

    def _post(self, body: m.Message, blobs: Sequence[bytes] = (), traceparent: str = "") -> None:
        # What the outbox refuses is lost like any message; the sweep sends it again.
        self._outbox.post(body, blobs, traceparent)

    def _forget(self, stream: Stream) -> None:
        """The request is over for us: close its stream at the tokenizer."""
        stream.end()
        if self._streams.pop(stream.request_id, None) is None:
            return
        if stream.tokenizer is not None:
            stream.tokenizer.num_streams -= 1
            stream.tokenizer.outbox.post(m.CloseStream(stream.request_id))
            stream.tokenizer = None

    def cancel_stream(self, stream: Stream, reason: str) -> None:
        """For ``Stream.cancel``."""
        if stream.request_id not in self._streams:
            return
        self._forget(stream)
        if stream.generate is not None:
            self._send_cancel(stream.request_id, stream.attempt, reason)

    def credit_stream(self, stream: Stream, is_open: bool) -> None:
        """For a stream whose reader is stuck, or reads again."""
        self._post(m.StreamCredit(stream.request_id, stream.attempt, is_open))

    def _send_cancel(self, request_id: str, attempt: int, reason: str) -> None:
        """Cancel at the router, repeated until Closed."""
        self._cancels[request_id] = attempt, reason, time.monotonic()
        self._post(m.Cancel(request_id, attempt, reason))

    def _fail(self, stream: Stream, failed: m.Failed) -> None:
        if stream.accepted is not None and not stream.accepted.done():
            stream.accepted.set_result(failed)
        stream.put(failed)
        self.cancel_stream(stream, "admin")

    def _close(self, stream: Stream, closed: m.Closed) -> None:
        self._cancels.pop(stream.request_id, None)
        if not all(stream.is_finished):
            # The router gave up before we had everything: never a silent truncation.
            message = "the request was closed before its last token arrived"
            self._fail(stream, m.Failed(stream.request_id, stream.attempt, "internal", message))
            return
        stream.put(closed)
        self._forget(stream)

    def _accept(self, stream: Stream) -> None:
        if stream.accepted is not None and not stream.accepted.done():
            stream.accepted.set_result(None)

    # ---- from the router

    async def _handle(self, envelope: Envelope) -> None:
        body = envelope.body
        if envelope.header.incarnation != self._link.last_router:
            self.num_stale += 1  # of a router that has been replaced
            return
        match body:
            case m.Closed():
                if body.request_id in self._cancels:
                    attempt, _, _ = self._cancels[body.request_id]
                    if body.attempt >= attempt:
                        del self._cancels[body.request_id]
                stream = self._streams.get(body.request_id)
                if stream is not None and body.attempt >= stream.attempt:
                    self._close(stream, body)
            case m.Queued() | m.Failed():
                stream = self._streams.get(body.request_id)
                if stream is None or stream.generate is None or body.attempt < stream.attempt:
                    self.num_stale += 1
                elif isinstance(body, m.Failed):
                    self._fail(stream, body)
                else:
                    self._accept(stream)
            case m.AskEmitted():
                self._answer(body)
            case m.PromptLogprobs():
                stream = self._streams.get(body.request_id)
                if stream is not None and stream.scores is not None:
                    try:
                        stream.scores.add(body, envelope.blobs)
                    except ProtocolError as error:
                        log.warning("bad scores", rid=body.request_id, error=error.message)
            case _:
                log.debug("unexpected message", type=type(body).__name__)

    def _answer(self, ask: m.AskEmitted) -> None:
        stream = self._streams.get(ask.request_id)
        if stream is None or stream.generate is None:
            if ask.request_id not in self._cancels:
                self._send_cancel(ask.request_id, ask.attempt, "client_gone")
            return
        if ask.attempt < stream.attempt:
            self.num_stale += 1
            return
        if ask.attempt > stream.attempt:
            stream.begin_attempt(ask.attempt)
            stream.num_resumes += 1
        self._accept(stream)
        # Without a tokenizer there is no answer; the router asks again.
        if self._reopen(stream):
            self._tell(stream)

    def _tell(self, stream: Stream) -> None:
        assert stream.tokenizer is not None
        states, blob = stream.choices()
        instance = stream.tokenizer.peer.instance
        self._post(m.Emitted(stream.request_id, stream.attempt, states, instance), (blob,))

    async def _on_router(self, incarnation: str) -> None:
        """Another router: it knows none of our requests."""
        self._outbox.clear()
        for request_id, (attempt, reason, _) in list(self._cancels.items()):
            self._send_cancel(request_id, attempt, reason)
        for stream in list(self._streams.values()):
            if stream.generate is None or stream.is_over:
                continue
            if not all(stream.is_finished):
                if stream.accepted is None or stream.accepted.done():
                    stream.num_resumes += 1
                stream.begin_attempt(stream.attempt + 1)
                self._reopen(stream)
                self._submit(stream)
        log.info("router", incarnation=incarnation, streams=len(self._streams))

    # ---- tokenizers

    async def _on_peers(self, peers: m.Peers) -> None:
        self._tokenizers.follow(peers)
        self._place()

    def _on_tokenizer_gone(self, link: TokenizerLink) -> None:
        for stream in self._streams.values():
            if stream.tokenizer is link:
                stream.tokenizer = None

    def _place(self) -> None:
        """Give each stream without a tokenizer, or at a draining one, a new one."""
        target = self._tokenizers.pick()
        if target is None:
            return
        for stream in list(self._streams.values()):
            here = stream.tokenizer
            if here is None or (here.peer.is_draining and not target.peer.is_draining):
                self._reopen(stream)
                if stream.generate is not None:
                    self._tell(stream)
                target = self._tokenizers.pick() or target

    def _reopen(self, stream: Stream) -> bool:
        """Open the stream with what the client has, where it is or at another tokenizer. False:
        there is none.
        """
        here, target = stream.tokenizer, stream.tokenizer
        if here is None or here.peer.is_draining:
            target = self._tokenizers.pick()
        if target is None:
            return False
        if target is not here:
            if here is not None:
                here.num_streams -= 1
                here.outbox.post(m.CloseStream(stream.request_id))
            target.num_streams += 1
            stream.tokenizer = target
        states, blob = stream.choices()
        body = m.OpenStream(stream.request_id, stream.attempt, stream.prompt.output, states)
        target.outbox.post(body, (blob,))
        stream.reopened_s = stream.delta_s = time.monotonic()
        self.num_reopened += 1
        return True

    def _heard(self, link: TokenizerLink, envelope: Envelope) -> None:
        match envelope.body:
            case m.TextDeltas():
                self._apply_all(link, envelope.body, envelope.blobs)
            case m.Failed():
                stream = self._streams.get(envelope.body.request_id)
                if stream is not None and stream.tokenizer is link:
                    self._fail(stream, envelope.body)
            case _:
                log.debug("unexpected message", type=type(envelope.body).__name__)

    # ---- text

    def _apply_all(
        self, tokenizer: TokenizerLink, deltas: m.TextDeltas, blobs: Sequence[bytes]
    ) -> None:
        ids = unpack_ids(blobs[0] if blobs else b"")
        begin = 0
        for delta in deltas.items:
            end = begin + delta.num_ids
            stream = self._streams.get(delta.request_id)
            if stream is not None and stream.tokenizer is tokenizer:
                self._apply(stream, delta, ids[begin:end], deltas.drawn_ns)
            else:
                self.num_stale += 1
            begin = end

    def _apply(
        self, stream: Stream, delta: m.TextDelta, ids: array[int], drawn_ns: int = 0
    ) -> None:
        """Append at the end, as a whole or not at all."""
        if (
            delta.attempt != stream.attempt
            or stream.generate is None
            or not 0 <= delta.choice < len(stream.ids)
            or stream.is_finished[delta.choice]
            or len(ids) != delta.num_ids
        ):
            self.num_stale += 1
            return
        have = stream.ids[delta.choice]
        now = time.monotonic()
        if delta.start != len(have):
            # A gap or an overlap: ask for the stream from our end. What is on its way meanwhile is
            # dropped or fits; the pause keeps one gap from causing many reopens.
            self.num_stale += 1
            if now - stream.reopened_s > REOPEN_S:
                self._reopen(stream)
            return
        have.extend(ids)
        stream.delta_s, stream.idle_s = now, IDLE_S
        self._accept(stream)
        if delta.finish_reason:
            stream.is_finished[delta.choice] = True
        stream.put(Delta(delta, ids, drawn_ns))
        if all(stream.is_finished):
            stream.finished_s = now
            self._send_cancel(stream.request_id, stream.attempt, "finished")
        elif delta.finish_reason == "stop":  # perhaps by a stop string, which decode does not know
            self._post(m.EndChoice(stream.request_id, stream.attempt, delta.choice))
        elif stream.num_buffered > MAX_BUFFERED_HARD:
            message = "the client does not read"
            self._fail(stream, m.Failed(stream.request_id, stream.attempt, "slow_reader", message))

    # ---- time

    async def _sweep(self) -> None:
        """Send again what got no answer; give up what waited too long."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            self._lost_router_s = 0.0 if self._link.router else self._lost_router_s or now
            is_lost = bool(self._lost_router_s) and now - self._lost_router_s > ROUTER_AWAY_S
            self._place()
            for stream in list(self._streams.values()):
                self._check(stream, now, is_lost)
            for request_id, (attempt, reason, since_s) in list(self._cancels.items()):
                if is_lost:
                    del self._cancels[request_id]
                elif now - since_s > RESEND_S:
                    self._send_cancel(request_id, attempt, reason)

    def _check(self, stream: Stream, now: float, is_lost: bool) -> None:
        if stream.generate is None:
            return
        if all(stream.is_finished):
            if now - stream.finished_s > CLOSE_WAIT_S:
                # The accounts are lost with the router; what the client has is complete.
                stream.put(m.Closed(stream.request_id, stream.attempt))
                self._forget(stream)
        elif is_lost:
            message = "the router is away"
            failed = m.Failed(stream.request_id, stream.attempt, NotReady.code, message, 503)
            self._fail(stream, failed)
        elif stream.accepted is not None and not stream.accepted.done():
            if self._link.router and now - stream.sent_s > RESEND_S:
                self._submit(stream)
        elif now - stream.delta_s > stream.idle_s and not stream.is_parked:
            # Both are idempotent: they mend what a lost message broke, else nothing happens.
            stream.idle_s = min(2 * stream.idle_s, MAX_IDLE_S)
            self._reopen(stream)
            self._submit(stream)
