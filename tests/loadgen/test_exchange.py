"""What the events of one answer put into its record."""

from __future__ import annotations

import json

import pytest

from decant.loadgen.exchange import Exchange, answer_hash, body
from decant.loadgen.plan import Record, Request, Target


def exchange(**fields: object) -> Exchange:
    request = Request(0, **fields)  # type: ignore[arg-type]
    return Exchange(request, Record(0, sent_ns=100), b"")


def event(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def delta(**fields: object) -> bytes:
    return event(choices=[{"index": 0, "delta": fields}])


END = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])


def test_counts_come_from_usage_not_from_chunks() -> None:
    one = exchange()
    for now, piece in ((110, "a b c"), (120, " d")):
        one.on_event(delta(content=piece), now)
    one.on_event(END, 121)
    one.on_event(event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 40}), 122)
    one.on_event(b"[DONE]", 123)
    one.finish("ok", 124)
    record = one.record
    assert record.chunk_ns == [110, 120]
    assert (record.num_prompt_tokens, record.num_output_tokens) == (9, 40)
    assert (one.text, record.outcome, record.answer_hash) == (
        "a b c d",
        "ok",
        answer_hash("a b c d"),
    )


def test_role_and_empty_chunks_are_no_tokens() -> None:
    one = exchange()
    one.on_event(delta(role="assistant", content=""), 110)
    one.on_event(END, 120)
    assert one.record.chunk_ns == []


@pytest.mark.parametrize(
    "chunk",
    [
        delta(reasoning_content="x"),
        delta(reasoning="x"),
        delta(tool_calls=[{"index": 0, "function": {"arguments": "{"}}]),
        event(choices=[{"index": 0, "text": "x"}]),
    ],
)
def test_every_kind_of_token_counts(chunk: bytes) -> None:
    one = exchange()
    one.on_event(chunk, 110)
    assert one.record.chunk_ns == [110]


def test_no_usage_is_no_count() -> None:
    one = exchange()
    one.on_event(delta(content="x"), 110)
    assert one.record.num_output_tokens == -1


def test_unknown_fields_and_nulls_are_fine() -> None:
    one = exchange()
    one.on_event(
        event(id="x", new=[1], usage=None, choices=[{"delta": {"content": None, "z": 1}}]), 1
    )
    assert not one.is_done


@pytest.mark.parametrize("data", [b"{", b"[1]", event(choices=3), event(error={"message": "no"})])
def test_bad_events_end_it(data: bytes) -> None:
    one = exchange()
    one.on_event(data, 110)
    assert one.is_done and one.record.outcome == "error" and one.record.error


def test_stream_without_finish_reason_is_an_error() -> None:
    one = exchange()
    one.on_event(delta(content="x"), 110)
    one.on_event(b"[DONE]", 111)
    one.finish("ok", 112)
    assert one.record.outcome == "error"


def test_correctness_compares_the_whole_text() -> None:
    for text, is_match in (("right", True), ("wrong", False)):
        one = exchange(expect=answer_hash("right"))
        one.on_event(delta(content=text), 1)
        one.on_event(END, 2)
        one.finish("ok", 3)
        assert (one.record.is_checked, one.record.is_match) == (True, is_match)
        assert one.record.text == ("" if is_match else "wrong")


def test_cancel_after() -> None:
    one = exchange(cancel_after=2)
    one.on_event(delta(content="x"), 1)
    assert not one.is_to_cancel
    one.on_event(delta(content="x"), 2)
    assert one.is_to_cancel


def test_decant_account() -> None:
    one = exchange()
    account = {"stages_ms": {"prefill": 2.5}, "num_steps": 3, "num_drafted": 6, "num_accepted": 4}
    one.on_event(event(choices=[], decant=account), 1)
    record = one.record
    assert record.stages_ms == {"prefill": 2.5}
    assert (record.num_steps, record.num_drafted, record.num_accepted) == (3, 6, 4)


def test_speculation_in_usage() -> None:
    one = exchange()
    drafts = {"drafted_tokens": 6, "accepted_tokens": 4, "steps": 3}
    usage = {"prompt_tokens": 1, "completion_tokens": 7, "speculation": drafts}
    one.on_event(event(choices=[], usage=usage, decant={"stages_ms": {"prefill": 1.0}}), 1)
    record = one.record
    assert (record.num_steps, record.num_drafted, record.num_accepted) == (3, 6, 4)
    assert record.stages_ms == {"prefill": 1.0}


def test_bodies() -> None:
    chat = Target("x", "m", extra={"top_p": 0.5})
    request = Request(0, system="S", user="U", max_tokens=3, seed=7)
    found = json.loads(body(chat, request, [{"role": "user", "content": "before"}]))
    assert [m["content"] for m in found["messages"]] == ["S", "before", "U"]
    assert found["stream_options"] == {"include_usage": True}
    assert (found["max_tokens"], found["seed"], found["top_p"]) == (3, 7, 0.5)
    text = Target("x", "m", "completions", ask_usage=False)
    assert json.loads(body(text, request))["prompt"] == "SU"
    ids = json.loads(body(text, Request(0, ids=[1, 2])))
    assert ids["prompt"] == [1, 2] and "stream_options" not in ids
