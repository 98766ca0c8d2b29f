"""Traces and conversations from files. Each reader says which line is wrong.

mooncake   JSONL: {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}; a
           hash id names 512 tokens of the prompt, equal ids are equal text (shared prefixes)
burstgpt   JSONL or CSV: Timestamp (s), Request tokens, Response tokens, optional Session ID
sharegpt   JSON list or JSONL: {"conversations": [{"from": "human"|"gpt", "value": "..."}]}
prompts    JSONL of our own: {"prompt": "...", "max_tokens": n, "content": class, "system": "..."}
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from decant.protocol.errors import InvalidRequest

MOONCAKE_BLOCK = 512  # tokens a hash id stands for
MAX_LENGTH = 1 << 22


class Row(Struct, frozen=True):
    """A request of a trace."""

    at_ns: int  # since the trace's first row
    num_input: int
    num_output: int
    hash_ids: list[int] = []
    session: str = ""


class Talk(Struct, frozen=True):
    """A conversation: what the user says, turn by turn, and how long each answer was in
    characters.
    """

    users: list[str]
    answer_chars: list[int]


class Prompt(Struct, frozen=True):
    prompt: str
    max_tokens: int = 0
    content: str = ""
    system: str = ""


def read_trace(path: str | Path, kind: str) -> list[Row]:
    """A mooncake or burstgpt trace, in time order. Raises: InvalidRequest."""
    if kind not in ("mooncake", "burstgpt"):
        raise InvalidRequest(f"a trace is mooncake or burstgpt, not {kind!r}")
    rows = []
    for number, fields in _objects(path):
        try:
            if kind == "mooncake":
                at = _number(fields["timestamp"], "timestamp") / 1e3
                lengths = fields["input_length"], fields["output_length"]
                ids = fields.get("hash_ids", [])
                if not isinstance(ids, list) or not all(type(i) is int for i in ids):
                    raise ValueError("hash_ids is a list of integers")
                session = ""
            else:
                at = _number(fields["Timestamp"], "Timestamp")
                lengths = fields["Request tokens"], fields["Response tokens"]
                ids, session = [], str(fields.get("Session ID") or "")
            num_input, num_output = (_length(x) for x in lengths)
        except KeyError as error:
            raise InvalidRequest(f"{path}, row {number}: {error.args[0]} is missing") from error
        except (ValueError, TypeError) as error:
            raise InvalidRequest(f"{path}, row {number}: {error}") from error
        if num_output:  # BurstGPT marks failed requests with no response
            rows.append(Row(round(at * 1e9), num_input, num_output, ids, session))
    if not rows:
        raise InvalidRequest(f"{path} has no requests")
    rows.sort(key=lambda r: r.at_ns)
    first = rows[0].at_ns
    return [Row(r.at_ns - first, r.num_input, r.num_output, r.hash_ids, r.session) for r in rows]


def read_sharegpt(path: str | Path) -> list[Talk]:
    """Conversations that begin with the user and have at least one answer."""
    talks = []
    for number, fields in _objects(path):
        turns: Any = fields.get("conversations", fields.get("conversation"))
        try:
            said = [(str(t["from"]).lower(), str(t["value"])) for t in turns]
        except (TypeError, KeyError) as error:
            raise InvalidRequest(
                f"{path}, entry {number}: conversations is a list of from and value"
            ) from error
        said = [t for t in said if t[0] != "system"]
        users, answers = [], []
        for (who, question), (other, answer) in zip(said[::2], said[1::2], strict=False):
            if who not in ("human", "user") or other not in ("gpt", "assistant", "chatgpt"):
                break
            users.append(question)
            answers.append(len(answer))
        if users:
            talks.append(Talk(users, answers))
    if not talks:
        raise InvalidRequest(f"{path} has no conversation that a user begins")
    return talks


def read_prompts(path: str | Path) -> list[Prompt]:
    """Prompts of our own format."""
    prompts = []
    for number, fields in _objects(path):
        prompt = fields.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise InvalidRequest(f"{path}, row {number}: prompt is a string that is not empty")
        try:
            most = _length(fields.get("max_tokens", 0))
        except ValueError as error:
            raise InvalidRequest(f"{path}, row {number}: {error}") from error
        prompts.append(
            Prompt(prompt, most, str(fields.get("content", "")), str(fields.get("system", "")))
        )
    if not prompts:
        raise InvalidRequest(f"{path} has no prompts")
    return prompts


def _objects(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, object) of a JSON list, a JSONL or a CSV file with a head line."""
    try:
        data = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read {path}: {error}") from error
    if str(path).endswith(".csv"):
        yield from enumerate(csv.DictReader(data.splitlines()), 2)
        return
    if data.lstrip().startswith("["):
        try:
            whole = json.loads(data)
        except (json.JSONDecodeError, RecursionError) as error:
            raise InvalidRequest(f"{path} is not JSON: {error}") from error
        pairs = list(enumerate(whole, 1))
    else:
        pairs = []
        for number, line in enumerate(data.splitlines(), 1):
            if not line.strip():
                continue
            try:
                pairs.append((number, json.loads(line)))
            except (json.JSONDecodeError, RecursionError) as error:
                raise InvalidRequest(f"{path}, row {number}: not JSON: {error}") from error
    for number, fields in pairs:
        if not isinstance(fields, dict):
            raise InvalidRequest(f"{path}, row {number}: not an object")
        yield number, fields


def _number(value: object, name: str) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is a number, not {value!r}") from error
    if not math.isfinite(number):
        raise ValueError(f"{name} is not finite")
    return number


def _length(value: object) -> int:
    number = _number(value, "a length")
    if number != int(number) or not 0 <= number <= MAX_LENGTH:
        raise ValueError(f"a length is a whole number from 0 to {MAX_LENGTH}, not {value!r}")
    return int(number)
