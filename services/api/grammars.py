"""What the answer must look like, from the request's fields to grammars for decode.

A grammar begins after ``</think>``: reasoning is free. Candidates are tried in order, since not
every regular expression of a JSON schema can be enforced; the last one must work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from decant.protocol.errors import InvalidRequest
from decant.protocol.messages import Grammar
from decant.services.api import structural_tag
from decant.services.api.conversation import Conversation, check_schema, read_response_format
from decant.services.api.validate import Fields, parse_json
from decant.services.chat.markers import DSML, END_THINK
from decant.services.chat.tool_grammar import ToolGrammar, json_grammar

MAX_GRAMMAR_CHARS = 64 << 10
MAX_OPTIONS = 1024
FIELDS = (
    *("regex", "ebnf", "structural_tag", "guided_regex", "guided_grammar", "guided_json"),
    "guided_choice",
)
OUTPUTS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


def for_text(fields: Fields) -> tuple[str, str, dict[str, Any] | None]:
    """(kind, text, schema) of the text itself: kind is "", json_object, json_schema, regex, ebnf
    or lark.

    Raises: InvalidRequest if more than one grammar is given."""
    kind, schema = read_response_format(fields)
    given = [(fields, name) for name in FIELDS if fields.has(name)]
    outputs = fields.object("structured_outputs")
    if outputs is not None:
        given += [(outputs, name) for name in OUTPUTS if outputs.has(name)]
    if len(given) + (kind != "text") > 1:
        where, last = given[-1]
        raise where.fail(last, "cannot be combined with another grammar.")
    if given:
        where, name = given[0]
        return _constraint(where, name)
    if kind == "text":
        return "", "", None
    if kind == "structural_tag":
        return "lark", structural_tag.lark(fields.get("response_format"), "response_format"), None
    return kind, json.dumps(schema) if schema is not None else "", schema


def _constraint(fields: Fields, name: str) -> tuple[str, str, dict[str, Any] | None]:
    """One of vLLM's and SGLang's own fields."""
    kind = name.removeprefix("guided_")
    if kind == "structural_tag":
        return "lark", structural_tag.lark(fields.get(name), fields.name(name)), None
    if kind == "json":
        schema = fields.get(name)
        if isinstance(schema, str):
            schema = parse_json(schema.encode("utf-8", "surrogatepass"))
        if not isinstance(schema, dict):
            raise fields.fail(name, "must be a JSON schema (an object).")
        check_schema(schema, fields.name(name))
        return "json_schema", json.dumps(schema), schema
    if kind == "json_object":
        return ("json_object" if fields.boolean(name) else ""), "", None
    if kind == "choice":
        options = fields.strings(name, MAX_OPTIONS, MAX_GRAMMAR_CHARS)
        if not options:
            raise fields.fail(name, "is empty.")
        words = " | ".join(json.dumps(option, ensure_ascii=False) for option in options)
        return "lark", f"start: {words}\n", None
    text = fields.string(name, longest=MAX_GRAMMAR_CHARS)
    return ("regex" if kind == "regex" else "ebnf"), text, None


def for_chat(
    fields: Fields, conversation: Conversation, is_parallel: bool, ids: Mapping[str, int]
) -> tuple[Grammar, ...]:
    """Candidates for a conversation; empty: the answer is free. ids: of the control tokens."""
    kind, text, schema = for_text(fields)
    choice, tools = conversation.choice, conversation.tools
    after = ids[END_THINK] if conversation.starts_thinking else -1
    functions = [t["function"] for t in tools]
    if choice.allowed:
        functions = [f for f in functions if f["name"] in choice.allowed]
    if choice.kind in ("required", "named"):
        if kind:
            raise fields.fail("tool_choice", "cannot demand a call beside another grammar.")
        if choice.kind == "named":
            functions = [f for f in functions if f["name"] == choice.name]
        return tuple(
            Grammar("lark", ToolGrammar(functions, ids[DSML], p).required(is_parallel), after)
            for p in (True, False)
        )
    is_strict = bool(functions) and all(f.get("strict") for f in functions)
    if kind in ("json_object", "json_schema") and functions:
        answer = json_grammar(schema or {"type": "object"}).removeprefix("start: ").strip()
        return tuple(
            Grammar(
                "lark", ToolGrammar(functions, ids[DSML], p).optional(is_parallel, answer), after
            )
            for p in (True, False)
        )
    if kind:
        if functions:
            raise InvalidRequest(f"{kind} cannot be combined with tools.", kind)
        return (Grammar(kind, text, after),)
    if is_strict or choice.allowed:
        return tuple(
            Grammar("lark", ToolGrammar(functions, ids[DSML], p).optional(is_parallel), after)
            for p in (True, False)
        )
    return ()


def for_completion(fields: Fields) -> tuple[Grammar, ...]:
    kind, text, _ = for_text(fields)
    return (Grammar(kind, text),) if kind else ()
