"""The shared life of a process: arguments, run directory, lock, event loop, signals, parent watch.

A service's file ends with::

    if __name__ == "__main__":
        run("decode", main)            # main: async def main(config: Config, instance: str) -> None

and its ``main`` asks for ``stop()``, an ``asyncio.Event``:

* It is set by the first SIGTERM or SIGINT (and may be set by the service, for instance on a
  ``Drain`` message). ``main`` then takes no new work, finishes or hands back what it has, within
  ``config.router.drain_s``, and returns: exit status 0.
* A second signal, or the death of the parent (supervisord), cancels ``main``; if it has not ended
  ``GRACE_S`` later, the process exits hard with status 1.
* ``main`` returning ends the process. A ConfigError gives one sentence on stderr and status 2, any
  other exception is logged and gives status 1; supervisord starts the process anew. (It does so at
  once; only who lived less than a second waits longer each time.)

While the process lives it holds a file lock ``INSTANCE.process`` in the run directory; a successor
waits for it, bounded, before ``main`` starts: two processes never bind one instance's sockets.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import faulthandler
import fcntl
import functools
import importlib.metadata
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn

import structlog
import uvloop

from decant.protocol.config import Config, load
from decant.protocol.errors import ConfigError
from decant.services import logs

LOCK_WAIT_S = 60.0
GRACE_S = 5.0
YOUNG_S, PAUSE_S = 10.0, 1.0  # who fails so early pauses, for a failing start must not fill a core
LAG_PERIOD_S = 0.25
PR_SET_PDEATHSIG = 1

Main = Callable[[Config, str], Coroutine[Any, Any, None]]

_stop: ContextVar[asyncio.Event] = ContextVar("stop")
_lags: list[float] = []  # ms, the last seconds; written by the watcher alone


def stop() -> asyncio.Event:
    """The stop event of this process. In a test without ``run``: a fresh one per context."""
    event = _stop.get(None)
    if event is None:
        event = asyncio.Event()
        _stop.set(event)
    return event


def loop_lag_ms() -> float:
    """Largest delay of the event loop during the last few seconds, in milliseconds."""
    return max(_lags, default=0.0)


@functools.cache
def build() -> str:
    """Version of this build, for Hello and metrics."""
    try:
        return importlib.metadata.version("decant")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"


def check_run_dir(path: str) -> None:
    """Raises: ConfigError unless the run directory exists, is ours and closed to others."""
    if not path:
        raise ConfigError("run_dir is not set in the configuration")
    try:
        info = os.stat(path)
    except OSError as error:
        raise ConfigError(f"run directory {path}: {error.strerror}") from error
    if not stat.S_ISDIR(info.st_mode):
        raise ConfigError(f"run directory {path} is not a directory")
    if info.st_uid != os.getuid():
        raise ConfigError(f"run directory {path} belongs to another user")
    if info.st_mode & 0o077:
        raise ConfigError(f"run directory {path} is open to others; its mode must be 0700")


def lock(path: str, wait_s: float = LOCK_WAIT_S) -> int:
    """Take the file lock ``path``, waiting for a predecessor. Returns: the descriptor to keep.

    Raises: ConfigError if somebody still holds it after ``wait_s``.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline, is_told = time.monotonic() + wait_s, False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                raise ConfigError(f"another process holds {path}") from None
            if not is_told:
                is_told = True
                structlog.get_logger().info("waiting for the predecessor's lock", path=path)
            time.sleep(0.1)


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask the kernel for a signal when the parent's thread that started us ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)


async def _watch(parent: int, kill: Callable[[str], None]) -> None:
    """Measure the loop's lag; end the process when its parent is gone."""
    keep = int(5 / LAG_PERIOD_S)
    while True:
        due = time.monotonic() + LAG_PERIOD_S
        await asyncio.sleep(LAG_PERIOD_S)
        _lags.append((time.monotonic() - due) * 1e3)
        del _lags[:-keep]
        if os.getppid() != parent:
            kill("the parent process is gone")


async def _supervise(main: Main, config: Config, instance: str, parent: int) -> None:
    """Run ``main`` under the rules of the module's docstring."""
    log = structlog.get_logger()
    event = stop()
    loop = asyncio.get_running_loop()
    task = loop.create_task(main(config, instance))

    def kill(why: str) -> None:
        if not task.done() and not task.cancelling():
            log.warning("stopping at once", why=why)
            task.cancel()
            loop.call_later(GRACE_S, os._exit, 1)

    def on_signal(number: int) -> None:
        if os.getppid() != parent:
            kill("the parent process is gone")
        elif event.is_set():
            kill(f"second signal {signal.Signals(number).name}")
        else:
            log.info("stopping", signal=signal.Signals(number).name)
            event.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    watch = loop.create_task(_watch(parent, kill))
    try:
        await task
    except asyncio.CancelledError:
        if not task.cancelled():
            raise
    finally:
        watch.cancel()


def run(service: str, main: Main) -> None:
    """Parse ``--config FILE --instance NAME``, prepare the process, run ``main``, exit.

    Never returns: ends in SystemExit with the statuses of the module's docstring.
    """
    parser = argparse.ArgumentParser(
        prog=f"decant.services.{service}", description=f"The {service} process of decant."
    )
    parser.add_argument("--config", required=True, type=Path, help="resolved configuration (TOML)")
    parser.add_argument("--instance", default=f"{service}-0", help="name, %(default)s")
    arguments = parser.parse_args()
    parent, begun_s = os.getppid(), time.monotonic()

    def fail(status: int) -> NoReturn:
        if time.monotonic() - begun_s < YOUNG_S:
            time.sleep(PAUSE_S)
        sys.exit(status)

    faulthandler.enable()
    os.umask(0o077)
    descriptor = -1
    try:
        config = load(arguments.config)
        check_run_dir(config.run_dir)
        logs.setup(service, arguments.instance, config)
        die_with_parent()
        descriptor = lock(f"{config.run_dir}/{arguments.instance}.process")
        structlog.get_logger().info("starting", build=build())
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_supervise(main, config, arguments.instance, parent))
    except ConfigError as error:
        print(f"{arguments.instance}: {error.message}", file=sys.stderr, flush=True)
        fail(2)
    except KeyboardInterrupt:
        sys.exit(1)
    except BaseException:
        structlog.get_logger().exception("the process failed")
        fail(1)
    finally:
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)
    structlog.get_logger().info("stopped")
    # NOTE: everything is closed. The interpreter's own end takes torch seconds on a busy machine,
    # during which a successor would wait for our lock and sockets.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
