"""NVIDIA MPS for a set: its control daemon as a program of the set, in folders of its own, and the
one safe way to end a process that may have a kernel in flight.

Processes of one GPU are one failure domain under MPS: a client that dies with a kernel in flight
takes the others with it. So an end that is wanted goes: abort word of the group (its ranks stop
waiting for each other), a second to drain, ``terminate_client`` at the control daemon for each
rank, then SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from decant.protocol.config import Config
from decant.protocol.errors import ConfigError
from decant.services.process import run, stop

CONTROL = "nvidia-cuda-mps-control"
COMMAND_WAIT_S = 5.0
DRAIN_S = 1.0  # after the abort word
READY_WAIT_S = 20.0  # for the daemon's socket
POLL_S = 0.1
SHM = Path("/dev/shm")
ABORT_OFFSET = 16  # of the word in a step header: engine/gpu/header.py

log = structlog.get_logger()


def environment(run_dir: str) -> dict[str, str]:
    """What a client, and the daemon, must have in their environment."""
    return {
        "CUDA_MPS_PIPE_DIRECTORY": f"{run_dir}/mps",
        "CUDA_MPS_LOG_DIRECTORY": f"{run_dir}/logs",
    }


def tell(run_dir: str, command: str) -> str:
    """A command to the control daemon. Returns: its answer. Raises: OSError if it is away."""
    try:
        done = subprocess.run(
            [CONTROL],
            input=command + "\n",
            capture_output=True,
            text=True,
            timeout=COMMAND_WAIT_S,
            env={**os.environ, **environment(run_dir)},
        )
    except subprocess.TimeoutExpired as error:
        raise ConnectionError(f"the MPS daemon did not answer {command!r}") from error
    if done.returncode:
        raise ConnectionError(f"the MPS daemon: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def clients(run_dir: str) -> dict[int, int]:
    """Pid of every client -> pid of its server. Raises: OSError."""
    found = {}
    for server in _numbers(tell(run_dir, "get_server_list")):
        for client in _numbers(tell(run_dir, f"get_client_list {server}")):
            found[client] = server
    return found


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split() if word.isdigit()]


def family(pid: int) -> list[int]:
    """A process and its descendants: the leader of a group and its ranks."""
    found, waiting = [], [pid]
    while waiting:
        found.append(waiting.pop())
        for path in Path(f"/proc/{found[-1]}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                waiting += _numbers(path.read_text())
    return found


def set_abort(config: Config, group: str) -> int:
    """Set the abort word of a group (prefill, prefill1, decode). Returns: headers found."""
    names = list(SHM.glob(f"{config.shm_prefix}{group}-header.*"))
    for name in names:
        with contextlib.suppress(OSError), open(name, "r+b", buffering=0) as file:
            file.seek(ABORT_OFFSET)
            file.write((1).to_bytes(4, "little"))
    return len(names)


def end_clients(
    run_dir: str, pids: list[int], say: Callable[[str, str], str] = tell
) -> list[int]:
    """``terminate_client`` for those of ``pids`` that are clients. Returns: them. Errors of the
    daemon are logged: the kill that follows is better than a process that stays."""
    ended = []
    try:
        servers = _numbers(say(run_dir, "get_server_list"))
        for server in servers:
            for pid in set(pids) & set(_numbers(say(run_dir, f"get_client_list {server}"))):
                say(run_dir, f"terminate_client {server} {pid}")
                ended.append(pid)
    except OSError as error:
        log.error("a GPU process cannot be ended safely: others may end with it", error=str(error))
    return ended


def fence(config: Config, instance: str, pid: int) -> None:
    """All but the SIGKILL, blocking, for a leader and its ranks. Does nothing without MPS."""
    if not config.gpu.mps:
        return
    role, _, number = instance.rpartition("-")
    ranks = family(pid)
    if set_abort(config, f"{role}{number}" if number != "0" else role):
        end = time.monotonic() + DRAIN_S
        while time.monotonic() < end and Path(f"/proc/{pid}").exists():
            time.sleep(POLL_S)
    ended = end_clients(config.run_dir, ranks)
    log.info("fenced at the MPS daemon", instance=instance, ranks=len(ranks), clients=len(ended))


def end_all(config: Config, pids: list[int]) -> None:
    """Before processes of a set are killed."""
    if config.gpu.mps and pids and (Path(config.run_dir) / "mps" / "control").exists():
        for role in ("prefill", "decode", "draft"):
            set_abort(config, role)
        end_clients(config.run_dir, pids)


async def main(config: Config, instance: str) -> None:
    """Run the daemon in the foreground; at the end wait for its clients. Raises: ConfigError."""
    if shutil.which(CONTROL) is None:
        raise ConfigError(f"gpu.mps is set, but {CONTROL} is not on PATH (it is in CUDA's driver)")
    run_dir = config.run_dir
    folder = Path(run_dir) / "mps"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    daemon = await asyncio.create_subprocess_exec(
        CONTROL, "-f", env={**os.environ, **environment(run_dir)},
        stdin=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    ended = asyncio.create_task(daemon.wait())
    asked = asyncio.create_task(stop().wait())
    try:
        deadline = time.monotonic() + READY_WAIT_S
        while not (folder / "control").exists():
            if daemon.returncode is not None or time.monotonic() > deadline:
                raise ConfigError(f"the MPS daemon did not start; see {run_dir}/logs/control.log")
            await asyncio.sleep(POLL_S)
        log.info("MPS is there", folder=str(folder))
        await asyncio.wait((ended, asked), return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            raise ConnectionError("the MPS daemon ended: every GPU process ends with it")
        await _wait_for_clients(config)
        with contextlib.suppress(OSError):
            await asyncio.to_thread(tell, run_dir, "quit")
    finally:
        asked.cancel()
        if daemon.returncode is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(ended), COMMAND_WAIT_S)
        if daemon.returncode is None:
            daemon.send_signal(signal.SIGKILL)
            await ended


async def _wait_for_clients(config: Config) -> None:
    """The set stops all programs at once, and clients need the daemon to end in order."""
    deadline = time.monotonic() + config.router.drain_s
    with contextlib.suppress(OSError):
        while await asyncio.to_thread(clients, config.run_dir):
            if time.monotonic() > deadline:
                log.warning("clients are left at the end of MPS")
                return
            await asyncio.sleep(POLL_S)


if __name__ == "__main__":
    run("mps", main)
