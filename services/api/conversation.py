"""Messages, tools and thinking mode of a chat request: validated, in the encoder's form.

All API shapes that hold a conversation are brought to OpenAI's messages first and checked here.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from decant.protocol.config import GatewayConfig
from decant.protocol.errors import InvalidRequest
from decant.services.api.errors import unsupported
from decant.services.api.validate import Fields, depth
from decant.services.chat.markers import TASKS

MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_CALLS = 128
MAX_SCHEMA_DEPTH = 32
MAX_SCHEMA_BYTES = 64 << 10
ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}\Z")

# What clients ask for -> the encoder's effort (DeepSeek's map of 2026).
EFFORTS = {
    "none": "none",
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "high",
    "max": "max",
    "ultra": "max",
}


@dataclass(frozen=True)
class ToolChoice:
    """kind: none, auto, required or named. allowed: the tools that may be called; empty: all."""

    kind: str = "auto"
    name: str = ""
    allowed: tuple[str, ...] = ()


@dataclass
class Conversation:
    """A checked chat prompt."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    choice: ToolChoice = field(default_factory=ToolChoice)
    thinking: bool = False
    effort: str = ""
    task: str = ""
    is_continued: bool = False
    response_format: dict[str, Any] | None = None

    @property
    def starts_thinking(self) -> bool:
        """Whether the first output token belongs to the reasoning."""
        if not self.thinking or self.task:
            return False
        last = self.messages[-1]
        return not self.is_continued or bool(
            last.get("reasoning_content") and not last.get("content")
        )

    def prompt(self) -> bytes:
        """The JSON of an ``Encode`` message of kind chat."""
        return json.dumps(
            {
                "messages": self.messages,
                "tools": self.tools,
                "response_format": self.response_format,
                "thinking": self.thinking,
                "effort": self.effort,
                "task": self.task,
                "continue": self.is_continued,
                "answer": not self.is_continued,
            },
            ensure_ascii=False,
            separators=(",", ":"),
        ).encode()


def read_conversation(fields: Fields, config: GatewayConfig) -> Conversation:
    """Raises: InvalidRequest."""
    given = fields.array("messages", MAX_MESSAGES, 1)
    messages = [_message(Fields(m, f"messages[{i}].")) for i, m in enumerate(given)]
    _check_order(messages, config)
    tools, choice = read_tools(fields)
    thinking, effort = read_thinking(fields, config)
    task = fields.option("task", "", tuple(TASKS))
    is_continued = bool(messages[-1].pop("prefix", False))
    if fields.boolean("continue_final_message"):
        if fields.boolean("add_generation_prompt"):
            raise fields.fail(
                "continue_final_message", "cannot be combined with add_generation_prompt."
            )
        is_continued = True
    if is_continued and messages[-1]["role"] != "assistant":
        raise InvalidRequest("only an assistant message can be continued", "messages")
    if any(m.pop("prefix", False) for m in messages[:-1]):
        raise InvalidRequest("only the last message can be a prefix", "messages")
    return Conversation(messages, tools, choice, thinking, effort, task, is_continued)


def _message(fields: Fields) -> dict[str, Any]:
    role = fields.string("role")
    if role not in ROLES:
        if not role:
            raise fields.fail("role", "is missing.")
        raise fields.fail("role", f"is {role!r:.40}, it must be one of {', '.join(ROLES)}.")
    message: dict[str, Any] = {"role": role, "content": _content(fields, role)}
    if role == "tool":
        message["tool_call_id"] = fields.string("tool_call_id", longest=256)
        if not message["tool_call_id"]:
            raise fields.fail("tool_call_id", "is missing.")
    if role == "assistant":
        reasoning = fields.string("reasoning_content") or fields.string("reasoning")
        if reasoning:
            message["reasoning_content"] = reasoning
        calls = fields.array("tool_calls", MAX_CALLS)
        if calls:
            message["tool_calls"] = [
                _call(Fields(c, f"{fields.path}tool_calls[{i}].")) for i, c in enumerate(calls)
            ]
        if fields.boolean("prefix"):
            message["prefix"] = True
        if not fields.has("content") and not calls and not reasoning:
            raise fields.fail("content", "is missing.")
    return message


