"""Messages to frames and back. Knows msgpack and nothing of sockets.

Frames of a message: ``[header, body, blob, ...]``; a ROUTER socket has the peer's identity in
front, which is not ours to see.
"""

from __future__ import annotations

import itertools
import secrets
import sys
import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any

import msgspec

from decant.protocol.errors import ProtocolError
from decant.protocol.messages import TYPES, WIRE_MAJOR, Header, Message

MAX_FRAMES = 8
MAX_FRAME_BYTES = 64 << 20

_encoder = msgspec.msgpack.Encoder()
_header = msgspec.msgpack.Decoder(Header)
_body: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(reduce(or_, TYPES))


@dataclass(frozen=True)
class Envelope:
    """A received message."""

    header: Header
    body: Message
    blobs: tuple[bytes, ...] = ()
    identity: bytes = b""  # of the peer, on a ROUTER socket
    pid: int = 0  # of a Hello's sender, as the kernel says; 0: unknown


@dataclass
class Sender:
    """Who we are; numbers what we send."""

    source: str
    incarnation: str = field(default_factory=lambda: secrets.token_hex(16))
    _seq: itertools.count[int] = field(default_factory=itertools.count)

    def frames(
        self, body: Message, blobs: Sequence[bytes | memoryview] = (), traceparent: str = ""
    ) -> list[bytes | memoryview]:
        """Frames of one message; ``blobs`` travel as they are."""
        header = Header(
            self.source,
            self.incarnation,
            next(self._seq),
            WIRE_MAJOR,
            time.monotonic_ns(),
            traceparent,
        )
        return [_encoder.encode(header), _encoder.encode(body), *blobs]


def parse(frames: Sequence[bytes], identity: bytes = b"") -> Envelope:
    """Frames (without identity) to an envelope.

    Raises: ProtocolError for a wrong number or size of frames, another major version, an unknown
    tag or a wrong field type.
    """
    if not 2 <= len(frames) <= MAX_FRAMES:
        raise ProtocolError(f"expected 2 to {MAX_FRAMES} frames, got {len(frames)}")
    if max(map(len, frames)) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame exceeds {MAX_FRAME_BYTES} bytes")
    try:
        header = _header.decode(frames[0])
        if header.major != WIRE_MAJOR:
            raise ProtocolError(f"wire version {header.major}, this build speaks {WIRE_MAJOR}")
        return Envelope(header, _body.decode(frames[1]), tuple(frames[2:]), identity)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"bad frame: {error}") from error


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as one blob: little-endian int32. Raises: OverflowError beyond int32."""
    values = ids if isinstance(ids, array) and ids.typecode == "i" else array("i", ids)
    if sys.byteorder == "big":
        values = array("i", values)
        values.byteswap()
    return values.tobytes()


def unpack_ids(blob: bytes) -> array[int]:
    """Token ids of a blob. Raises: ProtocolError if its size is not a multiple of 4."""
    if len(blob) % 4:
        raise ProtocolError(f"{len(blob)} bytes are not int32 token ids")
    values = array("i")
    values.frombytes(blob)
    if sys.byteorder == "big":
        values.byteswap()
    return values
