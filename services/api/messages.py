"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API.

A request is brought to the chat shape and checked there.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from decant.protocol.errors import InvalidRequest
from decant.services.api import chat, errors, sse
from decant.services.api.blocks import Block, Blocks, Kind, Step
from decant.services.api.generation import Backend, Generation
from decant.services.api.validate import Fields
from decant.services.requests import new_request_id

MAX_MESSAGES = 4096
MAX_BLOCKS = 1024
SIGNATURE = "decant"  # of thinking blocks; clients only pass it back
KNOWN = (
    "model", "messages", "system", "max_tokens", "stop_sequences", "stream", "temperature",
    "top_k", "top_p", "tools", "tool_choice", "thinking", "output_config", "output_format",
    "metadata", "service_tier", "container", "context_management", "mcp_servers", "inference_geo",
    "cache_control", "betas",
)  # fmt: skip
PING = sse.data({"type": "ping"}, "ping")
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


@dataclass(frozen=True)
class Request:
    """A validated request: the chat request behind it."""

    chat: chat.Request


def parse(data: Any, backend: Backend, tenant: str = "", is_counted: bool = False) -> Request:
    """is_counted: for count_tokens, which has no max_tokens. Raises: InvalidRequest, ApiError."""
    fields = Fields(data)
    chat.check_fields(fields, KNOWN, backend.config)
    body: dict[str, Any] = {
        name: fields.get(name)
        for name in ("model", "stream", "temperature", "top_k", "top_p")
        if fields.has(name)
    }
    max_tokens = fields.integer("max_tokens", 0, 1)  # checked where it is only counted, too
    if not is_counted:
        if not fields.has("max_tokens"):
            raise fields.fail("max_tokens", "is missing.")
        body["max_tokens"] = max_tokens
    body["stop"] = fields.strings("stop_sequences", 16, 256) or None
    body["messages"] = _messages(fields)
    tools = [_tool(Fields(t, f"tools[{i}].")) for i, t in enumerate(fields.array("tools", 128))]
    if tools:
        body["tools"] = tools
    choice = fields.object("tool_choice")
    if choice is not None:
        body["tool_choice"] = _tool_choice(choice)
        body["parallel_tool_calls"] = not choice.boolean("disable_parallel_tool_use")
    body["thinking"], body["reasoning_effort"] = _thinking(fields)
    metadata = fields.object("metadata")
    if metadata is not None:
        body["user_id"] = metadata.string("user_id")[:256] or None
    body["response_format"] = _format(fields)
    return Request(chat.parse(body, backend, tenant))


def _thinking(fields: Fields) -> tuple[dict[str, str], str | None]:
    """Thinking happens only where it was asked for."""
    given = fields.object("thinking")
    kind = "disabled"
    if given is not None:
        kind = given.option("type", "", ("enabled", "disabled", "adaptive"))
        given.integer("budget_tokens", 0, 0)
    config = fields.object("output_config")
    effort = config.option("effort", "", _EFFORTS) if config is not None else ""
    is_on = kind in ("enabled", "adaptive")
    return {"type": "enabled" if is_on else "disabled"}, (effort or None) if is_on else None


def _format(fields: Fields) -> dict[str, Any] | None:
    config = fields.object("output_config")
    given = config.object("format") if config is not None else fields.object("output_format")
    if given is None:
        return None
    given.option("type", "", ("json_schema",))
    return {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": given.get("schema"), "strict": True},
    }


def _tool(fields: Fields) -> dict[str, Any]:
    kind = fields.string("type", "custom")
    if kind != "custom":
        raise fields.fail("type", f"is {kind!r:.60}; only tools of the client can be called.")
    schema = fields.get("input_schema")
    if not isinstance(schema, dict):
        raise fields.fail("input_schema", "must be a JSON schema (an object).")
    function: dict[str, Any] = {"name": fields.get("name")}
    if fields.has("description"):
        function["description"] = fields.get("description")
    function["parameters"] = schema
    if fields.has("strict"):
        function["strict"] = fields.get("strict")
    return {"type": "function", "function": function}


def _tool_choice(choice: Fields) -> Any:
    kind = choice.option("type", "", ("auto", "any", "tool", "none"))
    name = choice.string("name")
    if kind == "tool":
        return {"type": "function", "function": {"name": name}}
    return {"any": "required"}.get(kind, kind)


def _messages(fields: Fields) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    system = fields.get("system")
    if isinstance(system, list):
        system = "\n\n".join(_text(Fields(part, f"system[{i}].")) for i, part in enumerate(system))
    if system is not None and not isinstance(system, str):
        raise fields.fail("system", "must be a string or an array of text blocks.")
    if system:
        messages.append({"role": "system", "content": system})
    for i, item in enumerate(fields.array("messages", MAX_MESSAGES, 1)):
        message = Fields(item, f"messages[{i}].")
        role = message.string("role")
        if role not in ("user", "assistant", "system"):
            raise message.fail("role", f"is {role!r:.40}, it must be user or assistant.")
        content = message.get("content")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif role == "assistant":
            messages.append(_assistant(message))
        else:
            messages += _user(message, role)
    if messages[-1]["role"] == "assistant":
        messages[-1]["prefix"] = True  # the answer goes on from there
    return messages


def _text(part: Fields) -> str:
    kind = part.string("type", "text")
    if kind != "text":
        raise part.fail("type", f"is {kind!r:.40}; this model reads text only.")
    if not part.has("text"):
        raise part.fail("text", "is missing.")
    return part.string("text")


