"""A process that has the heavy libraries loaded, and forks the workers that are started anew.

Importing torch is most of a worker's start. ``supervisord_main`` starts this process beside the
set, asks it for a worker instead of executing one, and does without it when it is not ready, dies
or does not answer. A worker is forked twice, so that it becomes supervisord's own child (which
is a subreaper): whatever is true of an executed worker is true of it.

Only on the CPU and with one thread of OpenMP: nothing here may have threads, or a device, when it
forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import msgspec

# NOTE: supervisord imports this file for the handle; what only the nursery needs is imported there.

SERVICES = ("decode", "prefill", "draft")
MODULES = (
    *(f"decant.services.{service}" for service in SERVICES),
    *("decant.engine.cpu_engine", "decant.engine.draft", "decant.engine.group"),
    *("decant.engine.load", "decant.services.grammar"),
)
START_S = 5.0  # after the set's start, which needs the processors first
NICE = 10  # of the imports
ANSWER_S = 5.0
ADOPTED_S = 5.0
MAX_ORDER_BYTES = 1 << 20
SHOWN_BYTES = 512  # room for a worker's command line, which ps shows
PR_SET_NAME = 15
READY = b"ready"


class Order(msgspec.Struct, frozen=True):
    """supervisord wants this worker. With it travel descriptors: stdin, stdout, stderr, and the end
    of a pipe that says "go" once supervisord knows the worker's pid.
    """

    arguments: list[str]  # of ``python -P -m MODULE``, MODULE included
    environment: dict[str, str]
    supervisor: int  # pid


class Nursery:
    """The handle that supervisord has of it."""

    def __init__(self, start_s: float = START_S) -> None:
        """start_s: until it begins to load, nicely; 0: at once, and like everybody."""
        self._start_s = start_s
        self._socket: socket.socket | None = None
        self._is_ready = False
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "decant.services.nursery", str(theirs.fileno()),
                 str(self._start_s), str(os.getpid()), " " * SHOWN_BYTES],
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
                     "CUDA_VISIBLE_DEVICES": ""},
            )  # fmt: skip
        self._socket, self._is_ready = ours, False

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def is_ready(self) -> bool:
        """It can fork workers now. Starts another one if it is gone."""
        if self._socket is None:
            return False
        if not self._is_ready:
            try:
                self._is_ready = self._socket.recv(16, socket.MSG_DONTWAIT) == READY
            except BlockingIOError:
                return False
            except OSError:
                self._is_ready = False
            if not self._is_ready:
                self._replace()
        return self._is_ready

    def fork(
        self, arguments: Sequence[str], environment: dict[str, str], descriptors: Sequence[int]
    ) -> int:
        """A worker, our child. descriptors: stdin, stdout, stderr. Returns: its pid; 0 if that did
        not work and it has to be executed.
        """
        if not self.is_ready:
            return 0
        assert self._socket is not None
        order = Order(list(arguments), environment, os.getpid())
        wait, go = os.pipe()
        try:
            self._socket.settimeout(ANSWER_S)
            socket.send_fds(self._socket, [msgspec.json.encode(order)], [*descriptors, wait])
            pid = int(self._socket.recv(16))
            os.write(go, b"1")
            return pid
        except (OSError, ValueError):
            self._replace()
            return 0
        finally:
            os.close(wait)
            os.close(go)  # without "go" the worker ends

    def _replace(self) -> None:
        self.close()
        self.start()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(ChildProcessError, subprocess.TimeoutExpired):
                self._process.wait(1.0)
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def can_raise(arguments: Sequence[str], environment: dict[str, str]) -> list[str]:
    """The part of a command line that is an order's; empty: this program has to be executed."""
    words = list(arguments)
    modules = {f"decant.services.{service}" for service in SERVICES}
    if len(words) < 4 or words[1:3] != ["-P", "-m"] or words[3] not in modules:
        return []
    if environment.get("OMP_NUM_THREADS") != "1" or environment.get("CUDA_VISIBLE_DEVICES") != "":
        return []
    return words[3:]


def _load(nice: int) -> None:
    """In a thread, because only a thread can be nice for a while."""
    if nice:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
    for name in MODULES:
        importlib.import_module(name)


def main(descriptor: int, start_s: float, parent: int) -> None:
    from decant.services.process import die_with_parent

    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it died before we could ask for that
        return
    link = socket.socket(fileno=descriptor)
    time.sleep(start_s)
    thread = threading.Thread(target=_load, args=(NICE if start_s else 0,))
    thread.start()
    thread.join()
    while len(os.listdir("/proc/self/task")) > 1:  # it is joined a moment before it is gone
        time.sleep(0.01)
    gc.collect()
    gc.freeze()  # what is here stays shared with the forked
    link.send(READY)
    while True:
        data, descriptors, _, _ = socket.recv_fds(link, MAX_ORDER_BYTES, 8)
        if not data:
            return
        order = msgspec.json.decode(data, type=Order)
        pid = _fork(order, descriptors, link)
        for number in descriptors:
            os.close(number)
        link.send(str(pid).encode())


def _fork(order: Order, descriptors: list[int], link: socket.socket) -> int:
    """Returns: the worker's pid, in the nursery."""
    source, sink = os.pipe()
    between = os.fork()
    if not between:
        worker = os.fork()
        if worker:
            os.write(sink, str(worker).encode())
            os._exit(0)
        os.close(sink)  # the nursery reads to its end
        link.detach()
        _become(order, descriptors)
    os.close(sink)
    os.waitpid(between, 0)
    with open(source, "rb") as file:
        return int(file.read())


def _become(order: Order, descriptors: list[int]) -> None:
    """In the worker: be what supervisord would have executed. Never returns."""
    status = 1
    try:
        os.setpgid(0, 0)
        stdin, stdout, stderr, wait = descriptors
        if os.read(wait, 1) != b"1":
            return
        for number, standard in ((stdin, 0), (stdout, 1), (stderr, 2)):
            os.dup2(number, standard)
        os.closerange(3, 1 << 16)
        os.environ.clear()
        os.environ.update(order.environment)
        end = time.monotonic() + ADOPTED_S
        while os.getppid() != order.supervisor:  # the process between us is about to end
            if time.monotonic() > end:
                return
            time.sleep(0.001)
        module, *sys.argv = order.arguments
        sys.argv.insert(0, module)
        service = module.rpartition(".")[2]
        ctypes.CDLL(None).prctl(PR_SET_NAME, service.encode(), 0, 0, 0)
        _show([sys.executable, "-P", "-m", *order.arguments])
        process = importlib.import_module("decant.services.process")
        process.run(service, importlib.import_module(module).main)
    except SystemExit as end_of_process:
        status = end_of_process.code if isinstance(end_of_process.code, int) else 1
    finally:
        os._exit(status)


def _show(words: Sequence[str]) -> None:
    """Put a command line where the kernel reads ours."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()  # from the third on
    begin, end = int(fields[45]), int(fields[46])  # arg_start, arg_end
    text = b"\0".join(word.encode() for word in words)[: end - begin - 1]
    if begin and text:
        ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
