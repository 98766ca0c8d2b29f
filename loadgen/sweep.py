"""Search for the highest load within an SLO: double until a step fails, then bisect.

The search is a generator over rates; running a step is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct


class Step(Struct, frozen=True):
    rate: float
    is_within: bool


def highest(
    is_within: Callable[[float], bool],
    start: float,
    *,
    tolerance: float = 0.05,
    most: float = 1e5,
    max_steps: int = 24,
) -> tuple[float, list[Step]]:
    """The highest rate that passed, and all steps. 0 if none passed.

    Doubles (or halves) from ``start`` until one rate passed and one failed, then bisects
    geometrically until they are within ``tolerance`` of each other. Assumes that a rate above one
    that failed fails too; one noisy step can cost accuracy, never the end of the search.
    """
    steps: list[Step] = []
    low, high = 0.0, 0.0  # passed, failed; 0: none yet
    rate = start
    while len(steps) < max_steps:
        passed = is_within(rate)
        steps.append(Step(rate, passed))
        if passed:
            low = rate
        else:
            high = rate
        if not high:
            if rate >= most:
                break
            rate = min(most, rate * 2)
        elif not low:
            rate /= 2
            if rate < start / 256:
                break
        elif high / low <= 1 + tolerance:
            break
        else:
            rate = (low * high) ** 0.5
    return low, steps
