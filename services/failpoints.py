"""Deaths and delays at named points, for tests of recovery. Off unless ``DECANT_FAILPOINT`` is set.

``DECANT_FAILPOINT="decode.before_release:kill@3 prefill.after_publish:sleep=0.5"``: what happens at
a point, the n-th time it is passed (``@n``, default 1; ``sleep`` from then on). Actions:
``kill`` (SIGKILL to ourselves), ``exit`` (status 1), ``stop`` (SIGSTOP), ``sleep=SECONDS`` (blocks
the calling thread), ``raise`` (RuntimeError).
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter

_passed: Counter[str] = Counter()


def _parse(text: str) -> dict[str, tuple[str, float, int]]:
    """Point -> (action, seconds, n). Raises: ValueError."""
    result = {}
    for part in text.split():
        point, _, what = part.partition(":")
        what, _, number = what.partition("@")
        action, _, seconds = what.partition("=")
        if action not in ("kill", "exit", "stop", "sleep", "raise"):
            raise ValueError(f"DECANT_FAILPOINT: {part!r} has no known action")
        result[point] = (action, float(seconds or 0), int(number or 1))
    return result


_points = _parse(os.environ.get("DECANT_FAILPOINT", ""))


def hit(point: str) -> None:
    """We are at this point."""
    if point not in _points:
        return
    _passed[point] += 1
    action, seconds, number = _points[point]
    if action == "sleep" and _passed[point] >= number:
        time.sleep(seconds)
    elif _passed[point] == number:
        if action == "exit":
            os._exit(1)
        if action == "raise":
            raise RuntimeError(f"failpoint {point}")
        os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)
