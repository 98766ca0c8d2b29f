"""Deaths and delays at named points, for tests of recovery. Off unless the environment asks.

``DECANT_FAILPOINT="decode.before_release:kill@3 prefill.after_publish:sleep=0.5"``: what happens at
a point, the n-th time it is passed (``@n``, default 1; ``sleep`` from then on). Actions:
``kill`` (SIGKILL to ourselves), ``exit`` (status 1), ``stop`` (SIGSTOP), ``sleep=SECONDS`` (blocks
the calling thread), ``raise`` (RuntimeError). ``?NUMBER`` limits it to passes that carry this mark:
decode marks a step with the seeds of its requests, so one request can be made poisonous.

``DECANT_FAILPOINT_DIR=FOLDER``: a file there with a point's name and an action as its content
(``kill@2``) happens once, in a running process: the file is removed by who acts on it.

Points of router and tokenizer are ``SERVICE.before_TAG`` and ``SERVICE.after_TAG`` of every message
that they receive (tags: ``protocol/messages.py``).
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ACTIONS = ("kill", "exit", "stop", "sleep", "raise")


@dataclass(frozen=True)
class Action:
    kind: str
    seconds: float = 0.0
    number: int = 1  # of the pass
    mark: int | None = None


def parse_action(text: str) -> Action:
    """``kill``, ``sleep=0.5``, ``exit@3``, ``exit@1?77``. Raises: ValueError."""
    what, _, mark = text.strip().partition("?")
    what, _, number = what.partition("@")
    kind, _, seconds = what.partition("=")
    if kind not in ACTIONS:
        raise ValueError(f"failpoint: {text!r} has no known action")
    return Action(kind, float(seconds or 0), int(number or 1), int(mark) if mark else None)


def parse(text: str) -> dict[str, Action]:
    """Point -> action. Raises: ValueError."""
    parts = (part.partition(":") for part in text.split())
    return {point: parse_action(what) for point, _, what in parts}


_passed: Counter[str] = Counter()
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


def _act(action: Action, point: str) -> None:
    if action.kind == "sleep":
        time.sleep(action.seconds)
    elif action.kind == "exit":
        os._exit(1)
    elif action.kind == "raise":
        raise RuntimeError(f"failpoint {point}")
    else:
        os.kill(os.getpid(), signal.SIGKILL if action.kind == "kill" else signal.SIGSTOP)
