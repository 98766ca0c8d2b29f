"""POST /v1/completions: text or ids in, text out; several prompts, echo, fill in the middle."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from decant.protocol.errors import InvalidRequest
from decant.protocol.messages import Output, TextDelta
from decant.services.api import grammars, logprobs, models, sse
from decant.services.api.chat import IGNORED, check_fields, limits_of, read_salt, shows_stop
from decant.services.api.chat import read_stream_options as read_stream
from decant.services.api.errors import unsupported
from decant.services.api.generation import Backend, Generation, Job
from decant.services.api.sampling import (
    read_max_tokens,
    read_num_choices,
    read_prompt_logprobs,
    read_sampling,
    read_stops,
)
from decant.services.api.usage import Usage, account
from decant.services.api.validate import Fields
from decant.services.chat.markers import BOS
from decant.services.requests import new_request_id

MAX_PROMPTS = 64
MAX_LOGPROBS = 5
DEFAULT_MAX_TOKENS = 16
KNOWN = (
    "model", "prompt", "suffix", "max_tokens", "temperature", "top_p", "top_k", "min_p",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "seed", "stop",
    "stop_token_ids", "ignore_eos", "min_tokens", "skip_special_tokens",
    "include_stop_str_in_output", "no_stop_trim", "add_special_tokens",
    "n", "best_of", "stream", "stream_options", "logprobs", "echo",
    "user_id", "cache_salt", "prompt_cache_key", "priority", "regex", "ebnf", "response_format",
    "structural_tag", "guided_regex", "guided_grammar",
    "guided_json", "guided_choice", "structured_outputs", "prompt_logprobs", *IGNORED,
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """A validated completions request: one job a prompt."""

    model: str
    jobs: list[Job]
    texts: list[str]  # what echo shows before each prompt's answer, "" without echo
    echo_ids: list[list[int]]  # prompts given as ids whose text must still be found
    is_streamed: bool
    includes_usage: bool
    usage_in_every_chunk: bool
    has_logprobs: bool
    is_echoed: bool
    is_scored: bool  # logprobs of the echoed prompt
    is_prompt_only: bool  # what is generated is not shown
    num_top: int  # alternatives beside each token; -1: no logprobs
    num_top_prompt: int  # of vLLM's field prompt_logprobs; -1: not wanted
    num_choices: int


def parse(data: Any, backend: Backend, tenant: str = "") -> Request:
    """Raises: InvalidRequest, ApiError."""
    fields = Fields(data)
    check_fields(fields, KNOWN, backend.config)
    model = models.check(fields, backend.model)
    limits = limits_of(backend)
    prompts = _prompts(fields, limits.vocab_size)
    is_echoed = fields.boolean("echo")
    has_max = fields.has("max_tokens")
    max_tokens = read_max_tokens(fields, "max_tokens", low=0)
    if has_max and not max_tokens and not is_echoed:
        raise fields.fail("max_tokens", "is 0, which needs echo.")
    top = fields.integer("logprobs", -1, 0, MAX_LOGPROBS)
    top_prompt = read_prompt_logprobs(fields)
    is_scored = top >= 0 and is_echoed
    num_choices = read_num_choices(fields, limits)
    best_of = fields.integer("best_of", num_choices, 1)
    if best_of != num_choices:
        raise unsupported("best_of other than n is not supported.", "best_of")
    if len(prompts) * num_choices > max(MAX_PROMPTS, limits.max_choices):
        raise InvalidRequest(
            f"{len(prompts)} prompts with n = {num_choices} are too many choices.", "prompt"
        )
    suffix = fields.string("suffix")
    if suffix and is_echoed:
        raise fields.fail("suffix", "cannot be combined with echo.")
    is_streamed, includes_usage, continuous = read_stream(fields)
    # max_tokens 0 with echo asks for the prompt alone: nothing is generated, but a token that
    # nobody sees where the prompt's own logprobs are wanted.
    is_prompt_only = has_max and not max_tokens
    most = 1 if is_prompt_only else max_tokens or DEFAULT_MAX_TOKENS
    scored = max(top if is_scored else -1, top_prompt)
    sampling = read_sampling(fields, limits, most, top, scored)
    output = Output(
        stop=read_stops(fields),
        include_stop=shows_stop(fields),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        plain=True,
        num_choices=num_choices,
        logprobs=top >= 0,
        min_tokens=sampling.min_tokens,
    )
    found = grammars.for_completion(fields)
    plain = "document" if fields.boolean("add_special_tokens") else "text"
    begin = BOS if plain == "document" else ""  # stands in what echo shows, too
    salt, priority = read_salt(fields), fields.integer("priority", 0, -100, 100)
    jobs = []
    for prompt in prompts if not is_prompt_only or scored >= 0 else []:
        kind = "ids" if isinstance(prompt, list) else "fim" if suffix else plain
        if kind == "fim":
            value: Any = {"prompt": prompt, "suffix": suffix}
        else:
            value = prompt
        jobs.append(
            Job(
                kind=kind,
                prompt=json.dumps(value, ensure_ascii=False).encode(),
                output=output,
                sampling=sampling,
                default_max_tokens=DEFAULT_MAX_TOKENS,
                grammars=found,
                tenant=tenant,
                cache_salt=salt,
                priority=priority,
            )
        )
    return Request(
        model=model,
        jobs=jobs,
        texts=[begin + p if is_echoed and isinstance(p, str) else "" for p in prompts],
        echo_ids=[p if is_echoed and isinstance(p, list) else [] for p in prompts],
        is_streamed=is_streamed,
        includes_usage=includes_usage,
        usage_in_every_chunk=continuous,
        has_logprobs=top >= 0,
        is_echoed=is_echoed,
        is_scored=is_scored,
        is_prompt_only=is_prompt_only,
        num_top=top,
        num_top_prompt=top_prompt,
        num_choices=num_choices,
    )


def _prompts(fields: Fields, vocab_size: int) -> list[str] | list[list[int]] | list[Any]:
    """One or several prompts, each a text or a list of token ids; none may be empty."""
    value = fields.get("prompt")
    if value is None:
        raise fields.fail("prompt", "is missing.")
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise fields.fail("prompt", "must be a text, token ids, or an array of these.")
    if all(isinstance(v, int) for v in value):
        value = [value]
    if len(value) > MAX_PROMPTS:
        raise fields.fail("prompt", f"has {len(value)} prompts, at most {MAX_PROMPTS} are allowed.")
    for item in value:
        if not isinstance(item, str | list) or not item:
            raise fields.fail("prompt", "holds an empty prompt or one of a wrong type.")
        if isinstance(item, list):
            Fields({"prompt": item}).token_ids("prompt", 1 << 21, vocab_size)
    return value


def _frame(request_id: str, model: str) -> dict[str, Any]:
    return {
        "id": f"cmpl-{request_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": None,
    }


class Run:
    """All generations of a request. ``async with``: leaving cancels what still runs."""

    def __init__(
        self, backend: Backend, request: Request, start_s: float, entered: Callable[[], None]
    ) -> None:
        """start_s, entered: as for Generation."""
        self.request, self.request_id = request, new_request_id()
        keeps = not request.is_streamed
        self.generations = [
            Generation(backend, job, keeps, start_s, entered) for job in request.jobs
        ]
        self._backend = backend
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Run:
        for generation in self.generations:
            await self._stack.enter_async_context(generation)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.aclose()

    async def _echoes(self) -> list[str]:
        """Text before each prompt's answers."""
        texts = list(self.request.texts)
        for i, ids in enumerate(self.request.echo_ids):
            if ids:
                texts[i] = (await self._backend.client.detokenize(ids)).text
        return texts

    def usage(self) -> Usage:
        total = Usage()
        for generation in self.generations:
            for name in vars(total):
                setattr(total, name, getattr(total, name) + getattr(generation.usage, name))
        if self.request.is_prompt_only:
            total.completion_tokens = 0
        return total

    async def complete(self) -> dict[str, Any]:
        """The whole answer at once."""
        echoes = await self._echoes()

        async def finish(generation: Generation) -> None:
            async for _ in generation.batches():
                pass

        async with asyncio.TaskGroup() as tasks:
            for generation in self.generations:
                tasks.create_task(finish(generation))
        choices = []
        for p, generation in enumerate(self.generations):
            for i, choice in enumerate(generation.choices):
                found = None
                request = self.request
                if request.has_logprobs and not request.is_prompt_only:
                    found = logprobs.completions(choice.logprobs, len(echoes[p]))
                if request.is_scored:
                    found = logprobs.joined(
                        logprobs.echoed(generation.prompt_scores, request.num_top), found
                    )
                item = {
                    "index": p * request.num_choices + i,
                    "text": echoes[p] + ("" if request.is_prompt_only else choice.content),
                    "logprobs": found,
                    "finish_reason": "length" if request.is_prompt_only else choice.finish_reason,
                    "matched_stop": choice.matched_stop or None,
                }
                if request.num_top_prompt >= 0:
                    item["prompt_logprobs"] = logprobs.prompt(
                        generation.prompt_scores, request.num_top_prompt
                    )
                choices.append(item)
        if not self.generations:
            choices = [
                {"index": i, "text": text, "logprobs": None, "finish_reason": "length"}
                for i, text in enumerate(echoes)
            ]
        frame = _frame(self.request_id, self.request.model)
        return {**frame, "choices": choices, "usage": self.usage().openai()}

    async def stream(self) -> AsyncIterator[bytes]:
        """Events of all prompts' answers as they come."""
        request, frame = self.request, _frame(self.request_id, self.request.model)
        offsets: dict[int, int] = {}
        echoes = await self._echoes()

        def chunk(
            index: int,
            text: str,
            delta: TextDelta | None = None,
            found: dict[str, Any] | None = None,
        ) -> bytes:
            if delta is not None and request.has_logprobs and delta.logprobs:
                found = logprobs.completions(delta.logprobs, offsets.get(index, 0))
                offsets[index] = offsets.get(index, 0) + sum(len(p.text) for p in delta.logprobs)
            item: dict[str, Any] = {
                "index": index,
                "text": text,
                "logprobs": found,
                "finish_reason": (delta.finish_reason or None) if delta else None,
            }
            if delta and delta.matched_stop:
                item["matched_stop"] = delta.matched_stop
            value: dict[str, Any] = {**frame, "choices": [item]}
            if request.usage_in_every_chunk:
                value["usage"] = self.usage().openai()
            elif request.includes_usage:
                value["usage"] = None
            return sse.data(value)

        begun: set[int] = set()
        if not self.generations:
            yield b"".join(chunk(i, text) for i, text in enumerate(echoes))
        async for p, batch in _merge(self.generations):
            out = b""
            for delta in batch:
                index = p * request.num_choices + delta.choice
                if index not in begun:
                    begun.add(index)
                    if echoes[p]:
                        scores = self.generations[p].prompt_scores
                        found = logprobs.echoed(scores, request.num_top)
                        out += chunk(index, echoes[p], found=found if request.is_scored else None)
                        offsets[index] = len(echoes[p])
                if request.is_prompt_only:
                    delta = TextDelta(
                        delta.request_id, delta.attempt, delta.choice, delta.start, 0,
                        finish_reason="length" if delta.finish_reason else "",
                    )  # fmt: skip
                if delta.content or delta.finish_reason or (delta.logprobs and request.jobs):
                    out += chunk(index, delta.content, delta)
            yield out
        if request.includes_usage:
            more = account(
                (generation.closed for generation in self.generations),
                (ms for generation in self.generations for ms in generation.deliveries_ms),
            )
            yield sse.data({**frame, "choices": [], "usage": self.usage().openai(), **more})
        yield sse.DONE


async def _merge(
    generations: Sequence[Generation],
) -> AsyncIterator[tuple[int, list[TextDelta]]]:
    """Batches of all generations in the order of arrival. The first failure ends all."""
    steps: dict[asyncio.Task[list[TextDelta]], int] = {}
    sources = [generation.batches() for generation in generations]

    async def step(source: AsyncIterator[list[TextDelta]]) -> list[TextDelta]:
        return await anext(source, [])

    for i, source in enumerate(sources):
        steps[asyncio.ensure_future(step(source))] = i
    try:
        while steps:
            done, _ = await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                i = steps.pop(task)
                batch = task.result()
                if batch:
                    steps[asyncio.ensure_future(step(sources[i]))] = i
                    yield i, batch
    finally:
        for task in steps:
            task.cancel()
        await asyncio.gather(*steps, return_exceptions=True)
