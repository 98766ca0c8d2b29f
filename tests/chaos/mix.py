"""Requests for the chaos tests, from a seed: every kind of body whose answer must not change.

Each answer is short and determined by its body (greedy, or with a seed), so a fault-free run is an
oracle for a disturbed one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

WORDS = ["river", "stone", "lamp", "green", "seven", "cloud", "paper", "north", "apple", "wheel"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog", "owl"]},
        "ok": {"type": "boolean"},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "name": {"type": "string", "maxLength": 12},
    },
    "required": ["kind", "ok", "age", "name"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather for a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 16},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
        },
    },
}


@dataclass(frozen=True)
class Ask:
    """One chat request."""

    kind: str
    body: dict[str, Any]

    @property
    def key(self) -> str:
        """Equal for requests whose answers have to be equal."""
        return json.dumps(self.body, sort_keys=True)

    @property
    def is_streamed(self) -> bool:
        return bool(self.body.get("stream"))


def _prompt(rng: Random) -> str:
    a, b = rng.randint(2, 400), rng.randint(2, 400)
    words = " ".join(rng.sample(WORDS, 5))
    numbers = ", ".join(str(rng.randint(1, 99)) for _ in range(6))
    return rng.choice(
        [
            f"What is {a} + {b}?",
            f"Sort these numbers: {numbers}",
            f"Copy this: {words}",
            f"Reverse this: {words}",
            "Tell me a story.",
        ]
    )


def _greedy(rng: Random) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": rng.randint(16, 64), "ignore_eos": True}


def _sampled(rng: Random) -> dict[str, Any]:
    return {"temperature": 1.0, "top_p": 0.95, "max_tokens": rng.randint(16, 48)}


def _choices(rng: Random) -> dict[str, Any]:
    return {"temperature": 1.0, "n": rng.choice([2, 4]), "max_tokens": rng.randint(12, 32)}


def _penalties(rng: Random) -> dict[str, Any]:
    return {
        "temperature": 0.8,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
        "max_tokens": rng.randint(16, 48),
        "ignore_eos": True,
    }


def _stop(rng: Random) -> dict[str, Any]:
    return {"temperature": 1.2, "stop": ["e ", "1", " the"], "max_tokens": 48, "ignore_eos": True}


def _thinking(rng: Random) -> dict[str, Any]:
    return {"temperature": 0, "thinking": {"type": "enabled"}, "max_tokens": rng.randint(24, 64)}


def _schema(rng: Random) -> dict[str, Any]:
    wanted = {"name": "animal", "schema": SCHEMA, "strict": True}
    return {
        "temperature": 1.0,
        "response_format": {"type": "json_schema", "json_schema": wanted},
        "max_tokens": 200,
    }


def _tools(rng: Random) -> dict[str, Any]:
    return {
        "temperature": 1.0,
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 200,
    }


def _everything(rng: Random) -> dict[str, Any]:
    """JSON schema, four choices and penalties at once."""
    return {**_schema(rng), "n": 4, "presence_penalty": 0.5, "frequency_penalty": 0.3}


KINDS: dict[str, Callable[[Random], dict[str, Any]]] = {
    "greedy": _greedy,
    "sampled": _sampled,
    "choices": _choices,
    "penalties": _penalties,
    "stop": _stop,
    "thinking": _thinking,
    "schema": _schema,
    "tools": _tools,
    "everything": _everything,
}
ALL = tuple(KINDS)
CONSTRAINED = ("schema", "tools", "choices", "penalties", "everything")
PLAIN = ("greedy", "sampled")
SHORT = ("greedy", "sampled", "stop", "penalties", "choices", "thinking")


def make(seed: int, num: int, model: str, kinds: tuple[str, ...] = ALL) -> list[Ask]:
    """``num`` different requests, the kinds in turn; four of five are streamed."""
    asks = []
    for i in range(num):
        rng = Random(f"{seed}/{i}")
        kind = kinds[i % len(kinds)]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": _prompt(rng)}],
            "seed": rng.randrange(1, 1 << 31),
            "stream": rng.random() < 0.8,
            **KINDS[kind](rng),
        }
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        asks.append(Ask(kind, body))
    return asks


def short(seed: int, num: int, model: str) -> list[Ask]:
    """A few tokens each: most of their life is on the way."""
    rng = Random(f"{seed}/short")
    asks = make(seed, num, model, SHORT)
    return [Ask(a.kind, {**a.body, "max_tokens": rng.randint(1, 10)}) for a in asks]


def long(seed: int, num: int, model: str, max_tokens: int) -> list[Ask]:
    """Streams that last: greedy and sampled in turn, to ``max_tokens``."""
    asks = make(seed, num, model, PLAIN)
    more = {"max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    return [Ask(a.kind, {**a.body, **more}) for a in asks]


def is_valid(ask: Ask, transcript: str) -> bool:
    """Do the answer's parts have the form that the request asked for? (Not cut at the limit.)"""
    if ask.kind not in ("schema", "tools", "everything"):
        return True
    for choice in json.loads(transcript)["choices"]:
        if choice["finish"] == "length":
            continue
        try:
            if ask.kind == "tools":
                (call,) = choice["calls"]
                given = json.loads(call[1])
                good = call[0] == "get_weather" and 1 <= given["days"] <= 9
                good = good and isinstance(given["city"], str)
            else:
                given = json.loads(choice["content"])
                good = set(given) == set(SCHEMA["required"]) and 0 <= given["age"] <= 99
                good = good and isinstance(given["ok"], bool) and len(given["name"]) <= 12
        except (ValueError, KeyError, TypeError):
            return False
        if not good:
            return False
    return True
