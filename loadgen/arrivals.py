"""When requests are due: endless iterators of nanoseconds since the start, from a seeded generator.

Rates are requests per second. Knows nothing of what is sent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from random import Random

from decant.protocol.errors import InvalidRequest

KINDS = ("poisson", "gamma", "constant", "burst", "ramp")
NS = 1_000_000_000


def constant(rate: float) -> Iterator[int]:
    """Request i at ``i / rate``."""
    return (round(i * NS / rate) for i in itertools.count())


def poisson(rate: float, rng: Random) -> Iterator[int]:
    """Independent arrivals: gaps are exponential with mean ``1 / rate``."""
    return gamma(rate, 1.0, rng)


def gamma(rate: float, burstiness: float, rng: Random) -> Iterator[int]:
    """Gaps are Gamma(shape = ``burstiness``, mean = ``1 / rate``): 1 is Poisson, below 1 bursty,
    large is nearly constant (the coefficient of variation is ``1 / sqrt(burstiness)``).
    """
    at = 0.0
    while True:
        at += rng.gammavariate(burstiness, 1.0 / (rate * burstiness))
        yield round(at * NS)


def burst(rate: float, size: int) -> Iterator[int]:
    """``size`` requests at once, every ``size / rate`` seconds."""
    return (round(i // size * size * NS / rate) for i in itertools.count())


def ramp(rate: float, rate_to: float, over_s: float, rng: Random) -> Iterator[int]:
    """Poisson with a rate that goes linearly from ``rate`` to ``rate_to`` in ``over_s`` and stays.

    The expected number until t is ``L(t) = rate t + (rate_to - rate) t^2 / (2 over_s)``; unit
    exponential sums are mapped back through its inverse.
    """
    slope = (rate_to - rate) / over_s
    at_end = (rate + rate_to) / 2 * over_s
    total = 0.0
    while True:
        total += rng.expovariate(1.0)
        if total >= at_end:
            at = over_s + (total - at_end) / rate_to
        else:
            # L(t) = total, written so that it holds for slope = 0 too
            at = 2 * total / (rate + math.sqrt(rate * rate + 2 * slope * total))
        yield round(at * NS)


def schedule(
    kind: str,
    rate: float,
    seed: int,
    *,
    num: int = 0,
    duration_s: float = 0.0,
    burstiness: float = 1.0,
    burst_size: int = 8,
    rate_to: float = 0.0,
) -> list[int]:
    """The due times of an open-loop run: the first ``num``, or those before ``duration_s``.

    With both, whichever ends first. Raises: InvalidRequest for an unknown kind or a bad number.
    """

    def need(ok: bool, text: str) -> None:
        if not ok:
            raise InvalidRequest(text)

    need(kind in KINDS, f"arrivals are one of {', '.join(KINDS)}, not {kind!r}")
    need(math.isfinite(rate) and rate > 0, f"the rate must be positive, not {rate}")
    need(num > 0 or duration_s > 0, "give a number of requests or a duration")
    need(burstiness > 0, "the burstiness must be positive")
    need(burst_size > 0, "the burst size must be positive")
    rng = Random(f"arrivals {seed}")
    if kind == "constant":
        times = constant(rate)
    elif kind == "poisson":
        times = poisson(rate, rng)
    elif kind == "gamma":
        times = gamma(rate, burstiness, rng)
    elif kind == "burst":
        times = burst(rate, burst_size)
    else:
        need(rate_to > 0, "a ramp needs --rate-to")
        over_s = duration_s or 2 * num / (rate + rate_to)
        times = ramp(rate, rate_to, over_s, rng)
    if duration_s > 0:
        end = round(duration_s * NS)
        times = itertools.takewhile(lambda at: at < end, times)
    return list(itertools.islice(times, num or None))
