"""Deaths and delays at named points, for tests of recovery. Off unless the environment asks.

``DECANT_FAILPOINT="decode.before_release:kill@3 prefill.after_publish:sleep=0.5"``: what happens at
a point, the n-th time it is passed (``@n``, default 1; ``sleep`` from then on). Actions:
``kill`` (SIGKILL to ourselves), ``exit`` (status 1), ``stop`` (SIGSTOP), ``sleep=SECONDS`` (blocks
the calling thread), ``raise`` (RuntimeError). ``?NUMBER`` limits it to passes that carry this mark:
decode marks a step with the seeds of its requests, so one request can be made poisonous.

``DECANT_FAILPOINT_DIR=FOLDER``: a file there with a point's name and an action as its content
(``kill@2``) happens once, in a running process: the file is removed by who acts on it.

``link.send:drop=0.01`` loses that share of all messages that the process sends; ``stall=0.01``
holds that share, and what comes after them on the same socket, for 0.2 to 2 s. As a file it counts
as long as it is there.

Points of router and tokenizer are ``SERVICE.before_TAG`` and ``SERVICE.after_TAG`` of every message
that they receive (tags: ``protocol/messages.py``).
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ACTIONS = ("kill", "exit", "stop", "sleep", "raise", "drop", "stall")
STALL_S = (0.2, 2.0)
SEEN_S = 0.5


@dataclass(frozen=True)
class Action:
    kind: str
    value: float = 0.0  # seconds of a sleep, share of drop and stall
    number: int = 1  # of the pass
    mark: int | None = None


def parse_action(text: str) -> Action:
    """``kill``, ``sleep=0.5``, ``exit@3``, ``exit@1?77``. Raises: ValueError."""
    what, _, mark = text.strip().partition("?")
    what, _, number = what.partition("@")
    kind, _, value = what.partition("=")
    if kind not in ACTIONS:
        raise ValueError(f"failpoint: {text!r} has no known action")
    return Action(kind, float(value or 0), int(number or 1), int(mark) if mark else None)


def parse(text: str) -> dict[str, Action]:
    """Point -> action. Raises: ValueError."""
    parts = (part.partition(":") for part in text.split())
    return {point: parse_action(what) for point, _, what in parts}


_passed: Counter[str] = Counter()
_seen: dict[str, tuple[float, Action | None]] = {}  # until when, what
_points = parse(os.environ.get("DECANT_FAILPOINT", ""))
_folder = os.environ.get("DECANT_FAILPOINT_DIR", "")
IS_ON = bool(_points or _folder)


def hit(point: str, marks: Iterable[int] = ()) -> None:
    """We are at this point, with these marks."""
    if not IS_ON:
        return
    action, path = _points.get(point), None
    if action is None and _folder:
        path = Path(_folder) / point
        try:
            action = parse_action(path.read_text())
        except (OSError, ValueError):
            return
    if action is None or (action.mark is not None and action.mark not in marks):
        return
    _passed[point] += 1
    if _passed[point] < action.number or (
        _passed[point] > action.number and action.kind != "sleep"
    ):
        return
    if path is not None:
        _passed[point] = 0
        try:
            path.unlink()
        except FileNotFoundError:
            return  # another process of the service was first
    _act(action, point)


def fate(point: str) -> float | None:
    """Of one message: seconds to hold it, mostly 0; None: it is lost."""
    action = _points.get(point) or _standing(point)
    if action is None or random.random() >= action.value:
        return 0.0
    return None if action.kind == "drop" else random.uniform(*STALL_S)


def _standing(point: str) -> Action | None:
    """What a file says that is not removed; looked at twice a second."""
    now = time.monotonic()
    due, action = _seen.get(point, (0.0, None))
    if now >= due:
        try:
            action = parse_action((Path(_folder) / point).read_text()) if _folder else None
        except (OSError, ValueError):
            action = None
        _seen[point] = now + SEEN_S, action
    return action


def _act(action: Action, point: str) -> None:
    if action.kind == "sleep":
        time.sleep(action.value)
    elif action.kind == "exit":
        os._exit(1)
    elif action.kind == "raise":
        raise RuntimeError(f"failpoint {point}")
    else:
        os.kill(os.getpid(), signal.SIGKILL if action.kind == "kill" else signal.SIGSTOP)
