"""supervisord as we run it: ``python -P -m decant.services.supervisord_main -c FILE [--warm]``.

Three things are ours. Its logs may fail: it reports what it cannot write to its log on its stderr;
where that is on the same full disk, the report's own failure ends it, and with it the whole set.
Here it drops such lines, and writes again once there is room. A program's descriptors are closed by
one call instead of 65,536. And with ``--warm`` workers are forked by the nursery, if they can be.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from typing import Any

from supervisor import loggers, options, process, supervisord

from decant.services.nursery import Nursery, can_raise

PR_SET_CHILD_SUBREAPER = 36


def forgive() -> None:
    """From now on no logger of supervisord raises for want of room."""
    close, roll = loggers.Handler.close, loggers.RotatingFileHandler.doRollover

    def quiet_close(self: Any) -> None:
        with suppress(OSError):
            close(self)

    def quiet_roll(self: Any) -> None:
        with suppress(OSError):
            if self.stream.closed:  # a rotation failed in the middle
                self.stream = open(self.baseFilename, "ab")  # noqa: SIM115
            roll(self)

    loggers.Handler.handleError = lambda self: None
    loggers.Handler.close = quiet_close
    loggers.RotatingFileHandler.doRollover = quiet_roll


def close_at_once() -> None:
    """A child's descriptors are closed in one system call."""

    def prepare(self: Any) -> None:
        given = self.config.options
        given.dup2(self.pipes["child_stdin"], 0)
        given.dup2(self.pipes["child_stdout"], 1)
        is_joined = self.config.redirect_stderr
        given.dup2(self.pipes["child_stdout" if is_joined else "child_stderr"], 2)
        os.closerange(3, given.minfds)

    process.Subprocess._prepare_child_fds = prepare


def warm() -> None:
    """Let the nursery fork what it can; whatever it cannot is executed as usual."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    nursery = Nursery()
    nursery.start()
    spawning: list[Any] = []  # the process whose fork is next
    spawn = process.Subprocess.spawn

    def noted_spawn(self: Any) -> Any:
        spawning.append(self)
        try:
            return spawn(self)
        finally:
            spawning.clear()

    def fork(self: Any) -> int:
        pid = _raise(nursery, spawning[0]) if spawning else 0
        return pid or os.fork()

    process.Subprocess.spawn = noted_spawn
    options.ServerOptions.fork = fork


def _raise(nursery: Nursery, wanted: Any) -> int:
    environment = {**os.environ, **(wanted.config.environment or {})}
    arguments = can_raise(wanted.get_execv_args()[1], environment)
    if not arguments or wanted.config.uid is not None:
        return 0
    pipes = wanted.pipes
    is_joined = wanted.config.redirect_stderr
    stderr = pipes["child_stdout" if is_joined else "child_stderr"]
    standard = [pipes["child_stdin"], pipes["child_stdout"], stderr]
    return nursery.fork(arguments, environment, standard)


if __name__ == "__main__":
    words = sys.argv[1:]
    forgive()
    close_at_once()
    if "--warm" in words:
        words.remove("--warm")
        warm()
    supervisord.main(words)
