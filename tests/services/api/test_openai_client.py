"""The official openai client against the gateway: text, streams, tools, usage, errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

MODEL = "test-model"
HELLO: list[Any] = [{"role": "user", "content": "Say hello."}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather for a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]
BLOCK = (
    '\n\n<DSML|tool_calls>\n<DSML|invoke name="get_weather">\n'
    '<DSML|parameter name="city" string="true">Paris</DSML|parameter>\n'
    '<DSML|parameter name="days" string="false">3</DSML|parameter>\n'
    "</DSML|invoke>\n</DSML|tool_calls><｜end▁of▁sentence｜>"
)


@pytest.fixture
async def client(stage: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=stage.base + "/v1", api_key="any", max_retries=0, timeout=20
    ) as client:
        yield client


async def test_text(stage: Any, client: openai.AsyncOpenAI) -> None:
    stage.say("Hello there! 🤔<｜end▁of▁sentence｜>", cached=4)
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO)
    message = answer.choices[0].message
    assert message.content == "Hello there! 🤔" and message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens == len(stage.prompts[0])
    assert usage.completion_tokens == len(stage.script.ids[0])
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 4
    extra: Any = usage
    assert extra.prompt_cache_hit_tokens + extra.prompt_cache_miss_tokens == usage.prompt_tokens


async def test_stream_with_reasoning_and_usage(stage: Any, client: openai.AsyncOpenAI) -> None:
    stage.say("Let me 思考.</think>Hi 🤔 you<｜end▁of▁sentence｜>")
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"thinking": {"type": "enabled"}},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    deltas: list[Any] = [c.choices[0].delta for c in chunks if c.choices]
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "Let me 思考."
    assert "".join(d.content or "" for d in deltas) == "Hi 🤔 you"
    for d in deltas:  # never two kinds in one chunk
        kinds = bool(getattr(d, "reasoning_content", None)) + bool(d.content) + bool(d.tool_calls)
        assert kinds <= 1
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    last = chunks[-1]
    assert not last.choices and last.usage is not None
    assert all(c.usage is None for c in chunks[:-1])
    details = last.usage.completion_tokens_details
    assert details is not None and details.reasoning_tokens == 6


async def test_tool_call(stage: Any, client: openai.AsyncOpenAI) -> None:
    stage.say("Let me see." + BLOCK)
    first = stage.script.ids[0]
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    calls: Any = choice.message.tool_calls
    assert calls[0].function.name == "get_weather"
    assert json.loads(calls[0].function.arguments) == {"city": "Paris", "days": 3}
    # The second round: what came is sent back, with the result.
    stage.say("Sunny.<｜end▁of▁sentence｜>")
    messages = [
        *HELLO,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": calls[0].id, "content": "21 C"},
    ]
    answer = await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    assert answer.choices[0].message.content == "Sunny."
    sampled = stage.prompts[0] + first
    assert stage.prompts[1][: len(sampled)] == sampled  # a prefix for the cache


@pytest.mark.parametrize("group", [1, 3, 100])
async def test_streamed_tool_call(stage: Any, client: openai.AsyncOpenAI, group: int) -> None:
    stage.say("thinking</think>" + BLOCK, group=group, pause_s=0.01 if group == 1 else 0.0)
    async with client.chat.completions.stream(
        model=MODEL, messages=HELLO, tools=TOOLS, extra_body={"thinking": {"type": "enabled"}}
    ) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    calls: Any = final.choices[0].message.tool_calls
    assert [c.function.name for c in calls] == ["get_weather"]
    assert json.loads(calls[0].function.arguments) == {"city": "Paris", "days": 3}
    assert final.choices[0].finish_reason == "tool_calls"
    if group == 1:
        assert kinds.count("tool_calls.function.arguments.delta") >= 3


async def test_choices(stage: Any, client: openai.AsyncOpenAI) -> None:
    stage.say("one<｜end▁of▁sentence｜>", "two and more<｜end▁of▁sentence｜>", "three")
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO, n=3, seed=7)
    assert [c.message.content for c in answer.choices] == ["one", "two and more", "three"]
    assert [c.finish_reason for c in answer.choices] == ["stop", "stop", "length"]
    assert stage.generates[0].num_choices == 3 and stage.generates[0].sampling.seed == 7
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(map(len, stage.script.ids))
    assert answer.usage.prompt_tokens == len(stage.prompts[0])


async def test_stop_string_and_length(stage: Any, client: openai.AsyncOpenAI) -> None:
    stage.say("one two three four five six<｜end▁of▁sentence｜>")
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO, stop=["three"])
    assert answer.choices[0].message.content == "one two "
    assert answer.choices[0].finish_reason == "stop"
    extra: Any = answer.choices[0]
    assert extra.matched_stop == "three"
    assert answer.usage is not None and answer.usage.completion_tokens == 3
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=2)
    assert answer.choices[0].message.content == "one two"
    assert answer.choices[0].finish_reason == "length"


async def test_logprobs(stage: Any, client: openai.AsyncOpenAI) -> None:
    stage.say("a 🤔 b<｜end▁of▁sentence｜>")
    answer = await client.chat.completions.create(
        model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2
    )
    found: Any = answer.choices[0].logprobs
    raw = b"".join(bytes(item.bytes) for item in found.content[:-1])
    assert raw.decode() == "a 🤔 b"
    assert found.content[0].logprob == -0.5 and len(found.content[0].top_logprobs) == 2
    assert len(found.content) == len(stage.script.ids[0])


async def test_completions(stage: Any, client: openai.AsyncOpenAI) -> None:
    stage.say(" world<｜end▁of▁sentence｜>")
    answer = await client.completions.create(model=MODEL, prompt="Hello", echo=True)
    assert answer.choices[0].text == "Hello world" and answer.choices[0].finish_reason == "stop"
    assert stage.prompts[0] == stage.vocabulary.encode_text("Hello")
    assert stage.generates[0].sampling.max_tokens == 16
    answer = await client.completions.create(model=MODEL, prompt=["a", "b"], n=2, logprobs=1)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    first: Any = answer.choices[0].logprobs
    assert first.tokens[0] == " world" and first.text_offset[0] == 0
    stream = await client.completions.create(
        model=MODEL, prompt=[5, 6, 7], stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].text for c in chunks if c.choices) == " world"
    assert stage.prompts[-1] == [5, 6, 7]
    assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens == 3


async def test_models(client: openai.AsyncOpenAI) -> None:
    found = [m async for m in client.models.list()]
    assert [m.id for m in found] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-4")


async def test_errors_are_the_clients_exceptions(stage: Any, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="nope", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model=MODEL, messages=[])
    assert bad.value.param == "messages"
    with pytest.raises(openai.BadRequestError) as long:
        await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5000)
    assert long.value.code == "context_length_exceeded"
    assert "2048" in long.value.message and "5000" in long.value.message


async def test_failure_in_mid_stream_raises(stage: Any, client: openai.AsyncOpenAI) -> None:
    stage.say("a long answer with many tokens", fail_after=3, pause_s=0.03)
    stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    text = ""
    with pytest.raises(openai.APIError, match="the engine failed"):
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            assert chunk.choices[0].finish_reason is None
    assert text == "a long answer"


async def test_prefix_continuation(stage: Any) -> None:
    stage.say(" four.<｜end▁of▁sentence｜>")
    async with openai.AsyncOpenAI(base_url=stage.base + "/beta", api_key="x") as client:
        messages: list[Any] = [*HELLO, {"role": "assistant", "content": "It is", "prefix": True}]
        answer = await client.chat.completions.create(model=MODEL, messages=messages)
    assert answer.choices[0].message.content == " four."
    assert stage.prompts[0][-2:] == stage.vocabulary.encode_text("It is")
