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
from decant.services.api.conversation import Conversation, read_response_format
from decant.services.api.errors import unsupported
from decant.services.api.validate import Fields
from decant.services.chat.markers import DSML, END_THINK
from decant.services.chat.tool_grammar import ToolGrammar, json_grammar

MAX_GRAMMAR_CHARS = 64 << 10
TEXT_FIELDS = ("regex", "ebnf", "guided_regex", "guided_grammar")


def for_text(fields: Fields) -> tuple[str, str, dict[str, Any] | None]:
    """(kind, text, schema) of the text itself: kind is "", json_object, json_schema, regex or ebnf.

    Raises: InvalidRequest if more than one grammar is given."""
    if fields.has("structural_tag"):
        raise unsupported("structural_tag is not supported; use tools or ebnf.", "structural_tag")
    kind, schema = read_response_format(fields)
    found = [name for name in TEXT_FIELDS if fields.has(name)]
    if len(found) + (kind != "text") > 1:
        last = found[-1]
        raise fields.fail(last, "cannot be combined with another grammar.")
    if found:
        text = fields.string(found[0], longest=MAX_GRAMMAR_CHARS)
        return ("regex" if "regex" in found[0] else "ebnf"), text, None
    if kind == "text":
        return "", "", None
    return kind, json.dumps(schema) if schema is not None else "", schema


def for_chat(
    fields: Fields, conversation: Conversation, is_parallel: bool, ids: Mapping[str, int]
) -> tuple[Grammar, ...]:
    """Candidates for a conversation; empty: the answer is free. ids: of the control tokens."""
    kind, text, schema = for_text(fields)
    choice, tools = conversation.choice, conversation.tools
    after = ids[END_THINK] if conversation.starts_thinking else -1
    if choice.kind in ("required", "named"):
        if kind:
            raise fields.fail("tool_choice", "cannot demand a call beside another grammar.")
        functions = [t["function"] for t in tools]
        if choice.kind == "named":
            functions = [f for f in functions if f["name"] == choice.name]
        return tuple(
            Grammar("lark", ToolGrammar(functions, ids[DSML], p).required(is_parallel), after)
            for p in (True, False)
        )
    functions = [t["function"] for t in tools]
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
    if is_strict:
        return tuple(
            Grammar("lark", ToolGrammar(functions, ids[DSML], p).optional(is_parallel), after)
            for p in (True, False)
        )
    return ()


def for_completion(fields: Fields) -> tuple[Grammar, ...]:
    kind, text, _ = for_text(fields)
    return (Grammar(kind, text),) if kind else ()
