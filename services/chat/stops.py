"""Stop strings on one text channel, with exact hold-back.

Held back is the longest suffix that is a proper prefix of some stop string, and nothing more; the
match that ends first wins, of two that end together the longer one. Both depend on the characters
only, not on how they arrive.
"""

from __future__ import annotations

from collections.abc import Sequence


def _borders(pattern: str) -> list[int]:
    """border[i]: length of the longest proper prefix of pattern[:i + 1] that is also its suffix.

    Source: Knuth, Morris, Pratt 1977."""
    border = [0] * len(pattern)
    for i in range(1, len(pattern)):
        k = border[i - 1]
        while k and pattern[i] != pattern[k]:
            k = border[k - 1]
        border[i] = k + (pattern[i] == pattern[k])
    return border


class StopMatcher:
    """Feed text with ``push``; after a match nothing more comes out."""

    def __init__(self, stops: Sequence[str], is_included: bool = False) -> None:
        """stops: non-empty strings. is_included: the matched string stays in the text."""
        self.matched = ""
        self._is_included = is_included
        self._patterns = [(s, _borders(s)) for s in sorted(set(stops), key=len, reverse=True)]
        self._lengths = [0] * len(self._patterns)  # matched prefix of each pattern
        self._held = ""

    def push(self, text: str) -> str:
        """What may be shown now. ``matched`` is set once a stop string is complete."""
        if self.matched:
            return ""
        if not self._patterns:
            return text
        buffer = self._held + text
        for i, char in enumerate(text, len(self._held)):
            for p, (pattern, border) in enumerate(self._patterns):
                k = self._lengths[p]
                while k and char != pattern[k]:
                    k = border[k - 1]
                k += char == pattern[k]
                self._lengths[p] = k
                if k == len(pattern):
                    self.matched, self._held = pattern, ""
                    end = i + 1
                    return buffer[: end if self._is_included else end - k]
        held = max(self._lengths)
        self._held = buffer[len(buffer) - held :]
        return buffer[: len(buffer) - held]

    def flush(self) -> str:
        """The text held back, when no more comes."""
        held, self._held = self._held, ""
        return "" if self.matched else held
