"""instructor against decant: structured output in its three modes. Arguments: URL MODEL."""

import sys
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Animal(BaseModel):
    """An animal."""

    kind: Literal["cat", "dog"]
    age: Literal[1, 2, 3]


url, model = sys.argv[1:]
plain = OpenAI(base_url=url + "/v1", api_key="any")
question = [{"role": "user", "content": "Which animal?"}]
text = plain.chat.completions.create(model=model, messages=question, max_tokens=40)
assert text.choices[0].message.content
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(plain, mode=mode)
    animal = client.chat.completions.create(
        model=model, messages=question, response_model=Animal, max_retries=0, max_tokens=120
    )
    assert animal.kind in ("cat", "dog"), (mode, animal)
client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
parts = list(
    client.chat.completions.create_partial(
        model=model, messages=question, response_model=Animal, max_retries=0, max_tokens=120
    )
)
assert parts[-1].age in (1, 2, 3), parts[-1]
print("ok")
