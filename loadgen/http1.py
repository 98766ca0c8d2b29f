"""HTTP/1.1 answers and server-sent events from bytes, as they arrive. No sockets.

Written for speed with thousands of small chunks a second: an ordinary client library costs several
times as much per chunk, and the generator must not be what is measured.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from msgspec import Struct

from decant.protocol.errors import InvalidRequest, ProtocolError

MAX_HEAD = 64 << 10
MAX_EVENT = 8 << 20


class Origin(Struct, frozen=True):
    """Where a base URL leads."""

    host: str
    port: int
    is_tls: bool
    prefix: str  # path in front of /v1

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_tls else 80) else f"{host}:{self.port}"


def origin(url: str) -> Origin:
    """Parse ``http(s)://host[:port][/prefix]``; a trailing /v1 is dropped. Raises:
    InvalidRequest.
    """
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidRequest(f"not a URL: {url}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise InvalidRequest(f"not a URL: {url}")
    is_tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return Origin(host, port or (443 if is_tls else 80), is_tls, prefix)


def request(at: Origin, path: str, body: bytes, key: str = "") -> bytes:
    """The bytes of a POST with a JSON body."""
    auth = f"Authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST {at.prefix}{path} HTTP/1.1\r\nHost: {at.authority}\r\n"
        "Content-Type: application/json\r\nAccept: text/event-stream, application/json\r\n"
        f"{auth}Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode("latin-1") + body


class ResponseParser:
    """One answer after the other on a connection: ``feed`` returns the body bytes in what arrived.

    After ``is_complete`` call ``reset`` before the next answer. Raises: ProtocolError.
    """

    def __init__(self) -> None:
        self._buffer = b""
        self.reset()

    def reset(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self._is_chunked = False
        self._left = 0  # of the body or the chunk; -1: until the connection ends
        self._in_trailer = False

    @property
    def is_event_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def is_reusable(self) -> bool:
        """May another request follow on this connection?"""
        return (
            self.is_complete
            and self._left != -1
            and not self._buffer
            and self.headers.get("connection", "").lower() != "close"
        )

    def feed(self, data: bytes) -> bytes:
        buffer = self._buffer + data if self._buffer else data
        at = 0
        while not self.status and not self.is_complete:
            end = buffer.find(b"\r\n\r\n", at)
            if end < 0:
                if len(buffer) > MAX_HEAD:
                    raise ProtocolError("the answer's head is too long")
                self._buffer = buffer[at:]
                return b""
            self._head(buffer[at:end])
            at = end + 4
        if self.is_complete:
            self._buffer = buffer[at:]
            return b""
        if not self._is_chunked:
            body = buffer[at:] if self._left < 0 else buffer[at : at + self._left]
            if self._left >= 0:
                self._left -= len(body)
                self.is_complete = self._left == 0
            self._buffer = buffer[at + len(body) :]
            return body
        pieces = []
        size = len(buffer)
        while at < size and not self.is_complete:
            if self._left > 2:  # inside a chunk; its two last bytes are its line end
                take = min(self._left - 2, size - at)
                pieces.append(buffer[at : at + take])
                at += take
                self._left -= take
            elif self._left:
                take = min(self._left, size - at)
                if buffer[at : at + take] != b"\r\n"[2 - self._left :][:take]:
                    raise ProtocolError("a chunk of the answer does not end where it says")
                at += take
                self._left -= take
            else:
                end = buffer.find(b"\r\n", at)
                if end < 0:
                    if size - at > MAX_HEAD:
                        raise ProtocolError("a chunk's head is too long")
                    break
                line = buffer[at:end]
                at = end + 2
                if self._in_trailer:
                    self.is_complete = not line
                    continue
                try:
                    length = int(line.partition(b";")[0], 16)
                except ValueError as error:
                    raise ProtocolError(f"not a chunk length: {line[:40]!r}") from error
                if length < 0:
                    raise ProtocolError("a chunk of negative length")
                if length:
                    self._left = length + 2
                else:
                    self._in_trailer = True
        self._buffer = buffer[at:]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _head(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        version, _, rest = first.partition(b" ")
        code = rest[:3]
        if not version.startswith(b"HTTP/1.") or not code.isdigit():
            raise ProtocolError(f"not an HTTP answer: {first[:60]!r}")
        status = int(code)
        if status in (100, 102, 103):
            return  # an interim answer; the real one follows
        headers = {}
        for line in lines:
            name, _, value = line.partition(b":")
            headers[name.decode("latin-1").lower()] = value.strip().decode("latin-1")
        self.status, self.headers = status, headers
        if "chunked" in headers.get("transfer-encoding", "").lower():
            self._is_chunked = True
        elif "content-length" in headers:
            if not headers["content-length"].isdigit():
                raise ProtocolError("a Content-Length that is not a number")
            self._left = int(headers["content-length"])
            self.is_complete = self._left == 0
        elif status in (204, 304):
            self.is_complete = True
        else:
            self._left = -1


class EventParser:
    """The ``data`` of server-sent events. Lines end with LF or CRLF."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Complete events in what arrived; comments and other fields are skipped.

        Raises: ProtocolError for an event that is too long.
        """
        if self._buffer:
            data = self._buffer + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *blocks, self._buffer = data.split(b"\n\n")
        if len(self._buffer) > MAX_EVENT:
            raise ProtocolError("an event is too long")
        events = []
        for block in blocks:
            if block.startswith(b"data: ") and b"\n" not in block:
                events.append(block[6:])
                continue
            lines = [
                line[5:].removeprefix(b" ")
                for line in block.split(b"\n")
                if line.startswith(b"data:")
            ]
            if lines:
                events.append(b"\n".join(lines))
        return events
