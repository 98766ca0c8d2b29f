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
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import structlog

from decant.protocol import messages as m
from decant.protocol.config import Config
from decant.protocol.errors import DecantError, NotReady
from decant.protocol.wire import Envelope, Sender, pack_ids, unpack_ids
from decant.services.link import RouterLink
from decant.services.sockets import Dealer, Outbox

ENCODE_TIMEOUT_S = 30.0
ROUTER_AWAY_S = 30.0  # after that, requests in flight fail
SWEEP_S = 0.25
RESEND_S = 1.0  # Generate without an answer, Cancel without Closed
REOPEN_S = 0.5  # between two attempts to close a gap in a stream
IDLE_S = 5.0  # without a delta: open the stream and submit again (a message may be lost) ...
MAX_IDLE_S = 60.0  # ... and after twice that time, at most so much
CLOSE_WAIT_S = 3.0  # for the accounts after the last token
MAX_BUFFERED_IDS = 512  # then decode is told to park the request
MAX_BUFFERED_HARD = 65536  # then the request is cancelled

log = structlog.get_logger()


def new_request_id() -> str:
    """32 hex digits, random."""
    return secrets.token_hex(16)


class RequestFailed(DecantError):
    """A tokenizer or the router said Failed. ``code``, ``status``, ``param``, ``retry_after_s``
    (0: none) and ``is_retryable`` are those of the message.
    """

    def __init__(self, failed: m.Failed) -> None:
        super().__init__(failed.message)
        self.code, self.status, self.param = failed.code, failed.status, failed.param
        self.retry_after_s, self.is_retryable = failed.retry_after_s, failed.is_retryable
        self.failed = failed


class Prompt(NamedTuple):
    """An encoded prompt. Its output stream is open at a tokenizer, unless it was only counted."""

    request_id: str
    ids: array[int]
    output: m.Output


class Delta(NamedTuple):
    """Text of some tokens of a choice, in order, without gap or repeat, with their ids."""

    text: m.TextDelta
    ids: array[int]


Event = Delta | m.Failed | m.Closed


class _Tokenizer:
    """The connection to one incarnation of a tokenizer."""

    def __init__(self, peer: m.Peer, socket: Dealer) -> None:
        self.peer, self.socket = peer, socket
        self.outbox = Outbox(socket.send)
        self.tasks: list[asyncio.Task[None]] = []
        self.num_streams = 0


