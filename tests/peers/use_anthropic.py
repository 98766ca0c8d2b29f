"""anthropic against decant: text, stream, tools, structured output. Arguments: URL MODEL."""

import json
import sys

import anthropic

url, model = sys.argv[1:]
client = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0)
ask = {"model": model, "max_tokens": 120, "extra_body": {"temperature": 0}}
hello = [{"role": "user", "content": "Hello, who are you?"}]
answer = client.messages.create(messages=hello, **ask)
text = answer.content[0].text
assert text and answer.stop_reason == "end_turn" and answer.usage.output_tokens > 0
with client.messages.stream(messages=hello, **ask) as stream:
    streamed = "".join(stream.text_stream)
    final = stream.get_final_message()
assert streamed == text and final.stop_reason == "end_turn", (streamed, text)
count = client.messages.count_tokens(model=model, messages=hello)
assert count.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
tool = {
    "name": "get_weather",
    "description": "Weather for a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
    },
}
weather = [{"role": "user", "content": "Weather in Paris for 3 days?"}]
for choice in ({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "get_weather"}):
    answer = client.messages.create(messages=weather, tools=[tool], tool_choice=choice, **ask)
    call = next(block for block in answer.content if block.type == "tool_use")
    assert answer.stop_reason == "tool_use" and call.input["city"] == "Paris", answer
turn = [
    *weather,
    {"role": "assistant", "content": [block.model_dump() for block in answer.content]},
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": call.id, "content": '{"temp_c": 21}'},
        ],
    },
]
assert client.messages.create(messages=turn, tools=[tool], **ask).content
kinds = []
with client.messages.stream(messages=weather, tools=[tool], **ask) as stream:
    for event in stream:
        kinds.append(event.type)
    call = next(block for block in stream.get_final_message().content if block.type == "tool_use")
assert call.name == "get_weather" and kinds.count("content_block_start") == kinds.count(
    "content_block_stop"
)
schema = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"enum": [1, 2, 3]}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}
answer = client.messages.create(
    messages=[{"role": "user", "content": "Which animal?"}],
    output_config={"format": {"type": "json_schema", "schema": schema}},
    **ask,
)
assert json.loads(answer.content[0].text)["kind"] in ("cat", "dog"), answer
thought = client.messages.create(
    messages=hello, thinking={"type": "enabled", "budget_tokens": 1024}, **ask
)
assert thought.content[0].type == "thinking", thought
print("ok")
