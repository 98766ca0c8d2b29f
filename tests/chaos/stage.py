"""A running set under test: the oracle, the comparison with it, and its rest afterwards."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from typing import Any

import census
from mix import Ask, is_valid
from real_set import RealSet
from traffic import Answer, Traffic

SHOWN = 3  # examples of each fault in a result
_numbers = itertools.count()

Result = dict[str, Any]


class Stage:
    """One set and what is known of it. ``before`` is its census at rest."""

    def __init__(self, real: RealSet, num_distinct: int = 60) -> None:
        """num_distinct: different requests of a row; they are asked again and again."""
        self.real, self.num_distinct = real, num_distinct
        self.transcripts: dict[str, str] = {}  # by Ask.key, fault-free
        real.wait_ready()
        real.wait_clean()
        self.before = census.take(real)

    def traffic(self, timeout_s: float = 180.0) -> Traffic:
        """A client with request ids of its own."""
        return Traffic(self.real.url, f"chaos{next(_numbers)}-{time.time_ns()}", timeout_s)

    async def learn(self, asks: list[Ask], at_once: int = 8) -> None:
        """Ask all of it without a disturbance. Raises: AssertionError if that fails."""
        todo = {a.key: a for a in asks if a.key not in self.transcripts}
        async with self.traffic() as traffic:
            for answer in await traffic.many(list(todo.values()), at_once):
                assert answer.is_ok, answer
                assert is_valid(answer.ask, answer.transcript), answer
                self.transcripts[answer.ask.key] = answer.transcript
        if todo:  # some processes are started by the first request that needs them
            await asyncio.to_thread(self.real.wait_clean)
            self.before = await asyncio.to_thread(census.take, self.real)

    def compare(self, answers: list[Answer]) -> Result:
        """Counts of what differs from the oracle, with examples."""
        failed = [a for a in answers if not a.is_ok and not a.is_hung]
        hung = [a for a in answers if a.is_hung]
        good = [a for a in answers if a.is_ok]
        wrong = [a for a in good if self.transcripts[a.ask.key] != a.transcript]
        invalid = [a for a in good if not is_valid(a.ask, a.transcript)]
        result: Result = {
            "requests": len(answers),
            "failed": len(failed),
            "hung": len(hung),
            "wrong": len(wrong),
            "invalid": len(invalid),
            "kinds": dict(Counter(a.ask.kind for a in answers)),
        }
        if failed or hung:
            result["errors"] = [
                f"{a.rid} {a.ask.kind} {a.status} {a.error}" for a in (failed + hung)[:SHOWN]
            ]
        if wrong:
            result["differences"] = [
                f"{a.rid}: {a.transcript[:400]} not {self.transcripts[a.ask.key][:400]}"
                for a in wrong[:SHOWN]
            ]
        return result

    async def rest(self, answers: list[Answer], timeout_s: float = 30.0) -> Result:
        """Wait until nothing is under way, then take ledger, census and audit.

        Returns: ``clean_s`` until all pages were free or cached, and ``faults``, hopefully empty.
        """
        faults: list[str] = []
        began = time.monotonic()
        try:
            await asyncio.to_thread(self.real.wait_ready, 60.0)
            began = time.monotonic()
            await asyncio.to_thread(self.real.wait_clean, timeout_s)
        except AssertionError as error:
            faults.append(str(error)[:4000])
        clean_s = time.monotonic() - began
        faults += await asyncio.to_thread(census.ledger, self.real)
        faults += await asyncio.to_thread(census.objections, self.real, self.before)
        rids = {a.rid for a in answers if a.status}
        faults += await asyncio.to_thread(census.audit, self.real, rids)
        return {"clean_s": round(clean_s, 2), "faults": faults}


def is_good(result: Result) -> bool:
    """Nothing failed, hung, was wrong or is left over."""
    bad = ("failed", "hung", "wrong", "invalid", "faults")
    return not any(result.get(name) for name in bad)


def p(values: list[float], share: float) -> float:
    """Percentile by rank; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def line(result: Result) -> str:
    """The one line that a script prints."""
    return json.dumps(result, ensure_ascii=False)
