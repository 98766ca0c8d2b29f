"""Grammars of answers: JSON, and the tool-call block that the V4 encoding defines.

Written in llguidance's Lark dialect, where ``<[128825]>`` is one token by its id: control tokens
stand in no string, so nothing inside a value can be one. Values are written as the chat encoding
writes them, so a constrained call is replayed with the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

MAX_LENGTH = 4096  # a string's maxLength beyond this is not enforced
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_FREE = "/(?s:.*)/"
_TO_END_TAG = "/(?s:.*)<\\//"  # any text up to the bracket of the end tag
_REFERENCES = ("$defs", "definitions")
MAX_REFERENCES = 8  # in a row
MAX_ALTERNATIVES = 8  # of a whole argument object


def json_grammar(schema: dict[str, Any]) -> str:
    """Lark text of one JSON value of a schema."""
    return f"start: {_json(schema, {})}\n"


def json_value(schema: dict[str, Any]) -> str:
    """One JSON value of a schema, inside another rule."""
    return _json(schema, {})


class ToolGrammar:
    """Builds the rules of one request's tools."""

    def __init__(
        self, functions: Sequence[dict[str, Any]], dsml_id: int, has_patterns: bool = True
    ) -> None:
        """has_patterns: enforce ``pattern`` of strings (some regular expressions cannot be)."""
        self._dsml = f"<[{dsml_id}]>"
        self._has_patterns = has_patterns
        self._functions = functions
        self._rules: list[str] = []

    def required(self, is_parallel: bool) -> str:
        """The answer is a block of calls and nothing else."""
        return self._text(f'start: "\\n\\n<" {self._block(is_parallel)}')

    def optional(self, is_parallel: bool, answer: str = "") -> str:
        """Text as it likes, and perhaps a block after it. answer: Lark of the text instead."""
        block = self._block(is_parallel)
        if answer:
            return self._text(f'start: {answer} | "\\n\\n<" {block}')
        return self._text(f"start: {_FREE} | /(?s:.*)</ {block}")

    def _text(self, start: str) -> str:
        return "\n".join([start, *self._rules]) + "\n"

    def _block(self, is_parallel: bool) -> str:
        d = self._dsml
        calls = [self._call(i, f) for i, f in enumerate(self._functions)]
        self._rules.append(f"call: {' | '.join(calls)}")
        more = ' ("\\n" call)*' if is_parallel else ""
        return f'{d} "tool_calls>\\n" call{more} "\\n</" {d} "tool_calls>"'

    def _call(self, index: int, function: dict[str, Any]) -> str:
        d, name = self._dsml, json.dumps(f'invoke name="{function["name"]}">\n')
        schema = function.get("parameters") or {}
        arguments = self._arguments(f"f{index}", schema)
        self._rules.append(f'f{index}: "<" {d} {name} {arguments} "</" {d} "invoke>"')
        return f"f{index}"

    def _arguments(self, prefix: str, schema: dict[str, Any]) -> str:
        """Parameters in the order of the schema, optional ones left out or not."""
        variants = _variants(schema)
        if len(variants) > 1:
            found = [self._object(f"{prefix}v{i}", v) for i, v in enumerate(variants)]
            return f"({' | '.join(found)})"
        return self._object(prefix, variants[0])

    def _object(self, prefix: str, schema: dict[str, Any]) -> str:
        properties, required = _properties(schema), _required(schema)
        # What is demanded and not described may be anything.
        properties = properties | {n: {} for n in required if n not in properties}
        if not properties:
            return '"\\n"'
        shared = _shared(schema)
        following = '""'
        rules = []
        for i, (name, value) in reversed(list(enumerate(properties.items()))):
            rule = f"{prefix}p{i}"
            one = self._parameter(name, value if isinstance(value, dict) else {}, shared)
            rest = "" if following == '""' else f" {following}"
            skip = "" if name in required else f" | {following}"
            rules.append(f'{rule}: ({one}) "\\n"{rest}{skip}')
            following = rule
        self._rules += reversed(rules)
        return following if required else f'("\\n" | {following})'

    def _parameter(self, name: str, schema: dict[str, Any], shared: dict[str, Any]) -> str:
        """The alternatives of one parameter: a raw string, a JSON value, or both."""
        d = self._dsml

        def tag(kind: str, value: str) -> str:
            head = json.dumps(f'parameter name="{name}" string="{kind}">', ensure_ascii=False)
            return f'"<" {d} {head} {value} {d} "parameter>"'

        texts, others = _split(schema)
        found = [tag("true", self._string(s)) for s in texts]
        found += [tag("false", f'{_json(s, shared)} "</"') for s in others]
        return " | ".join(found)

    def _string(self, schema: dict[str, Any]) -> str:
        """Lark of a raw string value with the bracket that follows it."""
        if "enum" in schema:
            return "(" + " | ".join(_literal(v + "</") for v in schema["enum"]) + ")"
        pattern = schema.get("pattern")
        if isinstance(pattern, str) and self._has_patterns:
            head = "" if pattern.startswith("^") else "(?s:.*)"
            tail = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
            body = pattern.removeprefix("^")
            body = body if tail else body[:-1]
            body = body.replace("/", "\\/").replace("\\\\/", "\\/")
            return f"/{head}(?:{body}){tail}<\\//"
        low, high = schema.get("minLength"), schema.get("maxLength")
        low = low if isinstance(low, int) and 0 <= low <= MAX_LENGTH else 0
        if isinstance(high, int) and low <= high <= MAX_LENGTH:
            return f"/(?s:.{{{low},{high}}})<\\//"
        return f"/(?s:.{{{low},}})<\\//" if low else _TO_END_TAG


