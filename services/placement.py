"""Which workers a waiting lane gets: the router's policy, and the only place that knows it. Pure.

The least loaded decode and the least loaded prefill that may take one more; where there are
several, the one that has the prompt's prefix, unless it has clearly more to do. A worker on
probation (it has just joined or recovered) takes one at a time; one at which a suspect is tested
takes nobody else; one that said busy is left alone for a moment.

A suspect is tested with nobody beside it but former suspects that were cleared: else, after a crash
of a large batch, its streams would run one after the other to their ends and everybody else would
wait. If the worker dies again, only the one under test is accused; accused twice, it runs alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from decant.services.affinity import Affinity
from decant.services.decisions import Ref, State
from decant.services.membership import Member, Membership
from decant.services.records import Lane, Record

MAX_PREFILLING = 8  # lanes at one prefill; more wait in the queue, where deadlines are kept
DEFAULT_SLOTS = 64
LEAD = {"prefill": 2, "decode": 8}  # load beyond the least that a known prefix is worth
BUSY_S = (0.02, 0.1)  # pause after Refused(busy): first, when it says so again


class Placement:
    """Loads of all workers at one moment, and the choice among them."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self.affinity = Affinity()
        self._busy_until: dict[Ref, float] = {}
        self._load: Counter[Ref] = Counter()  # choices at a decode, lanes at a prefill
        self._alone: set[Ref] = set()  # taken by one suspect
        self._strangers: Counter[Ref] = Counter()  # of the load: requests that were never cleared

    # ---- what workers say

    def refused(self, worker: Ref, now: float) -> None:
        """It is full."""
        first, again = BUSY_S
        self._busy_until[worker] = now + (again if worker in self._busy_until else first)

    def freed(self, worker: Ref) -> None:
        """Something came free there (or it is gone)."""
        self._busy_until.pop(worker, None)

    # ---- choice

    def count(self, records: Iterable[Record]) -> None:
        """Take the loads from the records."""
        self._load, self._alone, self._strangers = Counter(), set(), Counter()
        for record in records:
            tested = record.suspect_in if record.is_suspect else record.alone_in
            for lane in record.lanes.values():
                if lane.decode is None or lane.prefill is None or lane.state is State.DONE:
                    continue
                self._load[lane.decode] += len(lane.choices)
                if not record.is_cleared:
                    self._strangers[lane.decode] += 1
                if "decode" in tested:
                    self._alone.add(lane.decode)
                if lane.state <= State.PREFILLING:
                    self._load[lane.prefill] += 1
                    self._strangers[lane.prefill] += not record.is_cleared
                    if "prefill" in tested:
                        self._alone.add(lane.prefill)

    def choose(self, record: Record, lane: Lane, now: float) -> tuple[Ref, Ref] | None:
        """(decode, prefill) for a lane, now counted as theirs; None: it has to wait."""
        own = record.suspect_in if record.is_suspect else set()
        num = len(lane.choices)
        decode = self._best("decode", record, num, own, now)
        prefill = self._best("prefill", record, 1, own, now)
        if decode is None or prefill is None:
            return None
        self._load[decode] += num
        self._load[prefill] += 1
        for worker, service in ((decode, "decode"), (prefill, "prefill")):
            if service in own:
                self._alone.add(worker)
            if not record.is_cleared:
                self._strangers[worker] += 1
            if self._has_choice(service):
                self.affinity.note(service, record.prefixes, worker)
        return decode, prefill

    def alone_in(self, record: Record, num: int, decode: Ref, prefill: Ref) -> frozenset[str]:
        """Of the services where a suspect is tested: those whose worker, just chosen for a lane of
        ``num`` choices, computes nothing else.
        """
        if not record.is_suspect:
            return frozenset()
        own = {"decode": self._load[decode] == num, "prefill": self._load[prefill] == 1}
        return frozenset(s for s in record.suspect_in if own.get(s, True))

    def _has_choice(self, service: str) -> bool:
        return len(self._membership.usable(service)) > 1

    def _best(
        self, service: str, record: Record, num: int, own: set[str], now: float
    ) -> Ref | None:
        refs = [
            Ref(member.instance, member.incarnation)
            for member in self._membership.usable(service)
            if self._may_take(member, num, record.suspicion if service in own else 0, now)
        ]
        least = min(refs, key=lambda ref: self._load[ref], default=None)
        if least is None or len(refs) == 1:
            return least
        known = self.affinity.find(service, record.prefixes, set(refs))
        if known is not None and self._load[known] <= self._load[least] + LEAD[service]:
            return known
        return least

    def _may_take(self, member: Member, num: int, suspicion: int, now: float) -> bool:
        ref = Ref(member.instance, member.incarnation)
        if ref in self._alone or self._busy_until.get(ref, 0.0) > now:
            return False
        if self._load[ref] == 0:
            return True  # whatever the limits say: it will refuse what can never fit
        if member.is_on_probation or suspicion > 1 or (suspicion and self._strangers[ref]):
            return False
        limit = member.hello.limits.get("num_slots", DEFAULT_SLOTS)
        if member.service == "prefill":
            limit = min(limit, MAX_PREFILLING)
        return self._load[ref] + num <= limit
