"""The V4 chat encoding: messages to a prompt of plain text and control tokens.

There is no Jinja template for this model; the published encoder is the definition, and its golden
examples are our test. Output is a list of pieces in which a ``Marker`` is a control token.
Expects messages that the gateway has validated. Knows no ids and no HTTP.
Source: encoding_dsv4.py beside the DeepSeek-V4-Flash weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from decant.protocol.errors import InvalidRequest
from decant.services.chat.markers import (
    ASSISTANT,
    BOS,
    DSML,
    END_THINK,
    EOS,
    LATEST_REMINDER,
    TASKS,
    THINK,
    USER,
)

Message = dict[str, Any]
Pieces = list[str]

EFFORT_MAX = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to "
    "resolve the root cause, rigorously stress-testing your logic against all potential paths, "
    "edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, "
    "considered alternative, and rejected hypothesis to ensure absolutely no assumption is left "
    "unchecked.\n\n"
)
RESPONSE_FORMAT = (
    "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
)
_TOOLS = (
    "## Tools\n\nYou have access to a set of tools to help answer the user's question. You can "
    'invoke tools by writing a "<{dsml}tool_calls>" block like the following:\n\n'
    "<{dsml}tool_calls>\n"
    '<{dsml}invoke name="$TOOL_NAME">\n'
    '<{dsml}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE'
    "</{dsml}parameter>\n"
    "...\n"
    "</{dsml}invoke>\n"
    '<{dsml}invoke name="$TOOL_NAME2">\n'
    "...\n"
    "</{dsml}invoke>\n"
    "</{dsml}tool_calls>\n\n"
    'String parameters should be specified as is and set `string="true"`. For all other types '
    "(numbers, booleans, arrays, objects), pass the value in JSON format and set "
    '`string="false"`.\n\n'
    "If thinking_mode is enabled (triggered by {think}), you MUST output your complete reasoning "
    "inside {think}...{end_think} BEFORE any tool calls or final response.\n\n"
    "Otherwise, output directly after {end_think} with tool calls or final response.\n\n"
    "### Available Tool Schemas\n\n{schemas}\n\n"
    "You MUST strictly follow the above defined tool name and parameter schemas to invoke tool "
    "calls.\n"
)
_MARKERS = {"{dsml}": DSML, "{think}": THINK, "{end_think}": END_THINK}
VERBATIM_SUFFIX = "v"  # of a call id: its arguments are replayed byte for byte


@dataclass(frozen=True)
class Prompt:
    """What a chat request asks to be rendered; the JSON of an ``Encode`` message of kind chat.

    messages: OpenAI messages (roles system, developer, user, assistant, tool, latest_reminder), in
    which ``tools``, ``response_format``, ``task`` and ``wo_eos`` may also stand, as in the
    published encoder.
    effort: "", "none", "low", "high" or "max" (the April 2026 table).
    """

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    response_format: dict[str, Any] | None = None
    thinking: bool = False
    effort: str = ""
    task: str = ""
    is_continued: bool = False  # the last assistant message is a prefix to go on from
    is_answered: bool = False  # the assistant's turn begins, even after a turn of its own

    @staticmethod
    def from_json(data: dict[str, Any]) -> Prompt:
        return Prompt(
            messages=data["messages"],
            tools=data.get("tools") or [],
            response_format=data.get("response_format"),
            thinking=bool(data.get("thinking")),
            effort=data.get("effort") or "",
            task=data.get("task") or "",
            is_continued=bool(data.get("continue")),
            is_answered=bool(data.get("answer")),
        )


def render(prompt: Prompt) -> Pieces:
    """The whole prompt, generation header included.

    Raises: InvalidRequest for a message that the encoding cannot express."""
    messages = _prepare(prompt)
    drops = prompt.thinking and not any(m.get("tools") for m in messages)
    last_user = max(
        (i for i, m in enumerate(messages) if m["role"] in ("user", "developer")), default=-1
    )
    if drops:
        messages = [m for i, m in enumerate(messages) if m["role"] != "developer" or i >= last_user]
        last_user = max(
            (i for i, m in enumerate(messages) if m["role"] in ("user", "developer")), default=-1
        )
    pieces: Pieces = [BOS]
    if prompt.thinking and prompt.effort == "max":
        pieces.append(EFFORT_MAX)
    for i, message in enumerate(messages):
        keeps = prompt.thinking and (not drops or i >= last_user)
        follows_task = i > 0 and bool(messages[i - 1].get("task"))
        pieces += _message(message, keeps and not follows_task)
        following = messages[i + 1]["role"] if i + 1 < len(messages) else "assistant"
        if following in ("assistant", LATEST):
            pieces += _header(message, keeps)
    last = messages[-1]
    if prompt.is_answered and last["role"] in ("assistant", "system") and not last.get("task"):
        # The published encoder ends such a prompt without the word to speak.
        pieces += [ASSISTANT, THINK if prompt.thinking else END_THINK]
    return pieces


LATEST = "latest_reminder"


def _prepare(prompt: Prompt) -> list[Message]:
    """Messages with tools, format, task and continuation attached, tool results merged."""
    messages = [dict(m) for m in prompt.messages]
    if prompt.tools or prompt.response_format:
        if not messages or messages[0]["role"] not in ("system", "developer"):
            messages.insert(0, {"role": "system", "content": ""})
        if prompt.tools:
            messages[0]["tools"] = prompt.tools
        if prompt.response_format:
            messages[0]["response_format"] = prompt.response_format
    if messages and prompt.task:
        messages[-1]["task"] = prompt.task
    if messages and prompt.is_continued:
        messages[-1]["wo_eos"] = True
    return _merge_turns(messages)


def _merge_turns(messages: list[Message]) -> list[Message]:
    """Tool results become user turns; neighbouring user and tool messages become one.

    Results come in the order of the calls that they answer, not in the order of arrival."""
    merged: list[Message] = []
    order: dict[str, int] = {}
    for message in messages:
        role = message["role"]
        if role == "assistant":
            order = {c.get("id") or "": i for i, c in enumerate(message.get("tool_calls") or [])}
        if role not in ("user", "tool"):
            merged.append(message)
            continue
        if role == "tool":
            rank = order.get(message.get("tool_call_id") or "", len(order))
            part = (rank, f"<tool_result>{_text(message)}</tool_result>")
        else:
            part = (-1, _text(message))
        if merged and merged[-1]["role"] == "user":
            turn = merged[-1]
            turn["parts"] = [*turn["parts"], part]
            if message.get("task"):
                turn["task"] = message["task"]
        else:
            merged.append({**message, "role": "user", "parts": [part]})
    return merged


def _text(message: Message) -> str:
    """Content as one string; a list of text parts is joined by blank lines."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n\n".join(str(p.get("text", "")) for p in content)
    return content or ""


