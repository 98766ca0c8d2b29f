"""Length distributions in tokens: ``128``, ``uniform:64:256``, ``normal:128:32``,
``lognormal:128:0.8`` (median, sigma of the logarithm).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from decant.protocol.errors import InvalidRequest

Lengths = Callable[[Random], int]


def parse(text: str, most: int = 1 << 20) -> Lengths:
    """A function that draws a length from 1 to ``most``. Raises: InvalidRequest."""
    name, *rest = text.split(":")
    try:
        if not rest:
            name, numbers = "constant", [float(name)]
        else:
            numbers = [float(x) for x in rest]
        if not all(math.isfinite(x) and x >= 0 for x in numbers):
            raise ValueError
        draw = _draw(name, *numbers)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(
            f"a length is N, uniform:LOW:HIGH, normal:MEAN:SD or lognormal:MEDIAN:SIGMA, not {text}"
        ) from error
    return lambda rng: min(most, max(1, round(draw(rng))))


def _draw(name: str, first: float, second: float | None = None) -> Callable[[Random], float]:
    if name == "constant" and second is None:
        return lambda rng: first
    if second is None:
        raise ValueError
    if name == "uniform" and first <= second:
        return lambda rng: rng.randint(round(first), round(second))
    if name == "normal":
        return lambda rng: rng.gauss(first, second)
    if name == "lognormal" and first > 0:
        return lambda rng: rng.lognormvariate(math.log(first), second)
    raise ValueError
