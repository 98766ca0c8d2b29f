"""One streamed completion: its body, and the record that its events fill. No sockets, no clock."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from decant.loadgen.plan import Record, Request, Target

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
TEXT_KEPT = 400  # characters of an answer that differs from the fault-free one


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # what some servers call it
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _PromptDetails(Struct):
    cached_tokens: int | None = None


class _Speculation(Struct):
    """decant's extension of ``usage``."""

    drafted_tokens: int = 0
    accepted_tokens: int = 0
    steps: int = 0


class _Usage(Struct):
    prompt_tokens: int = -1
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    speculation: _Speculation | None = None


class _Account(Struct):
    """decant's extension of the final usage chunk."""

    stages_ms: dict[str, float] = {}
    delivery_ms: float = -1.0  # the end of decode's step to the socket, median by token batch
    num_drafted: int = 0
    num_accepted: int = 0
    num_steps: int = 0
    num_resumes: int = 0


class _Chunk(Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    decant: _Account | None = None


_decode = msgspec.json.Decoder(_Chunk).decode
_encode = msgspec.json.Encoder().encode


def answer_hash(text: str) -> str:
    """Names an answer; equal texts have equal names."""
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def body(target: Target, request: Request, messages: list[dict[str, str]] | None = None) -> bytes:
    """The JSON body. ``messages`` is the conversation so far, without this turn."""
    fields: dict[str, object] = {
        "model": target.model,
        "stream": True,
        "max_tokens": request.max_tokens,
        "temperature": target.temperature,
    }
    if request.seed:
        fields["seed"] = request.seed
    if target.ask_usage:
        fields["stream_options"] = {"include_usage": True}
    if target.ignore_eos:
        fields["ignore_eos"] = True
    if target.api == "chat":
        conversation: list[dict[str, str]] = []
        if request.system:
            conversation.append({"role": "system", "content": request.system})
        conversation += messages or []
        conversation.append({"role": "user", "content": request.user})
        fields["messages"] = conversation
    elif request.ids:
        fields["prompt"] = request.ids
    else:
        before = "".join(m["content"] for m in messages or [])
        fields["prompt"] = request.system + before + request.user
    fields.update(target.extra)
    return _encode(fields)


class Exchange:
    """A request under way. Feed it events; read ``record`` and ``text`` when ``is_done``."""

    def __init__(
        self,
        request: Request,
        record: Record,
        body: bytes,
        on_first: Callable[[int], None] | None = None,
    ) -> None:
        self.request = request
        self.record = record
        self.body = body
        self.text = ""
        self.is_done = False  # the record is final
        self.saw_end = False  # [DONE] came
        self._on_first = on_first
        self._pieces: list[str] = []

    def on_event(self, data: bytes, now_ns: int) -> None:
        """One event's data. Events after the end are ignored."""
        if self.saw_end or self.is_done:
            return
        if data == b"[DONE]":
            self.saw_end = True
            return
        record = self.record
        try:
            chunk = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.finish("error", now_ns, f"not a chunk: {error}: {data[:200]!r}")
            return
        if chunk.error:
            self.finish("error", now_ns, str(chunk.error)[:400])
            return
        has_tokens = False
        for choice in chunk.choices or ():
            delta = choice.delta
            if choice.text:
                self._pieces.append(choice.text)
                has_tokens = True
            elif delta is not None:
                for piece in (delta.reasoning_content, delta.reasoning, delta.content):
                    if piece:
                        self._pieces.append(piece)
                        has_tokens = True
                for call in delta.tool_calls or ():
                    self._pieces.append(bytes(call).decode())
                    has_tokens = True
            if choice.finish_reason:
                record.finish_reason = choice.finish_reason
        if has_tokens:
            record.chunk_ns.append(now_ns)
            if len(record.chunk_ns) == 1 and self._on_first:
                self._on_first(now_ns)
        if chunk.usage is not None:
            usage = chunk.usage
            record.num_prompt_tokens = usage.prompt_tokens
            if usage.completion_tokens is not None:
                record.num_output_tokens = usage.completion_tokens
            if usage.prompt_tokens_details is not None:
                record.num_cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
            if (drafts := usage.speculation) is not None:
                record.num_drafted = drafts.drafted_tokens
                record.num_accepted = drafts.accepted_tokens
                record.num_steps = drafts.steps
        if chunk.decant is not None:
            account = chunk.decant
            record.stages_ms = account.stages_ms
            record.delivery_ms = account.delivery_ms
            if account.num_steps:
                record.num_drafted = account.num_drafted
                record.num_accepted = account.num_accepted
                record.num_steps = account.num_steps
            record.num_resumes = account.num_resumes

    @property
    def is_to_cancel(self) -> bool:
        """The plan says: hang up now."""
        after = self.request.cancel_after
        return bool(after) and len(self.record.chunk_ns) >= after and not self.is_done

    def finish(self, outcome: str, now_ns: int, error: str = "") -> None:
        """The record's last entry; a second call changes nothing."""
        if self.is_done:
            return
        self.is_done = True
        record = self.record
        record.outcome, record.end_ns, record.error = outcome, now_ns, error
        self.text = "".join(self._pieces)
        if outcome != "ok":
            return
        if not record.finish_reason:
            record.outcome, record.error = "error", "the stream ended without a finish_reason"
            return
        record.answer_hash = answer_hash(self.text)
        if self.request.expect:
            record.is_checked = True
            record.is_match = record.answer_hash == self.request.expect
            if not record.is_match:
                record.text = self.text[:TEXT_KEPT]