def _variants(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects that the arguments may be: what stands at the top, or one for each alternative
    there, joined with what stands beside it."""
    schema = _resolved(schema)
    for word in ("anyOf", "oneOf"):
        parts = schema.get(word)
        if (
            isinstance(parts, list)
            and 0 < len(parts) <= MAX_ALTERNATIVES
            and all(isinstance(p, dict) for p in parts)
        ):
            base = {k: v for k, v in schema.items() if k != word}
            return [_joined(base, _resolved({**_shared(base), **part})) for part in parts]
    return [schema]


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    """What a reference at the top stands for."""
    for _ in range(MAX_REFERENCES):
        target = schema.get("$ref")
        group, _, name = target[2:].partition("/") if isinstance(target, str) else ("", "", "")
        known = schema.get(group)
        found = known.get(name) if group in _REFERENCES and isinstance(known, dict) else None
        if not isinstance(found, dict):
            break
        schema = _shared(schema) | found
    return schema


def _shared(schema: dict[str, Any]) -> dict[str, Any]:
    return {k: schema[k] for k in _REFERENCES if k in schema}


def _joined(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Both at once, as far as parameters go."""
    properties = _properties(a) | _properties(b)
    return {**a, **b, "properties": properties, "required": [*_required(a), *_required(b)]}


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def _required(schema: dict[str, Any]) -> list[str]:
    found = schema.get("required")
    return [n for n in found if isinstance(n, str)] if isinstance(found, list) else []


def _split(schema: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(schemas of raw strings, schemas of JSON values) that together allow what ``schema`` does."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        strings = [v for v in values if isinstance(v, str)]
        others = [v for v in values if not isinstance(v, str)]
        return [{"enum": strings}] if strings else [], [{"enum": others}] if others else []
    for name in ("anyOf", "oneOf"):
        parts = schema.get(name)
        if isinstance(parts, list) and parts and all(isinstance(p, dict) for p in parts):
            texts: list[dict[str, Any]] = []
            jsons: list[dict[str, Any]] = []
            for part in parts:
                found = _split(part)
                texts += found[0]
                jsons += found[1]
            return texts, jsons
    kinds = schema.get("type")
    if kinds == "string":
        return [schema], []
    if isinstance(kinds, list) and "string" in kinds:
        rest = [k for k in kinds if k != "string"]
        return [{**schema, "type": "string"}], [{**schema, "type": rest}] if rest else []
    if kinds is None and not any(k in schema for k in ("properties", "items", "allOf")):
        # Nothing is said, or it stands behind a reference: either form is a way to write it.
        return ([{}] if "$ref" not in schema else []), [schema]
    return [], [schema]


def _json(schema: dict[str, Any], shared: dict[str, Any]) -> str:
    return "%json " + json.dumps({**shared, **schema, "x-guidance": _SPACING})


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
