"""A client of many requests at once, and what it saw of each: the history that a row checks.

It never retries: a request that fails has failed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from mix import Ask

INCOMPLETE = "the answer is not complete"  # it ended like a whole one
TIMEOUT_S = 180.0  # of one request; then it counts as hung


@dataclass
class Answer:
    """What the client saw of one request."""

    rid: str
    ask: Ask
    status: int = 0  # 0: no answer
    transcript: str = ""  # canonical; empty if it is not complete
    error: str = ""
    is_hung: bool = False
    sent_s: float = 0.0  # CLOCK_MONOTONIC
    ended_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)  # of chunks with tokens
    retry_after: str = ""
    should_retry: str = ""  # x-should-retry
    code: str = ""  # of an error object

    @property
    def is_ok(self) -> bool:
        return bool(self.transcript)


class _Parts:
    """The choices of an answer, put together."""

    def __init__(self) -> None:
        self.choices: dict[int, dict[str, Any]] = {}
        self.usage: dict[str, Any] | None = None

    def choice(self, index: int) -> dict[str, Any]:
        empty: dict[str, Any] = {"reasoning": "", "content": "", "calls": [], "finish": None}
        return self.choices.setdefault(index, empty)

    def add(self, chunk: dict[str, Any]) -> bool:
        """Returns: it brought text."""
        self.usage = chunk.get("usage") or self.usage
        has_text = False
        for given in chunk.get("choices", ()):
            choice = self.choice(given["index"])
            delta = given.get("delta") or given.get("message") or {}
            for name, key in (("reasoning", "reasoning_content"), ("content", "content")):
                if delta.get(key):
                    choice[name] += delta[key]
                    has_text = True
            for position, call in enumerate(delta.get("tool_calls") or ()):
                index = call.get("index", position)
                calls = choice["calls"]
                while len(calls) <= index:
                    calls.append(["", ""])
                function = call.get("function", {})
                calls[index][0] += function.get("name") or ""
                calls[index][1] += function.get("arguments") or ""
                has_text = True
            choice["finish"] = given.get("finish_reason") or choice["finish"]
        return has_text

    def transcript(self) -> str:
        """Canonical text of the answer; empty if a choice has no end."""
        choices = [self.choices[i] for i in sorted(self.choices)]
        if not choices or not all(c["finish"] for c in choices):
            return ""
        tokens = (self.usage or {}).get("completion_tokens")
        return json.dumps({"choices": choices, "tokens": tokens}, sort_keys=True)


class Traffic:
    """Use ``async with``. ``on_arrival`` is called for every chunk with tokens."""

    def __init__(self, url: str, name: str, timeout_s: float = TIMEOUT_S, key: str = "") -> None:
        """name: prefix of the request ids, different for every run against one set."""
        self.answers: list[Answer] = []
        self._url, self._name, self._timeout_s = url, name, timeout_s
        self._number = 0
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def __aenter__(self) -> Traffic:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            read_bufsize=1 << 20,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(
        self, ask: Ask, on_arrival: Callable[[Answer], Awaitable[None]] | None = None
    ) -> Answer:
        """One request to its end. Raises only CancelledError (the client leaves)."""
        self._number += 1
        answer = Answer(f"{self._name}-{self._number}", ask, sent_s=time.monotonic())
        self.answers.append(answer)
        headers = {"X-Request-Id": answer.rid, **self._headers}
        url = self._url + "/v1/chat/completions"
        try:
            async with self._session.post(url, json=ask.body, headers=headers) as response:
                answer.status = response.status
                answer.retry_after = response.headers.get("Retry-After", "")
                answer.should_retry = response.headers.get("x-should-retry", "")
                if response.status != 200:
                    found = await response.json()
                    answer.code = str(found["error"].get("code"))
                    answer.error = json.dumps(found)[:300]
                elif ask.is_streamed:
                    await self._read(response, answer, on_arrival)
                else:
                    parts = _Parts()
                    parts.add(await response.json())
                    answer.transcript = parts.transcript()
        except TimeoutError:
            answer.is_hung, answer.error = True, "no end in time"
        except (aiohttp.ClientError, ValueError, KeyError) as error:
            answer.error = f"{type(error).__name__}: {error}"[:300]
        finally:
            answer.ended_s = time.monotonic()
        if not answer.transcript and not answer.error:
            answer.error = INCOMPLETE
        return answer

    async def _read(
        self,
        response: aiohttp.ClientResponse,
        answer: Answer,
        on_arrival: Callable[[Answer], Awaitable[None]] | None,
    ) -> None:
        parts, is_done = _Parts(), False
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            if is_done:
                answer.error = "something came after [DONE]"
                return
            if line.startswith(b"data: [DONE]"):
                is_done = True
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                answer.error = json.dumps(chunk["error"])[:300]
                answer.code = str(chunk["error"].get("code"))
                continue
            if parts.add(chunk):
                answer.arrivals_s.append(time.monotonic())
                if on_arrival:
                    await on_arrival(answer)
        if is_done and not answer.error:
            answer.transcript = parts.transcript()

    async def many(
        self,
        asks: Iterable[Ask],
        at_once: int,
        is_over: Callable[[], bool] = lambda: False,
    ) -> list[Answer]:
        """All requests, ``at_once`` under way at any time; stops early when ``is_over``."""
        source, found = iter(asks), []

        async def worker() -> None:
            for ask in source:
                if is_over():
                    return
                found.append(await self.ask(ask))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(worker())
        return found
