"""The run directory: where it is, who holds it, and what a set leaves in the system.

A set owns: processes (marked in their environment), sockets in the run directory and shared memory
objects with the run directory's prefix. ``leftovers`` finds them and ``sweep`` removes them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from decant.protocol.config import Config, load
from decant.protocol.errors import ConfigError
from decant.services import mps
from decant.services.supervisor import CONFIG_NAME, MARK, SupervisorClient

SHM = Path("/dev/shm")
LONGEST_SOCKET = len("/tokenizer-99.metrics")
MAX_PATH = 103  # a Unix socket's path has at most 107 bytes; Config.endpoint stops at 103


class RunDirBusy(ConfigError):
    """Another set runs in this directory."""


def default_run_dir() -> Path:
    """$DECANT_RUN_DIR, $XDG_RUNTIME_DIR/decant, ~/.decant/run or ./run: the first that we can use
    and whose name is short enough for a socket.
    """
    if chosen := os.environ.get("DECANT_RUN_DIR"):
        return Path(chosen).absolute()
    candidates = []
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        candidates.append(Path(runtime) / "decant")
    home = os.environ.get("HOME")
    if home and (os.access(home, os.W_OK) or not os.path.exists(home)):
        candidates.append(Path(home) / ".decant" / "run")
    candidates.append(Path("run"))
    paths = [c.absolute() for c in candidates]
    return next((p for p in paths if len(str(p)) + LONGEST_SOCKET <= MAX_PATH), paths[-1])


def prepare(path: Path) -> None:
    """Create the directory, mode 0700. Raises: ConfigError with one sentence."""
    if len(str(path)) + LONGEST_SOCKET > MAX_PATH:
        raise ConfigError(
            f"the run directory {path} has too long a name for a socket"
            f" ({len(str(path))} bytes, at most {MAX_PATH - LONGEST_SOCKET}); choose with --run-dir"
        )
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
        if status.st_uid != os.getuid():
            raise ConfigError(f"the run directory {path} belongs to another user")
        if stat.S_IMODE(status.st_mode) != 0o700:
            path.chmod(0o700)
        probe = path / ".probe"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write in the run directory {path}: {error.strerror}") from error


def lock(path: Path) -> int:
    """Hold the run directory until the descriptor closes (supervisord inherits it, so that the set
    holds it as long as it lives). Raises: RunDirBusy.
    """
    descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise RunDirBusy(
            f"a set already runs in {path}: stop it with `decant down --run-dir {path}`"
            " or choose another --run-dir"
        ) from error
    return descriptor


def read_config(path: Path) -> Config:
    """The resolved config of the set in a run directory. Raises: ConfigError."""
    if not (path / CONFIG_NAME).exists():
        raise ConfigError(f"nothing was started in {path} (there is no {CONFIG_NAME})")
    return load(path / CONFIG_NAME)


@dataclass(frozen=True)
class Leftovers:
    """What of a set is in the system."""

    pids: tuple[int, ...]
    sockets: tuple[Path, ...]
    segments: tuple[Path, ...]  # shared memory

    def __bool__(self) -> bool:
        return bool(self.pids or self.sockets or self.segments)

    def __str__(self) -> str:
        parts = [
            (self.pids, "process", "processes"),
            (self.sockets, "socket", "sockets"),
            (self.segments, "shared memory segment", "shared memory segments"),
        ]
        return ", ".join(f"{len(x)} {one if len(x) == 1 else many}" for x, one, many in parts)


def _ancestors() -> set[int]:
    """Our own process and its parents."""
    found, pid = set(), os.getpid()
    while pid > 1:
        found.add(pid)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
    return found


def find_pids(run_dir: Path) -> list[int]:
    """Processes of the set, supervisord included: those that carry its mark in their environment
    or its config file in their command line. Zombies do not count.
    """
    mark = f"{MARK}={run_dir}".encode()
    config = str(run_dir / CONFIG_NAME).encode()
    skipped = _ancestors()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) in skipped:
            continue
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            if command == [b""]:  # a zombie or a kernel thread
                continue
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark in environment or (b"--config" in command and config in command):
            found.append(int(folder.name))
    return found


def leftovers(config: Config) -> Leftovers:
    """Everything of this set that is in the system now."""
    run_dir = Path(config.run_dir)
    sockets = (
        tuple(p for p in sorted(run_dir.iterdir()) if p.is_socket()) if (run_dir.is_dir()) else ()
    )
    segments = tuple(sorted(SHM.glob(f"{config.shm_prefix}*"))) if SHM.is_dir() else ()
    return Leftovers(tuple(find_pids(run_dir)), sockets, segments)


def kill(pids: tuple[int, ...] | list[int], timeout_s: float = 5.0) -> None:
    """SIGKILL and wait until they are gone or zombies."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    end = time.monotonic() + timeout_s
    while any(is_alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in ("Z", "X")


def sweep(config: Config) -> Leftovers:
    """Kill and unlink what is left of a set; returns what there was."""
    found = leftovers(config)
    if found.pids:
        supervisors = [p for p in found.pids if _is_supervisord(p)]
        kill(supervisors)  # first, else it starts its children anew
        mps.end_all(config, list(found.pids))
        kill(found.pids)
        kill(find_pids(Path(config.run_dir)))
    for path in (*found.sockets, *found.segments):
        path.unlink(missing_ok=True)
    for name in ("supervisord.pid", "credentials", "admin.key"):
        (Path(config.run_dir) / name).unlink(missing_ok=True)
    # NOTE: a worker takes the socket in it for a daemon that runs
    shutil.rmtree(Path(config.run_dir) / "mps", ignore_errors=True)
    return found


def _is_supervisord(pid: int) -> bool:
    try:
        return b"decant.services.supervisord_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def stop_set(config: Config, timeout_s: float) -> Leftovers:
    """Stop a set in order: supervisord drains and stops every program; what is then left after
    ``timeout_s`` is killed. Returns what had to be removed by force (nothing, normally).
    """
    run_dir = Path(config.run_dir)
    try:
        SupervisorClient(run_dir).shutdown()
    except OSError:
        pass  # supervisord is gone or deaf: sweep finds its children
    else:
        end = time.monotonic() + timeout_s
        while find_pids(run_dir) and time.monotonic() < end:
            time.sleep(0.05)
    return sweep(config)