def _content(fields: Fields, role: str) -> str:
    """Text of a message; a list must hold text parts only."""
    content = fields.get("content")
    if content is None:
        if role not in ("assistant", "tool"):
            raise fields.fail("content", "is missing.")
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise fields.fail("content", "must be a string or an array of text parts.")
    texts = []
    for i, part in enumerate(content):
        item = Fields(part, f"{fields.path}content[{i}].")
        kind = item.string("type")
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise item.fail("type", f"is {kind!r:.40}; this model reads text only.")
        field = "refusal" if kind == "refusal" else "text"
        if not item.has(field):
            raise item.fail(field, "is missing.")
        texts.append(item.string(field))
    return "\n\n".join(texts)


def _call(fields: Fields) -> dict[str, Any]:
    fields.option("type", "function", ("function",))
    function = fields.object("function")
    if function is None:
        raise fields.fail("function", "is missing.")
    name = function.string("name", longest=128)
    if not _TOOL_NAME.match(name):
        raise function.fail("name", "is no function name.")
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if arguments is not None and not isinstance(arguments, str):
        raise function.fail("arguments", "must be a string of JSON.")
    return {
        "id": fields.string("id", longest=256),
        "type": "function",
        "function": {"name": name, "arguments": arguments or ""},
    }


def _check_order(messages: list[dict[str, Any]], config: GatewayConfig) -> None:
    """Every tool result answers a call that was made before it."""
    known: set[str] = set()
    for i, message in enumerate(messages):
        for call in message.get("tool_calls", []):
            known.add(call["id"])
        if message["role"] == "tool" and message["tool_call_id"] not in known:
            raise InvalidRequest(
                f"tool_call_id {message['tool_call_id']!r:.80} matches no earlier tool call",
                f"messages[{i}].tool_call_id",
            )
        if (
            config.strict_deepseek
            and message.get("tool_calls")
            and not message.get("reasoning_content")
        ):
            raise InvalidRequest(
                "the reasoning_content of a turn with tool calls must be passed back",
                f"messages[{i}].reasoning_content",
            )


def read_tools(fields: Fields) -> tuple[list[dict[str, Any]], ToolChoice]:
    """``tools`` and ``tool_choice``. With choice none the tools are not even rendered."""
    tools: list[dict[str, Any]] = []
    for i, tool in enumerate(fields.array("tools", MAX_TOOLS)):
        item = Fields(tool, f"{fields.path}tools[{i}].")
        kind = item.string("type", "function")
        if kind != "function":
            raise item.fail("type", f"is {kind!r:.40}, only functions can be called.")
        function = item.object("function")
        if function is None:
            raise item.fail("function", "is missing.")
        tools.append({"type": "function", "function": _function(function)})
    names = [t["function"]["name"] for t in tools]
    if len(set(names)) != len(names):
        raise fields.fail("tools", "declares a name twice.")
    choice = read_tool_choice(fields, names)
    return ([] if choice.kind == "none" else tools), choice


def _function(fields: Fields) -> dict[str, Any]:
    name = fields.string("name", longest=128)
    if not _TOOL_NAME.match(name):
        raise fields.fail("name", "must have 1 to 128 letters, digits, '_', '-', '.' or ':'.")
    fields.string("description")
    parameters = fields.get("parameters")
    if parameters is not None:
        if not isinstance(parameters, dict):
            raise fields.fail("parameters", "must be a JSON schema (an object).")
        check_schema(parameters, fields.name("parameters"))
    fields.boolean("strict")
    return {k: v for k, v in fields.data.items() if v is not None}


def check_schema(schema: Any, name: str) -> None:
    """Size and depth only: what a schema means is the grammar's business."""
    if depth(schema, MAX_SCHEMA_DEPTH) > MAX_SCHEMA_DEPTH:
        raise InvalidRequest(f"{name} is nested deeper than {MAX_SCHEMA_DEPTH}.", name)
    if len(json.dumps(schema)) > MAX_SCHEMA_BYTES:
        raise InvalidRequest(f"{name} is larger than {MAX_SCHEMA_BYTES >> 10} KiB.", name)


