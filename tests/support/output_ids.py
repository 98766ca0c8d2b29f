"""Token ids of a model's output that a test writes down as text."""

from __future__ import annotations

from collections.abc import Sequence

from decant.services.chat.markers import DSML, END_THINK, EOS, THINK, Marker
from decant.services.chat.vocabulary import Vocabulary


def ids_of(vocabulary: Vocabulary, text: str) -> list[int]:
    """``DSML|`` is written for the DSML token; the think and end tokens stand for themselves."""
    pieces: Sequence[str] = [text]
    for name, marker in (("DSML|", DSML), *((x, x) for x in (THINK, END_THINK, EOS))):
        split: list[str] = []
        for piece in pieces:
            if isinstance(piece, Marker):
                split.append(piece)
                continue
            first, *rest = piece.split(name)
            split.append(first)
            for part in rest:
                split += [marker, part]
        pieces = split
    return vocabulary.encode(pieces)