def _message(message: Message, has_reasoning: bool) -> Pieces:
    role = message["role"]
    if role == "system":
        return [_text(message), *_attachments(message)]
    if role == "developer":
        if not _text(message):
            raise InvalidRequest("a developer message needs content", "messages")
        return [USER, _text(message), *_attachments(message)]
    if role == "user":
        return [USER, _turn(message["parts"])]
    if role == LATEST:
        return [LATEST_REMINDER, _text(message)]
    if role != "assistant":
        raise InvalidRequest(f"unknown role {role!r}", "messages")
    pieces: Pieces = []
    text, calls = _text(message), message.get("tool_calls") or []
    if has_reasoning:
        reasoning = message.get("reasoning_content") or ""
        pieces.append(reasoning)
        if not (message.get("wo_eos") and reasoning and not text and not calls):
            pieces.append(END_THINK)  # else the reasoning itself is to be continued
    pieces += [text, *_calls(calls)]
    return pieces if message.get("wo_eos") else [*pieces, EOS]


def _turn(parts: list[tuple[int, str]]) -> str:
    """One user turn; the tool results among its parts are put in the order of the calls."""
    places = [i for i, (rank, _) in enumerate(parts) if rank >= 0]
    results = sorted((parts[i] for i in places), key=lambda p: p[0])
    texts = [text for _, text in parts]
    for place, (_, text) in zip(places, results, strict=True):
        texts[place] = text
    return "\n\n".join(texts)


