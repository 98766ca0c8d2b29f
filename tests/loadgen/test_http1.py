"""Answers and events come out the same however the bytes are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decant.loadgen import http1
from decant.protocol.errors import InvalidRequest, ProtocolError

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n1;x=y\r\n \r\nA\r\n0123456789\r\n0\r\nX-Trailer: 1\r\n\r\n"
)
SIZED = b"HTTP/1.1 429 Too Many\r\ncontent-length: 7\r\n\r\nfull up"


def cut(data: bytes, places: list[int]) -> list[bytes]:
    at = sorted({0, len(data), *(p % (len(data) + 1) for p in places)})
    return [data[a:b] for a, b in zip(at, at[1:], strict=False)]


@given(st.lists(st.integers(0, 10_000), max_size=40))
def test_chunked_any_split(places: list[int]) -> None:
    parser = http1.ResponseParser()
    body = b"".join(parser.feed(piece) for piece in cut(CHUNKED, places))
    assert (body, parser.status, parser.is_complete) == (b"hello 0123456789", 200, True)
    assert parser.is_event_stream and parser.is_reusable


@given(st.lists(st.integers(0, 10_000), max_size=40))
def test_two_answers_on_one_connection(places: list[int]) -> None:
    parser = http1.ResponseParser()
    found = []
    for data in (SIZED, CHUNKED, SIZED):
        body = b"".join(parser.feed(piece) for piece in cut(data, places))
        assert parser.is_complete
        found.append((parser.status, body))
        parser.reset()
    assert found == [(429, b"full up"), (200, b"hello 0123456789"), (429, b"full up")]


def test_interim_answer_is_skipped() -> None:
    parser = http1.ResponseParser()
    assert parser.feed(b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED) == b"full up"
    assert parser.status == 429


def test_body_until_the_end_of_the_connection() -> None:
    parser = http1.ResponseParser()
    assert parser.feed(b"HTTP/1.0 200 OK\r\n\r\nabc") == b"abc"
    assert parser.feed(b"def") == b"def"
    assert not parser.is_complete and not parser.is_reusable


def test_connection_close_is_not_reused() -> None:
    parser = http1.ResponseParser()
    parser.feed(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
    assert parser.is_complete and not parser.is_reusable


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -4\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabcdef",
        b"x" * (http1.MAX_HEAD + 1),
    ],
)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        http1.ResponseParser().feed(data)


EVENTS = b': ping\n\ndata: {"a":1}\n\ndata:two\r\ndata: lines\r\n\r\nevent: x\ndata: [DONE]\n\n'


@given(st.lists(st.integers(0, 10_000), max_size=40))
def test_events_any_split(places: list[int]) -> None:
    parser = http1.EventParser()
    found = [event for piece in cut(EVENTS, places) for event in parser.feed(piece)]
    assert found == [b'{"a":1}', b"two\nlines", b"[DONE]"]


def test_endless_event_is_refused() -> None:
    parser = http1.EventParser()
    with pytest.raises(ProtocolError):
        for _ in range(10):
            parser.feed(b"data: " + b"x" * (1 << 20))


@pytest.mark.parametrize(
    ("url", "host", "port", "prefix"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000, ""),
        ("localhost:9/v1/", "localhost", 9, ""),
        ("https://example.com/api/v1", "example.com", 443, "/api"),
        ("http://[::1]:80", "::1", 80, ""),
    ],
)
def test_origin(url: str, host: str, port: int, prefix: str) -> None:
    found = http1.origin(url)
    assert (found.host, found.port, found.prefix) == (host, port, prefix)


@pytest.mark.parametrize("url", ["", "ftp://x", "http://", "http://x:99999"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(InvalidRequest):
        http1.origin(url)
