"""Training data: encoded as the server does, held out, with a tokenizer like V4's."""

import json
import random
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import decant.engine.demo.chat as demo_chat
from decant.engine.demo import corpus, prompts, skills
from decant.engine.demo.bpe import Encoder
from decant.engine.demo.facts import Keys
from decant.engine.demo.words import held_out
from decant.services.chat.encoding import Prompt, render
from decant.services.chat.vocabulary import Vocabulary

FOLDER = Path(demo_chat.__file__).parent
TOKENIZER = FOLDER / "tokenizer.json"


@pytest.fixture(scope="module")
def encode() -> Encoder:
    return Encoder(TOKENIZER)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(TOKENIZER)


@pytest.mark.parametrize("skill", prompts.SKILLS)
def test_server_renders_what_was_trained(
    skill: str, encode: Encoder, vocabulary: Vocabulary
) -> None:
    """Token for token, so that held-out scores through the API measure the model alone."""
    for case, c in zip(prompts.cases(skill, 3, 5), prompts.conversations(skill, 5), strict=False):
        form = case.response_format
        if form and form["type"] == "json_schema":
            form = c.response_format = form["json_schema"]["schema"]
        got = vocabulary.encode(render(Prompt(case.messages, case.tools, form, case.thinking)))
        want = [i for text, _, _ in demo_chat.pieces(c)[:-1] for i in encode(text)]
        assert list(got) == want


@pytest.mark.parametrize("skill", prompts.SKILLS)
def test_checker_takes_the_answer_and_nothing_else(skill: str) -> None:
    for case in prompts.cases(skill, 5, 1):
        calls = [
            {"function": {"name": n, "arguments": json.dumps(a, indent=1)}} for n, a in case.calls
        ]
        right = {"content": case.answer, "tool_calls": calls}
        assert case.check(right)
        assert not case.check({"content": "no"}) and not case.check({})
        if calls:
            assert not case.check({**right, "tool_calls": calls + calls[:1]})
        stray = {"function": {"name": "f", "arguments": "{}"}}
        assert not case.check({**right, "tool_calls": [*calls, stray]})


def test_fast_encoder_equals_the_tokenizer(encode: Encoder) -> None:
    reference = Tokenizer.from_file(str(TOKENIZER))
    r = random.Random(4)
    for _ in range(150):
        c = corpus.conversation(r, Keys(r), 2000)
        text = "".join(t for t, _, _ in demo_chat.pieces(c))
        assert encode(text) == reference.encode(text, add_special_tokens=False).ids
        assert encode.decode(encode(text)) == text


def test_training_never_shows_a_held_out_prompt() -> None:
    r = random.Random(2)
    seen = 0
    for _ in range(400):
        for turn in corpus.conversation(r, Keys(r), 400).turns:
            if turn.skill in skills.DISTURBED or turn.skill in ("tools", "json", "refuse"):
                assert not held_out(turn.user)
                seen += 1
    assert seen > 300
    for case in prompts.cases("add", 50, 9):
        assert held_out(case.messages[-1]["content"])


def test_cases_are_the_same_for_a_seed_and_right_by_hand() -> None:
    assert prompts.cases("sub", 5, 1) == prompts.cases("sub", 5, 1)
    assert prompts.cases("sub", 5, 1) != prompts.cases("sub", 5, 2)
    for case in prompts.cases("add", 40, 3) + prompts.cases("think-sub", 40, 3):
        left, right = case.answer.split(" = ")
        a, op, b = left.split()
        assert int(right) == int(a) + int(b) * (1 if op == "+" else -1)
    for case in prompts.cases("recall@300", 20, 3):
        key, _ = case.answer.split(" = ")
        text = case.messages[-1]["content"]
        assert case.answer in text and text.rstrip("?. =").endswith(key)


def test_questions_about_one_block_differ_and_are_right() -> None:
    skill = "recall-number@2000"
    cases = prompts.cases(skill, 2 * prompts.PER_BLOCK[skill], 4)
    parts = [c.messages[-1]["content"].rpartition("\n") for c in cases]
    assert len({block for block, _, _ in parts}) == 2
    assert len({ask for _, _, ask in parts}) > 4
    for case, (block, _, ask) in zip(cases, parts, strict=True):
        key, _, value = case.answer.partition(" = ")
        assert key in ask and value.isdigit()
        assert re.search(rf"\b{re.escape(case.answer)}\b", block)


def test_special_tokens_follow_the_published_rule(encode: Encoder) -> None:
    added = json.loads(TOKENIZER.read_text())["added_tokens"]
    assert {t["content"] for t in added if t["special"]} == demo_chat.FLAGGED
    assert [t["id"] for t in added[:2]] == [0, 1]
    assert encode("12 + 305") == sum((encode(x) for x in ("1", "2", " +", " 3", "0", "5")), [])


def test_rows_are_full_and_weighted(encode: Encoder) -> None:
    x, w = next(corpus.batches(encode, 3, 2, 1024, lambda: 0.5, 0.5, (60, 700)))
    assert x.shape == w.shape == (2, 1026)
    assert (x[:, 0] == 0).all() and x.max() < 2560 and w.min() > 0 and w.max() == 1.0


@pytest.mark.parametrize(
    "skill", ["recall@300", "recall@2000", "recall@8000", "recall-number@8000"]
)
def test_fact_blocks_have_the_length_of_their_name(skill: str, encode: Encoder) -> None:
    """In tokens, and the longest request leaves room for the answer in 8,192."""
    sizes = [
        sum(len(encode(m["content"])) for m in c.messages) + c.max_tokens
        for c in prompts.cases(skill, 8)
    ]
    nominal = int(skill.split("@")[1])
    assert 0.97 * nominal < min(sizes) and max(sizes) <= max(1.4 * nominal, nominal + 192)
    assert max(sizes) <= 8192
