"""POST /v1/chat/completions: OpenAI's shape with DeepSeek's names."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from decant.protocol.config import GatewayConfig
from decant.protocol.messages import Output, TextDelta, ToolDelta
from decant.services.api import grammars, logprobs, models, sse
from decant.services.api.conversation import (
    Conversation,
    read_conversation,
    read_response_format,
)
from decant.services.api.errors import unsupported
from decant.services.api.generation import Backend, Generation, Job
from decant.services.api.sampling import (
    MAX_TOP_LOGPROBS,
    Limits,
    read_max_tokens,
    read_num_choices,
    read_prompt_logprobs,
    read_sampling,
    read_stops,
)
from decant.services.api.usage import account
from decant.services.api.validate import Fields
from decant.services.chat.encoding import VERBATIM_SUFFIX

# Fields of vLLM and SGLang that would change the answer: better refused than silently ignored.
REFUSED = (
    "bad_words", "allowed_token_ids", "use_beam_search", "truncate_prompt_tokens",
    "thinking_token_budget", "logits_processors", "custom_logit_processor", "lora_path",
    "prompt_embeds", "input_embeds", "chat_template", "session_params", "functions",
)  # fmt: skip

# Known, without effect here: accepted so that clients which always send them work.
IGNORED = (
    "user", "metadata", "store", "service_tier", "prediction", "safety_identifier", "verbosity",
    "rid", "request_id", "add_generation_prompt", "separate_reasoning",
    "stream_reasoning", "web_search_options", "function_call", "best_of",
    "return_token_ids", "spaces_between_special_tokens",
)  # fmt: skip
KNOWN = (
    "model", "messages", "max_completion_tokens", "max_tokens", "temperature", "top_p", "min_p",
    "top_k", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "seed",
    "stop", "stop_token_ids", "ignore_eos", "min_tokens", "skip_special_tokens",
    "include_stop_str_in_output", "no_stop_trim",
    "n", "stream", "stream_options", "logprobs", "top_logprobs",
    "tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort",
    "thinking", "enable_thinking", "chat_template_kwargs", "reasoning", "task", "user_id",
    "cache_salt", "prompt_cache_key", "priority", "continue_final_message", "modalities", "regex",
    "ebnf", "structural_tag", "guided_regex", "guided_grammar",
    "guided_json", "guided_choice", "structured_outputs", "include_reasoning", "audio",
    "prompt_logprobs",
    *IGNORED,
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """A validated chat request."""

    model: str
    job: Job
    conversation: Conversation
    is_streamed: bool
    includes_usage: bool
    usage_in_every_chunk: bool
    is_parallel: bool
    has_logprobs: bool
    shows_reasoning: bool


def limits_of(backend: Backend) -> Limits:
    model = backend.model
    return Limits(model.vocab_size, model.max_context, backend.config.max_choices)


def check_fields(fields: Fields, known: tuple[str, ...], config: GatewayConfig) -> None:
    """Unknown fields are ignored, or refused with ``strict_fields``."""
    for name in REFUSED:
        if fields.data.get(name):
            raise unsupported(f"{name} is not supported.", name)
    if config.strict_fields:
        for name in fields.data:
            if name not in known:
                raise unsupported(f"Unknown field {name!r:.80}.", name)


def read_stream_options(fields: Fields) -> tuple[bool, bool, bool]:
    """(stream, include_usage, continuous_usage_stats)."""
    is_streamed = fields.boolean("stream")
    options = fields.object("stream_options")
    if options is None:
        return is_streamed, False, False
    if not is_streamed:
        raise fields.fail("stream_options", "is only allowed with stream.")
    continuous = options.boolean("continuous_usage_stats")
    return is_streamed, options.boolean("include_usage"), continuous


def shows_stop(fields: Fields) -> bool:
    """Whether a stop string that matched stays in the text: vLLM's field or SGLang's."""
    named = [fields.boolean(name) for name in ("include_stop_str_in_output", "no_stop_trim")]
    return any(named)


def read_salt(fields: Fields) -> str:
    """Whoever names a tenant gets a prefix cache of its own: no two namings give one salt."""
    parts = [fields.string(f, longest=256) for f in ("user_id", "cache_salt", "prompt_cache_key")]
    return json.dumps(parts) if any(parts) else ""


def parse(data: Any, backend: Backend, tenant: str = "") -> Request:
    """Raises: InvalidRequest, ApiError."""
    fields = Fields(data)
    config = backend.config
    check_fields(fields, KNOWN, config)
    model = models.check(fields, backend.model)
    if fields.has("modalities") and fields.array("modalities", 8) != ["text"]:
        raise unsupported("This model writes text only.", "modalities")
    if fields.get("echo"):
        raise unsupported("echo is a field of /v1/completions.", "echo")
    if fields.has("audio"):
        raise unsupported("This model writes text only.", "audio")
    conversation = read_conversation(fields, config)
    limits = limits_of(backend)
    num_choices = read_num_choices(fields, limits)
    max_tokens = read_max_tokens(fields, "max_completion_tokens", "max_tokens")
    has_logprobs = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, 0, MAX_TOP_LOGPROBS)
    if fields.has("top_logprobs") and top and not has_logprobs:
        raise fields.fail("top_logprobs", "needs logprobs.")
    is_streamed, includes_usage, continuous = read_stream_options(fields)
    kind, schema = read_response_format(fields)
    if kind.startswith("json"):
        conversation.response_format = schema if schema is not None else {"type": kind}
    is_parallel = fields.boolean("parallel_tool_calls", True)
    found = grammars.for_chat(fields, conversation, is_parallel, backend.model.added_ids)
    functions = [t["function"] for t in conversation.tools]
    top_prompt = read_prompt_logprobs(fields)
    sampling = read_sampling(fields, limits, max_tokens, top if has_logprobs else -1, top_prompt)
    output = Output(
        thinking=conversation.starts_thinking,
        tools=[f["name"] for f in functions],
        stop=read_stops(fields),
        include_stop=shows_stop(fields),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        num_choices=num_choices,
        logprobs=has_logprobs,
        tool_schemas=json.dumps(functions) if functions else "",
        min_tokens=sampling.min_tokens,
    )
    job = Job(
        kind="chat",
        prompt=conversation.prompt(),
        output=output,
        sampling=sampling,
        default_max_tokens=config.default_max_tokens,
        grammars=found,
        tenant=tenant,
        cache_salt=read_salt(fields),
        priority=fields.integer("priority", 0, -100, 100),
    )
    return Request(
        model=model,
        job=job,
        conversation=conversation,
        is_streamed=is_streamed,
        includes_usage=includes_usage,
        usage_in_every_chunk=continuous,
        is_parallel=is_parallel,
        has_logprobs=has_logprobs,
        shows_reasoning=fields.boolean("include_reasoning", True),
    )


def call_id(request_id: str, choice: int, index: int) -> str:
    """Unique per choice and call. The suffix asks for a byte-exact replay of the arguments."""
    return f"call_{request_id[:20]}{choice:x}x{index:x}{VERBATIM_SUFFIX}"


def _frame(kind: str, request_id: str, model: str, created: int) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{request_id}",
        "object": kind,
        "created": created,
        "model": model,
        "system_fingerprint": None,
    }


async def complete(request: Request, generation: Generation) -> dict[str, Any]:
    """The whole answer at once."""
    async for _ in generation.batches():
        pass
    choices = []
    for i, choice in enumerate(generation.choices):
        calls = [
            {
                "id": call_id(generation.request_id, i, tool.index),
                "type": "function",
                "function": {"name": tool.name, "arguments": tool.arguments},
            }
            for tool in choice.tools.values()
            if tool.is_complete and (request.is_parallel or tool.index == 0)
        ]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": choice.content if choice.content or not calls else None,
            "refusal": None,
        }
        if request.shows_reasoning and (choice.reasoning or request.conversation.thinking):
            message["reasoning_content"] = choice.reasoning
        if calls:
            message["tool_calls"] = calls
        choices.append(
            {
                "index": i,
                "message": message,
                "logprobs": logprobs.chat(choice.logprobs) if request.has_logprobs else None,
                "finish_reason": choice.finish_reason,
                "matched_stop": choice.matched_stop or None,
            }
        )
    frame = _frame("chat.completion", generation.request_id, request.model, int(time.time()))
    value = {**frame, "choices": choices, "usage": generation.usage.openai()}
    if request.job.sampling.prompt_logprobs >= 0:
        value["prompt_logprobs"] = logprobs.prompt(
            generation.prompt_scores, request.job.sampling.prompt_logprobs
        )
    return value


async def stream(request: Request, generation: Generation) -> AsyncIterator[bytes]:
    """Events of the answer: role, reasoning, content, tool calls, finish, usage, [DONE]."""
    frame = _frame("chat.completion.chunk", generation.request_id, request.model, int(time.time()))
    begun: set[int] = set()

    def chunk(choice: int, delta: dict[str, Any], **more: Any) -> bytes:
        item = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        value: dict[str, Any] = {**frame, "choices": [item]}
        if request.usage_in_every_chunk:
            value["usage"] = generation.usage.openai()
        elif request.includes_usage:
            value["usage"] = None
        return sse.data(value)

    async for batch in generation.batches():
        out = b""
        for delta in batch:
            if delta.choice not in begun:
                begun.add(delta.choice)
                out += chunk(delta.choice, {"role": "assistant", "content": ""})
            for piece, more in _pieces(request, generation.request_id, delta):
                out += chunk(delta.choice, piece, **more)
        yield out
    if request.includes_usage:
        more = account([generation.closed], generation.deliveries_ms)
        yield sse.data({**frame, "choices": [], "usage": generation.usage.openai(), **more})
    yield sse.DONE


def _pieces(
    request: Request, request_id: str, delta: TextDelta
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The chunks of one delta, never two kinds in one."""
    pieces: list[tuple[dict[str, Any], dict[str, Any]]] = []
    if delta.reasoning and request.shows_reasoning:
        pieces.append(({"reasoning_content": delta.reasoning}, {}))
    if delta.content:
        pieces.append(({"content": delta.content}, {}))
    for tool in delta.tools:
        if request.is_parallel or tool.index == 0:
            pieces += [({"tool_calls": [c]}, {}) for c in _call_pieces(request_id, delta, tool)]
    if request.has_logprobs and delta.logprobs:
        if not pieces:
            pieces.append(({}, {}))
        pieces[0][1]["logprobs"] = logprobs.chat(delta.logprobs)
    if delta.finish_reason:
        more: dict[str, Any] = {"finish_reason": delta.finish_reason}
        if delta.matched_stop:
            more["matched_stop"] = delta.matched_stop
        pieces.append(({}, more))
    return pieces


def _call_pieces(request_id: str, delta: TextDelta, tool: ToolDelta) -> list[dict[str, Any]]:
    """First id, type and name with no arguments, then arguments only."""
    pieces: list[dict[str, Any]] = []
    if tool.name:
        pieces.append(
            {
                "index": tool.index,
                "id": call_id(request_id, delta.choice, tool.index),
                "type": "function",
                "function": {"name": tool.name, "arguments": ""},
            }
        )
    if tool.arguments:
        pieces.append({"index": tool.index, "function": {"arguments": tool.arguments}})
    return pieces
