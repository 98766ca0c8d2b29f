"""openai against decant: text, stream, tools, structured output. Arguments: URL MODEL."""

import json
import sys
from typing import Literal

import openai
from pydantic import BaseModel


class Animal(BaseModel):
    """An animal."""

    kind: Literal["cat", "dog"]
    age: Literal[1, 2, 3]


url, model = sys.argv[1:]
client = openai.OpenAI(base_url=url + "/v1", api_key="any", max_retries=0)
assert [m.id for m in client.models.list()] == [model]
ask = {"model": model, "temperature": 0, "max_tokens": 120}
hello = [{"role": "user", "content": "Hello, who are you?"}]
text = client.chat.completions.create(messages=hello, **ask).choices[0].message.content
assert text
chunks = client.chat.completions.create(
    messages=hello, stream=True, stream_options={"include_usage": True}, **ask
)
streamed, usage = "", None
for chunk in chunks:
    usage = chunk.usage or usage
    streamed += "".join(choice.delta.content or "" for choice in chunk.choices)
assert streamed == text and usage.completion_tokens > 0, (streamed, text)
tool = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather for a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
weather = [{"role": "user", "content": "Weather in Paris for 3 days?"}]
for choice in ("auto", "required", {"type": "function", "function": {"name": "get_weather"}}):
    answer = client.chat.completions.create(
        messages=weather, tools=[tool], tool_choice=choice, **ask
    )
    call = answer.choices[0].message.tool_calls[0]
    assert answer.choices[0].finish_reason == "tool_calls"
    assert json.loads(call.function.arguments)["city"] == "Paris", call
turn = [
    *weather,
    answer.choices[0].message.model_dump(exclude_none=True),
    {"role": "tool", "tool_call_id": call.id, "content": '{"temp_c": 21}'},
]
assert client.chat.completions.create(messages=turn, tools=[tool], **ask).choices[0].message
with client.chat.completions.stream(messages=weather, tools=[tool], **ask) as stream:
    done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
assert done[0].name == "get_weather", done
animal = client.chat.completions.parse(messages=hello, response_format=Animal, **ask)
assert isinstance(animal.choices[0].message.parsed, Animal)
assert client.completions.create(prompt="2 + 2", **ask).choices[0].text is not None
answer = client.responses.create(
    model=model, input="Hello, who are you?", temperature=0, max_output_tokens=120
)
assert answer.output_text == text, (answer.output_text, text)
parsed = client.responses.parse(model=model, input="Which animal?", text_format=Animal)
assert isinstance(parsed.output_parsed, Animal)
print("ok")
