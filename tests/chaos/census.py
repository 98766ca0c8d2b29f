"""What a set has in the system, before and after: processes, threads, descriptors, sockets, shared
memory, resident memory; and what its logs say of each request.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from real_set import RealSet

from decant.services import rundir
from decant.services.supervisor import SupervisorClient

MAX_MORE_FDS = 12  # idle connections and sockets that close a little later


def rss_bytes(pid: int) -> int:
    """Resident memory without shared memory objects (the KV pools have a fixed size, and become
    resident page by page with their first use); 0 if the process is gone.
    """
    total = 0
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(("RssAnon:", "RssFile:")):
                total += int(line.split()[1]) * 1024
    except OSError:
        return 0
    return total


def cpu_s(real: RealSet) -> dict[str, float]:
    """Processor time of each program so far, its threads included."""
    found = {}
    for info in SupervisorClient(real.run_dir).processes():
        try:
            words = Path(f"/proc/{info['pid']}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found[str(info["name"])] = (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    return found


def _count(folder: Path) -> int:
    try:
        return sum(1 for _ in folder.iterdir())
    except OSError:
        return 0


@dataclass(frozen=True)
class Census:
    num_processes: int
    fds: dict[str, int]
    threads: dict[str, int]
    rss: dict[str, int]  # bytes
    sockets: frozenset[str]  # file names
    num_segments: int

    def objections(self, before: Census) -> list[str]:
        """What has grown since ``before``; restarted processes count like their predecessors."""
        found = []
        if self.num_processes != before.num_processes:
            found.append(f"{self.num_processes} processes, {before.num_processes} before")
        for name, number in self.fds.items():
            if number > before.fds.get(name, 0) + MAX_MORE_FDS:
                found.append(f"{name}: {number} descriptors, {before.fds.get(name)} before")
        for name, number in self.threads.items():
            if number > before.threads.get(name, 0) + 4:
                found.append(f"{name}: {number} threads, {before.threads.get(name)} before")
        if self.sockets != before.sockets:
            found.append(f"sockets {sorted(self.sockets ^ before.sockets)} came or went")
        if self.num_segments != before.num_segments:
            found.append(f"{self.num_segments} shared segments, {before.num_segments} before")
        return found


def take(real: RealSet) -> Census:
    """Count now."""
    pids = {i["name"]: int(i["pid"]) for i in SupervisorClient(real.run_dir).processes()}
    left = rundir.leftovers(real.config)
    return Census(
        len(left.pids),
        {name: _count(Path(f"/proc/{pid}/fd")) for name, pid in pids.items()},
        {name: _count(Path(f"/proc/{pid}/task")) for name, pid in pids.items()},
        {name: rss_bytes(pid) for name, pid in pids.items()},
        frozenset(path.name for path in left.sockets),
        len(left.segments),
    )


def objections(real: RealSet, before: Census, timeout_s: float = 10.0) -> list[str]:
    """What is too much against ``before``, once it had time to settle."""
    end = time.monotonic() + timeout_s
    while (found := take(real).objections(before)) and time.monotonic() < end:
        time.sleep(0.25)
    return found


def log_events(real: RealSet, instance: str, event: str) -> list[dict[str, object]]:
    """Lines of one kind in a process's logs, rotated ones included, oldest file first."""
    found = []
    for path in sorted((real.run_dir / "logs").glob(f"{instance}.log*"), reverse=True):
        for line in path.read_bytes().splitlines():
            if b'"' + event.encode() + b'"' not in line:
                continue
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # cut by a rotation
            if entry.get("event") == event:
                found.append(entry)
    return found


def audit(real: RealSet, rids: set[str]) -> list[str]:
    """The gateway's log has exactly one final record for each request id."""
    seen = Counter(str(e.get("rid")) for e in log_events(real, "gateway-0", "request"))
    missing = [rid for rid in rids if not seen[rid]]
    many = [rid for rid in rids if seen[rid] > 1]
    found = []
    if missing:
        found.append(f"{len(missing)} requests without a final record, such as {missing[0]}")
    if many:
        found.append(f"{len(many)} requests with several final records, such as {many[0]}")
    return found


def ledger(real: RealSet) -> list[str]:
    """Pages of every pool sum to its size, and all are free or cached."""
    found = []
    sizes = {"decode-0": real.config.decode.pages, "prefill-0": real.config.prefill.pages}
    pages = real.pages()
    for name, size in sizes.items():
        counts = pages.get(name, {})
        if sum(counts.values()) != size:
            found.append(f"{name}: {counts} does not sum to {size}")
        for state, number in counts.items():
            if number and state not in ("pages_free", "pages_cached"):
                found.append(f"{name}: {number:g} {state}")
    return found
