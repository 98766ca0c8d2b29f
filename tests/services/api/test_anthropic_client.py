"""The official anthropic client against /v1/messages: text, thinking, tools, streams, errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import anthropic
import pytest

MODEL = "test-model"
EOS = "<｜end▁of▁sentence｜>"
HELLO: list[Any] = [{"role": "user", "content": "Say hello."}]
TOOLS: list[Any] = [
    {
        "name": "get_weather",
        "description": "Weather for a city.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]
BLOCK = (
    '\n\n<DSML|tool_calls>\n<DSML|invoke name="get_weather">\n'
    '<DSML|parameter name="city" string="true">Paris</DSML|parameter>\n</DSML|invoke>\n%s'
    f"</DSML|tool_calls>{EOS}"
)
ONE = BLOCK % ""
TWO = BLOCK % '<DSML|invoke name="get_weather">\n</DSML|invoke>\n'


@pytest.fixture
async def client(stage: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=stage.base + "/anthropic", api_key="any", max_retries=0, timeout=20
    ) as client:
        yield client


async def test_text(stage: Any, client: anthropic.AsyncAnthropic) -> None:
    stage.say("Hello! 🤔" + EOS, cached=2)
    answer = await client.messages.create(
        model=MODEL, max_tokens=50, system="Be brief.", messages=HELLO
    )
    assert [b.type for b in answer.content] == ["text"]
    first: Any = answer.content[0]
    assert first.text == "Hello! 🤔" and answer.stop_reason == "end_turn"
    assert answer.usage.input_tokens == len(stage.prompts[0]) - 2
    assert answer.usage.cache_read_input_tokens == 2
    assert stage.prompts[0][-1] == 128822  # no thinking unasked


async def test_stream_has_whole_blocks_in_order(
    stage: Any, client: anthropic.AsyncAnthropic
) -> None:
    stage.say("Let me see.</think>Looking." + TWO)
    async with client.messages.stream(
        model=MODEL,
        max_tokens=500,
        messages=HELLO,
        tools=TOOLS,
        thinking={"type": "enabled", "budget_tokens": 1024},
    ) as stream:
        raw = [e.type async for e in stream if e.type.startswith(("message_", "content_block_"))]
        final = await stream.get_final_message()
    assert [b.type for b in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, first, second = list[Any](final.content)
    assert (thinking.thinking, text.text) == ("Let me see.", "Looking.")
    assert thinking.signature
    assert (first.name, first.input, second.input) == ("get_weather", {"city": "Paris"}, {})
    assert first.id != second.id and final.stop_reason == "tool_use"
    assert raw[0] == "message_start" and raw[-2:] == ["message_delta", "message_stop"]
    blocks = [t for t in raw if t in ("content_block_start", "content_block_stop")]
    assert blocks == ["content_block_start", "content_block_stop"] * 4


async def test_a_tool_turn_goes_on(stage: Any, client: anthropic.AsyncAnthropic) -> None:
    stage.say("Hm.</think>" + ONE)
    more: Any = {"model": MODEL, "max_tokens": 200, "tools": TOOLS}
    more["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    answer = await client.messages.create(messages=HELLO, **more)
    first = stage.script.ids[0]
    call: Any = answer.content[-1]
    stage.say("Rain.</think>It rains." + EOS)
    messages: list[Any] = [
        *HELLO,
        {"role": "assistant", "content": answer.content},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    "content": [{"type": "text", "text": "rain"}],
                },
                {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    answer = await client.messages.create(messages=messages, **more)
    whole = stage.prompts[0] + first
    assert stage.prompts[1][: len(whole)] == whole  # what was sampled is a prefix of the next turn
    assert "<tool_result>rain</tool_result>\n\nSo?" in stage.vocabulary.decode(stage.prompts[1])


async def test_stop_reasons(stage: Any, client: anthropic.AsyncAnthropic) -> None:
    stage.say("one two three four" + EOS)
    answer = await client.messages.create(
        model=MODEL, max_tokens=50, messages=HELLO, stop_sequences=["three"]
    )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "three")
    answer = await client.messages.create(model=MODEL, max_tokens=2, messages=HELLO)
    assert answer.stop_reason == "max_tokens"


async def test_prefill(stage: Any, client: anthropic.AsyncAnthropic) -> None:
    stage.say(" four." + EOS)
    messages: list[Any] = [*HELLO, {"role": "assistant", "content": "It is"}]
    await client.messages.create(model=MODEL, max_tokens=9, messages=messages)
    assert stage.prompts[0][-2:] == stage.vocabulary.encode_text("It is")


async def test_count_tokens(stage: Any, client: anthropic.AsyncAnthropic) -> None:
    found = await client.messages.count_tokens(model=MODEL, messages=HELLO, tools=TOOLS)
    stage.say("x" + EOS)
    await client.messages.create(model=MODEL, max_tokens=9, messages=HELLO, tools=TOOLS)
    assert found.input_tokens == len(stage.prompts[0])
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        extra = {"max_tokens": 0}
        await client.messages.count_tokens(model=MODEL, messages=HELLO, extra_body=extra)


async def test_errors(stage: Any, client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(model="nope", max_tokens=9, messages=HELLO)
    with pytest.raises(anthropic.BadRequestError) as error:
        bad: list[Any] = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
        await client.messages.create(model=MODEL, max_tokens=9, messages=bad)
    body: Any = error.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert "messages[0].content[0].type" in body["error"]["message"]
    stage.say("one two three four" + EOS, fail_after=2, pause_s=0.03)
    with pytest.raises(anthropic.APIStatusError, match="the engine failed"):
        async with client.messages.stream(model=MODEL, max_tokens=99, messages=HELLO) as stream:
            async for _ in stream:
                pass


async def test_raw_bodies(stage: Any) -> None:
    stage.say("x" + EOS)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"system": 5}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "input"),
    ]
    async with aiohttp.ClientSession() as http:
        for more, name in bad:
            body = {"model": MODEL, "max_tokens": 9, "messages": HELLO, **more}
            async with http.post(stage.base + "/v1/messages", json=body) as response:
                answer = json.loads(await response.read())
                assert response.status == 400, more
                assert name in answer["error"]["message"] and answer["type"] == "error"
    assert not stage.generates
