"""A small HTTP client of our own API, for the command line: standard library only, streams SSE.

Knows the shapes of the OpenAI chat API and our figures in ``usage``.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from decant.protocol.errors import ConfigError, DecantError

MAX_LINE_BYTES = 16 << 20


class ApiError(DecantError):
    """The server answered with an error, or not at all (``status`` 0)."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Figures:
    """Times of one streamed answer, in nanoseconds from sending, and its counts."""

    sent_ns: int = 0
    first_ns: int = 0
    last_ns: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = ""

    @property
    def ttft_ms(self) -> float:
        """First token received - request sent."""
        return (self.first_ns - self.sent_ns) / 1e6

    @property
    def tpot_ms(self) -> float:
        """(last - first) / (tokens - 1); 0 for fewer than two tokens."""
        tokens = int(self.usage.get("completion_tokens", 0))
        return (self.last_ns - self.first_ns) / 1e6 / (tokens - 1) if tokens > 1 else 0.0


class Api:
    """One server. Raises: ApiError for every answer that is not 200."""

    def __init__(self, url: str, key: str = "", timeout_s: float = 600.0) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is not an http address")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._host, self._port, self._is_tls = parts.hostname, parts.port, parts.scheme == "https"
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._timeout_s = timeout_s

    def _request(
        self, method: str, path: str, body: object = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout_s)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, self._headers)
            return connection, connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ApiError(f"no answer from {self.url}: {error}") from error

    def call(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Status and parsed body (text, if it is not JSON). Raises: ApiError without an answer."""
        connection, response = self._request(method, path, body)
        try:
            text = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise ApiError(f"{self.url} broke off: {error}") from error
        finally:
            connection.close()
        try:
            return response.status, json.loads(text)
        except ValueError:
            return response.status, text

    def get(self, path: str) -> Any:
        status, body = self.call("GET", path)
        if status != 200:
            raise ApiError(_message(body, status), status)
        return body

    def post(self, path: str, body: object) -> Any:
        status, answer = self.call("POST", path, body)
        if status != 200:
            raise ApiError(_message(answer, status), status)
        return answer

    def model(self) -> str:
        """The first served model's name."""
        return str(self.get("/v1/models")["data"][0]["id"])

    def stream(self, path: str, body: dict[str, Any], figures: Figures) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed answer; ``figures`` is filled on the way.

        Raises: ApiError, also for an error inside the stream and a stream without an end.
        """
        figures.sent_ns = time.monotonic_ns()
        request = {**body, "stream": True, "stream_options": {"include_usage": True}}
        connection, response = self._request("POST", path, request)
        try:
            if response.status != 200:
                text = response.read().decode(errors="replace")
                raise ApiError(_message(text, response.status), response.status)
            while line := response.readline(MAX_LINE_BYTES):
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ApiError(_message(chunk, 200), 200)
                now = time.monotonic_ns()
                if any(_has_text(choice) for choice in chunk.get("choices", [])):
                    figures.first_ns = figures.first_ns or now
                    figures.last_ns = now
                for choice in chunk.get("choices", []):
                    figures.finish_reason = choice.get("finish_reason") or figures.finish_reason
                figures.usage = chunk.get("usage") or figures.usage
                yield chunk
            raise ApiError(f"{self.url} broke off in mid-stream")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ApiError(f"{self.url} broke off: {error}") from error
        finally:
            connection.close()

    def chat(
        self,
        messages: list[dict[str, Any]],
        show: Callable[[str, str], None],
        **fields: Any,
    ) -> tuple[str, str, Figures]:
        """Stream one chat answer; ``show(channel, text)`` gets each piece, channel "reasoning",
        "content" or "tool". Returns: content, reasoning, figures.
        """
        figures, content, reasoning = Figures(), "", ""
        body = {"messages": messages, **fields}
        for chunk in self.stream("/v1/chat/completions", body, figures):
            for choice in chunk.get("choices", []):
                delta = choice.get("delta") or {}
                if text := delta.get("reasoning_content"):
                    reasoning += text
                    show("reasoning", text)
                if text := delta.get("content"):
                    content += text
                    show("content", text)
                for call in delta.get("tool_calls") or []:
                    part = call.get("function") or {}
                    name = f"{part['name']} " if part.get("name") else ""
                    show("tool", name + (part.get("arguments") or ""))
        return content, reasoning, figures


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def unix_get(path: str, page: str, timeout_s: float = 5.0) -> str:
    """A page of a process's Unix socket (``Config.metrics_path``). Raises: ApiError."""
    return unix_call(path, "GET", page, "", timeout_s)


def unix_call(path: str, method: str, page: str, key: str = "", timeout_s: float = 5.0) -> str:
    """Any call over a Unix socket, with a Bearer key. Raises: ApiError."""
    connection = _UnixConnection(path, timeout_s)
    try:
        head = {"Authorization": f"Bearer {key}"} if key else {}
        connection.request(method, page, headers=head)
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise ApiError(f"no answer at {path}: {error}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise ApiError(_message(text, response.status), response.status)
    return text


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(
        delta.get("content")
        or delta.get("reasoning_content")
        or delta.get("tool_calls")
        or choice.get("text")
    )


def _message(body: Any, status: int) -> str:
    if isinstance(body, str):
        try:
            body = json.loads(body)
        except ValueError:
            return f"HTTP {status}: {body.strip()[:300]}"
    error = body.get("error", body) if isinstance(body, dict) else body
    text = error.get("message", error) if isinstance(error, dict) else error
    return f"HTTP {status}: {text}" if status != 200 else str(text)


def acceptance(usage: dict[str, Any]) -> str:
    """The speculation part of the figures line: accepted of drafted tokens."""
    counts = usage.get("speculation") or {}
    drafted, accepted = int(counts.get("drafted_tokens", 0)), int(counts.get("accepted_tokens", 0))
    if not drafted:
        return "no drafts"
    return f"{accepted} of {drafted} drafts accepted ({accepted / drafted:.0%})"


def figures_line(figures: Figures) -> str:
    """One line: TTFT, TPOT, tokens, acceptance."""
    usage = figures.usage
    rate = f" ({1000 / figures.tpot_ms:.0f} tok/s)" if figures.tpot_ms else ""
    return (
        f"TTFT {figures.ttft_ms:.0f} ms · TPOT {figures.tpot_ms:.1f} ms{rate} · "
        f"{usage.get('prompt_tokens', '?')} + {usage.get('completion_tokens', '?')} tokens · "
        f"{acceptance(usage)}"
    )
