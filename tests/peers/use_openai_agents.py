"""openai-agents against decant: text, stream, tools, structured output. Arguments: URL MODEL."""

import asyncio
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel


class Animal(BaseModel):
    """An animal."""

    kind: Literal["cat", "dog"]
    age: Literal[1, 2, 3]


url, name = sys.argv[1:]
set_tracing_disabled(True)
client = AsyncOpenAI(base_url=url + "/v1", api_key="any")
settings = ModelSettings(temperature=0.0, max_tokens=120)
cities = []


@function_tool
def get_weather(city: str, days: int) -> str:
    """Weather for a city."""
    cities.append(city)
    return '{"temp_c": 21}'


async def main() -> None:
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(name, client)
        agent = Agent("plain", model=model, model_settings=settings)
        text = (await Runner.run(agent, "Hello, who are you?")).final_output
        assert text
        result = Runner.run_streamed(agent, "Hello, who are you?")
        async for _ in result.stream_events():
            pass
        assert result.final_output == text, (result.final_output, text)
        worker = Agent("worker", model=model, model_settings=settings, tools=[get_weather])
        cities.clear()
        await Runner.run(worker, "Weather in Paris for 3 days?")
        assert cities == ["Paris"], cities
        judge = Agent("judge", model=model, model_settings=settings, output_type=Animal)
        assert isinstance((await Runner.run(judge, "Which animal?")).final_output, Animal)


asyncio.run(main())
print("ok")
