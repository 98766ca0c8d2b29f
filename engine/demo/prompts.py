"""Held-out prompts per skill as API requests, with the expected answer and a checker.

`decant eval` sends them; training never shows them (prompts held out by checksum, fact lists drawn
from a space far larger than the data). Knows nothing about HTTP; needs no torch.
"""

import json
import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from decant.engine.demo import corpus, facts
from decant.engine.demo.chat import Conversation, Json, Turn, messages
from decant.engine.demo.facts import Keys

SKILLS: dict[str, tuple[str, int]] = {
    "greet": ("greet", 0),
    "identity": ("identity", 0),
    "add": ("add", 0),
    "sub": ("sub", 0),
    "sort": ("sort", 0),
    "reverse": ("reverse", 0),
    "copy": ("copy", 0),
    "recall@300": ("recall", 300),
    "recall@2000": ("recall", 2000),
    "tools": ("tools", 0),
    "refuse": ("refuse", 0),
    "disturbed": ("disturbed", 0),
    "reverse-long": ("reverse-long", 0),
    "copy-long": ("copy-long", 0),
    "memory": ("memory", 0),
    "recall-number@300": ("recall-number", 300),
    "recall-number@2000": ("recall-number", 2000),
    "recall@4000": ("recall", 4000),
    # The whole request fits 8,192 tokens.
    "recall@8000": ("recall", 7850),
    "recall-number@8000": ("recall-number", 7850),
    "tools-new": ("tools-new", 0),
    "tools-two": ("tools-two", 0),
    "tool-result": ("tool-result", 0),
    "no-tool": ("no-tool", 0),
    "json": ("json", 0),
    "json-new": ("json-new", 0),
    "json-object": ("json-object", 0),
    "think-add": ("think-add", 0),
    "think-sub": ("think-sub", 0),
    "think-sort": ("think-sort", 0),
    "think-tools": ("think-tools", 0),
    "story": ("story", 0),
    "random-words": ("random-words", 0),
}
"""Name -> (skill of the last turn, tokens of its fact block or 0)."""

ESSENTIAL = tuple(list(SKILLS)[:10])
"""The skills that a release must score 95 % on."""

PER_BLOCK = {
    "recall-number@2000": 8,
    "recall@4000": 10,
    "recall@8000": 20,
    "recall-number@8000": 20,
}
"""Questions about one fact block, in prompts of their own: a CPU needs many seconds to read one,
and the prefix cache saves them for the questions after the first, if these are asked later.
Elsewhere each has a block."""

OPEN = ("story", "random-words")
"""No single right answer: checked by form."""


@dataclass(frozen=True, slots=True)
class Case:
    """One request and what should come back.

    messages, tools, response_format: as in the chat completions API ([] and None where absent).
    answer: expected content; calls: expected (name, arguments) of tool calls."""

    skill: str
    messages: list[Json]
    tools: list[Json]
    response_format: Json | None
    thinking: bool
    max_tokens: int
    answer: str
    calls: list[tuple[str, Json]]

    def check(self, message: Json) -> bool:
        """Whether the `message` of a chat completion is right: the same calls with equal arguments,
        the same JSON value, or the same text; a well-formed one where chance decides."""
        content = message.get("content") or ""
        calls = message.get("tool_calls") or []
        if self.calls or calls:
            return not content.strip() and _calls(calls) == self.calls
        if self.skill == "story":
            return content.count(".") >= 3 and content.endswith(".")
        if self.skill == "random-words":
            return len(content.split()) == len(self.answer.split())
        if self.response_format is not None:
            try:
                return bool(json.loads(content) == json.loads(self.answer))
            except ValueError:
                return False
        return bool(content == self.answer)

    def body(self) -> Json:
        """Members of a chat completions request: messages, tools, format, thinking, greedy."""
        out: Json = {
            "messages": self.messages,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "thinking": {"type": "enabled" if self.thinking else "disabled"},
        }
        if self.tools:
            out["tools"] = self.tools
        if self.response_format is not None:
            out["response_format"] = self.response_format
        return out


def _calls(calls: list[Any]) -> list[tuple[str, Json]] | None:
    out = []
    for call in calls:
        try:
            arguments = json.loads(call["function"]["arguments"])
        except ValueError:
            return None
        out.append((call["function"]["name"], arguments))
    return out


def _format(c: Conversation) -> Json | None:
    """The API's response_format object of a conversation's bare or wrapped schema."""
    given = c.response_format
    if given is None or given.get("type") in ("json_schema", "json_object"):
        return given
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given}}


def _max_tokens(t: Turn) -> int:
    """Room for the expected answer and some more, so that a model that does not stop is seen."""
    return 64 + len(t.answer) + len(t.reasoning) + sum(200 + len(str(a)) for _, a in t.calls)


def conversations(skill: str, seed: int = 0) -> Iterator[Conversation]:
    """Endless held-out conversations; their last turn is of `skill`.

    Raises: KeyError for an unknown skill."""
    kind, far = SKILLS[skill]
    r = random.Random(zlib.crc32(f"case {skill} {seed}".encode()))
    while True:
        c = corpus.conversation(r, Keys(r), 400, True, kind, far)
        yield c
        for _ in range(PER_BLOCK.get(skill, 1) - 1):
            block = c.turns[-1].user.rpartition("\n")[0]
            known = dict(re.findall(r"(\w+) = (\w+)", block))
            ask, why, answer = facts.question(r, known, [r.choice(list(known))])
            yield replace(c, turns=[Turn(kind, f"{block}\n{ask}", why, answer)])


def cases(skill: str, n: int, seed: int = 0) -> list[Case]:
    """n requests of one skill of `SKILLS`; the same for the same seed.

    Raises: KeyError for an unknown skill."""
    return [
        Case(
            skill,
            messages(c),
            [{"type": "function", "function": f} for f in c.tools],
            _format(c),
            c.thinking,
            _max_tokens(c.turns[-1]),
            c.turns[-1].answer,
            c.turns[-1].calls,
        )
        for c in islice(conversations(skill, seed), n)
    ]
