"""One prompt on its way: encode, check the context, generate, and its events in batches.

Common to every API shape. Knows no HTTP.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import TracebackType

import msgspec

from decant.protocol.config import GatewayConfig
from decant.protocol.errors import ContextTooLong, EngineError, InvalidRequest
from decant.protocol.messages import (
    Closed,
    Failed,
    Grammar,
    Output,
    Sampling,
    TextDelta,
    TokenLogprob,
    ToolDelta,
)
from decant.services.api import errors
from decant.services.api.checker import Checker
from decant.services.api.usage import Usage
from decant.services.model_folder import ModelFolder
from decant.services.prompt_scores import PromptScores
from decant.services.requests import Delta, RequestClient, Stream, new_request_id
from decant.services.serving_metrics import GatewayMetrics

DELIVERIES = 256  # last token batches whose delivery is remembered for the account


@dataclass(frozen=True)
class Backend:
    """What the API shapes need of the process."""

    config: GatewayConfig
    model: ModelFolder
    client: RequestClient
    metrics: GatewayMetrics
    checker: Checker


@dataclass(frozen=True)
class Job:
    """A validated request for one prompt."""

    kind: str  # of Encode
    prompt: bytes
    output: Output
    sampling: Sampling  # max_tokens 0: the rest of the context, up to ``default_max_tokens``
    default_max_tokens: int
    grammars: tuple[Grammar, ...] = ()  # candidates, the first usable one is taken
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0


@dataclass(frozen=True)
class ScoredToken:
    """A token of the prompt under the model. The first one has no logprob."""

    token_id: int
    text: str
    logprob: float | None
    rank: int
    top: list[tuple[int, str, float]]  # id, text, logprob; the likeliest first


@dataclass
class Choice:
    """All that a choice has said so far."""

    content: str = ""
    reasoning: str = ""
    tools: dict[int, ToolDelta] = field(default_factory=dict)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ids: array[int] = field(default_factory=lambda: array("i"))
    finish_reason: str = ""
    matched_stop: str = ""
    num_tokens: int = 0
    first_s: float = 0.0  # since the request came
    last_s: float = 0.0


class Generation:
    """``async with Generation(...) as g: async for deltas in g.batches(): ...``

    Leaving the block cancels what still runs, on every process. ``usage`` is complete after the
    last batch; ``choices`` hold the whole text if ``keeps`` is set."""

    def __init__(
        self,
        backend: Backend,
        job: Job,
        keeps: bool,
        start_s: float,
        entered: Callable[[], None] = lambda: None,
    ) -> None:
        """start_s: when the HTTP request came, CLOCK_MONOTONIC. entered: called once the router has
        taken or refused it.
        """
        self.usage = Usage()
        self.prompt_ids: array[int] = array("i")
        self.prompt_scores: list[ScoredToken] = []  # of the prompt, if the job wants them
        self.choices = [Choice() for _ in range(job.output.num_choices)]
        self.closed: Closed | None = None
        self.max_tokens = 0
        self.encode_ms = 0.0
        self.first_s = 0.0  # time of the first token, CLOCK_MONOTONIC
        self.request_id = new_request_id()
        self.deliveries_ms: deque[float] = deque(maxlen=DELIVERIES)
        self._unsent_ns = 0  # when decode had the oldest tokens that are not written yet
        self._backend, self._job, self._keeps, self._start_s = backend, job, keeps, start_s
        self._entered = entered
        self._stream: Stream | None = None

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._stream is not None:
            self._stream.cancel()

    async def start(self) -> None:
        """Encode and submit. Raises: what the tokenizer or admission says, ContextTooLong."""
        try:
            await self._submit()
        finally:
            self._entered()

    async def _submit(self) -> None:
        client, job = self._backend.client, self._job
        grammar = await self._grammar()
        began_s = time.monotonic()
        prompt = await client.encode(self.request_id, job.kind, job.prompt, job.output)
        self.encode_ms = (time.monotonic() - began_s) * 1e3
        try:
            self.prompt_ids = prompt.ids
            self.usage.prompt_tokens = len(prompt.ids)
            sampling = self._bounded(len(prompt.ids))
            self.max_tokens = sampling.max_tokens
            self._backend.metrics.request(
                len(prompt.ids), job.output.num_choices, sampling.max_tokens
            )
            timeout_ms = int(self._backend.config.request_timeout_s * 1000)
            self._stream = await client.generate(
                prompt,
                sampling,
                deadline_ms=time.monotonic_ns() // 1_000_000 + timeout_ms,
                grammar=grammar,
                tenant=job.tenant,
                cache_salt=job.cache_salt,
                priority=job.priority,
            )
        except BaseException:
            client.discard(prompt)
            raise

    async def _grammar(self) -> Grammar | None:
        """The first usable candidate. Raises: InvalidRequest if none is."""
        for i, grammar in enumerate(self._job.grammars):
            try:
                await self._backend.checker.check(grammar)
            except InvalidRequest:
                if i + 1 == len(self._job.grammars):
                    raise
            else:
                return grammar
        return None

    def _bounded(self, num_prompt: int) -> Sampling:
        """The sampling with a maximum that fits the context."""
        sampling, context = self._job.sampling, self._backend.model.max_context
        wanted = sampling.max_tokens
        if num_prompt + max(wanted, 1) > context:
            asked = f" plus {wanted} requested tokens" if wanted else ""
            raise ContextTooLong(
                f"The prompt has {num_prompt} tokens{asked}; "
                f"the model's context is {context} tokens.",
                prompt_tokens=num_prompt,
                max_tokens=wanted,
            )
        if not wanted:
            wanted = min(self._job.default_max_tokens, context - num_prompt)
        return msgspec.structs.replace(
            sampling, max_tokens=wanted, min_tokens=min(sampling.min_tokens, wanted)
        )

    async def batches(self) -> AsyncIterator[list[TextDelta]]:
        """What arrived since the last batch, one delta a choice. Raises: RequestFailed."""
        await self.start()
        stream = self._stream
        assert stream is not None
        async for event in stream:
            if stream.scores is not None and isinstance(event, Delta):
                await self._read_scores(stream.scores)
                stream.scores = None
            events = [event]
            while stream.num_buffered:  # a slow client gets fewer, larger pieces
                events.append(await anext(stream))
            batch: dict[int, TextDelta] = {}
            for item in events:
                if isinstance(item, Failed):
                    raise errors.failed(item)
                if isinstance(item, Closed):
                    self._close(item)
                elif isinstance(item, Delta):
                    self._count(item)
                    old = batch.get(item.text.choice)
                    batch[item.text.choice] = item.text if old is None else join(old, item.text)
            if batch:
                yield list(batch.values())

    def written(self, is_written: bool) -> None:
        """The events of what ``batches`` gave last were written to the client's socket; False:
        they were empty (a held-back piece of a stop string, half a character).
        """
        drawn_ns, self._unsent_ns = self._unsent_ns, 0
        if is_written and drawn_ns:
            took_s = max(0, time.monotonic_ns() - drawn_ns) / 1e9
            self.deliveries_ms.append(took_s * 1e3)
            self._backend.metrics.delivery.observe(took_s)

    async def _read_scores(self, scores: PromptScores) -> None:
        """Fill ``prompt_scores``. Raises: EngineError if they do not come, NotReady."""
        try:
            await scores.wait()
        except TimeoutError as error:
            raise EngineError("the prompt's log probabilities were lost") from error
        ids = sorted({*self.prompt_ids, *scores.top_ids})
        pieces = (await self._backend.client.detokenize(ids)).pieces
        texts = dict(zip(ids, pieces, strict=True))
        num = scores.num_top
        self.prompt_scores = [
            ScoredToken(
                token_id,
                texts[token_id],
                scores.logprobs[i] if i else None,
                scores.ranks[i],
                [
                    (top, texts[top], scores.top_logprobs[i * num + j])
                    for j, top in enumerate(scores.top_ids[i * num : (i + 1) * num])
                    if i
                ],
            )
            for i, token_id in enumerate(self.prompt_ids)
        ]

    def _count(self, delta: Delta) -> None:
        if not self.first_s:
            self.first_s = time.monotonic()
        self._unsent_ns = self._unsent_ns or delta.drawn_ns
        text = delta.text
        if text.finish_reason == "error":
            raise EngineError("the model failed to continue this request")
        self.usage.completion_tokens += len(delta.ids)
        self.usage.reasoning_tokens += text.num_reasoning_ids
        choice = self.choices[text.choice]
        choice.finish_reason = text.finish_reason or choice.finish_reason
        choice.matched_stop = text.matched_stop or choice.matched_stop
        now_s = time.monotonic() - self._start_s
        if delta.ids:
            is_first = not choice.num_tokens
            gap_s = now_s if is_first else now_s - choice.last_s
            choice.first_s, choice.last_s = now_s if is_first else choice.first_s, now_s
            choice.num_tokens += len(delta.ids)
            self._backend.metrics.tokens(len(delta.ids), gap_s, is_first)
        if text.finish_reason:
            self._backend.metrics.choice(
                text.finish_reason, choice.num_tokens, choice.first_s, now_s
            )
        if not self._keeps:
            return
        choice.content += text.content
        choice.reasoning += text.reasoning
        choice.logprobs += text.logprobs
        choice.ids.extend(delta.ids)
        for tool in text.tools:
            known = choice.tools.get(tool.index)
            choice.tools[tool.index] = tool if known is None else _join_tool(known, tool)

    def _close(self, closed: Closed) -> None:
        self.closed = closed
        self.usage.cached_tokens = min(closed.num_cached_tokens, self.usage.prompt_tokens)
        self.usage.num_drafted = closed.num_drafted
        self.usage.num_accepted = closed.num_accepted
        self.usage.num_steps = closed.num_steps
        self._backend.metrics.closed(
            self.usage.cached_tokens, closed.num_accepted, closed.num_steps, closed.stages_ms
        )


def _join_tool(a: ToolDelta, b: ToolDelta) -> ToolDelta:
    return ToolDelta(
        a.index, a.name or b.name, a.arguments + b.arguments, a.is_complete or b.is_complete
    )


def join(a: TextDelta, b: TextDelta) -> TextDelta:
    """Two neighbouring deltas of one choice as one."""
    tools = list(a.tools)
    for tool in b.tools:
        if tools and tools[-1].index == tool.index and not tool.name:
            tools[-1] = _join_tool(tools[-1], tool)
        else:
            tools.append(tool)
    return msgspec.structs.replace(
        a,
        num_ids=a.num_ids + b.num_ids,
        content=a.content + b.content,
        reasoning=a.reasoning + b.reasoning,
        tools=tools,
        finish_reason=b.finish_reason or a.finish_reason,
        matched_stop=b.matched_stop or a.matched_stop,
        logprobs=[*a.logprobs, *b.logprobs],
        num_reasoning_ids=a.num_reasoning_ids + b.num_reasoning_ids,
    )
