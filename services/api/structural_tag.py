"""Structural tags: free text with parts that must look like something, as one Lark grammar.

Both spellings that clients send::

    {"structures": [{"begin": "<f>", "schema": {...}, "end": "</f>"}], "triggers": ["<f"]}
    {"format": {"type": "triggered_tags", "triggers": [...], "tags": [...]}}

Formats: const_string, json_schema, regex, any_text, sequence, or, tag, triggered_tags and
tags_with_separator. A tag's begin and end are text: nothing here can write a control token.
"""

from __future__ import annotations

import json
from typing import Any

from decant.protocol.errors import InvalidRequest
from decant.services.api.conversation import check_schema
from decant.services.api.errors import unsupported
from decant.services.api.validate import Fields, depth, parse_json
from decant.services.chat.tool_grammar import json_value

MAX_DEPTH = 32
MAX_PARTS = 128
MAX_CHARS = 4096  # of one literal
_TEXT = "/(?s:.*)/"


def lark(given: Any, name: str) -> str:
    """The grammar of an answer. given: the object, or its JSON text. Raises: InvalidRequest."""
    if isinstance(given, str):
        given = parse_json(given.encode("utf-8", "surrogatepass"))
    if depth(given, MAX_DEPTH) > MAX_DEPTH:
        raise InvalidRequest(f"{name} is nested deeper than {MAX_DEPTH}.", name)
    fields = Fields(given, f"{name}.")
    rules = _Rules()
    if fields.has("format"):
        if fields.has("structures"):
            raise fields.fail("structures", "cannot be combined with format.")
        start = rules.format(_object(fields, "format"))
    else:
        tags = []
        for i, item in enumerate(fields.array("structures", MAX_PARTS, 1)):
            tag = Fields(item, f"{fields.name('structures')}[{i}].")
            tags.append(_Tag(tag, rules.schema(tag, "schema")))
        start = rules.triggered(fields, tags, at_least_one=False, is_single=False)
    return "\n".join([f"start: {start}", *rules.lines]) + "\n"


def _object(fields: Fields, field: str) -> Fields:
    found = fields.object(field)
    if found is None:
        raise fields.fail(field, "is missing.")
    return found


class _Tag:
    """begin, the Lark of the content, end."""

    def __init__(self, fields: Fields, content: str) -> None:
        self.begin = fields.string("begin", longest=MAX_CHARS)
        self.end = fields.string("end", longest=MAX_CHARS)
        self.content = content
        if not self.begin:
            raise fields.fail("begin", "is missing or empty.")
        if content == _TEXT and not self.end:
            raise fields.fail("end", "is missing: text needs an end.")


class _Rules:
    """Writes rules; each method returns what stands for its part in another rule."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {body}")
        return name

    def schema(self, fields: Fields, field: str) -> str:
        schema = fields.get(field)
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise fields.fail(field, "must be a JSON schema (an object).")
        check_schema(schema, fields.name(field))
        return json_value(schema)

    def format(self, fields: Fields) -> str:
        """Any format. Raises: InvalidRequest."""
        kind = fields.string("type")
        match kind:
            case "const_string":
                return _literal(_text(fields, "value"))
            case "json_schema":
                return self.schema(fields, "json_schema")
            case "regex":
                pattern = _text(fields, "pattern")
                return "/(?:" + pattern.replace("\\/", "/").replace("/", "\\/") + ")/"
            case "any_text":
                return _TEXT
            case "sequence" | "or":
                parts = [self.format(part) for part in _parts(fields, "elements")]
                if kind == "sequence" and _TEXT in parts[:-1]:
                    raise fields.fail("elements", "holds any_text before its end: use a tag.")
                return "(" + (" " if kind == "sequence" else " | ").join(parts) + ")"
            case "tag":
                return self._tag(self._read_tag(fields))
            case "triggered_tags":
                tags = [self._read_tag(tag) for tag in _parts(fields, "tags")]
                return self.triggered(
                    fields, tags, fields.boolean("at_least_one"), fields.boolean("stop_after_first")
                )
            case "tags_with_separator":
                one = " | ".join(
                    self._rule(self._tag(self._read_tag(tag))) for tag in _parts(fields, "tags")
                )
                more = f" ({_literal(_text(fields, 'separator'))} ({one}))*"
                body = f"(({one}){'' if fields.boolean('stop_after_first') else more})"
                return body if fields.boolean("at_least_one") else f"{body}?"
        known = "const_string, json_schema, regex, any_text, sequence, or, tag, triggered_tags"
        raise unsupported(
            f"{fields.name('type')} is {kind!r:.60}; {known} and tags_with_separator are served.",
            fields.name("type"),
        )

    def _read_tag(self, fields: Fields) -> _Tag:
        return _Tag(fields, self.format(_object(fields, "content")))

    def _tag(self, tag: _Tag, begin: str | None = None) -> str:
        """A whole tag; begin: what is still to be written of its begin."""
        begin = _literal(tag.begin if begin is None else begin)
        if tag.content == _TEXT:  # ends where its end stands for the first time
            text = "/(?s:.*)" + _escape(tag.end) + "/"
            return f"{begin} {self._rule(text, '[lazy]')}"
        return f"{begin} {tag.content} {_literal(tag.end)}"

    def triggered(
        self, fields: Fields, tags: list[_Tag], at_least_one: bool, is_single: bool
    ) -> str:
        """Text; where a trigger was written, one of its tags goes on."""
        triggers = fields.strings("triggers", MAX_PARTS, MAX_CHARS)
        if not triggers:
            raise fields.fail("triggers", "is missing.")
        for a in triggers:
            for b in triggers:
                if a != b and b.startswith(a):
                    raise fields.fail("triggers", f"holds {a!r:.40}, which begins {b!r:.40}.")
        groups: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for tag in tags:
            found = next((t for t in triggers if tag.begin.startswith(t)), None)
            if found is None:
                raise fields.fail("triggers", f"has none that begins the tag {tag.begin!r:.60}.")
            groups[found].append(self._rule(self._tag(tag, tag.begin[len(found) :])))
        calls = []
        for trigger, rests in groups.items():
            if rests:
                text = self._rule(f"/(?s:.*){_escape(trigger)}/", "[lazy]")
                calls.append(self._rule(f"{text} ({' | '.join(rests)})"))
        one = f"({' | '.join(calls)})"
        if is_single:
            return one if at_least_one else f"({one} | {_TEXT})"
        return f"({one}{'+' if at_least_one else '*'} {_TEXT})"


def _parts(fields: Fields, field: str) -> list[Fields]:
    items = fields.array(field, MAX_PARTS, 1)
    return [Fields(item, f"{fields.name(field)}[{i}].") for i, item in enumerate(items)]


def _text(fields: Fields, field: str) -> str:
    value = fields.get(field)
    if not isinstance(value, str):
        raise fields.fail(field, "must be a string.")
    return fields.string(field, longest=MAX_CHARS)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escape(text: str) -> str:
    """A literal inside a regular expression of Lark."""
    out = []
    for char in text:
        if char in "\\/.^$|?*+()[]{}-&~#":
            out.append("\\" + char)
        elif char == "\n":
            out.append("\\n")
        else:
            out.append(char)
    return "".join(out)
