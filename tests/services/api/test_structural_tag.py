"""Structural tags: what the grammar allows, in both spellings, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from decant.protocol.errors import InvalidRequest
from decant.protocol.messages import Grammar
from decant.services.api import structural_tag
from decant.services.chat.vocabulary import Vocabulary
from decant.services.grammar import Compiler
from decant.services.model_folder import SHIPPED

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CALLS = {
    "structures": [
        {"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "integer"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


def tag(begin: str, end: str, **content: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


QUOTE = tag("<t>", "</t>", type="any_text")
WORD = tag("[", "]", type="regex", pattern="[a-z]+")
ONCE = {
    "type": "triggered_tags", "triggers": ["<t>"], "tags": [QUOTE], "at_least_one": True,
    "stop_after_first": True,
}  # fmt: skip
RATIO = {
    "type": "sequence",
    "elements": [
        {"type": "const_string", "value": "Answer: "},
        {
            "type": "or",
            "elements": [
                {"type": "regex", "pattern": "[0-9]+/[0-9]"},
                {"type": "json_schema", "json_schema": SCHEMA},
            ],
        },
    ],
}
LIST = {"type": "tags_with_separator", "separator": ",", "tags": [WORD], "at_least_one": True}
QUOTED = {"type": "sequence", "elements": [QUOTE, {"type": "any_text"}]}
EVEN_NONE = {**LIST, "at_least_one": False, "stop_after_first": True}

CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        CALLS,
        ["hello", 'hello <f=a>{"a": 1}</f> bye', '<f=b>12</f><f=a>{"a": 3}</f>', "a <f", ""],
        ["a <f=c>1</f>", "a <f=a>1</f>", "a <f=", "x <f=b>1</f> <f=zz"],
    ),
    (ONCE, ["hi <t>abc</t>", "<t>a<b</t>"], ["hi", "hi <t>abc</t> more", "<t>x"]),
    (RATIO, ["Answer: 12/3", 'Answer: {"a": 1}'], ["Answer: x", "12/3"]),
    (LIST, ["[a]", "[a],[bc]"], ["", "[a][b]", "[a],", "[1]"]),
    (EVEN_NONE, ["", "[a]"], ["[a],[b]"]),
    (QUOTED, ["<t>a</t>", "<t>.*</t> then </t> more"], ["a", "<t>"]),
]


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    vocabulary = Vocabulary(SHIPPED / "tokenizer.json")
    return Compiler(vocabulary, vocabulary.size)


def accepts(compiler: Compiler, grammar: str, text: str) -> bool:
    matcher = compiler.matcher(Grammar("lark", grammar))
    words = Vocabulary(SHIPPED / "tokenizer.json").encode_text(text)
    return all(matcher.consume_token(i) for i in words) and bool(matcher.is_accepting())


@pytest.mark.parametrize("case", CASES, ids=lambda c: str(c[0].get("type", "structures")))
def test_what_is_allowed(
    case: tuple[dict[str, Any], list[str], list[str]], compiler: Compiler
) -> None:
    given, good, bad = case
    grammar = structural_tag.lark(given if given is CALLS else {"format": given}, "x")
    for text in good:
        assert accepts(compiler, grammar, text), text
    for text in bad:
        assert not accepts(compiler, grammar, text), text


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({}, "x.structures"),
        ("{", None),
        ([], "x"),
        ({**CALLS, "format": ONCE}, "x.structures"),
        ({**CALLS, "triggers": ["<g"]}, "x.triggers"),
        ({**CALLS, "triggers": ["<f", "<f="]}, "x.triggers"),
        ({**CALLS, "triggers": []}, "x.triggers"),
        ({**CALLS, "structures": [{"begin": "<f=", "schema": 3}]}, "x.structures[0].schema"),
        ({"format": {"type": "sequence", "elements": []}}, "x.format.elements"),
        ({"format": {"type": "const_string"}}, "x.format.value"),
        ({"format": {"type": "qwen_xml_parameter"}}, "x.format.type"),
        ({"format": {**ONCE, "tags": [tag("", "b", type="any_text")]}}, "x.format.tags[0].begin"),
        ({"format": tag("a", "", type="any_text")}, "x.format.end"),
        (
            {"format": {**QUOTED, "elements": [{"type": "any_text"}, QUOTE]}},
            "x.format.elements",
        ),
    ],
)
def test_what_is_refused(given: Any, where: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        structural_tag.lark(given, "x")
    assert caught.value.param == where


def test_depth_is_bounded() -> None:
    deep: dict[str, Any] = {"type": "any_text"}
    for _ in range(40):
        deep = {"type": "or", "elements": [deep]}
    with pytest.raises(InvalidRequest, match="nested deeper"):
        structural_tag.lark({"format": deep}, "x")
