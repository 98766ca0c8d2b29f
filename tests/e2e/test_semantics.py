"""What the sampling fields mean, against the real set: each whole and streamed.

Completions over token ids or a short text, so that the answers are long enough to show an effect;
speculation is on throughout.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from real_set import RealSet

pytestmark = pytest.mark.e2e

PROMPT = "The quick cat sat on the"
Ask = Callable[..., list[dict[str, Any]]]


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def ask(request: pytest.FixtureRequest, real_set: RealSet) -> Ask:
    """``ask(field=...)``: the choices of a completion (chat with ``messages``), put together
    alike whether streamed or not: text, reasoning, finish_reason, matched_stop, logprobs."""

    def whole(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        answer = real_set.api.post(path, body)
        found = []
        for choice in answer["choices"]:
            message = choice.get("message", {})
            found.append(
                {
                    "text": choice.get("text", message.get("content")),
                    "reasoning": message.get("reasoning_content", ""),
                    "finish_reason": choice["finish_reason"],
                    "matched_stop": choice.get("matched_stop"),
                    "logprobs": choice["logprobs"],
                    "usage": answer["usage"],
                }
            )
        return found

    def streamed(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        data = json.dumps(body).encode()
        head = {"Content-Type": "application/json"}
        call = urllib.request.Request(real_set.url + path, data, head)
        found: dict[int, dict[str, Any]] = {}
        lines = urllib.request.urlopen(call, timeout=120).read().decode().splitlines()
        events = [line[6:] for line in lines if line.startswith("data: ")]
        assert events.pop() == "[DONE]"
        for event in map(json.loads, events):
            for choice in event["choices"]:
                empty = {"text": "", "reasoning": "", "finish_reason": None, "logprobs": None}
                into = found.setdefault(choice["index"], {**empty, "matched_stop": None})
                delta = choice.get("delta", {})
                into["text"] += choice.get("text", delta.get("content") or "")
                into["reasoning"] += delta.get("reasoning_content") or ""
                for name in ("finish_reason", "matched_stop"):
                    into[name] = choice.get(name) or into[name]
                for name, values in (choice["logprobs"] or {}).items():
                    into["logprobs"] = into["logprobs"] or {}
                    into["logprobs"][name] = [*into["logprobs"].get(name, ()), *(values or ())]
            for choice in found.values():
                choice["usage"] = event["usage"]
        return [found[i] for i in sorted(found)]

    def go(path: str = "/v1/completions", **fields: Any) -> list[dict[str, Any]]:
        if "messages" in fields:
            path = "/v1/chat/completions"
        else:
            fields = {"prompt": PROMPT, **fields}
        body = {"model": real_set.model, "seed": 11, "max_tokens": 24, **fields}
        return (streamed if request.param else whole)(path, body)

    return go


def test_stop_strings(ask: Ask) -> None:
    full = ask(temperature=0, ignore_eos=True)[0]
    text = full["text"]
    stop = text[7:10]
    cut = ask(temperature=0, ignore_eos=True, stop=[stop, "never seen"])[0]
    assert cut["text"] == text[: text.index(stop)]
    assert (cut["finish_reason"], cut["matched_stop"]) == ("stop", stop)
    shown = ask(temperature=0, ignore_eos=True, stop=stop, include_stop_str_in_output=True)[0]
    assert shown["text"] == text[: text.index(stop) + len(stop)]
    assert full["finish_reason"] == "length" and full["matched_stop"] is None


def test_stop_strings_do_not_match_in_reasoning(ask: Ask) -> None:
    fields = {
        "messages": [{"role": "user", "content": "What is 12 + 30?"}],
        "thinking": {"type": "enabled"},
        "temperature": 0,
        "max_tokens": 100,
    }
    whole = ask(**fields)[0]
    assert whole["text"] and whole["finish_reason"] == "stop"
    word = whole["reasoning"].split()[0]
    again = ask(**fields, stop=[word])[0]
    assert again["reasoning"] == whole["reasoning"] and word in again["reasoning"]


def test_stop_token_ids(ask: Ask, real_set: RealSet) -> None:
    full = ask(temperature=0, ignore_eos=True, logprobs=0)[0]
    tokens = full["logprobs"]["tokens"]
    words = real_set.api.post("/v1/tokenize", {"model": real_set.model, "prompt": full["text"]})
    stop = words["tokens"][5]
    cut = ask(temperature=0, ignore_eos=True, stop_token_ids=[stop])[0]
    assert cut["finish_reason"] == "stop" and cut["matched_stop"] == str(stop)
    assert full["text"].startswith(cut["text"]) and len(cut["text"]) < len("".join(tokens))


def test_logprobs_are_the_models_with_speculation(ask: Ask, real_set: RealSet) -> None:
    """The same tokens as a prompt have the same logprobs: bit for bit, accepted drafts too."""
    for temperature in (0, 1.0):
        found = ask(temperature=temperature, ignore_eos=True, logprobs=3, max_tokens=16)[0]
        given = found["logprobs"]
        assert len(given["tokens"]) == 16 and "".join(given["tokens"]) == found["text"]
        assert given["text_offset"][:2] == [0, len(given["tokens"][0])]
        words = {"model": real_set.model, "prompt": PROMPT}
        ids = real_set.api.post("/v1/tokenize", words)["tokens"]
        more = {"model": real_set.model, "prompt": found["text"]}
        both = ids + real_set.api.post("/v1/tokenize", more)["tokens"]
        scored = ask(prompt=both, echo=True, logprobs=3, max_tokens=0)[0]
        assert scored["text"] == PROMPT + found["text"]
        assert scored["usage"]["completion_tokens"] == 0
        lists = scored["logprobs"]
        assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
        last = len(ids) - 1
        assert lists["text_offset"][last] == len(PROMPT) - len(lists["tokens"][last])
        if lists["tokens"][len(ids) :] == given["tokens"]:  # the text has one spelling
            wanted = lists["token_logprobs"][len(ids) :]
            assert given["token_logprobs"] == pytest.approx(wanted, abs=1e-6)
            assert [list(x) for x in given["top_logprobs"]] == [
                list(x) for x in lists["top_logprobs"][len(ids) :]
            ]


def test_echo_with_logprobs_and_an_answer(ask: Ask) -> None:
    plain = ask(temperature=0, ignore_eos=True, logprobs=2, max_tokens=6)[0]
    both = ask(temperature=0, ignore_eos=True, logprobs=2, max_tokens=6, echo=True)[0]
    assert both["text"] == PROMPT + plain["text"]
    lists = both["logprobs"]
    assert "".join(lists["tokens"]) == both["text"]
    assert lists["token_logprobs"][-6:] == plain["logprobs"]["token_logprobs"]
    assert lists["text_offset"][-6] == len(PROMPT)
    assert both["usage"]["prompt_cache_hit_tokens"] == 0  # scores come from what is computed


def test_chat_logprobs(ask: Ask) -> None:
    fields = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}
    found = ask(**fields, logprobs=True, top_logprobs=2, thinking={"type": "enabled"},
                max_tokens=100)[0]  # fmt: skip
    items = found["logprobs"]
    assert b"".join(bytes(i["bytes"]) for i in items["reasoning"]).decode().startswith(
        found["reasoning"]
    )
    assert found["text"] in "".join(i["token"] for i in items["content"])
    for item in items["content"] + items["reasoning"]:
        top = item["top_logprobs"]
        assert len(top) == 2 and top[0]["logprob"] >= top[1]["logprob"]
        assert top[0]["token"] == item["token"]  # greedy


def test_n_and_seed(ask: Ask) -> None:
    fields = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 12}
    four = [c["text"] for c in ask(**fields, n=4)]
    assert len(set(four)) == 4
    assert [c["text"] for c in ask(**fields, n=4)] == four
    assert ask(**fields)[0]["text"] == four[0]  # a choice does not depend on the others
    assert ask(**{**fields, "seed": 12})[0]["text"] != four[0]
    count = ask(**fields, n=4)[0]["usage"]
    assert count["completion_tokens"] == 48 and count["prompt_tokens"] < 24  # counted once


def test_logit_bias(ask: Ask, real_set: RealSet) -> None:
    words = real_set.api.post("/v1/tokenize", {"model": real_set.model, "prompt": " cat"})
    token = words["tokens"][0]
    text = ask(temperature=0, logit_bias={str(token): 100}, max_tokens=5)[0]["text"]
    piece = real_set.api.post("/v1/detokenize", {"model": real_set.model, "tokens": [token] * 5})
    assert text == piece["prompt"]


def test_min_tokens_and_ignore_eos(ask: Ask) -> None:
    chat = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}
    short = ask(**chat)[0]
    assert short["finish_reason"] == "stop"
    num = short["usage"]["completion_tokens"]
    longer = ask(**chat, min_tokens=num + 6)[0]
    assert longer["usage"]["completion_tokens"] >= num + 6
    endless = ask(**chat, ignore_eos=True, max_tokens=num + 9)[0]
    assert endless["usage"]["completion_tokens"] == num + 9
    assert endless["finish_reason"] == "length"


@pytest.mark.parametrize(
    "penalty", ["frequency_penalty", "presence_penalty", "repetition_penalty"]
)
def test_penalties(penalty: str, ask: Ask, real_set: RealSet) -> None:
    """Text that repeats itself gets more different tokens, or fewer with the opposite sign."""

    def num_different(**fields: float) -> int:
        text = ask(temperature=0, ignore_eos=True, max_tokens=40, **fields)[0]["text"]
        words = real_set.api.post("/v1/tokenize", {"model": real_set.model, "prompt": text})
        return len(set(words["tokens"]))

    opposite = 0.9 if penalty == "repetition_penalty" else -2
    free = num_different()
    assert num_different(**{penalty: 2}) > free > num_different(**{penalty: opposite})


def test_prompt_logprobs(real_set: RealSet) -> None:
    """vLLM's field: token id to logprob, rank and text, for completions and chat."""
    body = {"model": real_set.model, "prompt": PROMPT, "max_tokens": 2, "prompt_logprobs": 2}
    choice = real_set.api.post("/v1/completions", body)["choices"][0]
    ids = real_set.api.post("/v1/tokenize", {"model": real_set.model, "prompt": PROMPT})["tokens"]
    found = choice["prompt_logprobs"]
    assert len(found) == len(ids) and found[0] is None
    for token, at in zip(ids[1:], found[1:], strict=True):
        own = at[str(token)]
        ranks = sorted(x["rank"] for x in at.values())
        assert ranks[:2] == [1, 2] and own["rank"] in ranks and own["logprob"] <= 0
    chat = {"model": real_set.model, "messages": [{"role": "user", "content": "Hi"}]}
    answer = real_set.api.post("/v1/chat/completions", {**chat, "prompt_logprobs": 0})
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
def test_a_schema_beside_the_other_fields(thinking: str, ask: Ask) -> None:
    """Several choices, penalties, a bias against the end, temperature, drafts, a stop string."""
    animals, colours = ["cat", "dog", "horse"], ["red", "green", "blue"]
    properties = {"kind": {"enum": animals}, "colour": {"enum": colours}}
    schema = {"type": "object", "properties": properties, "required": ["kind", "colour"]}
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Which animal?"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        "thinking": {"type": thinking},
        "temperature": 1.0,
        "n": 3,
        "max_tokens": 300,
    }
    if thinking == "disabled":  # a tiny model's reasoning would not survive these
        penalties = {"frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 1.5}
        fields |= {**penalties, "logit_bias": {"1": -100}}
    else:
        fields["temperature"] = 0.3
    for choice in ask(**fields):
        value = json.loads(choice["text"])
        assert value["kind"] in animals and value["colour"] in colours
        assert choice["finish_reason"] == "stop"
    for choice in ask(**fields, stop=[', "colour"']):
        value = json.loads(choice["text"] + "}")
        assert list(value) == ["kind"] and value["kind"] in animals
        assert choice["matched_stop"] == ', "colour"'


def test_a_stop_string_within_min_tokens_does_not_end(ask: Ask) -> None:
    full = ask(temperature=0, ignore_eos=True)[0]["text"]
    stop = full[:3]
    assert ask(temperature=0, ignore_eos=True, stop=stop)[0]["text"] == ""
    later = ask(temperature=0, ignore_eos=True, stop=stop, min_tokens=8)[0]["text"]
    assert later and full.startswith(later)