class Stream:
    """Events of one request, and all that is needed to start it again.

    ``ids[choice]`` are the tokens that have been applied (they may still wait in the buffer).
    """

    def __init__(self, client: RequestClient, prompt: Prompt, tokenizer: _Tokenizer | None) -> None:
        self.request_id, self.prompt = prompt.request_id, prompt
        self.attempt = 1
        self.ids = [array("i") for _ in range(prompt.output.num_choices)]
        self.is_finished = [False] * prompt.output.num_choices
        self.generate: m.Generate | None = None  # as submitted; None while only encoded
        self.num_resumes = 0
        self.is_over = False  # no event will be added
        self.tokenizer = tokenizer
        self._client = client
        self._events: deque[Event] = deque()
        self._wake = asyncio.Event()
        self.idle_s = IDLE_S
        self._num_buffered = 0
        self.is_parked = False
        self.cancel_reason = ""
        self.accepted: asyncio.Future[m.Failed | None] | None = None
        self.sent_s = self.delta_s = self.reopened_s = self.finished_s = time.monotonic()

    # ---- for the gateway

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Event:
        """The next event; after Failed or Closed the iteration ends. Waits as long as the request
        lives (the router owns its deadline).
        """
        while not self._events:
            if self.is_over:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        event = self._events.popleft()
        if isinstance(event, Delta):
            self._num_buffered -= max(1, len(event.ids))
            if self.is_parked and self._num_buffered < MAX_BUFFERED_IDS // 4:
                self._park(False)
        return event

    def cancel(self, reason: str = "client_gone") -> None:
        """Stop the request wherever it is. Idempotent; never waits; no event follows."""
        self._events.clear()
        self._client._cancel(self, reason)

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    # ---- for the client

    def choices(self) -> tuple[list[m.ChoiceState], bytes]:
        """What the client has, as in Emitted, and the blob of ids."""
        states = [
            m.ChoiceState(i, len(ids), is_finished)
            for i, (ids, is_finished) in enumerate(zip(self.ids, self.is_finished, strict=True))
        ]
        return states, b"".join(map(pack_ids, self.ids))

    def put(self, event: Event) -> None:
        if self.is_over:
            return
        self._events.append(event)
        if isinstance(event, Delta):
            self._num_buffered += max(1, len(event.ids))
            if self._num_buffered > MAX_BUFFERED_IDS and not self.is_parked:
                self._park(True)
        else:
            self.is_over = True
        self._wake.set()

    def end(self) -> None:
        """No more events, not even a last one."""
        self.is_over = True
        self._wake.set()

    @property
    def num_buffered(self) -> int:
        """Ids that wait to be read."""
        return self._num_buffered

    def _park(self, is_parked: bool) -> None:
        self.is_parked = is_parked
        self._client._post(m.StreamCredit(self.request_id, self.attempt, not is_parked))


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
        self._tokenizers: dict[str, _Tokenizer] = {}  # by incarnation
        self._tokenizer_joined = asyncio.Event()
        self._streams: dict[str, Stream] = {}  # encoded or generating
        self._cancels: dict[str, tuple[int, str, float]] = {}  # request: attempt, reason, since
        self._waiters: dict[str, asyncio.Future[Envelope]] = {}  # Encode and Detokenize
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

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._link.run())
                tasks.create_task(self._outbox.run())
                tasks.create_task(self._sweep())
        finally:
            for tokenizer in list(self._tokenizers.values()):
                self._drop_tokenizer(tokenizer)
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
        envelope, tokenizer = await self._ask(request_id, encode, (), timeout_s)
        ids = unpack_ids(envelope.blobs[0] if envelope.blobs else b"")
        result = Prompt(request_id, ids, output)
        if not count_only:
            self._streams[request_id] = stream = Stream(self, result, tokenizer)
            tokenizer.num_streams += 1
            if tokenizer.peer.incarnation not in self._tokenizers:
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
        envelope, _ = await self._ask(request_id, body, (pack_ids(ids),), timeout_s)
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
        self._post(body, (pack_ids(stream.prompt.ids), b"" if is_fresh else blob))

    def _post(self, body: m.Message, blobs: Sequence[bytes] = ()) -> None:
        # What the outbox refuses is lost like any message; the sweep sends it again.
        self._outbox.post(body, blobs)

    def _forget(self, stream: Stream) -> None:
        """The request is over for us: close its stream at the tokenizer."""
        stream.end()
        if self._streams.pop(stream.request_id, None) is None:
            return
        if stream.tokenizer is not None:
            stream.tokenizer.num_streams -= 1
            stream.tokenizer.outbox.post(m.CloseStream(stream.request_id))
            stream.tokenizer = None

    def _cancel(self, stream: Stream, reason: str) -> None:
        if stream.request_id not in self._streams:
            return
        self._forget(stream)
        if stream.generate is not None:
            self._send_cancel(stream.request_id, stream.attempt, reason)

    def _send_cancel(self, request_id: str, attempt: int, reason: str) -> None:
        """Cancel at the router, repeated until Closed."""
        self._cancels[request_id] = attempt, reason, time.monotonic()
        self._post(m.Cancel(request_id, attempt, reason))

    def _fail(self, stream: Stream, failed: m.Failed) -> None:
        if stream.accepted is not None and not stream.accepted.done():
            stream.accepted.set_result(failed)
        stream.put(failed)
        self._cancel(stream, "admin")

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
            stream.attempt = ask.attempt
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
                stream.attempt += 1
                self._reopen(stream)
                self._submit(stream)
        log.info("router", incarnation=incarnation, streams=len(self._streams))

    async def _on_peers(self, peers: m.Peers) -> None:
        live = {p.incarnation: p for p in peers.peers if p.service == "tokenizer" and p.endpoint}
        for incarnation, tokenizer in list(self._tokenizers.items()):
            if incarnation in live:
                tokenizer.peer = live[incarnation]
            else:
                self._drop_tokenizer(tokenizer)
        for incarnation, peer in live.items():
            if incarnation not in self._tokenizers:
                self._add_tokenizer(peer)
        self._place()

    # ---- tokenizers

    def _add_tokenizer(self, peer: m.Peer) -> None:
        tokenizer = _Tokenizer(peer, Dealer(self._sender, peer.endpoint))
        self._tokenizers[peer.incarnation] = tokenizer
        tokenizer.outbox.post(self._hello)
        tokenizer.tasks = [
            asyncio.create_task(tokenizer.outbox.run()),
            asyncio.create_task(self._read(tokenizer)),
        ]
        self._tokenizer_joined.set()

    def _drop_tokenizer(self, tokenizer: _Tokenizer) -> None:
        self._tokenizers.pop(tokenizer.peer.incarnation, None)
        for task in tokenizer.tasks:
            task.cancel()
        tokenizer.socket.close()
        if not self._tokenizers:
            self._tokenizer_joined.clear()
        for stream in self._streams.values():
            if stream.tokenizer is tokenizer:
                stream.tokenizer = None

    def _pick(self) -> _Tokenizer | None:
        """The tokenizer with the fewest streams; a draining one only if there is no other."""
        return min(
            self._tokenizers.values(),
            key=lambda t: (t.peer.is_draining, t.num_streams),
            default=None,
        )

    def _place(self) -> None:
        """Give each stream without a tokenizer, or at a draining one, a new one."""
        target = self._pick()
        if target is None:
            return
        for stream in list(self._streams.values()):
            here = stream.tokenizer
            if here is None or (here.peer.is_draining and not target.peer.is_draining):
                self._reopen(stream)
                if stream.generate is not None:
                    self._tell(stream)
                target = self._pick() or target

    def _reopen(self, stream: Stream) -> bool:
        """Open the stream with what the client has, where it is or at another tokenizer. False:
        there is none.
        """
        here, target = stream.tokenizer, stream.tokenizer
        if here is None or here.peer.is_draining:
            target = self._pick()
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

    async def _ask(
        self, request_id: str, body: m.Message, blobs: Sequence[bytes], timeout_s: float
    ) -> tuple[Envelope, _Tokenizer]:
        """Send to a tokenizer and wait for the answer; again elsewhere if it dies meanwhile."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    await self._tokenizer_joined.wait()
                    tokenizer = self._pick()
                    assert tokenizer is not None
                    answer = self._waiters[request_id] = loop.create_future()
                    if not tokenizer.outbox.post(body, blobs):
                        raise NotReady("the tokenizer's queue is full")
                    alive = tokenizer.tasks[1]
                    await asyncio.wait({answer, alive}, return_when=asyncio.FIRST_COMPLETED)
                    if answer.done():
                        envelope = answer.result()
                        if isinstance(envelope.body, m.Failed):
                            raise RequestFailed(envelope.body)
                        return envelope, tokenizer
        except TimeoutError as error:
            self._abandon(request_id)
            raise NotReady(f"no tokenizer answered within {timeout_s:g} s") from error
        except asyncio.CancelledError:
            self._abandon(request_id)
            raise
        finally:
            self._waiters.pop(request_id, None)

    def _abandon(self, request_id: str) -> None:
        for tokenizer in self._tokenizers.values():
            tokenizer.outbox.post(m.CloseStream(request_id))

    async def _read(self, tokenizer: _Tokenizer) -> None:
        while True:
            envelope = await tokenizer.socket.receive()
            body = envelope.body
            match body:
                case m.TextDeltas():
                    if envelope.header.incarnation == tokenizer.peer.incarnation:
                        self._apply_all(tokenizer, body, envelope.blobs)
                case m.Encoded() | m.Text() | m.Failed():
                    waiter = self._waiters.get(body.request_id)
                    if waiter is not None and not waiter.done():
                        waiter.set_result(envelope)
                    elif isinstance(body, m.Failed):
                        stream = self._streams.get(body.request_id)
                        if stream is not None and stream.tokenizer is tokenizer:
                            self._fail(stream, body)
                case _:
                    log.debug("unexpected message", type=type(body).__name__)

    # ---- text

    def _apply_all(
        self, tokenizer: _Tokenizer, deltas: m.TextDeltas, blobs: Sequence[bytes]
    ) -> None:
        ids = unpack_ids(blobs[0] if blobs else b"")
        begin = 0
        for delta in deltas.items:
            end = begin + delta.num_ids
            stream = self._streams.get(delta.request_id)
            if stream is not None and stream.tokenizer is tokenizer:
                self._apply(stream, delta, ids[begin:end])
            else:
                self.num_stale += 1
            begin = end

    def _apply(self, stream: Stream, delta: m.TextDelta, ids: array[int]) -> None:
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
        stream.put(Delta(delta, ids))
        if all(stream.is_finished):
            stream.finished_s = now
            self._send_cancel(stream.request_id, stream.attempt, "finished")
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
