"""POST /v1/responses: OpenAI's Responses API, stateless.

A request is brought to the chat shape and checked there. Nothing is stored: whoever names an
earlier response is asked to send its items again.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from decant.protocol.errors import InvalidRequest
from decant.services.api import chat, errors, logprobs, sse
from decant.services.api.blocks import Block, Blocks, Kind, Step
from decant.services.api.errors import unsupported
from decant.services.api.generation import Backend, Generation
from decant.services.api.validate import Fields

MAX_ITEMS = 4096
# Taken over into the chat request under the same name.
_SAME = (
    "model", "temperature", "top_p", "top_k", "min_p", "seed", "parallel_tool_calls", "reasoning",
    "stream", "user", "metadata", "prompt_cache_key", "priority", "thinking", "reasoning_effort",
    "chat_template_kwargs", "stop", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "logit_bias", "ignore_eos", "min_tokens", "user_id", "cache_salt", "service_tier",
    "safety_identifier",
)  # fmt: skip
KNOWN = (
    *_SAME, "input", "instructions", "max_output_tokens", "tools", "tool_choice", "text", "include",
    "store", "previous_response_id", "conversation", "background", "truncation", "top_logprobs",
    "max_tool_calls", "stream_options", "prompt", "prompt_cache_retention", "context_management",
    "client_metadata",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """A validated request: the chat request behind it, and what the answer repeats."""

    chat: chat.Request
    given: dict[str, Any]


def parse(data: Any, backend: Backend, tenant: str = "") -> Request:
    """Raises: InvalidRequest, ApiError."""
    fields = Fields(data)
    chat.check_fields(fields, KNOWN, backend.config)
    for name in ("previous_response_id", "conversation", "prompt"):
        if fields.has(name):
            raise unsupported(
                f"{name} is not supported: nothing is stored here. "
                "Send the earlier items again in input.",
                name,
            )
    if fields.boolean("background"):
        raise unsupported("background responses are not supported.", "background")
    fields.boolean("store")
    fields.option("truncation", "disabled", ("disabled", "auto"))
    body: dict[str, Any] = {name: data[name] for name in _SAME if data.get(name) is not None}
    reasoning = fields.object("reasoning")
    if reasoning is not None:
        reasoning.string("summary")
    body["messages"] = _messages(fields)
    if fields.has("max_output_tokens"):
        body["max_completion_tokens"] = fields.integer("max_output_tokens", 0, 1)
    if fields.has("top_logprobs") or "message.output_text.logprobs" in fields.array("include", 32):
        body["logprobs"] = True
        body["top_logprobs"] = fields.integer("top_logprobs", 0, 0, 20)
    tools = [_tool(Fields(t, f"tools[{i}].")) for i, t in enumerate(fields.array("tools", 128))]
    if tools:
        body["tools"] = tools
    if fields.has("tool_choice"):
        body["tool_choice"] = _tool_choice(fields)
    text = fields.object("text")
    if text is not None:
        body["response_format"] = _format(text)
    try:
        return Request(chat.parse(body, backend, tenant), data)
    except InvalidRequest as error:
        if error.param and error.param.startswith("messages"):
            error.param = "input" + error.param.removeprefix("messages")
        raise


def _tool(fields: Fields) -> dict[str, Any]:
    kind = fields.string("type")
    if kind != "function":
        raise fields.fail("type", f"is {kind!r:.40}, only functions can be called.")
    function = {
        k: fields.get(k)
        for k in ("name", "description", "parameters", "strict")
        if fields.get(k) is not None
    }
    return {"type": "function", "function": function}


def _tool_choice(fields: Fields) -> Any:
    value = fields.get("tool_choice")
    if isinstance(value, str):
        return value
    choice = Fields(value, "tool_choice.")
    if choice.string("type") == "allowed_tools":
        return value
    return {"type": "function", "function": {"name": choice.string("name")}}


def _format(text: Fields) -> dict[str, Any] | None:
    given = text.object("format")
    if given is None:
        return None
    if given.get("type") != "json_schema":
        return given.data
    schema = {k: given.get(k) for k in ("name", "schema", "strict") if given.has(k)}
    return {"type": "json_schema", "json_schema": schema}


def _messages(fields: Fields) -> list[dict[str, Any]]:
    """``instructions`` and ``input`` as chat messages. Neighbouring items of the assistant's turn
    (reasoning, message, function calls) become one message."""
    messages: list[dict[str, Any]] = []
    instructions = fields.string("instructions")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    value = fields.get("input")
    if isinstance(value, str):
        if not value:
            raise fields.fail("input", "is empty.")
        return [*messages, {"role": "user", "content": value}]
    turn: dict[str, Any] | None = None
    for i, item in enumerate(fields.array("input", MAX_ITEMS, 1)):
        part = Fields(item, f"input[{i}].")
        kind = part.string("type", "message")
        if kind == "message" and part.get("role") != "assistant":
            turn = None
            messages.append({"role": part.get("role"), "content": _content(part)})
            continue
        if kind == "function_call_output":
            turn = None
            output = part.get("output")
            content = output if isinstance(output, str | list) else json.dumps(output)
            messages.append(
                {"role": "tool", "tool_call_id": part.get("call_id"), "content": content}
            )
            continue
        if kind not in ("message", "reasoning", "function_call"):
            raise part.fail("type", f"is {kind!r:.40}, which this server does not know.")
        closes = kind == "message" and ("content" in (turn or {}) or "tool_calls" in (turn or {}))
        if turn is None or closes or (kind == "reasoning" and len(turn) > 1):
            turn = {"role": "assistant"}
            messages.append(turn)
        if kind == "message":
            turn["content"] = _content(part)
        elif kind == "reasoning":
            turn["reasoning_content"] = _reasoning(part)
        else:
            function = {"name": part.get("name"), "arguments": part.get("arguments")}
            turn.setdefault("tool_calls", []).append(
                {"id": part.string("call_id", longest=256), "function": function}
            )
    return [m for m in messages if len(m) > 1]


def _content(part: Fields) -> Any:
    content = part.get("content")
    return "" if content is None and part.get("role") == "assistant" else content


def _reasoning(part: Fields) -> str:
    """The text of a reasoning item: its content, or else its summary."""
    for name in ("content", "summary"):
        texts = [
            Fields(item, f"{part.path}{name}.").string("text") for item in part.array(name, 256)
        ]
        if texts:
            return "\n\n".join(texts)
    return ""


class Answer:
    """One response as it grows."""

    def __init__(self, request: Request, generation: Generation) -> None:
        self._request, self._generation = request, generation
        self._blocks = Blocks(request.chat.is_parallel)
        self._created = int(time.time())
        self._sequence = 0
        self._logprobs: list[Any] = []
        self._id = f"resp_{generation.request_id}"

    async def complete(self) -> dict[str, Any]:
        """The whole answer at once."""
        async for batch in self._generation.batches():
            for delta in batch:
                self._logprobs += delta.logprobs
                self._blocks.feed(delta)
        return self._response(self._status())

    async def stream(self) -> AsyncIterator[bytes]:
        """Typed events with sequence numbers."""
        is_begun = False
        async for batch in self._generation.batches():
            out = b""
            if not is_begun:
                is_begun = True
                for name in ("created", "in_progress"):
                    out += self._event(
                        f"response.{name}", response=self._response("in_progress", is_open=True)
                    )
            for delta in batch:
                self._logprobs += delta.logprobs
                for step, block, text in self._blocks.feed(delta):
                    out += self._step(step, block, text)
            yield out
        status = self._status()
        yield self._event(f"response.{status}", response=self._response(status))

    def failure(self, error: Exception) -> bytes:
        """The last event of a stream that failed."""
        response = self._response("failed")
        told = errors.body(error)["error"]
        response["error"] = {"code": "server_error", "message": told["message"]}
        return self._event("response.failed", response=response)

    def _status(self) -> str:
        return "incomplete" if self._blocks.finish_reason == "length" else "completed"

    def _end_of(self, block: Block) -> str:
        """Status of an item that ended: the last one may have been cut by the limit."""
        is_cut = self._status() == "incomplete" and block is self._blocks.blocks[-1]
        return "incomplete" if is_cut and not block.is_complete else "completed"

    def _event(self, kind: str, **values: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._sequence, **values}
        self._sequence += 1
        return sse.data(event, kind)

    def _step(self, step: Step, block: Block, text: str) -> bytes:
        names = {
            Kind.REASONING: "response.reasoning_text",
            Kind.TEXT: "response.output_text",
            Kind.TOOL: "response.function_call_arguments",
        }
        at: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.index}
        inner = at if block.kind is Kind.TOOL else {**at, "content_index": 0}
        more: dict[str, Any] = {"logprobs": []} if block.kind is Kind.TEXT else {}
        if step is Step.DELTA:
            return self._event(f"{names[block.kind]}.delta", **inner, delta=text, **more)
        if step is Step.OPEN:
            item = {**self._item(block, "in_progress"), **self._empty(block)}
            out = self._event("response.output_item.added", output_index=block.index, item=item)
            if block.kind is not Kind.TOOL:
                out += self._event("response.content_part.added", **inner, part=_part(block, ""))
            return out
        if block.kind is Kind.TOOL:
            out = self._event(
                f"{names[block.kind]}.done", **inner, name=block.name, arguments=block.text
            )
        else:
            out = self._event(f"{names[block.kind]}.done", **inner, text=block.text, **more)
            out += self._event("response.content_part.done", **inner, part=_part(block, block.text))
        item = self._item(block, self._end_of(block))
        return out + self._event("response.output_item.done", output_index=block.index, item=item)

    @staticmethod
    def _empty(block: Block) -> dict[str, Any]:
        return {"arguments": ""} if block.kind is Kind.TOOL else {"content": []}

    def _item_id(self, block: Block) -> str:
        prefix = {Kind.REASONING: "rs", Kind.TEXT: "msg", Kind.TOOL: "fc"}[block.kind]
        return f"{prefix}_{self._generation.request_id[:24]}{block.index:x}"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        if block.kind is Kind.REASONING:
            return {
                **item,
                "type": "reasoning",
                "summary": [],
                "content": [_part(block, block.text)],
                "encrypted_content": None,
            }
        if block.kind is Kind.TEXT:
            part = _part(block, block.text)
            found = [p for p in self._logprobs if p.channel == "content"]
            if found:
                part["logprobs"] = logprobs.chat(found)["content"]
            return {**item, "type": "message", "role": "assistant", "content": [part]}
        return {
            **item,
            "type": "function_call",
            "call_id": chat.call_id(self._generation.request_id, 0, block.tool_index),
            "name": block.name,
            "arguments": block.text,
        }

    def _response(self, status: str, is_open: bool = False) -> dict[str, Any]:
        given, request = self._request.given, self._request.chat
        sampling = request.job.sampling
        is_incomplete = status == "incomplete"
        output = [] if is_open else self._items()
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None if is_open else int(time.time()),
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
            "instructions": given.get("instructions"),
            "max_output_tokens": given.get("max_output_tokens"),
            "max_tool_calls": None,
            "model": request.model,
            "output": output,
            "parallel_tool_calls": request.is_parallel,
            "previous_response_id": None,
            "prompt_cache_key": given.get("prompt_cache_key"),
            "reasoning": {"effort": (given.get("reasoning") or {}).get("effort"), "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": sampling.temperature,
            "text": given.get("text") or {"format": {"type": "text"}},
            "tool_choice": given.get("tool_choice") or "auto",
            "tools": given.get("tools") or [],
            "top_logprobs": max(sampling.logprobs, 0),
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None if is_open else self._generation.usage.responses(),
            "user": given.get("user"),
            "metadata": given.get("metadata") or {},
        }

    def _items(self) -> list[dict[str, Any]]:
        """Finished items; a call that never closed is not one."""
        return [
            self._item(b, self._end_of(b))
            for b in self._blocks.blocks
            if b.kind is not Kind.TOOL or b.is_complete
        ]


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
