"""Structured output and forced tool calls: the grammar that reaches decode, and its trial."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from decant.protocol.errors import InvalidRequest
from decant.protocol.messages import Grammar
from decant.services.api.checker import Checker

MODEL = "test-model"
PATH = "/v1/chat/completions"
EOS = "<｜end▁of▁sentence｜>"
END_THINK, DSML = 128822, 128825
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
TAGS = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}
NAMED = {"type": "function", "function": {"name": "f"}}
THINK = {"thinking": {"type": "enabled"}}


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def ask(
    http: aiohttp.ClientSession, stage: Any, path: str = PATH, **more: Any
) -> tuple[int, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **more}
    async with http.post(stage.base + path, json=body) as response:
        return response.status, await response.json()


async def test_grammars_that_reach_decode(stage: Any, http: aiohttp.ClientSession) -> None:
    stage.say("x" + EOS)
    cases: list[tuple[dict[str, Any], str, int]] = [
        ({"response_format": {"type": "json_object"}}, "json_object", -1),
        ({"response_format": {"type": "json_object"}, **THINK}, "json_object", END_THINK),
        ({"response_format": FORMAT}, "json_schema", -1),
        ({"regex": "[ab]+"}, "regex", -1),
        ({"ebnf": 'root ::= "a" | "b"'}, "ebnf", -1),
        ({"guided_json": SCHEMA}, "json_schema", -1),
        ({"guided_choice": ["yes", "no"], **THINK}, "lark", END_THINK),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "lark", -1),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "ebnf", -1),
        ({"response_format": {"type": "structural_tag", **TAGS}}, "lark", -1),
        ({"structural_tag": TAGS, **THINK}, "lark", END_THINK),
        ({"tools": [TOOL], "tool_choice": "required"}, "lark", -1),
        ({"tools": [TOOL], "tool_choice": NAMED, **THINK}, "lark", END_THINK),
        ({"tools": [STRICT]}, "lark", -1),
        ({"tools": [TOOL], "response_format": FORMAT}, "lark", -1),
    ]
    for more, kind, after in cases:
        stage.generates.clear()
        status, body = await ask(http, stage, **more)
        assert status == 200, (more, body)
        grammar = stage.generates[0].grammar
        assert grammar is not None and (grammar.kind, grammar.after_token) == (kind, after), more
    for more in ({}, {"tools": [TOOL]}, {"tools": [STRICT], "tool_choice": "none"}):
        stage.generates.clear()
        await ask(http, stage, **more)
        assert stage.generates[0].grammar is None
    status, _ = await ask(http, stage, "/v1/completions", prompt="a", messages=None, regex="[ab]")
    assert status == 200 and stage.generates[-1].grammar == Grammar("regex", "[ab]")


async def test_grammars_that_are_refused(stage: Any, http: aiohttp.ClientSession) -> None:
    bad: list[dict[str, Any]] = [
        {"regex": "["},
        {"regex": "a", "ebnf": 'root ::= "a"'},
        {"regex": "a", "response_format": FORMAT},
        {"ebnf": "root ::= ("},
        {"structural_tag": {}},
        {"response_format": {"type": "structural_tag"}},
        {"structural_tag": TAGS, "regex": "a"},
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        {"structured_outputs": {"regex": "a"}, "response_format": FORMAT},
        {"guided_choice": []},
        {"tools": [TOOL], "structural_tag": TAGS},
        {"tools": [TOOL], "tool_choice": "required", "response_format": FORMAT},
        {"tools": [TOOL], "regex": "a"},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wibble"}}}},
    ]
    for more in bad:
        status, body = await ask(http, stage, **more)
        assert status == 400 and body["error"]["message"], more
    assert not stage.generates


async def test_a_pattern_that_cannot_be_enforced_is_left_out(
    stage: Any, http: aiohttp.ClientSession
) -> None:
    stage.say("x" + EOS)
    parameters = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=a)b"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    status, body = await ask(http, stage, tools=[tool], tool_choice="required")
    assert status == 200, body
    assert "(?=a)" not in stage.generates[0].grammar.text


async def test_what_takes_too_long_is_killed(folder: Path) -> None:
    checker = Checker(folder / "tokenizer.json", 129280, limit_s=0.0)
    try:
        with pytest.raises(InvalidRequest, match="takes more than"):
            await checker.check(Grammar("regex", "a+"))
        with pytest.raises(InvalidRequest, match="takes more than"):
            await checker.check(Grammar("regex", "a+"))  # known, no process is spent
        assert not checker._idle
        checker._limit_s = 20.0
        await checker.check(Grammar("regex", "b+"))
        with pytest.raises(InvalidRequest, match="larger than"):
            await checker.check(Grammar("regex", "a" * 300_000))
    finally:
        await checker.close()
