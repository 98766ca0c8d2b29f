"""What clients and operators do wrong, tried on the running set."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest
from real_set import RealSet

USER = [{"role": "user", "content": "hi"}]


def post(real_set: RealSet, data: bytes, path: str = "/v1/chat/completions") -> tuple[int, Any]:
    host, _, port = real_set.url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    try:
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        try:
            return response.status, json.loads(text)
        except ValueError:
            return response.status, text
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"model": "unknown-model"}, 404),
        ({"messages": []}, 400),
        ({"messages": "hi"}, 400),
        ({"max_tokens": -1}, 400),
        ({"temperature": "hot"}, 400),
        ({"temperature": -1}, 400),
        ({"n": 1000}, 400),
        ({"top_p": 0}, 400),
        ({"max_tokens": 10**9}, 400),
        ({"messages": [{"role": "user", "content": "word " * 20000}]}, 400),
    ],
)
def test_bad_fields(change: dict[str, Any], status: int, real_set: RealSet) -> None:
    body = {"model": real_set.model, "messages": USER, "max_tokens": 4, **change}
    got, answer = post(real_set, json.dumps(body).encode())
    assert got == status, answer
    assert answer["error"]["message"], "an OpenAI error body"


@pytest.mark.parametrize("data", [b"{", b"", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000])
def test_bad_json(data: bytes, real_set: RealSet) -> None:
    status, answer = post(real_set, data)
    assert status == 400, answer
    assert answer["error"]["message"]


def test_two_megabytes_of_prompt(real_set: RealSet) -> None:
    body = {"model": real_set.model, "messages": [{"role": "user", "content": "ab cd " * 350_000}]}
    status, answer = post(real_set, json.dumps(body).encode())
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"
    assert real_set.chat("What is 2 + 2?")[0], "the set still serves"


def test_a_body_over_the_limit_is_413(real_set: RealSet) -> None:
    status, _ = post(real_set, b" " * (real_set.config.gateway.max_body_bytes + 1))
    assert status == 413


def test_unknown_routes(real_set: RealSet) -> None:
    for path in ("/v1/none", "/v1//chat/completions", "/v1/chat/../models", "/admin"):
        status, _ = post(real_set, b"{}", path)
        assert status in (404, 405), path
