"""One tokenizer.json: prompts to ids, ids to bytes. Knows no template and no stream.

Two encoders are kept apart on purpose: ``encode`` takes markers as ids and everything else
**without** the added vocabulary, so no text of a caller can become a control token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from decant.protocol.errors import CheckpointError, InvalidRequest
from decant.services.chat.markers import OPTIONAL, REQUIRED, Marker


def _byte_alphabet() -> dict[str, int]:
    """The printable character that a byte-level BPE vocabulary writes for each byte.

    Source: GPT-2's ``bytes_to_unicode``: printable Latin-1 bytes stand for themselves, the other
    68 take the code points from 256 upwards in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class Vocabulary:
    """Loaded once per process. Encoding is thread-safe and releases the interpreter lock."""

    def __init__(self, path: str | Path) -> None:
        """path: a Hugging Face tokenizer.json with a byte-level BPE model.

        Raises: CheckpointError if it is unreadable or lacks a marker of the chat encoding."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            added = {str(t["content"]): int(t["id"]) for t in data["added_tokens"]}
            special = {int(t["id"]) for t in data["added_tokens"] if t["special"]}
            vocab: dict[str, int] = data["model"]["vocab"]
            self._plain = Tokenizer.from_str(
                json.dumps({**data, "added_tokens": [], "post_processor": None})
            )
        except Exception as error:  # the library raises bare Exceptions for a bad file
            raise CheckpointError(f"cannot load the tokenizer {path}: {error}") from error
        missing = [m for m in REQUIRED if m not in added]
        if missing:
            raise CheckpointError(f"{path} lacks the token {missing[0]!r}: not a V4 tokenizer")
        self.special_ids = frozenset(special)
        self.added_ids = frozenset(added.values())
        self.ids = {m: added[m] for m in (*REQUIRED, *OPTIONAL) if m in added}
        self.size = 1 + max(max(vocab.values(), default=0), max(added.values()))
        alphabet = _byte_alphabet()
        self._bytes = [b""] * self.size
        for token, i in vocab.items():
            try:
                self._bytes[i] = bytes(alphabet[c] for c in token)
            except KeyError:  # an added token that also stands in the model's vocabulary
                self._bytes[i] = token.encode()
        for token, i in added.items():
            self._bytes[i] = token.encode()

    def marker_id(self, marker: Marker) -> int:
        """Raises: InvalidRequest if this tokenizer has no such control token."""
        try:
            return self.ids[marker]
        except KeyError:
            raise InvalidRequest(f"this model has no token {marker!r}") from None

    def encode(self, pieces: Iterable[str]) -> list[int]:
        """Ids of a rendered prompt. Neighbouring pieces of plain text are encoded as one text."""
        ids: list[int] = []
        text: list[str] = []
        for piece in pieces:
            if isinstance(piece, Marker):
                ids += self.encode_text("".join(text))
                text.clear()
                ids.append(self.marker_id(piece))
            else:
                text.append(piece)
        return ids + self.encode_text("".join(text))

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text; nothing in it is a control token."""
        if not text:
            return []
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def bytes_of(self, token_id: int) -> bytes:
        """The exact bytes that a token stands for; empty for padding rows of the vocabulary."""
        return self._bytes[token_id] if 0 <= token_id < self.size else b""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, markers written out; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.bytes_of, ids)).decode("utf-8", "replace")
