"""The command line's HTTP client against a small real server: streams, errors, broken streams."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from decant.protocol.errors import ConfigError
from decant.services import cli
from decant.services.client import Api, ApiError, Figures, acceptance


def chunk(**delta: Any) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": delta}]})


USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 3,
    "speculation": {"drafted_tokens": 4, "accepted_tokens": 3, "steps": 2},
}
GOOD = [
    chunk(role="assistant", content=""),
    chunk(reasoning_content="let me"),
    chunk(content="4"),
    chunk(content="2\x1b[31m"),
    json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}),
    json.dumps({"choices": [], "usage": USAGE}),
    "[DONE]",
]
ERROR = [chunk(content="4"), json.dumps({"error": {"message": "engine died", "code": "x"}})]


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass

    def _answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"data": [{"id": "m1"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        how = body["model"]
        if how == "refused":
            self._answer(429, b'{"error": {"message": "too many"}}')
        elif how == "html":
            self._answer(502, b"<html>bad gateway</html>", "text/html")
        else:
            lines = {"good": GOOD, "error": ERROR, "broken": GOOD[:3], "junk": ["{"]}[how]
            assert body["stream"] and body["stream_options"] == {"include_usage": True}
            text = ": keep-alive\n\n" + "".join(f"data: {line}\n\n" for line in lines)
            self._answer(200, text.encode(), "text/event-stream")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def ask(url: str, model: str) -> tuple[str, str, Figures]:
    return Api(url, timeout_s=10).chat([], lambda channel, text: None, model=model)


def test_a_good_stream(url: str) -> None:
    content, reasoning, figures = ask(url, "good")
    assert (content, reasoning) == ("42\x1b[31m", "let me")
    assert figures.finish_reason == "stop" and figures.usage == USAGE
    assert figures.last_ns >= figures.first_ns > figures.sent_ns
    assert acceptance(figures.usage) == "3 of 4 drafts accepted (75%)"


@pytest.mark.parametrize(
    ("model", "status", "text"),
    [
        ("refused", 429, "too many"),
        ("html", 502, "bad gateway"),
        ("error", 200, "engine died"),
        ("broken", 0, "broke off"),
        ("junk", 0, "broke off"),
    ],
)
def test_failures(model: str, status: int, text: str, url: str) -> None:
    with pytest.raises(ApiError, match=text) as caught:
        ask(url, model)
    assert caught.value.status == status


def test_figures_are_the_definitions() -> None:
    figures = Figures(100, 10_000_100, 30_000_100, {"completion_tokens": 5})
    assert figures.ttft_ms == 10.0
    assert figures.tpot_ms == 5.0
    assert Figures(0, 5, 5, {"completion_tokens": 1}).tpot_ms == 0.0


def test_not_an_address() -> None:
    with pytest.raises(ConfigError):
        Api("ftp://x")


def test_chat_shows_reasoning_apart_and_no_control_characters(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(["chat", "hi", "--url", url, "--model", "good", "--figures"])
    out = capsys.readouterr().out
    assert code == 0
    assert "[reasoning] let me" in out and "[answer] 42" in out
    assert "\x1b" not in out
    assert "5 + 3 tokens" in out
    assert cli.main(["chat", "hi", "--url", url, "--model", "refused"]) == 1
    assert "too many" in capsys.readouterr().err
