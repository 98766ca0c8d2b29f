"""A timer that rings to within some microseconds, as a reader of the event loop.

Event loops round their timers to a millisecond, which alone would cost the whole budget of
lateness. Linux has ``timerfd``; elsewhere the loop's own timer serves.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress

TFD_TIMER_ABSTIME = 1
CLOCK_MONOTONIC = 1


class _Timespec(ctypes.Structure):
    _fields_ = [("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long)]


class _Itimerspec(ctypes.Structure):
    _fields_ = [("it_interval", _Timespec), ("it_value", _Timespec)]


class Alarm:
    """One pending time at most; ``set`` replaces it. Make it inside a running loop."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ring = ring
        self._handle: asyncio.TimerHandle | None = None
        self._fd = -1
        self._spec = _Itimerspec()
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            flags = os.O_NONBLOCK | os.O_CLOEXEC  # TFD_NONBLOCK and TFD_CLOEXEC are these values
            self._fd = self._libc.timerfd_create(CLOCK_MONOTONIC, flags)
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._on_readable)

    def set(self, at_ns: int) -> None:
        """Ring at this CLOCK_MONOTONIC time, at once if it is over."""
        if self._fd < 0:
            if self._handle:
                self._handle.cancel()
            self._handle = self._loop.call_at(
                self._loop.time() + (at_ns - time.monotonic_ns()) / 1e9, self._ring
            )
            return
        value = self._spec.it_value
        value.tv_sec, value.tv_nsec = divmod(max(at_ns, 1), 1_000_000_000)
        if self._libc.timerfd_settime(self._fd, TFD_TIMER_ABSTIME, ctypes.byref(self._spec), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _on_readable(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._fd, 8)
        self._ring()

    def close(self) -> None:
        if self._handle:
            self._handle.cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
