"""Characters never split, whatever the tokens cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decant.services.chat.detokenizer import Detokenizer


@given(st.one_of(st.text().map(str.encode), st.binary(max_size=40)), st.data())
def test_pieces_join_to_the_whole(data: bytes, draw: st.DataObject) -> None:
    stream, text, rest = Detokenizer(), "", data
    while rest:
        n = draw.draw(st.integers(1, len(rest)))
        text, rest = text + stream.push(rest[:n]), rest[n:]
    assert text + stream.flush() == data.decode("utf-8", "replace")


def test_half_a_character_waits_and_ends_as_a_replacement() -> None:
    stream = Detokenizer()
    euro = "€".encode()
    assert [stream.push(euro[:2]), stream.push(euro[2:])] == ["", "€"]
    assert (stream.push(euro[:1]), stream.flush(), stream.push(b"a")) == ("", "�", "a")
