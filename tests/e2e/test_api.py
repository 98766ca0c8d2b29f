"""The official clients against the real set: what a user of the demo gets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from real_set import RealSet

pytestmark = pytest.mark.e2e

WEATHER = {
    "name": "get_weather",
    "description": "Weather for a city.",
    "parameters": {
        "type": "object",
        "properties": {
            # A bound, since a tiny model may ramble in a string until the token limit.
            "city": {"type": "string", "maxLength": 40},
            "days": {"type": "integer", "maximum": 99},
        },
        "required": ["city"],
    },
}
TOOLS: list[Any] = [{"type": "function", "function": WEATHER}]
THINK = {"thinking": {"type": "enabled"}}


@pytest.fixture
def client(real_set: RealSet) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=real_set.url + "/v1", api_key="any", timeout=120, max_retries=0
    ) as client:
        yield client


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_streamed_and_whole_answers_are_equal(real_set: RealSet, client: openai.OpenAI) -> None:
    for more in ({}, THINK):
        ask: Any = {
            "model": real_set.model,
            "messages": user("What is 12 + 30?"),
            "seed": 5,
            "max_tokens": 80,
            "extra_body": more,
        }
        whole = client.chat.completions.create(**ask)
        content = reasoning = ""
        usage: Any = None
        for chunk in client.chat.completions.create(
            **ask, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage or usage
            if chunk.choices:
                delta: Any = chunk.choices[0].delta
                content += delta.content or ""
                reasoning += getattr(delta, "reasoning_content", None) or ""
        message: Any = whole.choices[0].message
        assert content == message.content and "｜" not in content
        assert reasoning == (getattr(message, "reasoning_content", None) or "")
        assert whole.usage is not None
        assert usage.completion_tokens == whole.usage.completion_tokens


def test_choices_differ_and_a_seed_repeats_them(real_set: RealSet, client: openai.OpenAI) -> None:
    ask: Any = {"model": real_set.model, "messages": user("Tell me a story."), "n": 3, "seed": 11}
    first = client.chat.completions.create(**ask, max_tokens=24)
    second = client.chat.completions.create(**ask, max_tokens=24)
    texts = [c.message.content for c in first.choices]
    assert texts == [c.message.content for c in second.choices]
    assert len(set(texts)) > 1


def test_stop_strings_and_logprobs(real_set: RealSet, client: openai.OpenAI) -> None:
    ask: Any = {"model": real_set.model, "messages": user("What is 12 + 30?"), "temperature": 0}
    whole = client.chat.completions.create(**ask, logprobs=True, top_logprobs=3)
    text = whole.choices[0].message.content or ""
    found: Any = whole.choices[0].logprobs
    assert b"".join(bytes(i.bytes) for i in found.content).decode().startswith(text)
    for item in found.content:
        assert item.logprob <= 0 and item.top_logprobs[0].logprob >= item.logprob - 1e-4
    stop = text[3:6]
    cut = client.chat.completions.create(**ask, stop=[stop])
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("thinking", [False, True])
def test_forced_calls_are_always_valid(
    thinking: bool, real_set: RealSet, client: openai.OpenAI
) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    for i, choice in enumerate(["required", named] * 3):
        answer = client.chat.completions.create(
            model=real_set.model,
            messages=user("Hello!" if i % 2 else "Weather in Rome?"),
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            seed=i,
            max_tokens=300,
            extra_body=THINK if thinking else {},
        )
        assert answer.choices[0].finish_reason == "tool_calls"
        calls: Any = answer.choices[0].message.tool_calls
        arguments = json.loads(calls[0].function.arguments)
        assert isinstance(arguments["city"], str) and isinstance(arguments.get("days", 1), int)
        assert set(arguments) <= {"city", "days"}


def test_a_tool_turn_and_its_answer(real_set: RealSet, client: openai.OpenAI) -> None:
    ask: Any = {"model": real_set.model, "tools": TOOLS, "temperature": 0, "max_tokens": 120}
    messages = user("Weather in Paris for 3 days?")
    first = client.chat.completions.create(messages=messages, **ask)
    message = first.choices[0].message
    calls: Any = message.tool_calls
    assert calls and json.loads(calls[0].function.arguments)["city"] == "Paris"
    messages += [
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": calls[0].id, "content": '{"temp_c": 21}'},
    ]
    second = client.chat.completions.create(messages=messages, **ask)
    assert second.choices[0].message.content
    usage = second.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens_details.cached_tokens or 0) <= usage.prompt_tokens


@pytest.mark.parametrize("thinking", [False, True])
def test_json_schema_holds(thinking: bool, real_set: RealSet, client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["cat", "dog"]}, "ok": {"type": "boolean"}},
        "required": ["kind", "ok"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=real_set.model,
        messages=user("Which animal?"),
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "animal", "schema": schema, "strict": True},
        },
        n=4,
        max_tokens=200,
        extra_body=THINK if thinking else {},
    )
    for choice in answer.choices:
        value = json.loads(choice.message.content or "")
        assert value["kind"] in ("cat", "dog") and isinstance(value["ok"], bool)
        assert choice.finish_reason == "stop"


def test_completions_and_responses(real_set: RealSet, client: openai.OpenAI) -> None:
    text = client.completions.create(model=real_set.model, prompt="One two", max_tokens=5, seed=1)
    assert text.usage is not None and text.usage.completion_tokens <= 5
    answer = client.responses.create(model=real_set.model, input="What is 2 + 5?", temperature=0)
    assert answer.status == "completed" and answer.output_text


def test_messages(real_set: RealSet) -> None:
    with anthropic.Anthropic(base_url=real_set.url, api_key="any", max_retries=0) as client:
        with client.messages.stream(
            model=real_set.model,
            max_tokens=200,
            messages=user("Weather in Paris for 3 days?"),
            extra_body={"temperature": 0},
            tools=[
                {
                    "name": "get_weather",
                    "description": "Weather for a city.",
                    "input_schema": WEATHER["parameters"],  # type: ignore[typeddict-item]
                }
            ],
        ) as stream:
            final = stream.get_final_message()
        call: Any = final.content[-1]
        assert final.stop_reason == "tool_use" and call.input["city"] == "Paris"
