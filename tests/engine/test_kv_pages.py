"""The ledger under random operations: states sum, nothing leaks, nothing is freed twice."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from decant.engine.kv_pages import Ledger, State, pages_for
from decant.protocol.errors import KVPageError, OutOfPages

NUM = 12
OWNERS = st.sampled_from(["a", "b", "c", "d"])


class LedgerMachine(RuleBasedStateMachine):
    """Against a model that is a plain dict (page, owner) -> state and a set of cached pages."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(NUM)
        self.holds: dict[tuple[int, str], State] = {}
        self.cached: set[int] = set()

    def state(self, page: int) -> State:
        states = [s for (p, _), s in self.holds.items() if p == page]
        return max(states, default=State.CACHED if page in self.cached else State.FREE)

    def has_content(self, page: int) -> bool:
        states = [s for (p, _), s in self.holds.items() if p == page]
        return page in self.cached or State.ACTIVE in states or State.PUBLISHED in states

    def of(self, owner: str, *states: State) -> list[int]:
        return [p for (p, o), s in self.holds.items() if o == owner and s in states]

    @rule(owner=OWNERS, num=st.integers(0, 5))
    def reserve(self, owner: str, num: int) -> None:
        free = {p for p in range(NUM) if self.state(p) is State.FREE}
        if num > len(free):
            with pytest.raises(OutOfPages):
                self.ledger.reserve(owner, num)
            return
        pages = self.ledger.reserve(owner, num)
        assert len(set(pages)) == num
        assert set(pages) <= free
        self.holds |= {(p, owner): State.RESERVED for p in pages}

    @rule(owner=OWNERS, data=st.data())
    def share(self, owner: str, data: st.DataObject) -> None:
        page = data.draw(st.integers(0, NUM - 1))
        if self.has_content(page) and (page, owner) not in self.holds:
            self.ledger.share(owner, [page])
            self.holds[page, owner] = State.ACTIVE
        else:
            with pytest.raises(KVPageError):
                self.ledger.share(owner, [page])

    @rule(owner=OWNERS)
    def activate(self, owner: str) -> None:
        pages = self.of(owner, State.RESERVED)
        self.ledger.activate(owner, pages)
        self.holds |= {(p, owner): State.ACTIVE for p in pages}

    @rule(owner=OWNERS)
    def publish(self, owner: str) -> None:
        pages = self.of(owner, State.ACTIVE)
        self.ledger.publish(owner, pages)
        self.holds |= {(p, owner): State.PUBLISHED for p in pages}

    @rule(owner=OWNERS)
    def quarantine(self, owner: str) -> None:
        pages = self.of(owner, *State)
        assert self.ledger.quarantine(owner) == len(pages)
        self.holds |= {(p, owner): State.QUARANTINED for p in pages}

    @rule(owner=OWNERS)
    def release(self, owner: str) -> None:
        pages = self.of(owner, *State)
        assert self.ledger.release(owner) == len(pages)
        for page in pages:
            del self.holds[page, owner]

    @rule(owner=OWNERS, data=st.data())
    def release_one(self, owner: str, data: st.DataObject) -> None:
        page = data.draw(st.integers(0, NUM - 1))
        if (page, owner) in self.holds:
            self.ledger.release(owner, [page])
            del self.holds[page, owner]
        else:
            with pytest.raises(KVPageError):  # a double free
                self.ledger.release(owner, [page])

    @rule(page=st.integers(0, NUM - 1))
    def cache(self, page: int) -> None:
        if self.has_content(page):
            self.ledger.cache(page)
            self.cached.add(page)
        else:
            with pytest.raises(KVPageError):
                self.ledger.cache(page)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def uncache(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.cached)))
        self.ledger.uncache(page)
        self.cached.remove(page)

    @invariant()
    def agrees(self) -> None:
        self.ledger.check()
        assert [self.ledger.state(p) for p in range(NUM)] == [self.state(p) for p in range(NUM)]
        assert sum(self.ledger.counts().values()) == NUM

    def teardown(self) -> None:
        for owner in "abcd":
            self.ledger.release(owner)
        for page in self.cached:
            self.ledger.uncache(page)
        self.ledger.check()
        assert self.ledger.counts()["free"] == NUM
        assert len(self.ledger.reserve("last", NUM)) == NUM


def test_ledger_machine() -> None:
    run_state_machine_as_test(
        LedgerMachine, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )


def test_pages_for() -> None:
    assert [pages_for(n, 256) for n in (0, 1, 255, 256, 257, 512)] == [0, 1, 1, 1, 2, 2]


def test_check_finds_a_corrupted_count() -> None:
    ledger = Ledger(4)
    ledger.reserve("a", 2)
    ledger._counts[State.FREE] += 1
    with pytest.raises(KVPageError, match="counts"):
        ledger.check()
