"""Bytes of tokens to text, never splitting a character.

A token of a byte-level BPE may hold a part of a UTF-8 sequence; what is incomplete waits for the
next token. The joined output is the same for every grouping of the bytes.
"""

from __future__ import annotations

import codecs


class Detokenizer:
    """One stream. Bytes that can never become a character turn into U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: bytes) -> str:
        """The characters that ``piece`` completes."""
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """What is left at a control token or at the end: U+FFFD for an unfinished sequence."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
