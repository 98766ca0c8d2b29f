"""Disturbs a running set on a seeded schedule: kill -9, SIGTERM, SIGSTOP for a while.

A victim is a process of supervisord, by its pid at that moment; what was done is kept, and when.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass
from random import Random

from real_set import RealSet

from decant.services.supervisor import SupervisorClient

WORKERS = ("decode-0", "prefill-0", "draft-0", "tokenizer-0", "router-0")


@dataclass(frozen=True)
class Deed:
    """One disturbance."""

    at_s: float  # CLOCK_MONOTONIC
    victim: str
    pid: int
    signal: str


class Nemesis:
    """Use ``async with``: it works until the block ends, or until ``most`` deeds are done."""

    def __init__(
        self,
        real: RealSet,
        seed: int,
        period_s: float,
        victims: tuple[str, ...] = WORKERS,
        number: signal.Signals = signal.SIGKILL,
        stopped_s: float = 0.0,
        most: int = 1 << 30,
        rest_s: float = 0.0,
        until_s: float = float("inf"),
    ) -> None:
        """number: the signal. stopped_s: after a SIGSTOP, for SIGCONT (if it still exists).
        rest_s: a victim has been the router's member for so long (0: whatever runs is struck).
        until_s: CLOCK_MONOTONIC, then it stops.
        """
        self.deeds: list[Deed] = []
        self._real, self._random = real, Random(seed)
        self._period_s, self._victims, self._most = period_s, victims, most
        self._number, self._stopped_s, self._rest_s = number, stopped_s, rest_s
        self._until_s = until_s
        self._continue: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Nemesis:
        self._task = asyncio.create_task(self._work())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        if self._continue:
            await asyncio.wait(self._continue)

    @property
    def by_victim(self) -> dict[str, int]:
        return dict(Counter(d.victim for d in self.deeds))

    async def _work(self) -> None:
        due = time.monotonic()
        while len(self.deeds) < self._most and time.monotonic() < self._until_s:
            # NOTE: after a long wait for its victim no burst follows to make up for it.
            due = max(due, time.monotonic()) + self._period_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            victim = self._random.choice(self._victims)
            while (deed := await asyncio.to_thread(self._strike, victim)) is None:
                await asyncio.sleep(0.1)  # until it runs, and has rested
            self.deeds.append(deed)
            if self._number is signal.SIGSTOP:
                task = asyncio.create_task(self._release(deed.pid))
                self._continue.add(task)
                task.add_done_callback(self._continue.discard)

    def _has_rested(self, victim: str, pid: int) -> bool:
        if not self._rest_s:
            return True
        try:
            state = self._real.state()
        except Exception:  # the router is away, or starting
            return False
        if not state["is_ready"]:
            return False
        if victim == "router-0":
            return True
        return any(
            x["pid"] == pid
            and x["uptime_s"] >= self._rest_s
            and not (x["is_on_probation"] and x["service"] in ("decode", "prefill"))
            for x in state["processes"]
        )

    def _strike(self, victim: str) -> Deed | None:
        for info in SupervisorClient(self._real.run_dir).processes():
            pid = int(info["pid"])
            if info["name"] == victim and pid and self._has_rested(victim, pid):
                try:
                    os.kill(pid, self._number)
                except ProcessLookupError:
                    return None
                return Deed(time.monotonic(), victim, pid, self._number.name)
        return None

    async def _release(self, pid: int) -> None:
        await asyncio.sleep(self._stopped_s)
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return  # it was fenced
