"""Processes by pid: noticing that one has ended, and ending one for certain (fencing).

Knows pids, signals and how a process ended (``exits.py``); nothing of requests. A process is held
by a pidfd from the moment it said Hello, so that a reused pid can never be hit; and nobody can have
another one killed by its Hello, because the kernel says who sent it (``may_name``).
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from decant.protocol.config import Config
from decant.services import exits

FENCE_LOG_S = 5.0  # a killed process that does not go away is reported this often
EXIT_WAIT_S = 1.0  # for supervisord's word on how a process ended
EXIT_POLL_S = 0.05
BEFORE_KILL_S = 15.0

ExitReason = Callable[[int], bool | None]
"""pid -> it ended by itself (True), was ended from outside (False), not known yet (None)."""

log = structlog.get_logger()


def unknown(pid: int) -> bool | None:
    """The default: an end is taken for an outside kill."""
    return False


def may_name(sender: int, pid: int) -> bool:
    """Whether a process may introduce this one: itself, or a child (of a child ...) of its own.

    sender: as the kernel says; 0: it did not (not a Unix socket), then anybody of our user may be
    named.
    """
    while sender and pid != sender:
        try:
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            pid = int(words[1])
        except (OSError, ValueError, IndexError):
            return False
        if pid <= 1:
            return False
    return True


def supervisord_says(config: Config) -> ExitReason:
    """Exit reasons from the log of the supervisord of our run directory."""

    def reason(pid: int) -> bool | None:
        if not os.path.exists(f"{config.run_dir}/logs/supervisord.log"):
            return False
        found = exits.exit_reason(config.run_dir, pid)
        return None if found is None else found.is_own_fault

    return reason


@dataclass
class _Watched:
    pid: int
    descriptor: int  # pidfd; -1: none
    is_fenced: bool = False
    status: int | None = None  # wait status, once it has ended and we know


class Reaper:
    """``watch`` every process; ``on_exit(key)`` is called as soon as one has ended, then
    ``on_ended(key, is_own_fault)`` once it is known how.
    """

    def __init__(
        self,
        on_exit: Callable[[str], object],
        on_ended: Callable[[str, bool], object],
        exit_reason: ExitReason = unknown,
    ) -> None:
        self._on_exit, self._on_ended, self._exit_reason = on_exit, on_ended, exit_reason
        self._watched: dict[str, _Watched] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, key: str, pid: int) -> None:
        """key: the incarnation. A process of another user, or ourselves, is only believed, not
        watched or killed.
        """
        if key in self._watched or pid == os.getpid():
            return
        try:
            descriptor = os.pidfd_open(pid)
            if os.stat(f"/proc/{pid}").st_uid != os.getuid():
                os.close(descriptor)
                return
        except OSError:
            self._spawn(self._report(key, _Watched(pid, -1)))
            return
        self._watched[key] = _Watched(pid, descriptor)
        asyncio.get_running_loop().add_reader(descriptor, self._exited, key)

    def fence(self, key: str, before: Callable[[int], object] | None = None) -> None:
        """Kill it with SIGKILL; ``on_ended(key, False)`` follows when it is gone, not before.

        before: called with the pid in a thread, before the kill: what must be done first so that
        others do not die with it (services/mps.py).
        """
        watched = self._watched.get(key)
        if watched is None:
            self._spawn(self._report(key, _Watched(0, -1, is_fenced=True)))
            return
        watched.is_fenced = True
        self._spawn(self._kill(key, watched, before))

    def close(self) -> None:
        for key in list(self._watched):
            if (watched := self._release(key)) is not None:
                os.close(watched.descriptor)
        for task in self._tasks:
            task.cancel()

    def _spawn(self, job: object) -> None:
        task = asyncio.ensure_future(job)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _release(self, key: str) -> _Watched | None:
        """Stop watching; the descriptor stays open."""
        watched = self._watched.pop(key, None)
        if watched is not None:
            asyncio.get_running_loop().remove_reader(watched.descriptor)
        return watched

    def _exited(self, key: str) -> None:
        watched = self._release(key)
        if watched is not None:
            # NOTE: now, before its parent reaps it: older kernels forget how it ended.
            watched.status = exits.wait_status(watched.pid, watched.descriptor)
            self._on_exit(key)
            self._spawn(self._report(key, watched))

    async def _kill(
        self, key: str, watched: _Watched, before: Callable[[int], object] | None
    ) -> None:
        if before is not None:
            try:
                async with asyncio.timeout(BEFORE_KILL_S):
                    await asyncio.to_thread(before, watched.pid)
            except Exception:
                log.exception("a process is killed unprepared", pid=watched.pid)
        while self._watched.get(key) is watched:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(watched.descriptor, signal.SIGKILL)
            await asyncio.sleep(FENCE_LOG_S)
            if self._watched.get(key) is watched:
                log.error("a killed process is still there", pid=watched.pid)

    async def _report(self, key: str, watched: _Watched) -> None:
        try:
            is_own_fault = not watched.is_fenced and await self._is_own_fault(watched)
        finally:
            if watched.descriptor >= 0:
                os.close(watched.descriptor)
        self._on_ended(key, is_own_fault)

    async def _is_own_fault(self, watched: _Watched) -> bool:
        """supervisord may have asked it to end, which only its log says. If there is none to be
        had (a full disk), a bad end is its own.
        """
        deadline = time.monotonic() + EXIT_WAIT_S
        while True:
            if watched.status is None and watched.descriptor >= 0:
                watched.status = exits.wait_status(watched.pid, watched.descriptor)
            if watched.status is not None and exits.is_outside(watched.status):
                return False
            said = await asyncio.to_thread(self._exit_reason, watched.pid)
            if said is not None:
                return said
            if time.monotonic() > deadline:
                return watched.status is not None
            await asyncio.sleep(EXIT_POLL_S)
