"""What waits for workers: a bounded queue with priorities and fair shares. Pure: no sockets, no
clock of its own.

Order: suspects (they must run alone, others wait for them), then resumed lanes (their client has
been reading already), then by priority (larger first), then the tenant that was served least, then
first come. Served is counted in tokens, start-time fair queueing: a tenant that was idle starts at
the present, it does not collect credit.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import NamedTuple

from decant.protocol.config import RouterConfig
from decant.protocol.errors import QueueFull

MAX_TENANTS = 4096
RETRY_AFTER_S = (1.0, 30.0)
BURST_S = 4.0  # of resumes_per_s
SMOOTHING = 0.1


class Key(NamedTuple):
    request_id: str
    lane: int


@dataclass(frozen=True)
class Waiting:
    key: Key
    tenant: str
    priority: int
    cost: int  # tokens
    not_before_s: float
    is_resume: bool
    is_suspect: bool
    seq: int


class Admission:
    def __init__(self, config: RouterConfig) -> None:
        self._max_queued, self._rate = config.max_queued, config.resumes_per_s
        self._waiting: dict[Key, Waiting] = {}
        # The same, in order of arrival: (is_suspect, is_resume, priority, tenant) -> lanes.
        self._groups: dict[tuple[bool, bool, int, str], OrderedDict[Key, Waiting]] = {}
        self._num_fresh = 0
        self._served: dict[str, float] = {}  # virtual time of each tenant
        self._now_served = 0.0  # virtual time of who was served last
        self._seq = itertools.count()
        self._tickets, self._tickets_s = config.resumes_per_s * BURST_S, 0.0
        self._interval_s, self._served_s = 0.1, 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_fresh(self) -> int:
        """Lanes that wait for their first attempt: what the bound counts."""
        return self._num_fresh

    @property
    def is_open(self) -> bool:
        """There is room for one more request."""
        return self.num_fresh < self._max_queued

    def num_free(self, few: int) -> int:
        """Places left if requests wait and no more than ``few`` are left; -1: enough."""
        free = max(0, self._max_queued - self._num_fresh)
        return free if self._num_fresh and free <= few else -1

    def position(self, request_id: str) -> int:
        """How many wait before this request, roughly; -1 if it does not wait."""
        for i, key in enumerate(self._waiting):
            if key.request_id == request_id:
                return i
        return -1

    def retry_after_s(self) -> float:
        """When there may be room, from how fast the queue moved lately."""
        low, high = RETRY_AFTER_S
        return min(high, max(low, len(self._waiting) * self._interval_s))

    def admit(self, tenant: str) -> str:
        """May a new request of this tenant join? Returns: the request to turn away for it (the
        youngest of the tenant that fills the queue), or "".

        Raises: QueueFull.
        """
        if self.is_open:
            return ""
        fresh = [w for w in self._waiting.values() if not w.is_resume]
        counts: dict[str, int] = {}
        for w in fresh:
            counts[w.tenant] = counts.get(w.tenant, 0) + 1
        largest = max(counts, key=lambda t: counts[t], default=tenant)
        if counts.get(tenant, 0) + 1 >= counts.get(largest, 0):
            raise QueueFull(f"{len(fresh)} requests are waiting", self.retry_after_s())
        return max((w for w in fresh if w.tenant == largest), key=lambda w: w.seq).key.request_id

    def push(
        self,
        key: Key,
        tenant: str,
        priority: int,
        cost: int,
        not_before_s: float = 0.0,
        is_resume: bool = False,
        is_suspect: bool = False,
    ) -> None:
        """A lane waits."""
        self._take_out(key)
        self._put(
            Waiting(
                key,
                tenant,
                priority,
                max(1, cost),
                not_before_s,
                is_resume,
                is_suspect,
                next(self._seq),
            )
        )
        self._served.setdefault(tenant, self._now_served)
        if len(self._served) > MAX_TENANTS:
            busy = {w.tenant for w in self._waiting.values()}
            self._served = {t: v for t, v in self._served.items() if t in busy}

    def put_back(self, waiting: Waiting, not_before_s: float) -> None:
        """It was popped but refused: it keeps its place, and what it was charged is given back."""
        self._put(replace(waiting, not_before_s=not_before_s), is_first=True)
        if waiting.is_resume:
            self._tickets += 1.0
        elif waiting.tenant in self._served:
            self._served[waiting.tenant] -= waiting.cost

    def remove(self, request_id: str) -> None:
        """No lane of this request waits any more."""
        for key in [k for k in self._waiting if k.request_id == request_id]:
            self._take_out(key)

    def next(self, now: float) -> Waiting | None:
        """Who is to be served first among those whose time has come; it stays in the queue."""
        has_ticket = self._refill(now) >= 1.0
        best: Waiting | None = None
        best_order: tuple[bool, bool, int, float, int] | None = None
        for (is_suspect, is_resume, priority, tenant), lanes in self._groups.items():
            if is_resume and not has_ticket:
                continue
            head = next((w for w in lanes.values() if w.not_before_s <= now), None)
            if head is None:
                continue
            served = max(self._served.get(tenant, 0.0), self._now_served)
            order = (
                not is_suspect,
                not is_resume,
                -priority if not is_resume else 0,
                served if not is_resume else 0.0,
                head.seq,
            )
            if best_order is None or order < best_order:
                best, best_order = head, order
        return best

    def pop(self, key: Key, now: float) -> Waiting:
        """It was placed."""
        found = self._take_out(key)
        assert found is not None
        if found.is_resume:
            self._tickets -= 1.0
            return found
        begin = max(self._served.get(found.tenant, 0.0), self._now_served)
        self._now_served = begin
        self._served[found.tenant] = begin + found.cost
        if self._served_s:
            gap_s = min(now - self._served_s, RETRY_AFTER_S[1])
            self._interval_s += SMOOTHING * (gap_s - self._interval_s)
        self._served_s = now
        return found

    def _put(self, waiting: Waiting, is_first: bool = False) -> None:
        group = waiting.is_suspect, waiting.is_resume, waiting.priority, waiting.tenant
        lanes = self._groups.setdefault(group, OrderedDict())
        lanes[waiting.key] = self._waiting[waiting.key] = waiting
        if is_first:
            lanes.move_to_end(waiting.key, last=False)
        self._num_fresh += not waiting.is_resume

    def _take_out(self, key: Key) -> Waiting | None:
        found = self._waiting.pop(key, None)
        if found is not None:
            group = found.is_suspect, found.is_resume, found.priority, found.tenant
            del self._groups[group][key]
            if not self._groups[group]:
                del self._groups[group]
            self._num_fresh -= not found.is_resume
        return found

    def _refill(self, now: float) -> float:
        full = max(1.0, self._rate * BURST_S)
        gained = self._rate * max(0.0, now - self._tickets_s)
        self._tickets, self._tickets_s = min(full, self._tickets + gained), now
        return self._tickets