def read_tool_choice(fields: Fields, names: list[str]) -> ToolChoice:
    value = fields.get("tool_choice")
    if value is None:
        return ToolChoice("auto" if names else "none")
    if isinstance(value, str):
        kind = fields.option("tool_choice", "auto", ("none", "auto", "required"))
        if kind == "required" and not names:
            raise fields.fail("tool_choice", "is 'required', but there are no tools.")
        return ToolChoice(kind if names else "none")
    choice = Fields(value, f"{fields.path}tool_choice.")
    if choice.get("type") == "allowed_tools":
        return _allowed_tools(choice, names)
    function = choice.object("function")
    name = function.string("name") if function else choice.string("name")
    if name not in names:
        raise fields.fail("tool_choice", f"names {name!r:.80}, which is not among the tools.")
    return ToolChoice("named", name)


def _allowed_tools(choice: Fields, names: list[str]) -> ToolChoice:
    """All tools stay in the prompt, only these may be called. Responses has no inner object."""
    given = choice.object("allowed_tools") or choice
    kind = given.option("mode", "auto", ("auto", "required"))
    allowed: list[str] = []
    for i, tool in enumerate(given.array("tools", MAX_TOOLS, 1)):
        item = Fields(tool, f"{given.path}tools[{i}].")
        name = (item.object("function") or item).string("name")
        if name not in names:
            raise item.fail("name", f"is {name!r:.80}, which is not among the tools.")
        allowed.append(name)
    return ToolChoice(kind, allowed=tuple(allowed))


def read_thinking(fields: Fields, config: GatewayConfig) -> tuple[bool, str]:
    """(thinking, effort). Four spellings are in use; an explicit ``thinking`` wins."""
    effort = fields.option("reasoning_effort", "", tuple(EFFORTS))
    thinking: bool | None = None
    reasoning = fields.object("reasoning")
    if reasoning is not None:
        effort = reasoning.option("effort", effort, tuple(EFFORTS))
        if reasoning.has("enabled"):
            thinking = reasoning.boolean("enabled")
    kwargs = fields.object("chat_template_kwargs")
    if kwargs is not None:
        for name in kwargs.data:
            if name not in ("thinking", "enable_thinking", "reasoning_effort"):
                raise unsupported(
                    f"{kwargs.name(name)} is not supported; "
                    "thinking, enable_thinking and reasoning_effort are.",
                    kwargs.name(name),
                )
            if name != "reasoning_effort" and kwargs.has(name):
                thinking = kwargs.boolean(name)
        effort = kwargs.option("reasoning_effort", effort, tuple(EFFORTS))
    if fields.has("enable_thinking"):
        thinking = fields.boolean("enable_thinking")
    if isinstance(fields.get("thinking"), bool):
        thinking = fields.boolean("thinking")
    else:
        explicit = fields.object("thinking")
        if explicit is not None:
            kind = explicit.option("type", "enabled", ("enabled", "disabled", "adaptive", "auto"))
            thinking = kind != "disabled"
            explicit.integer("budget_tokens", 0, 0)
            effort = explicit.option("reasoning_effort", effort, tuple(EFFORTS))
    if thinking is None:
        thinking = effort != "none" if effort else config.default_thinking
    return thinking, EFFORTS[effort] if effort and thinking else ""


def read_response_format(fields: Fields) -> tuple[str, dict[str, Any] | None]:
    """(kind, schema): text, json_object or json_schema."""
    given = fields.object("response_format")
    if given is None:
        return "text", None
    kind = given.option("type", "", ("text", "json_object", "json_schema", "structural_tag"))
    if not kind:
        raise given.fail("type", "is missing.")
    if kind != "json_schema":
        return kind, None
    wrapper = given.object("json_schema")
    if wrapper is None:
        raise given.fail("json_schema", "is missing.")
    wrapper.string("name", longest=128)
    wrapper.boolean("strict")
    schema = wrapper.get("schema")
    if not isinstance(schema, dict):
        raise wrapper.fail("schema", "must be a JSON schema (an object).")
    check_schema(schema, wrapper.name("schema"))
    return kind, schema
