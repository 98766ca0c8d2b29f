"""How a process ended: by itself, or killed from outside. What the poison rule rests on.

Two witnesses, neither of which has to be its parent. The kernel: a zombie's ``/proc/PID/stat`` ends
with its wait status, and from Linux 6.15 on a pidfd keeps it after the reaping. supervisord: it
writes every end to its log at the moment of the reaping, and alone knows whether it had asked for
it. Its PROCESS_STATE events are no witness: they carry no exit status (only whether it was an
expected one, and none of a signal's is), and a listener that falls behind loses some.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
from dataclasses import dataclass
from pathlib import Path

_SPAWNED = re.compile(r"spawned: '([^']+)' with pid (\d+)")
_ENDED = re.compile(r"(exited|stopped): (\S+) \((.*?)(?:; (?:not )?expected)?\)\s*$")
_SIGNAL = re.compile(r"terminated by (SIG\w+|signal \d+)")
_STATUS = re.compile(r"exit status (\d+)")
MAX_LOG_BYTES = 11 << 20  # one rotated file of supervisord and a little
OUTSIDE = (signal.SIGKILL, signal.SIGTERM)  # nobody does that to himself

# linux/pidfd.h: struct pidfd_info of 64 bytes {u64 mask, cgroupid; u32 pid ... ; s32 exit_code}.
_PIDFD_INFO_BYTES, _PIDFD_INFO_EXIT, _EXIT_CODE_AT = 64, 8, 60
_PIDFD_GET_INFO = 3 << 30 | _PIDFD_INFO_BYTES << 16 | 0xFF << 8 | 11  # _IOWR(0xFF, 11, ...)


@dataclass(frozen=True)
class Exit:
    """The end of one process."""

    name: str  # program: decode-0
    pid: int
    reason: str  # supervisord's words: "terminated by SIGKILL", "exit status 1"
    was_asked: bool  # stopped by supervisord, not by itself
    time: str  # local time, as in the log

    @property
    def signal(self) -> str:
        """SIGKILL, SIGSEGV ...; empty if it exited."""
        match = _SIGNAL.search(self.reason)
        return match[1] if match else ""

    @property
    def status(self) -> int | None:
        """Exit status; None if a signal ended it."""
        match = _STATUS.search(self.reason)
        return int(match[1]) if match else None

    @property
    def is_own_fault(self) -> bool:
        """Ended by itself: not asked, not killed or terminated from outside, no status 0."""
        return not self.was_asked and self.signal not in ("SIGKILL", "SIGTERM") and self.status != 0


def wait_status(pid: int, descriptor: int) -> int | None:
    """Wait status of a process that has ended, as the kernel tells everybody of its user.

    descriptor: its pidfd. None: it still runs, or it is reaped and the kernel is older than 6.15.
    """
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # NOTE: a pid that was reaped and given to another zombie within a moment is not ours.
        if words[0] == "Z" and _pid_of(descriptor) == pid:
            return int(words[-1])
    except (OSError, ValueError, IndexError, StopIteration):
        pass
    info = bytearray(_PIDFD_INFO_BYTES)
    struct.pack_into("<Q", info, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    if not struct.unpack_from("<Q", info, 0)[0] & _PIDFD_INFO_EXIT:
        return None
    return int(struct.unpack_from("<i", info, _EXIT_CODE_AT)[0])


def _pid_of(descriptor: int) -> int:
    """The process that a pidfd stands for; -1 once it is reaped."""
    text = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
    return next(int(x[4:]) for x in text.splitlines() if x.startswith("Pid:"))


def is_outside(status: int) -> bool:
    """Whether a wait status says that it was told to end, or had nothing more to do."""
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status) in OUTSIDE
    return os.WEXITSTATUS(status) == 0


def parse_exits(text: str) -> list[Exit]:
    """All ends in a piece of supervisord's log, oldest first. Lines of other kinds are skipped."""
    pids: dict[str, int] = {}
    exits = []
    for line in text.splitlines():
        if match := _SPAWNED.search(line):
            pids[match[1]] = int(match[2])
        elif match := _ENDED.search(line):
            how, name, reason = match.groups()
            exits.append(Exit(name, pids.get(name, 0), reason, how == "stopped", line[:23]))
    return exits


def read_exits(run_dir: str | Path) -> list[Exit]:
    """All known ends in a run directory, oldest first; empty if there is no log."""
    text = ""
    for name in ("supervisord.log.1", "supervisord.log"):
        try:
            with open(Path(run_dir) / "logs" / name, "rb") as file:
                text += file.read(MAX_LOG_BYTES).decode(errors="replace")
        except OSError:
            continue
    return parse_exits(text)


def exit_reason(run_dir: str | Path, pid: int) -> Exit | None:
    """How a process ended; None as long as supervisord has not reaped it (ask again).

    NOTE: reads a file of up to 22 MB; call it in a thread, or for a death only.
    """
    return next((e for e in reversed(read_exits(run_dir)) if e.pid == pid), None)
