"""Processes of a TP group: locks, forked ranks, command channels, and the end of all when one ends.

Rank 0 leads and is the process that supervisord knows; the others are its forked children. Nothing
here knows what a command does.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import os
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog
import torch
from torch import Tensor

from decant.protocol.errors import ConfigError, DecantError, EngineError, HandoffError, KVPageError

LOCK_WAIT_S = 30.0  # for a predecessor's death
START_WAIT_S = 120.0  # for a follower to load its weights
COMMAND_WAIT_S = 120.0  # for a follower's answer
GATHER_WAIT_S = 120.0
MAX_FRAME_BYTES = 1 << 30
_PR_SET_PDEATHSIG = 1

T = TypeVar("T")

log = structlog.get_logger()


def lock_rank(run_dir: str, role: str, rank: int) -> int:
    """Take the rank's file lock for the life of the process; waits for a predecessor to be gone.

    Returns: the descriptor that holds the lock. Raises: ConfigError after LOCK_WAIT_S."""
    path = Path(run_dir) / f"{role}-rank{rank}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline, is_logged = time.monotonic() + LOCK_WAIT_S, False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise ConfigError(f"another {role} process still holds {path}") from None
        if not is_logged:
            log.info("waiting for the predecessor's lock", role=role, rank=rank)
            is_logged = True
        time.sleep(0.05)


def unlock(descriptor: int) -> None:
    """Give a rank's lock back; -1 is none."""
    if descriptor >= 0:
        os.close(descriptor)


class Channel:
    """Frames over a socket pair; one request at a time, each with one answer."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()

    def send(self, frame: bytes) -> None:
        self._sock.sendall(struct.pack("<I", len(frame)) + frame)

    def receive(self, timeout_s: float | None) -> bytes:
        """Raises: EOFError if the other side is gone, TimeoutError."""
        self._sock.settimeout(timeout_s)
        (size,) = struct.unpack("<I", self._exactly(4))
        if size > MAX_FRAME_BYTES:
            raise EOFError("a frame is too large")
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self._sock.recv(min(1 << 20, size - len(parts)))
            if not part:
                raise EOFError("the other rank is gone")
            parts += part
        return bytes(parts)

    def close(self) -> None:
        self._sock.close()


def run_on_all(
    channels: list[Channel], lock: threading.Lock, frame: bytes, local: Callable[[], T]
) -> T:
    """Send a command to all followers, run it here, collect the answers.

    Raises: what ``local`` raises, else the first follower's error."""
    with lock:
        for channel in channels:
            channel.send(frame)
        try:
            result = local()
        finally:
            answers = [msgspec.msgpack.decode(c.receive(COMMAND_WAIT_S)) for c in channels]
    for answer in answers:
        if answer is not None:
            kind, message = answer
            kinds = {"HandoffError": HandoffError, "KVPageError": KVPageError}
            raise kinds.get(kind, EngineError)(message)
    return result


def serve(channel: Channel, handle: Callable[[bytes], None]) -> None:
    """A follower's loop: run commands until an empty frame or the end of the channel. An error of
    ours is answered; any other ends the process, and with it the group."""
    while True:
        try:
            frame = channel.receive(None)
        except (EOFError, OSError):
            return
        if not frame:
            return
        answer: list[str] | None = None
        try:
            handle(frame)
        except DecantError as error:
            answer = [type(error).__name__, error.message]
        channel.send(msgspec.msgpack.encode(answer))


def die_with_parent(parent: int) -> None:
    """The kernel kills this process when the thread that forked it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def join_gloo(file: str, rank: int, tp: int) -> Callable[[Tensor], Tensor]:
    """Join the group's collectives; returns the all-gather of K-shards, in rank order."""
    dist: Any = importlib.import_module("torch.distributed")  # its stubs lack what we use

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(file, tp)
    ranks = dist.ProcessGroupGloo(store, rank, tp, timedelta(seconds=GATHER_WAIT_S))

    def gather(shards: Tensor) -> Tensor:
        """[shards of this rank, rows, width] -> [shards of all ranks, rows, width]."""
        out = torch.empty(tp * len(shards), *shards.shape[1:])
        ranks.allgather([list(out.chunk(tp))], [shards.contiguous()]).wait()
        return out

    return gather


@dataclass
class Followers:
    """The leader's side of a group."""

    rendezvous: str
    pids: list[int] = field(default_factory=list)
    steps: list[Channel] = field(default_factory=list)
    copies: list[Channel] = field(default_factory=list)
    step_lock: threading.Lock = field(default_factory=threading.Lock)
    copy_lock: threading.Lock = field(default_factory=threading.Lock)
    is_closing: bool = False

    def watch(self) -> None:
        """End this process when a follower ends, however it ends."""
        for pid in self.pids:
            threading.Thread(target=self._wait_for, args=(pid,), daemon=True).start()

    def _wait_for(self, pid: int) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        if not self.is_closing:
            log.error("a rank of the group is gone; ending with it", pid=pid)
            sys.stderr.flush()
            os._exit(70)

    def close(self) -> None:
        self.is_closing = True
        for channel in (*self.steps, *self.copies):
            with contextlib.suppress(OSError):
                channel.send(b"")
            channel.close()
        deadline = time.monotonic() + 5.0
        for pid in self.pids:
            while time.monotonic() < deadline and Path(f"/proc/{pid}").exists():
                time.sleep(0.01)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def fork_followers(
    run_dir: str, role: str, tp: int, follow: Callable[[int, str, Channel, Channel], None]
) -> Followers:
    """Fork ranks 1 .. tp - 1, each of which runs ``follow(rank, rendezvous, steps, copies)`` and
    ends when that returns. Call it from the main thread, before other threads exist and before
    torch has computed anything.

    NOTE: the lock of rank 0 is inherited, so it is free only when the followers are gone too."""
    folder = run_dir or tempfile.gettempdir()
    group = Followers(f"{folder}/{role}-{os.getpid()}-{time.monotonic_ns()}.rendezvous")
    leader = os.getpid()
    for rank in range(1, tp):
        step_pair, copy_pair = socket.socketpair(), socket.socketpair()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                die_with_parent(leader)
                for channel in (*group.steps, *group.copies):
                    channel.close()
                step_pair[0].close()
                copy_pair[0].close()
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader decides
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                signal.set_wakeup_fd(-1)
                follow(rank, group.rendezvous, Channel(step_pair[1]), Channel(copy_pair[1]))
                status = 0
            except BaseException as error:  # noqa: BLE001  the process's edge
                log.error("a rank failed", rank=rank, role=role, error=repr(error))
            finally:
                sys.stderr.flush()
                os._exit(status)
        step_pair[1].close()
        copy_pair[1].close()
        group.pids.append(pid)
        group.steps.append(Channel(step_pair[0]))
        group.copies.append(Channel(copy_pair[0]))
    return group
