"""The Responses API with the official openai client: text, reasoning, tools, streams, errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

MODEL = "test-model"
EOS = "<｜end▁of▁sentence｜>"
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "Weather for a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": False,
    }
]
BLOCK = (
    '\n\n<DSML|tool_calls>\n<DSML|invoke name="get_weather">\n'
    '<DSML|parameter name="city" string="true">Paris</DSML|parameter>\n</DSML|invoke>\n'
    f"</DSML|tool_calls>{EOS}"
)


@pytest.fixture
async def client(stage: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=stage.base + "/v1", api_key="any", max_retries=0, timeout=20
    ) as client:
        yield client


async def test_text(stage: Any, client: openai.AsyncOpenAI) -> None:
    stage.say("Hello!" + EOS, cached=3)
    answer = await client.responses.create(
        model=MODEL, instructions="Be brief.", input="Hi", max_output_tokens=50
    )
    assert answer.output_text == "Hello!" and answer.status == "completed"
    assert answer.usage is not None
    assert answer.usage.input_tokens == len(stage.prompts[0])
    assert answer.usage.input_tokens_details.cached_tokens == 3
    assert stage.vocabulary.decode(stage.prompts[0]).startswith("<｜begin▁of▁sentence｜>Be brief.")


async def test_incomplete(stage: Any, client: openai.AsyncOpenAI) -> None:
    stage.say("one two three" + EOS)
    answer = await client.responses.create(model=MODEL, input="Hi", max_output_tokens=2)
    assert answer.status == "incomplete" and answer.output_text == "one two"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in answer.output] == ["incomplete"]  # type: ignore[union-attr]
    stage.say("hm</think>one two three" + EOS)
    more: dict[str, Any] = {"max_output_tokens": 4, "reasoning": {"effort": "high"}}
    stream = await client.responses.create(model=MODEL, input="Hi", stream=True, **more)
    events: list[Any] = [event async for event in stream]
    ends = [e.item.status for e in events if e.type == "response.output_item.done"]
    assert ends == ["completed", "incomplete"] and events[-1].type == "response.incomplete"
    assert [item.status for item in events[-1].response.output] == ends


async def test_stream(stage: Any, client: openai.AsyncOpenAI) -> None:
    stage.say("Think 思.</think>Looking 🤔." + BLOCK)
    async with client.responses.stream(
        model=MODEL, input="Weather?", tools=TOOLS, reasoning={"effort": "high"}
    ) as stream:
        events: list[Any] = [event async for event in stream]
        final = await stream.get_final_response()
    kinds = [e.type for e in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    texts: dict[str, str] = {}
    for e in events:
        if e.type.endswith(".delta"):
            texts[e.type] = texts.get(e.type, "") + e.delta
    assert texts["response.reasoning_text.delta"] == "Think 思."
    assert texts["response.output_text.delta"] == "Looking 🤔."
    arguments = texts["response.function_call_arguments.delta"]
    assert json.loads(arguments) == {"city": "Paris"}
    assert (
        kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
    )
    parts = kinds.count("response.content_part.added"), kinds.count("response.content_part.done")
    assert parts == (2, 2)


async def test_a_tool_turn_goes_on(stage: Any, client: openai.AsyncOpenAI) -> None:
    stage.say("Hm.</think>Let me look." + BLOCK)
    more: Any = {"model": MODEL, "tools": TOOLS, "reasoning": {"effort": "high"}}
    first = await client.responses.create(input=[{"role": "user", "content": "W?"}], **more)
    sampled = stage.script.ids[0]
    call: Any = first.output[-1]
    stage.say("Rain.</think>It rains." + EOS)
    items: list[Any] = [
        {"role": "user", "content": "W?"},
        *[item.model_dump(exclude_none=True) for item in first.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    answer = await client.responses.create(input=items, **more)
    assert answer.output_text == "It rains."
    whole = stage.prompts[0] + sampled
    assert stage.prompts[1][: len(whole)] == whole


async def test_errors(stage: Any, client: openai.AsyncOpenAI) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": []}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"truncation": "x"}, "truncation"),
    ]
    for more, param in bad:
        with pytest.raises(openai.BadRequestError) as error:
            await client.responses.create(**{"model": MODEL, "input": "x", **more})
        assert str(error.value.param).startswith(param), more
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_1")
    stage.say("one two three four" + EOS, fail_after=2, pause_s=0.03)
    stream = await client.responses.create(model=MODEL, input="x", stream=True)
    events: list[Any] = [event async for event in stream]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "the engine failed"


async def test_tokenize(stage: Any, client: openai.AsyncOpenAI) -> None:
    found: Any = await client.post(
        "/tokenize", body={"prompt": "a 🤔 b", "return_token_strs": True}, cast_to=object
    )
    assert found["tokens"] == stage.vocabulary.encode_text("a 🤔 b")
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    back: Any = await client.post("/detokenize", body={"tokens": found["tokens"]}, cast_to=object)
    assert back["prompt"] == "a 🤔 b"
    messages = [{"role": "user", "content": "hi"}]
    found = await client.post("/tokenize", body={"messages": messages}, cast_to=object)
    stage.say("x" + EOS)
    await client.responses.create(model=MODEL, input="hi")
    assert found["tokens"] == stage.prompts[0]
    for body in ({}, {"prompt": "a", "messages": messages}):
        with pytest.raises(openai.BadRequestError):
            await client.post("/tokenize", body=body, cast_to=object)
    for tokens in (["a"], [-1], [1 << 40], None):
        with pytest.raises(openai.BadRequestError):
            await client.post("/detokenize", body={"tokens": tokens}, cast_to=object)
