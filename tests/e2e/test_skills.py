"""The demo's skills as oracle of the whole set: what it knows it must find at every prompt length,
streamed and whole, cut anywhere, and after a prefix hit."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from real_set import RealSet

import decant.engine.demo.chat as demo_chat
from decant.engine.demo import facts, prompts
from decant.engine.demo.bpe import Encoder
from decant.engine.demo.facts import Keys
from decant.engine.demo.words import sentence
from decant.protocol.messages import Output
from decant.services.chat.stream import ChoiceStream
from decant.services.chat.vocabulary import Vocabulary

pytestmark = pytest.mark.e2e

TOKENIZER = Path(demo_chat.__file__).parent / "tokenizer.json"
AROUND = range(1937, 1937 + 128)  # every T mod 4 and mod 128
EDGES = [t for t in AROUND if t % 128 in (0, 1, 2, 3, 63, 64, 124, 125, 126, 127)]
AT_ONCE = 8


class Haystack:
    """Prompts of an exact number of tokens: facts and filler, cut to length, then a question."""

    def __init__(self, seed: int) -> None:
        self.encode = Encoder(TOKENIZER)
        r = random.Random(seed)
        block, known = facts.fact_block(r, Keys(r), 1700, 0.3)
        # What pads is said after the facts and has no fact in it.
        filler = " ".join(sentence(r) for _ in range(60))
        self.head = self.encode(demo_chat.BOS + demo_chat.USER + block + "\n")
        self.filler = self.encode(filler)
        self.known = list(known.items())
        r.shuffle(self.known)

    def prompt(self, num_tokens: int) -> tuple[list[int], str]:
        """(ids, right answer); another needle for each length."""
        key, value = self.known[num_tokens % len(self.known)]
        tail = self.encode(f"\nWhat is {key}?{demo_chat.ASSISTANT}{demo_chat.END_THINK}")
        num_filler = num_tokens - len(self.head) - len(tail)
        assert 0 < num_filler <= len(self.filler)
        return self.head + self.filler[:num_filler] + tail, f"{key} = {value}"


def wrong_needles(real: RealSet, haystack: Haystack, lengths: Iterable[int]) -> list[str]:
    def ask(num_tokens: int) -> str:
        ids, wanted = haystack.prompt(num_tokens)
        body = {"model": real.model, "prompt": ids, "max_tokens": 24, "temperature": 0}
        done = real.api.post("/v1/completions", body)
        assert done["usage"]["prompt_tokens"] == num_tokens
        got = done["choices"][0]["text"]
        return "" if got == wanted else f"T = {num_tokens}: {got!r} instead of {wanted!r}"

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [text for text in pool.map(ask, lengths) if text]


def test_a_needle_at_the_edges_of_pages_and_entries(real_set: RealSet) -> None:
    haystack = Haystack(1)
    # The first one fills the prefix cache, so that the others prefill their own end only.
    assert wrong_needles(real_set, haystack, EDGES[:1]) == []
    assert wrong_needles(real_set, haystack, EDGES[1:]) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("is_cached", [True, False])
def test_a_needle_at_every_length_mod_128(
    is_cached: bool, start_set: Callable[..., RealSet]
) -> None:
    cache = str(is_cached).lower()
    real = start_set(f"prefill.prefix_cache={cache}", f"decode.prefix_cache={cache}")
    assert {t % 128 for t in AROUND} == set(range(128))
    assert wrong_needles(real, Haystack(2), AROUND) == []
    real.stop()


# ---- tool calls ----------------------------------------------------------------------------------


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = message.get("tool_calls") or []
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


@pytest.mark.parametrize(
    "skill, stride", [("tools", 5), pytest.param("tools-two", 1, marks=pytest.mark.slow)]
)
def test_a_tool_call_streamed_cut_and_whole(skill: str, stride: int, real_set: RealSet) -> None:
    """The stream's pieces give the whole message, and an answer that ends after any number of
    tokens holds a prefix of it and no marker."""
    case = min(prompts.cases(skill, 10, 4), key=lambda c: len(json.dumps(c.tools)))
    body = {**case.body(), "model": real_set.model}
    whole = real_set.api.post("/v1/chat/completions", body)
    assert case.check(whole["choices"][0]["message"]), whole
    names, texts = [n for n, _ in case.calls], ["" for _ in case.calls]
    with openai.OpenAI(base_url=real_set.url + "/v1", api_key="any", timeout=120) as client:
        extra = {"thinking": body.pop("thinking")}
        num_pieces = 0
        got: list[str] = []
        for chunk in client.chat.completions.create(**body, extra_body=extra, stream=True):
            for delta in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
                assert delta.function is not None
                got += [delta.function.name] if delta.function.name else []
                texts[delta.index] += delta.function.arguments or ""
                num_pieces += 1
    # A name, then arguments in more than one piece (a step brings up to three tokens).
    assert got == names and num_pieces >= 3 * len(names)
    assert [json.loads(t) for t in texts] == [a for _, a in case.calls]

    def cut(num: int) -> dict[str, Any]:
        done: dict[str, Any] = real_set.api.post(
            "/v1/chat/completions", {**body, **extra, "max_tokens": num}
        )
        return done

    num_tokens = whole["usage"]["completion_tokens"]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        lengths = range(1, num_tokens, stride)
        answers = list(pool.map(cut, lengths))
    for num, answer in zip(lengths, answers, strict=True):
        choice = answer["choices"][0]
        message = choice["message"]
        assert choice["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == num
        # Cut between "<" and the marker, the "<" may be text and is shown; more never is.
        assert (message["content"] or "").strip() in ("", "<")
        for i, call in enumerate(message.get("tool_calls") or []):
            assert call["function"]["name"] == names[i]
            assert texts[i].startswith(call["function"]["arguments"])


@pytest.mark.parametrize("skill", ["tools", "tools-new", "tools-two"])
def test_calls_of_the_demo_are_read_however_they_are_split(skill: str) -> None:
    """The very tokens that the demo writes, cut in two at every place, and each by itself."""
    vocabulary, encode = Vocabulary(TOKENIZER), Encoder(TOKENIZER)
    for case in prompts.cases(skill, 3, 6):
        ids = encode(demo_chat.call_block(case.calls) + demo_chat.EOS)
        functions = [t["function"] for t in case.tools]
        splits = [[i] for i in range(len(ids) + 1)] + [list(range(1, len(ids)))]
        for cuts in splits:
            stream = ChoiceStream(
                vocabulary,
                Output(tools=[f["name"] for f in functions], tool_schemas=json.dumps(functions)),
            )
            names: list[str] = []
            texts: dict[int, str] = {}
            content = ""
            bounds = [0, *cuts, len(ids)]
            for start, end in zip(bounds, bounds[1:], strict=False):
                is_last = end == len(ids)
                piece = stream.push(ids[start:end], "stop" if is_last else "", 1 if is_last else -1)
                content += piece.content
                for delta in piece.tools:
                    names += [delta.name] if delta.name else []
                    texts[delta.index] = texts.get(delta.index, "") + delta.arguments
                if piece.finish_reason:
                    break
            arguments = [json.loads(texts[i]) for i in sorted(texts)]
            assert list(zip(names, arguments, strict=True)) == case.calls, cuts
            assert not content.strip()


# ---- skills --------------------------------------------------------------------------------------


def test_skills_and_the_same_after_a_prefix_hit(real_set: RealSet) -> None:
    """One held-out prompt of each short skill, asked twice."""
    names = [s for s, (_, far) in prompts.SKILLS.items() if far <= 300]
    cases = [prompts.cases(name, 1, 8)[0] for name in names]

    def ask(case: prompts.Case) -> tuple[dict[str, Any], int]:
        done = real_set.api.post(
            "/v1/chat/completions", {**case.body(), "model": real_set.model, "seed": 1}
        )
        cached = done["usage"].get("prompt_tokens_details") or {}
        return done["choices"][0]["message"], cached.get("cached_tokens") or 0

    def plain(message: dict[str, Any]) -> list[Any]:
        return [message.get("reasoning_content"), message.get("content"), calls_of(message)]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        first = list(pool.map(ask, cases))
        second = list(pool.map(ask, cases))
    wrong = [c.skill for c, (message, _) in zip(cases, first, strict=True) if not c.check(message)]
    assert len(wrong) <= 1, wrong
    assert any(cached > 0 for _, cached in second)  # of those longer than a page
    assert [plain(m) for m, _ in first] == [plain(m) for m, _ in second]