def _user(message: Fields, role: str) -> list[dict[str, Any]]:
    """Tool results are messages of their own; the texts around them are joined."""
    found: list[dict[str, Any]] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            found.append({"role": role, "content": "\n\n".join(texts)})
            texts.clear()

    for i, block in enumerate(message.array("content", MAX_BLOCKS, 1)):
        part = Fields(block, f"{message.path}content[{i}].")
        if part.get("type") != "tool_result":
            texts.append(_text(part))
            continue
        flush()
        content = part.get("content")
        if isinstance(content, list):
            content = "\n\n".join(
                _text(Fields(c, f"{part.path}content[{j}].")) for j, c in enumerate(content)
            )
        if content is not None and not isinstance(content, str):
            raise part.fail("content", "must be a string or an array of text blocks.")
        call_id = part.string("tool_use_id", longest=256)
        found.append({"role": "tool", "tool_call_id": call_id, "content": content or ""})
    flush()
    return found


def _assistant(message: Fields) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(message.array("content", MAX_BLOCKS)):
        part = Fields(block, f"{message.path}content[{i}].")
        kind = part.string("type")
        if kind == "thinking":
            thoughts.append(part.string("thinking"))
        elif kind == "tool_use":
            arguments = part.get("input")
            if not isinstance(arguments, dict):
                raise part.fail("input", "must be an object.")
            function = {
                "name": part.get("name"),
                "arguments": json.dumps(arguments, ensure_ascii=False),
            }
            calls.append({"id": part.string("id", longest=256), "function": function})
        elif kind != "redacted_thinking":
            texts.append(_text(part))
    found: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        found["reasoning_content"] = "\n\n".join(thoughts)
    if calls:
        found["tool_calls"] = calls
    return found


class Answer:
    """One message as it grows."""

    def __init__(self, request: Request, generation: Generation) -> None:
        self._request, self._generation = request.chat, generation
        self._blocks = Blocks(request.chat.is_parallel)

    async def complete(self) -> dict[str, Any]:
        """The whole answer at once."""
        async for batch in self._generation.batches():
            for delta in batch:
                self._blocks.feed(delta)
        content = [
            self._block(b) for b in self._blocks.blocks if b.kind is not Kind.TOOL or b.is_complete
        ]
        return self._message(content, self._stop())

    async def stream(self) -> AsyncIterator[bytes]:
        """message_start, blocks, message_delta, message_stop."""
        is_begun = False
        async for batch in self._generation.batches():
            out = b""
            if not is_begun:
                is_begun = True
                start = self._message([], {"stop_reason": None, "stop_sequence": None})
                out += sse.data({"type": "message_start", "message": start}, "message_start")
                out += PING
            for delta in batch:
                for step, block, text in self._blocks.feed(delta):
                    out += self._step(step, block, text)
            yield out
        usage = self._generation.usage.anthropic()
        last = {"type": "message_delta", "delta": self._stop(), "usage": usage}
        yield sse.data(last, "message_delta") + sse.data({"type": "message_stop"}, "message_stop")

    @staticmethod
    def failure(error: Exception) -> bytes:
        return sse.data(errors.anthropic_body(error), "error")

    def _stop(self) -> dict[str, Any]:
        reason, matched = self._blocks.finish_reason, self._blocks.matched_stop
        if reason == "stop" and matched:
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        return {"stop_reason": _STOP_REASONS.get(reason, "end_turn"), "stop_sequence": None}

    def _message(self, content: list[dict[str, Any]], stop: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._generation.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": content,
            **stop,
            "usage": self._generation.usage.anthropic(),
        }

    def _block(self, block: Block) -> dict[str, Any]:
        if block.kind is Kind.REASONING:
            return {"type": "thinking", "thinking": block.text, "signature": SIGNATURE}
        if block.kind is Kind.TEXT:
            return {"type": "text", "text": block.text}
        return {**self._tool(block), "input": json.loads(block.text)}

    def _tool(self, block: Block) -> dict[str, Any]:
        call_id = chat.call_id(self._generation.request_id, 0, block.tool_index)
        return {"type": "tool_use", "id": call_id, "name": block.name, "input": {}}

    def _step(self, step: Step, block: Block, text: str) -> bytes:
        if step is Step.OPEN:
            start: dict[str, Any] = {
                Kind.REASONING: {"type": "thinking", "thinking": "", "signature": ""},
                Kind.TEXT: {"type": "text", "text": ""},
            }.get(block.kind) or self._tool(block)
            return self._event("content_block_start", block, content_block=start)
        if step is Step.CLOSE:
            out = b""
            if block.kind is Kind.REASONING:
                signature = {"type": "signature_delta", "signature": SIGNATURE}
                out = self._event("content_block_delta", block, delta=signature)
            return out + self._event("content_block_stop", block)
        delta = {
            Kind.REASONING: {"type": "thinking_delta", "thinking": text},
            Kind.TEXT: {"type": "text_delta", "text": text},
            Kind.TOOL: {"type": "input_json_delta", "partial_json": text},
        }[block.kind]
        return self._event("content_block_delta", block, delta=delta)

    @staticmethod
    def _event(kind: str, block: Block, **values: Any) -> bytes:
        return sse.data({"type": kind, "index": block.index, **values}, kind)


async def count(request: Request, backend: Backend) -> dict[str, int]:
    """count_tokens: the prompt is encoded and nothing else happens."""
    job = request.chat.job
    prompt = await backend.client.encode(
        new_request_id(), job.kind, job.prompt, job.output, count_only=True
    )
    return {"input_tokens": len(prompt.ids)}


def explain(error: Exception) -> dict[str, Any]:
    """The error body; names of fields are part of the message, Anthropic has no ``param``."""
    if isinstance(error, InvalidRequest) and error.param and error.param not in error.message:
        error.message = f"{error.param}: {error.message}"
    return errors.anthropic_body(error)
