"""What the model writes, split into reasoning, content and tool calls, piece by piece.

The parser takes ordinary text and control tokens apart: a tag begins only with the DSML *token*,
so text that merely looks like a tag stays text. Its output depends on the sequence of tokens, not
on how they were grouped. It knows no ids (``stream.py`` feeds it) and no stop strings.

A block, after the visible content::

    <DSML tool_calls> <DSML invoke name="f"> <DSML parameter name="p" string="true">text</DSML
    parameter> ... </DSML invoke> ... </DSML tool_calls>

Strict: a call counts only when it closes, its name must be declared, tags are never shown.
Lenient: no outer wrapper (then the call must close and have its required arguments), white space
or text around tags, a JSON object instead of parameter tags, a missing parameter end tag, a
missing ``</think>`` before a block.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from decant.protocol.messages import ToolDelta

MAX_TAG = 512  # characters; a longer "tag" is text
MAX_CHECKED = 4096  # characters of a JSON value that are held back to be checked

_HELD_IN_TEXT = re.compile(r"\n{0,2}(?:</?)?\Z")
_HELD_IN_BLOCK = re.compile(r"(?:</?)?\Z")
_TAG = re.compile(r"\s*(tool_calls|invoke|parameter)(?![\w-])([^\0]*?)\s*(/?)\Z")
_NAME = re.compile(r'name\s*=\s*"([^"]*)"')
_STRING = re.compile(r'string\s*=\s*"(true|false)"')
_WRAPPERS = ("arguments", "input")  # names that a model invents around the real arguments


class State(Enum):
    REASONING = auto()
    CONTENT = auto()
    TAG = auto()  # after a DSML token, until the tag's ``>``
    BETWEEN = auto()  # in or behind a block, outside of a call
    CALL = auto()  # in a call, outside of a parameter
    VALUE = auto()  # in a parameter
    BODY = auto()  # in a call whose arguments come as one JSON object


@dataclass
class Tool:
    """What the parser uses of a declared function."""

    properties: frozenset[str] | None = None  # None: not known
    required: frozenset[str] = frozenset()
    strings: frozenset[str] = frozenset()  # parameters declared as strings


def tools_from(names: list[str], schemas: str) -> dict[str, Tool]:
    """names: of the declared tools; schemas: JSON list of their OpenAI functions, or empty."""
    tools = {name: Tool() for name in names}
    for function in json.loads(schemas) if schemas else []:
        parameters = function.get("parameters")
        if function.get("name") not in tools or not isinstance(parameters, dict):
            continue
        properties = parameters.get("properties")
        if isinstance(properties, dict):
            tools[function["name"]] = Tool(
                frozenset(properties),
                frozenset(r for r in parameters.get("required") or [] if isinstance(r, str)),
                frozenset(
                    name
                    for name, schema in properties.items()
                    if isinstance(schema, dict) and schema.get("type") == "string"
                ),
            )
    return tools


@dataclass
class Parsed:
    """What a push added to each channel."""

    reasoning: str = ""
    content: str = ""
    tools: list[ToolDelta] = field(default_factory=list)


@dataclass
class _Call:
    """The call that is being read."""

    index: int
    tool: Tool
    names: set[str] = field(default_factory=set)
    num_members: int = 0
    is_open: bool = False  # the object's brace is out
    is_bare: bool = False  # no outer wrapper: shown only when complete and plausible
    pending: list[ToolDelta] = field(default_factory=list)


def is_json(text: str) -> bool:
    """Whether a text is one JSON value (NaN and Infinity are not)."""
    return _loads(text) is not _BAD


_BAD = object()


def _refuse(name: str) -> Any:
    raise ValueError(name)


def _loads(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _BAD


def escape_value(text: str) -> str:
    """A JSON string."""
    return json.dumps(text, ensure_ascii=False)


def escape(text: str) -> str:
    """A piece of the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class Parser:
    """One choice's output. Feed it, then ``take`` what became visible."""

    def __init__(self, is_thinking: bool, tools: dict[str, Tool]) -> None:
        """tools: the declared ones; without any, blocks are swallowed and nothing is called."""
        self.num_complete = 0
        self._tools = tools
        self._state = State.REASONING if is_thinking else State.CONTENT
        self._before = self._state  # of TAG
        self._held = ""
        self._tag = ""
        self._is_end_tag = False
        self._has_bracket = False
        self._is_wrapped = False  # inside of a tool_calls tag
        self._is_ignoring = False  # inside of a call that does not count
        self._is_early = False  # the block began before the end of thinking
        self._call: _Call | None = None
        self._num_calls = 0
        self._name = ""  # of the parameter that is being read
        self._is_string = True
        self._is_skipped = False  # a parameter that repeats an earlier one
        self._is_wrapper = False  # a parameter that a model invents around the real ones
        self._value: list[str] | None = None  # a JSON value that is held back to be checked
        self._value_size = 0
        self._has_content = False
        self._out = Parsed()

    @property
    def is_reasoning(self) -> bool:
        state = self._before if self._state is State.TAG else self._state
        return state is State.REASONING

    def take(self) -> Parsed:
        """What came out since the last take; pieces of one call are joined."""
        out, self._out = self._out, Parsed()
        return out

    # ---- what comes in -----------------------------------------------------------------------

    def text(self, text: str) -> None:
        """Ordinary text."""
        while text:
            text = self._tag_text(text) if self._state is State.TAG else self._plain_text(text)

    def dsml(self) -> None:
        """The DSML token."""
        if self._state is State.TAG:
            self._not_a_tag()
        self._is_end_tag = self._held.endswith("</")
        text, bracket, _ = self._held.partition("<")
        self._held, self._has_bracket = text, bool(bracket)
        self._before, self._state, self._tag = self._state, State.TAG, ""

    def think(self) -> None:
        """The token that begins thinking; only the very first thing can begin it."""
        if self._state is State.CONTENT and not self._has_content and not self._held:
            self._state = State.REASONING

    def end_think(self) -> None:
        """The token that ends thinking."""
        if self._state is State.TAG:
            self._not_a_tag()
        if self._state is State.REASONING:
            self._show(self._held)
            self._held, self._state = "", State.CONTENT
        elif self._is_early:
            self._abandon()
            self._held, self._state, self._is_early = "", State.CONTENT, False

    def finish(self) -> None:
        """No more comes: show what was held back as text, drop unfinished tags and calls."""
        if self._state in (State.REASONING, State.CONTENT):
            self._show(self._held)
        self._held = ""

    # ---- text --------------------------------------------------------------------------------

    def _plain_text(self, text: str) -> str:
        """Text outside of a tag; returns what is left for another state."""
        is_text = self._state in (State.REASONING, State.CONTENT)
        text = self._held + text
        match = (_HELD_IN_TEXT if is_text else _HELD_IN_BLOCK).search(text, max(0, len(text) - 4))
        at = match.start() if match else len(text)
        text, self._held = text[:at], text[at:]
        if self._state is not State.BETWEEN:
            self._decided(text)
        elif text.strip() and not self._is_wrapped and not self._is_ignoring:
            self._state, held, self._held = State.CONTENT, self._held, ""
            return text.lstrip() + held
        return ""

    def _decided(self, text: str) -> None:
        """Text that is certainly no part of a tag."""
        if self._state in (State.REASONING, State.CONTENT):
            self._show(text)
        elif self._state is State.VALUE:
            self._show_value(text)
        elif self._state is State.BODY and self._value is not None:
            self._value.append(text)
        elif self._state is State.CALL and self._call is not None:
            body = text.lstrip()
            if body.startswith("{") and not self._call.is_open:
                self._state, self._value = State.BODY, [body]

    def _show(self, text: str) -> None:
        if self._state is State.REASONING:
            self._out.reasoning += text
        elif text:
            self._has_content = True
            self._out.content += text

    def _tag_text(self, text: str) -> str:
        """Text of a tag; returns what follows the tag."""
        start = len(self._tag)
        self._tag += text
        quotes = self._tag.count('"', 0, start)
        for i in range(start, len(self._tag)):
            char = self._tag[i]
            if char == "\n" or i >= MAX_TAG:
                return self._not_a_tag(i)
            quotes += char == '"'
            if char == ">" and quotes % 2 == 0:
                match = _TAG.match(self._tag[:i])
                if match is None:
                    return self._not_a_tag(i + 1)
                rest = self._tag[i + 1 :]
                self._state, self._tag = self._before, ""
                name, attributes, slash = match.groups()
                self._on_tag(name, attributes, bool(slash))
                return rest
        return ""

    def _not_a_tag(self, end: int | None = None) -> str:
        """The DSML token began nothing: the text around it, up to ``end``, stays text; the token
        is not shown. Returns the rest."""
        bracket = "</" if self._is_end_tag else "<" if self._has_bracket else ""
        text, rest = self._tag[:end], "" if end is None else self._tag[end:]
        held, self._held = self._held, ""
        self._state, self._tag = self._before, ""
        if self._state is not State.BETWEEN:
            self._decided(held + bracket + text)
        return rest

    # ---- tags --------------------------------------------------------------------------------

    def _on_tag(self, name: str, attributes: str, is_empty: bool) -> None:
        """A whole tag, in the state in which it began."""
        if self._state in (State.REASONING, State.CONTENT):
            if self._is_end_tag:  # a stray end tag is dropped
                return
            # A block ends the thinking and swallows the newlines before it.
            self._is_early = self._state is State.REASONING
            self._held, self._state = "", State.BETWEEN
        self._held = ""
        if name == "tool_calls":
            self._abandon()
            self._is_wrapped = not self._is_end_tag
        elif name == "invoke" and self._is_end_tag:
            self._close_call()
            self._is_ignoring = False
        elif name == "invoke":
            self._abandon()
            self._open_call(attributes, is_empty)
        elif self._is_end_tag:
            if self._state is State.VALUE:
                self._close_value()
        elif self._state is State.BETWEEN:
            self._is_ignoring = True
        elif self._state is not State.BODY:
            if self._state is State.VALUE:  # its end tag is missing
                self._close_value()
            self._open_value(attributes)
            if is_empty:
                self._close_value()

    def _open_call(self, attributes: str, is_empty: bool) -> None:
        match = _NAME.search(attributes)
        tool = self._tools.get(match[1]) if match else None
        if match is None or tool is None:
            self._is_ignoring = not is_empty
            return
        self._call = _Call(self._num_calls, tool, is_bare=not self._is_wrapped)
        self._state = State.CALL
        self._emit(name=match[1])
        if is_empty:
            self._close_call()

    def _close_call(self) -> None:
        call = self._call
        if call is None:
            return
        if self._state is State.VALUE:  # its end tag is missing
            self._close_value()
        if self._state is State.BODY and not self._close_body(call):
            self._abandon()
            return
        self._emit(arguments="}" if call.is_open else "{}", is_complete=True)
        if call.is_bare:
            if not call.tool.required <= call.names:
                self._abandon()
                return
            for delta in call.pending:
                self._append(delta)
        self.num_complete += 1
        self._num_calls += 1
        self._call, self._state = None, State.BETWEEN

    def _close_body(self, call: _Call) -> bool:
        text = "".join(self._value or []).strip()
        self._value = None
        values = _loads(text)
        if not isinstance(values, dict):
            return False
        name, inner = next(iter(values.items())) if len(values) == 1 else ("", None)
        if isinstance(inner, dict) and self._is_invented(call, name):
            values, text = inner, json.dumps(inner, ensure_ascii=False)
        self._open_object(call, text, values)
        return True

    def _open_object(self, call: _Call, text: str, values: dict[str, Any]) -> None:
        """Show a whole JSON object without its last brace."""
        self._emit(arguments=text.strip()[:-1].rstrip())
        call.is_open, call.num_members = True, len(values)
        call.names |= set(values)

    def _abandon(self) -> None:
        """The open call, if any, does not count. What was shown of it stays incomplete."""
        if self._call is not None and not self._call.is_bare:
            self._num_calls += 1
        self._call, self._value, self._is_ignoring = None, None, False
        self._state = State.BETWEEN

    # ---- parameters --------------------------------------------------------------------------

    def _open_value(self, attributes: str) -> None:
        call = self._call
        assert call is not None
        name, kind = _NAME.search(attributes), _STRING.search(attributes)
        self._state, self._value, self._value_size = State.VALUE, None, 0
        self._name = name[1] if name else ""
        self._is_skipped = name is None or self._name in call.names
        self._is_wrapper = not call.is_open and self._is_invented(call, self._name)
        if kind is not None:
            self._is_string = kind[1] == "true"
        else:
            known = call.tool.properties
            self._is_string = known is None or self._name in call.tool.strings
        if self._is_skipped:
            return
        if self._is_wrapper:
            self._value = []
            return
        self._open_member(call)
        if not self._is_string:
            self._value = []

    @staticmethod
    def _is_invented(call: _Call, name: str) -> bool:
        """Whether ``name`` is a wrapper around the arguments and no parameter of the tool."""
        known = call.tool.properties
        return known is not None and name in _WRAPPERS and name not in known

    def _open_member(self, call: _Call) -> None:
        """The member's name, and the opening quote of a string."""
        before = "{" if not call.is_open else ", " if call.num_members else ""
        call.is_open = True
        call.num_members += 1
        call.names.add(self._name)
        quote = '"' if self._is_string else ""
        self._emit(arguments=f"{before}{json.dumps(self._name, ensure_ascii=False)}: {quote}")

    def _show_value(self, text: str) -> None:
        if self._is_skipped or not text:
            return
        if self._value is not None:
            self._value.append(text)
            self._value_size += len(text)
            if self._value_size > MAX_CHECKED and not self._is_wrapper:
                self._emit(arguments="".join(self._value))
                self._value = None
        else:
            self._emit(arguments=escape(text) if self._is_string else text)

    def _close_value(self) -> None:
        call = self._call
        assert call is not None
        self._state = State.CALL
        held, self._value = self._value, None
        if self._is_skipped:
            return
        if held is None:
            self._emit(arguments='"' if self._is_string else "")
            return
        text = "".join(held)
        values = _loads(text)
        if self._is_wrapper:
            if isinstance(values, dict):
                self._open_object(call, text, values)
                return
            is_string, self._is_string = self._is_string, False
            self._open_member(call)
            values = _BAD if is_string else values
        self._emit(arguments=escape_value(text) if values is _BAD else text)

    # ---- what goes out -----------------------------------------------------------------------

    def _emit(self, name: str = "", arguments: str = "", is_complete: bool = False) -> None:
        call = self._call
        assert call is not None
        delta = ToolDelta(call.index, name, arguments, is_complete)
        if call.is_bare:
            call.pending.append(delta)
        else:
            self._append(delta)

    def _append(self, delta: ToolDelta) -> None:
        out = self._out.tools
        if out and out[-1].index == delta.index and not delta.name:
            last = out.pop()
            delta = ToolDelta(
                last.index,
                last.name,
                last.arguments + delta.arguments,
                last.is_complete or delta.is_complete,
            )
        out.append(delta)
