"""What people who come from other servers send, and what they may count on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from decant.services.api.chat import REFUSED
from decant.services.chat.markers import ASSISTANT, BOS, END_THINK, THINK

MODEL = "test-model"
PATH = "/v1/chat/completions"
EOS = "<｜end▁of▁sentence｜>"
USER: list[Any] = [{"role": "user", "content": "hi"}]


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def post(
    http: aiohttp.ClientSession, stage: Any, path: str = PATH, **more: Any
) -> tuple[int, Any]:
    body = {"model": MODEL, **({"messages": USER} if path == PATH else {}), **more}
    async with http.post(stage.base + path, json=body) as response:
        if more.get("stream") and response.status == 200:
            lines = (await response.text()).splitlines()
            found = [x[6:] for x in lines if x.startswith("data: ")]
            assert found.pop() == "[DONE]"
            return 200, [json.loads(x) for x in found]
        return response.status, await response.json()


async def test_whole_numbers_may_have_a_point(stage: Any, http: aiohttp.ClientSession) -> None:
    """JSON knows one kind of number, and some clients write 16.0."""
    stage.say("x" + EOS)
    status, _ = await post(http, stage, max_tokens=16.0, seed=3.0, n=1.0, top_k=5.0)
    sampling = stage.generates[0].sampling
    assert (status, sampling.max_tokens, sampling.seed, sampling.top_k) == (200, 16, 3, 5)
    for bad in (16.5, 1e300):
        status, body = await post(http, stage, max_tokens=bad)
        assert status == 400 and body["error"]["param"] == "max_tokens"


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
async def test_what_would_change_the_answer_is_not_ignored(
    path: str, stage: Any, http: aiohttp.ClientSession
) -> None:
    stage.say("x" + EOS)
    prompt = {} if path == PATH else {"prompt": "hi"}
    for name in REFUSED:
        for value in (True, [5], {"a": 1}, 7):
            status, body = await post(http, stage, path, **prompt, **{name: value})
            assert status == 400 and body["error"]["param"] == name
            assert body["error"]["code"] == "unsupported_parameter"
    status, _ = await post(http, stage, path, **prompt, bad_words=[], use_beam_search=False)
    assert status == 200
    status, body = await post(http, stage, echo=True)
    assert status == 400 and body["error"]["param"] == "echo"


async def test_only_allowed_tools_are_called(stage: Any, http: aiohttp.ClientSession) -> None:
    """All tools stay in the prompt (and in its cache), the grammar knows the allowed ones."""
    stage.say("x" + EOS)
    tools = [tool("get_rain"), tool("get_snow")]
    await post(http, stage, tools=tools)
    names = [{"type": "function", "function": {"name": "get_snow"}}]
    for mode in ("auto", "required"):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": names}}
        status, body = await post(http, stage, tools=tools, tool_choice=choice)
        assert status == 200, body
        assert stage.prompts[-1] == stage.prompts[0]
        text = stage.generates[-1].grammar.text
        assert "get_snow" in text and "get_rain" not in text
        flat = {
            "type": "allowed_tools", "mode": mode,
            "tools": [{"type": "function", "name": "get_snow"}],
        }  # fmt: skip
        functions = [{"type": "function", **t["function"]} for t in tools]
        status, body = await post(
            http, stage, "/v1/responses", input="hi", tools=functions, tool_choice=flat
        )
        assert status == 200, body
        assert stage.generates[-1].grammar.text == text
        choice["allowed_tools"]["tools"] = [tool("get_hail")]  # type: ignore[index]
        status, body = await post(http, stage, tools=tools, tool_choice=choice)
        assert status == 400 and "get_hail" in body["error"]["message"]


@pytest.mark.parametrize("thinking", [False, True])
async def test_the_assistant_s_turn_begins(
    thinking: bool, stage: Any, http: aiohttp.ClientSession
) -> None:
    """Also where the last message is its own and not to be continued, or a system prompt."""
    stage.say(("so" + END_THINK if thinking else "") + "x" + EOS)
    ids = stage.vocabulary.ids
    begin = [ids[ASSISTANT], ids[THINK] if thinking else ids[END_THINK]]
    more: dict[str, Any] = {"thinking": {"type": "enabled" if thinking else "disabled"}}
    for messages in (
        USER,
        [*USER, {"role": "assistant", "content": "well"}],
        [{"role": "system", "content": "Say x."}],
    ):
        status, body = await post(http, stage, messages=messages, **more)
        assert status == 200 and body["choices"][0]["message"]["content"] == "x"
        assert stage.prompts[-1][-2:] == begin


async def test_reasoning_is_continued(stage: Any, http: aiohttp.ClientSession) -> None:
    stage.say(" cats." + END_THINK + "Cats." + EOS)
    messages = [*USER, {"role": "assistant", "content": "", "reasoning_content": "I like"}]
    more: dict[str, Any] = {"thinking": {"type": "enabled"}, "continue_final_message": True}
    status, body = await post(http, stage, messages=messages, **more)
    message = body["choices"][0]["message"]
    assert (status, message["reasoning_content"], message["content"]) == (200, " cats.", "Cats.")
    assert stage.prompts[0][-2:] == stage.vocabulary.encode_text("I like")


async def test_a_text_begins_with_its_token_where_asked(
    stage: Any, http: aiohttp.ClientSession
) -> None:
    stage.say("x" + EOS)
    plain = stage.vocabulary.encode_text("One two")
    begun = [stage.vocabulary.ids[BOS], *plain]
    cases: list[tuple[dict[str, Any], list[int]]] = [
        ({}, plain),
        ({"add_special_tokens": True}, begun),
    ]
    for more, wanted in cases:
        status, body = await post(http, stage, "/v1/completions", prompt="One two", **more)
        assert status == 200 and stage.prompts[-1] == wanted
        assert body["usage"]["prompt_tokens"] == len(wanted)
        status, body = await post(http, stage, "/v1/tokenize", prompt="One two", **more)
        assert status == 200 and body["tokens"] == wanted
    both: dict[str, Any] = {"prompt": ["One two", plain], "add_special_tokens": True, "echo": True}
    status, body = await post(http, stage, "/v1/completions", **both, max_tokens=0)
    assert [c["text"] for c in body["choices"]] == [BOS + "One two", "One two"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
async def test_a_stop_string_waits_for_min_tokens(
    path: str, stream: bool, stage: Any, http: aiohttp.ClientSession
) -> None:
    """As in vLLM: what stands within the first min_tokens tokens does not end the answer."""
    text = "one two three two four"
    ids = stage.vocabulary.encode_text(text)
    assert len(ids) == 5
    prompt = {} if path == PATH else {"prompt": "hi"}
    for min_tokens, wanted in ((0, "one "), (1, "one "), (2, "one two three "), (4, text)):
        stage.say(text + EOS)
        status, body = await post(
            http, stage, path, **prompt, stream=stream, stop=" two"[1:], min_tokens=min_tokens
        )
        assert status == 200
        choices = [e["choices"][0] for e in body] if stream else body["choices"]
        said = [c.get("text") or (c.get("delta") or c.get("message") or {}) for c in choices]
        joined = "".join(p if isinstance(p, str) else p.get("content") or "" for p in said)
        assert joined == wanted


@pytest.mark.parametrize("field", ["include_stop_str_in_output", "no_stop_trim"])
@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
async def test_a_stop_string_may_stay(
    path: str, field: str, stage: Any, http: aiohttp.ClientSession
) -> None:
    stage.say("one two three" + EOS)
    prompt = {} if path == PATH else {"prompt": "hi"}
    status, body = await post(http, stage, path, **prompt, stop="two", **{field: True})
    choice = body["choices"][0]
    assert status == 200 and choice["matched_stop"] == "two"
    assert (choice.get("text") or choice["message"]["content"]) == "one two"


async def test_streamed_choices_begin_and_end_each_by_itself(
    stage: Any, http: aiohttp.ClientSession
) -> None:
    stage.say("one two" + EOS, "three" + EOS)
    more: dict[str, Any] = {"n": 2, "stream": True, "stream_options": {"include_usage": True}}
    _, found = await post(http, stage, **more)
    last = found.pop()
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 5
    for index, text in enumerate(("one two", "three")):
        own = [e["choices"][0] for e in found if e["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in own) == text
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + ["stop"]
        assert own[-1]["delta"] == {}
