"""Who was a member of the router's predecessor, so that a restarted router does not declare the
living dead: Peers says "who is missing is dead", hence it is held back until everybody who still
lives has had the time to join again.

One small JSON file in the run directory, replaced atomically.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

import msgspec

from decant.protocol.config import Config
from decant.services.membership import Member

MAX_BYTES = 1 << 20


class Entry(msgspec.Struct, frozen=True):
    instance: str
    incarnation: str
    pid: int


def _is_alive(pid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.getuid()
    except OSError:
        return False


class Roster:
    def __init__(self, config: Config) -> None:
        self._path = f"{config.run_dir}/router.members"
        self._written = b""

    def read(self) -> set[str]:
        """Incarnations of the last router's members whose process still exists; empty if there is
        no file, or none that can be read.
        """
        try:
            with open(self._path, "rb") as file:
                entries = msgspec.json.decode(file.read(MAX_BYTES), type=list[Entry])
        except (OSError, msgspec.DecodeError):
            return set()
        return {e.incarnation for e in entries if _is_alive(e.pid)}

    def write(self, members: Iterable[Member]) -> None:
        """Note who is a member now. A file system that is full or read-only only costs the hint."""
        entries = [Entry(m.instance, m.incarnation, m.hello.pid) for m in members]
        data = msgspec.json.encode(sorted(entries, key=lambda e: e.instance))
        if data == self._written:
            return
        with suppress(OSError):
            with open(self._path + ".new", "wb") as file:
                file.write(data)
            os.replace(self._path + ".new", self._path)
            self._written = data
