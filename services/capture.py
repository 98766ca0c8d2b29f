"""Copies of frames for debugging: ``DECANT_CAPTURE=FILE`` makes every process append what its
sockets send and receive; ``decant wire FILE`` prints it.

The file is a sequence of msgpack maps, written whole with one append each, so processes can share
it. It is bounded: at ``MAX_BYTES`` a process stops, and only the first ``MAX_BLOB`` bytes of a
frame are kept. It holds prompts and answers; nobody writes one unless asked.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import msgspec

VARIABLE = "DECANT_CAPTURE"
MAX_BYTES = 64 << 20
MAX_BLOB = 4096
NUM_PLAIN = 2  # header and body are kept whole up to MAX_BODY
MAX_BODY = 1 << 20
CHECK_EVERY = 64  # records between two looks at the file's size (other processes write too)


class Capture:
    """An open capture file."""

    def __init__(self, path: str, limit: int = MAX_BYTES) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._limit = limit
        self._pid = os.getpid()
        self._num = 0
        self.is_full = False

    def write(self, direction: str, endpoint: str, frames: Sequence[bytes | memoryview]) -> None:
        """Append one message. direction: "in" or "out". Errors end the capture, nothing else."""
        if self.is_full:
            return
        kept = [
            bytes(frame[: MAX_BODY if i < NUM_PLAIN else MAX_BLOB])
            for i, frame in enumerate(frames)
        ]
        record = {
            "at_ns": time.time_ns(),
            "pid": self._pid,
            "direction": direction,
            "endpoint": endpoint,
            "sizes": [len(frame) for frame in frames],
            "frames": kept,
        }
        try:
            if self._num % CHECK_EVERY == 0:
                self.is_full = os.fstat(self._descriptor).st_size >= self._limit
            if not self.is_full:
                os.write(self._descriptor, msgspec.msgpack.encode(record))
        except OSError:
            self.is_full = True
        self._num += 1


def from_environment() -> Capture | None:
    """The capture of this process, if ``DECANT_CAPTURE`` names a file that we can write."""
    path = os.environ.get(VARIABLE)
    try:
        return Capture(path) if path else None
    except OSError:
        return None
