"""pydantic-ai against decant: text, stream, tools, structured output. Arguments: URL MODEL."""

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Animal(BaseModel):
    """An animal."""

    kind: Literal["cat", "dog"]
    age: Literal[1, 2, 3]


url, name = sys.argv[1:]
model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=url + "/v1", api_key="any"))
settings = {"temperature": 0.0, "max_tokens": 120}


async def main() -> None:
    agent = Agent(model, model_settings=settings)
    text = (await agent.run("Hello, who are you?")).output
    assert text
    async with agent.run_stream("Hello, who are you?") as result:
        streamed = await result.get_output()
    assert streamed == text, (streamed, text)
    animal = (await Agent(model, output_type=Animal, model_settings=settings).run("Which?")).output
    assert isinstance(animal, Animal)
    cities = []
    worker = Agent(model, model_settings=settings)

    @worker.tool_plain
    def get_weather(city: str, days: int) -> str:
        """Weather for a city."""
        cities.append(city)
        return '{"temp_c": 21}'

    await worker.run("Weather in Paris for 3 days?")
    assert cities == ["Paris"], cities


asyncio.run(main())
print("ok")
