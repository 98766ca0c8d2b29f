"""litellm against decant: text, stream, tools, structured output. Arguments: URL MODEL."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else the import asks the network

import litellm

url, model = sys.argv[1:]
tool = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather for a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 40},
                "days": {"type": "integer", "maximum": 99},
            },
            "required": ["city"],
        },
    },
}
for provider in ("openai", "deepseek"):
    ask = {
        "model": f"{provider}/{model}",
        "api_base": url + "/v1",
        "api_key": "any",
        "max_tokens": 100,
        "temperature": 0,
    }
    hello = [{"role": "user", "content": "Hello, who are you?"}]
    text = litellm.completion(messages=hello, **ask).choices[0].message.content
    assert text, "no text"
    streamed = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in litellm.completion(messages=hello, stream=True, **ask)
    )
    assert streamed == text, (streamed, text)
    weather = [{"role": "user", "content": "Weather in Paris for 3 days?"}]
    for choice in ("auto", "required"):
        answer = litellm.completion(messages=weather, tools=[tool], tool_choice=choice, **ask)
        call = answer.choices[0].message.tool_calls[0].function
        assert call.name == "get_weather" and json.loads(call.arguments)["city"], call
answer = litellm.completion(
    messages=hello, response_format={"type": "json_object"}, **{**ask, "model": f"openai/{model}"}
)
assert isinstance(answer.choices[0].message.content, str)
thought = litellm.completion(messages=hello, thinking={"type": "enabled"}, **ask)
assert thought.choices[0].message.reasoning_content is not None
print("ok")
