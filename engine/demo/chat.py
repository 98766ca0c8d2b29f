"""A conversation of the training data, as text in DeepSeek-V4's chat encoding and as API messages.

Owns the encoding that the model learns: markers, tools block, response format, reasoning kept or
dropped, DSML calls, tool results. The server renders the same messages with its own encoder; a test
compares both. Source: section 8.2 of the specification.
"""

import json
from dataclasses import dataclass, field
from typing import Any

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK, DSML = "<think>", "</think>", "｜DSML｜"
SPECIAL = [
    BOS,
    EOS,
    PAD,
    USER,
    ASSISTANT,
    THINK,
    END_THINK,
    DSML,
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜extracted_url｜>",
    "<｜read_url｜>",
    "<｜fim▁begin｜>",
    "<｜fim▁hole｜>",
    "<｜fim▁end｜>",
]
FLAGGED = {BOS, EOS, PAD}
"""Flagged "special" in tokenizer.json; the others are added tokens only, as in the published
tokenizer."""

TOOLS_BLOCK = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by \
writing a "<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, \
booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside \
<think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{schemas}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
FORMAT_BLOCK = (
    "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{schema}"
)

LOW = 0.04
"""Loss weight of text that the model reads."""

Json = dict[str, Any]
Piece = tuple[str, float, str | None]
"""Text, loss weight, skill (on what the assistant writes)."""


@dataclass(slots=True)
class Turn:
    """A user turn and the assistant's answer."""

    skill: str
    user: str
    reasoning: str
    answer: str = ""
    calls: list[tuple[str, Json]] = field(default_factory=list)
    results: list[str] = field(default_factory=list)  # of the calls of the turn before


@dataclass(slots=True)
class Conversation:
    """System text, turns, and what is attached to the system message."""

    system: str
    turns: list[Turn]
    thinking: bool = False
    tools: list[Json] = field(default_factory=list)  # {"name", "description", "parameters"}
    response_format: Json | None = None


def dumps(value: object) -> str:
    """JSON as the encoder writes it."""
    return json.dumps(value, ensure_ascii=False)


def call_block(calls: list[tuple[str, Json]]) -> str:
    """The DSML block of one or more calls, with the blank line before it."""
    invokes = []
    for name, arguments in calls:
        lines = [f'<{DSML}invoke name="{name}">']
        for key, value in arguments.items():
            text = isinstance(value, str)
            shown = value if text else dumps(value)
            flag = "true" if text else "false"
            lines.append(f'<{DSML}parameter name="{key}" string="{flag}">{shown}</{DSML}parameter>')
        lines.append(f"</{DSML}invoke>")
        invokes.append("\n".join(lines))
    return f"\n\n<{DSML}tool_calls>\n" + "\n".join(invokes) + f"\n</{DSML}tool_calls>"


def system_text(c: Conversation) -> str:
    """System content with the tools block and the response format."""
    text = c.system
    if c.tools:
        text += "\n\n" + TOOLS_BLOCK.format(schemas="\n".join(map(dumps, c.tools)))
    if c.response_format is not None:
        text += "\n\n" + FORMAT_BLOCK.format(schema=dumps(c.response_format))
    return text


def user_text(t: Turn) -> str:
    """Content of a user turn: tool results first, then what the user says."""
    parts = [f"<tool_result>{x}</tool_result>" for x in t.results]
    return "\n\n".join(parts + [t.user] * bool(t.user or not parts))


def pieces(c: Conversation) -> list[Piece]:
    """The whole conversation in the chat encoding. Without tools only the last turn keeps its
    reasoning."""
    out: list[Piece] = [(BOS + system_text(c), LOW, None)]
    for i, t in enumerate(c.turns):
        out.append((USER + user_text(t) + ASSISTANT, LOW, None))
        answer = t.answer + (call_block(t.calls) if t.calls else "") + EOS
        if c.thinking and (c.tools or i == len(c.turns) - 1):
            out.append((THINK, LOW, None))
            out.append((t.reasoning + END_THINK + answer, 1.0, "think-" + t.skill))
        else:
            out.append((END_THINK, LOW, None))
            out.append((answer, 1.0, t.skill))
    return out


def messages(c: Conversation) -> list[Json]:
    """API messages up to the last user turn (the last answer is what a server should give)."""
    out: list[Json] = []
    if c.system:
        out.append({"role": "system", "content": c.system})
    ids: list[str] = []
    for i, t in enumerate(c.turns):
        for call_id, result in zip(ids, t.results, strict=True):
            out.append({"role": "tool", "tool_call_id": call_id, "content": result})
        if t.user or not t.results:
            out.append({"role": "user", "content": t.user})
        if i == len(c.turns) - 1:
            break
        said: Json = {"role": "assistant", "content": t.answer}
        if c.thinking and c.tools:
            said["reasoning_content"] = t.reasoning
        ids = [f"call_{i}_{k}" for k in range(len(t.calls))]
        if t.calls:
            said["tool_calls"] = [
                {"id": i_, "type": "function", "function": {"name": n, "arguments": dumps(a)}}
                for i_, (n, a) in zip(ids, t.calls, strict=True)
            ]
        out.append(said)
    return out