def _header(message: Message, thinks: bool) -> Pieces:
    """What comes between a message and the assistant's words."""
    start = THINK if thinks else END_THINK
    task = message.get("task")
    if task:
        if task not in TASKS:
            raise InvalidRequest(f"unknown task {task!r}", "task")
        return [ASSISTANT, start, TASKS[task]] if task == "action" else [TASKS[task]]
    return [ASSISTANT, start] if message["role"] in ("user", "developer") else []


def _attachments(message: Message) -> Pieces:
    pieces: Pieces = []
    if message.get("tools"):
        pieces += ["\n\n", *tools_block(message["tools"])]
    if message.get("response_format"):
        pieces += ["\n\n", RESPONSE_FORMAT, to_json(message["response_format"])]
    return pieces


def to_json(value: Any) -> str:
    """The encoding's way to write JSON: ``", "`` and ``": "``, non-ASCII kept."""
    return json.dumps(value, ensure_ascii=False)


def tools_block(tools: list[dict[str, Any]]) -> Pieces:
    """The fixed text around the declared functions, one JSON object a line."""
    schemas = "\n".join(to_json(tool.get("function", tool)) for tool in tools)
    before, after = _TOOLS.split("{schemas}")
    return [*_with_markers(before), schemas, *_with_markers(after)]


def _with_markers(template: str) -> Pieces:
    """Split our own template at its placeholders, which become control tokens."""
    pieces: Pieces = [template]
    for name, marker in _MARKERS.items():
        split: Pieces = []
        for piece in pieces:
            if isinstance(piece, type(marker)):
                split.append(piece)
                continue
            first, *rest = piece.split(name)
            split.append(first)
            for text in rest:
                split += [marker, text]
        pieces = split
    return pieces


def _calls(calls: list[dict[str, Any]]) -> Pieces:
    """The DSML block of a past turn."""
    if not calls:
        return []
    pieces: Pieces = ["\n\n<", DSML, "tool_calls>\n"]
    for i, call in enumerate(calls):
        function = call["function"]
        verbatim = str(call.get("id") or "").endswith(VERBATIM_SUFFIX)
        pieces += ["\n" if i else "", "<", DSML, f'invoke name="{function["name"]}">\n']
        arguments = split_arguments(function.get("arguments"), verbatim)
        for j, (name, is_string, value) in enumerate(arguments):
            kind = "true" if is_string else "false"
            pieces += ["\n" if j else "", "<", DSML, f'parameter name="{name}" string="{kind}">']
            pieces += [value, "</", DSML, "parameter>"]
        pieces += ["\n</", DSML, "invoke>"]
    return [*pieces, "\n</", DSML, "tool_calls>"]


def split_arguments(arguments: Any, verbatim: bool) -> list[tuple[str, bool, str]]:
    """(name, is a string, value text) of each argument of a past call.

    verbatim: keep the spelling of JSON values instead of writing them anew, so that a call which
    the model sampled with other spaces is replayed with the same tokens (its KV stays a prefix).
    What is no JSON object becomes one string parameter ``arguments``."""
    text = arguments if isinstance(arguments, str) else to_json(arguments or {})
    try:
        values = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        return [("arguments", True, text)]
    raw = _raw_values(text) if verbatim else {}
    return [
        (name, True, value)
        if isinstance(value, str)
        else (name, False, raw.get(name) or to_json(value))
        for name, value in values.items()
    ]


def _raw_values(text: str) -> dict[str, str]:
    """Member name -> the exact text of its value, for an object that is known to be valid JSON."""
    decoder = json.JSONDecoder()
    values: dict[str, str] = {}
    i = text.index("{") + 1
    while True:
        while text[i] in " \t\r\n,":
            i += 1
        if text[i] == "}":
            return values
        name, i = decoder.raw_decode(text, i)
        i = text.index(":", i) + 1
        while text[i] in " \t\r\n":
            i += 1
        _, end = decoder.raw_decode(text, i)
        values[name] = text[i:end]
        i = end
