"""langchain-openai against decant: text, stream, tools, structured output. Arguments: URL MODEL."""

import sys
from typing import Literal

from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Animal(BaseModel):
    """An animal."""

    kind: Literal["cat", "dog"]
    age: Literal[1, 2, 3]


def get_weather(city: Literal["Paris", "Rome"], days: Literal[1, 2, 3]) -> str:
    """Weather for a city."""
    return f"{city} {days}"


url, model = sys.argv[1:]
chat = ChatOpenAI(
    model=model, base_url=url + "/v1", api_key="any", temperature=0, max_completion_tokens=120
)
text = chat.invoke("Hello, who are you?")
assert text.content and text.usage_metadata["output_tokens"] > 0
streamed = "".join(str(chunk.content) for chunk in chat.stream("Hello, who are you?"))
assert streamed == text.content, (streamed, text.content)
call = chat.bind_tools([get_weather]).invoke("Weather in Paris for 3 days?").tool_calls[0]
assert call["name"] == "get_weather" and call["args"]["city"] == "Paris", call
forced = chat.bind_tools([get_weather], tool_choice="get_weather").invoke("Hello")
assert forced.tool_calls[0]["name"] == "get_weather"
for method in ("json_schema", "function_calling"):
    animal = chat.with_structured_output(Animal, method=method).invoke("Which animal?")
    assert isinstance(animal, Animal), (method, animal)
print("ok")
