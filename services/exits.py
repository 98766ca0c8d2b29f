"""How the processes of a run directory ended, read from supervisord's own log.

supervisord's PROCESS_STATE events carry no exit status (only whether it was an expected one) and a
listener that falls behind loses events, so the log, which it writes at the moment of the reaping,
is the better witness. It is a hint for the poison rule: who ended by itself, and who was killed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_SPAWNED = re.compile(r"spawned: '([^']+)' with pid (\d+)")
_ENDED = re.compile(r"(exited|stopped): (\S+) \((.*?)(?:; (?:not )?expected)?\)\s*$")
_SIGNAL = re.compile(r"terminated by (SIG\w+|signal \d+)")
_STATUS = re.compile(r"exit status (\d+)")
MAX_LOG_BYTES = 11 << 20  # one rotated file of supervisord and a little


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
