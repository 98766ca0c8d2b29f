"""Frames: every message survives the wire, is plain msgpack, and bad frames are refused."""

import msgpack
import msgspec
import pytest

from decant.protocol.errors import ProtocolError
from decant.protocol.messages import BY_TAG, TYPES, Message, TokenRun, Tokens
from decant.protocol.wire import Sender, parse


def example(kind: type[Message]) -> Message:
    """A message with a value for every field that has no default."""
    values: dict[str, object] = {}
    for f in msgspec.structs.fields(kind):
        if f.required:
            text = str(f.type)
            if f.type is int:
                values[f.name] = 3
            elif f.type is bytes:
                values[f.name] = b"{}"
            elif "list" in text:
                values[f.name] = []
            elif f.type is bool:
                values[f.name] = True
            elif f.type is str:
                values[f.name] = "x"
            else:
                values[f.name] = f.type()
    return kind(**values)


@pytest.mark.parametrize("kind", TYPES, ids=lambda k: k.__name__)
def test_every_message_survives_and_is_plain_msgpack(kind: type[Message]) -> None:
    message = example(kind)
    frames = [bytes(f) for f in Sender("test-0").frames(message, [b"\1\0\0\0"])]
    envelope = parse(frames, b"id")
    assert envelope.body == message
    assert envelope.blobs == (b"\1\0\0\0",)
    assert envelope.header.source == "test-0"
    plain = msgpack.unpackb(frames[1], strict_map_key=False)
    assert BY_TAG[plain["type"]] is kind


def test_bad_frames_are_refused() -> None:
    good = [bytes(f) for f in Sender("a").frames(Tokens(1, [TokenRun("r", 1, 0, 0, 1)]))]
    tag = msgpack.packb({"type": "nonsense"})
    kind = msgpack.packb({"type": "tokens", "step": "one", "runs": []})
    major = msgpack.packb({"source": "a", "incarnation": "b", "major": 99})
    for frames in ([], good[:1], [good[0], tag], [good[0], kind], [major, good[1]], [b"", b""]):
        with pytest.raises(ProtocolError):
            parse(frames)
    with pytest.raises(ProtocolError):
        parse([*good, *[b""] * 9])


def test_sequence_numbers_grow() -> None:
    sender = Sender("a")
    seqs = [parse([bytes(f) for f in sender.frames(Tokens(1, []))]).header.seq for _ in range(3)]
    assert seqs == [0, 1, 2]
