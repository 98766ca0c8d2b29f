"""Prompt text by content class, made from a seed: prose, code, JSON, maths.

Draft models guess code and JSON far better than prose, so acceptance is only comparable per class.
Text is cut to a number of characters; how many tokens that is, ``probe.py`` measures on the server.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

from decant.protocol.errors import InvalidRequest

CLASSES = ("prose", "code", "json", "maths")

_NOUNS = [
    "river",
    "harbour",
    "lantern",
    "garden",
    "letter",
    "winter",
    "village",
    "teacher",
    "bridge",
    "market",
    "engine",
    "island",
    "forest",
    "painter",
    "kitchen",
    "window",
    "captain",
    "orchard",
    "station",
    "mountain",
]
_VERBS = [
    "crossed",
    "repaired",
    "described",
    "followed",
    "carried",
    "painted",
    "measured",
    "remembered",
    "sold",
    "kept",
]
_ADJECTIVES = [
    "quiet",
    "narrow",
    "distant",
    "broken",
    "early",
    "careful",
    "heavy",
    "bright",
    "small",
    "forgotten",
]
_PLACES = [
    "near the old mill",
    "before the rain",
    "at the edge of town",
    "for many years",
    "in the end",
]
_NAMES = [
    "total",
    "count",
    "index",
    "value",
    "buffer",
    "items",
    "limit",
    "result",
    "offset",
    "width",
]

TASKS = {
    "prose": "Continue this text in the same tone.",
    "code": "Write the next function of this file. Answer with code only.",
    "json": "Answer with one more object of the same form, as JSON only.",
    "maths": "Work out the next lines step by step.",
}


def text(kind: str, num_chars: int, rng: Random) -> str:
    """Text of exactly ``num_chars`` characters. Raises: InvalidRequest for an unknown class."""
    make = _MAKERS.get(kind)
    if make is None:
        raise InvalidRequest(f"a content class is one of {', '.join(CLASSES)}, not {kind!r}")
    pieces: list[str] = []
    size = 0
    while size < num_chars:
        piece = make(rng)
        pieces.append(piece)
        size += len(piece)
    return "".join(pieces)[:num_chars]


def _prose(rng: Random) -> str:
    pick = rng.choice
    return (
        f"The {pick(_ADJECTIVES)} {pick(_NOUNS)} {pick(_VERBS)} the {pick(_NOUNS)} "
        f"{pick(_PLACES)}, and the {pick(_NOUNS)} {pick(_VERBS)} a {pick(_ADJECTIVES)} "
        f"{pick(_NOUNS)}. "
    )


def _code(rng: Random) -> str:
    name, a, b = rng.choice(_NOUNS), *rng.sample(_NAMES, 2)
    return (
        f"def {rng.choice(_VERBS)}_{name}({a}: int, {b}: int) -> int:\n"
        f"    if {a} > {rng.randint(1, 99)}:\n        return {a} - {b}\n"
        f"    return {b} * {rng.randint(2, 9)}\n\n"
    )


def _json(rng: Random) -> str:
    row = {
        "id": rng.randint(1, 99_999),
        "name": f"{rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)}",
        rng.choice(_NAMES): rng.randint(0, 999),
        "is_open": rng.random() < 0.5,
    }
    return json.dumps(row) + ",\n"


def _maths(rng: Random) -> str:
    a, b, c = rng.randint(2, 99), rng.randint(2, 99), rng.randint(2, 9)
    return f"({a} + {b}) * {c} = {a + b} * {c} = {(a + b) * c}\n"


_MAKERS: dict[str, Callable[[Random], str]] = {
    "prose": _prose,
    "code": _code,
    "json": _json,
    "maths": _maths,
}


def parse_mix(spec: str) -> dict[str, float]:
    """``prose`` or ``prose=3,code=1`` to shares. Raises: InvalidRequest."""
    shares: dict[str, float] = {}
    for part in spec.split(","):
        name, _, weight = part.strip().partition("=")
        try:
            shares[name] = float(weight or 1)
        except ValueError as error:
            raise InvalidRequest(f"{part!r}: a share is a number") from error
        if name not in CLASSES or not shares[name] > 0:
            raise InvalidRequest(f"{part!r}: expected CLASS=SHARE with {', '.join(CLASSES)}")
    return shares
