"""What a request record decides: the words between ``records.py`` and whoever carries them out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from decant.protocol.messages import Message


class State(IntEnum):
    QUEUED = 0
    RESERVING = 1
    PREFILLING = 2
    HANDOFF = 3
    DECODING = 4
    DONE = 5
    RESUMING = 6
    CANCELLING = 7
    CLOSED = 8


class Ref(NamedTuple):
    """One incarnation of a worker."""

    instance: str
    incarnation: str


@dataclass(frozen=True)
class ToGateway:
    body: Message
    blobs: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class ToWorker:
    worker: Ref
    body: Message
    blobs: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Enqueue:
    """This lane waits for a decode and a prefill worker (``Record.place``), not before a time."""

    lane: int
    not_before_s: float
    is_resume: bool


@dataclass(frozen=True)
class Dequeue:
    """None of this request's lanes waits any more."""


@dataclass(frozen=True)
class Proved:
    """A lane reached decoding by way of these two."""

    decode: Ref
    prefill: Ref


@dataclass(frozen=True)
class Count:
    """For the metrics: resumes (cause, stage), stale (type), refused (reason), failed (code),
    preempted.
    """

    what: str
    labels: tuple[str, ...] = ()


Decision = ToGateway | ToWorker | Enqueue | Dequeue | Proved | Count
