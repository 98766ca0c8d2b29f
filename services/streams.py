"""One request in the gateway: its events on their way to the client, and what re-creates it."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from typing import NamedTuple, Protocol

from decant.protocol import messages as m
from decant.protocol.errors import DecantError
from decant.protocol.wire import pack_ids
from decant.services.prompt_scores import PromptScores
from decant.services.tokenizer_links import TokenizerLink

IDLE_S = 5.0  # without a delta: open the stream and submit again (a message may be lost) ...
MAX_IDLE_S = 60.0  # ... and after twice that time, at most so much
MAX_BUFFERED_IDS = 512  # then decode is told to park the request


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
    traceparent: str = ""  # W3C trace context that its messages carry


class Delta(NamedTuple):
    """Text of some tokens of a choice, in order, without gap or repeat, with their ids."""

    text: m.TextDelta
    ids: array[int]
    drawn_ns: int = 0  # when decode had them, CLOCK_MONOTONIC; 0: not known


Event = Delta | m.Failed | m.Closed


class Owner(Protocol):
    """Who keeps the streams and talks to the router."""

    def cancel_stream(self, stream: Stream, reason: str) -> None: ...

    def credit_stream(self, stream: Stream, is_open: bool) -> None: ...


class Stream:
    """Events of one request, and all that is needed to start it again.

    ``ids[choice]`` are the tokens that have been applied (they may still wait in the buffer).
    """

    def __init__(self, owner: Owner, prompt: Prompt, tokenizer: TokenizerLink | None) -> None:
        self.request_id, self.prompt = prompt.request_id, prompt
        self.attempt = 1
        self.ids = [array("i") for _ in range(prompt.output.num_choices)]
        self.is_finished = [False] * prompt.output.num_choices
        self.generate: m.Generate | None = None  # as submitted; None while only encoded
        self.scores: PromptScores | None = None  # if the request wants its prompt's
        self.num_resumes = 0
        self.is_over = False  # no event will be added
        self.tokenizer = tokenizer
        self._owner = owner
        self._events: deque[Event] = deque()
        self._wake = asyncio.Event()
        self.idle_s = IDLE_S
        self._num_buffered = 0
        self.is_parked = False
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
        self._owner.cancel_stream(self, reason)

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    # ---- for the client

    def begin_attempt(self, attempt: int) -> None:
        """From now on only this attempt counts. It starts with an open window."""
        self.attempt, self.is_parked = attempt, False

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
        self._owner.credit_stream(self, not is_parked)
