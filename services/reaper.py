"""Processes by pid: noticing that one has ended, and ending one for certain (fencing).

Knows pids, signals and how supervisord says that a process ended; nothing of requests. A process is
held by a pidfd from the moment it said Hello, so that a reused pid can never be hit.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import structlog

from decant.protocol.config import Config
from decant.services import exits

FENCE_LOG_S = 5.0  # a killed process that does not go away is reported this often
EXIT_WAIT_S = 1.0  # for supervisord's word on how a process ended
EXIT_POLL_S = 0.05

ExitReason = Callable[[int], bool | None]
"""pid -> it ended by itself (True), was ended from outside (False), not known yet (None)."""

log = structlog.get_logger()


def unknown(pid: int) -> bool | None:
    """The default: an end is taken for an outside kill."""
    return False


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
    descriptor: int
    is_fenced: bool = False


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
            self._spawn(self._report(key, pid, is_fenced=False))
            return
        self._watched[key] = _Watched(pid, descriptor)
        asyncio.get_running_loop().add_reader(descriptor, self._exited, key)

    def fence(self, key: str, why: str) -> None:
        """Kill it with SIGKILL; ``on_ended(key, False)`` follows when it is gone, not before."""
        watched = self._watched.get(key)
        if watched is None:
            self._spawn(self._report(key, 0, is_fenced=True))
            return
        watched.is_fenced = True
        self._spawn(self._kill(key, watched))

    def close(self) -> None:
        for key in list(self._watched):
            self._release(key)
        for task in self._tasks:
            task.cancel()

    def _spawn(self, job: object) -> None:
        task = asyncio.ensure_future(job)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _release(self, key: str) -> _Watched | None:
        watched = self._watched.pop(key, None)
        if watched is not None:
            asyncio.get_running_loop().remove_reader(watched.descriptor)
            os.close(watched.descriptor)
        return watched

    def _exited(self, key: str) -> None:
        watched = self._release(key)
        if watched is not None:
            self._on_exit(key)
            self._spawn(self._report(key, watched.pid, watched.is_fenced))

    async def _kill(self, key: str, watched: _Watched) -> None:
        while self._watched.get(key) is watched:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(watched.descriptor, signal.SIGKILL)
            await asyncio.sleep(FENCE_LOG_S)
            if self._watched.get(key) is watched:
                log.error("a killed process is still there", pid=watched.pid)

    async def _report(self, key: str, pid: int, is_fenced: bool) -> None:
        is_own_fault: bool | None = False
        if not is_fenced:
            is_own_fault, waited_s = None, 0.0
            while is_own_fault is None and waited_s < EXIT_WAIT_S:
                is_own_fault = await asyncio.to_thread(self._exit_reason, pid)
                if is_own_fault is None:
                    await asyncio.sleep(EXIT_POLL_S)
                    waited_s += EXIT_POLL_S
        self._on_ended(key, bool(is_own_fault))
