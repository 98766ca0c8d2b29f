"""Who holds which page and which slot of a pool. Bookkeeping only: no bytes, no torch, no clock.

Every page is in exactly one state. Several owners may hold one page (choices of a request share
full prompt pages; requests share a cached prefix), each with a state of its own; the page's state
is the most restrictive of them:

    FREE < CACHED < RESERVED < ACTIVE < PUBLISHED < QUARANTINED

An *owner* is any hashable name; (request_id, attempt, choice) in the schedulers. The same class
keeps slots. The counts by state are exported and must sum to the number of pages.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable

from decant.protocol.errors import KVPageError, OutOfPages

Owner = Hashable


class State(enum.IntEnum):
    """Ordered: of several holders the greatest decides."""

    FREE = 0
    CACHED = 1  # kept by the prefix cache alone
    RESERVED = 2  # promised, content not valid yet
    ACTIVE = 3  # content in use by a sequence
    PUBLISHED = 4  # offered to a peer, must not change
    QUARANTINED = 5  # given up by its owner, but somebody may still read or write it


def pages_for(num_tokens: int, page_tokens: int) -> int:
    """Pages that cover ``num_tokens`` positions."""
    return -(-num_tokens // page_tokens)


class Ledger:
    """States and holders of ``num`` pages (or slots)."""

    def __init__(self, num: int, unit: str = "page") -> None:
        self.num = num
        self.unit = unit
        self._free = list(range(num - 1, -1, -1))  # a stack: the last one freed is warm
        self._holders: list[dict[Owner, State]] = [{} for _ in range(num)]
        self._owned: dict[Owner, dict[int, None]] = {}
        self._is_cached = bytearray(num)
        self._counts = [num, 0, 0, 0, 0, 0]

    # ---- reading ---------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self._free)

    def state(self, page: int) -> State:
        holders = self._holders[page]
        if holders:
            return max(holders.values())
        return State.CACHED if self._is_cached[page] else State.FREE

    def owned(self, owner: Owner) -> list[int]:
        """Pages of an owner, in the order in which it got them."""
        return list(self._owned.get(owner, ()))

    def has_content(self, page: int) -> bool:
        """Whether somebody relies on the page's content: the cache or an owner that is active."""
        holds = self._holders[page].values()
        return bool(self._is_cached[page]) or State.ACTIVE in holds or State.PUBLISHED in holds

    def num_holders(self, page: int) -> int:
        return len(self._holders[page])

    def count(self, state: State) -> int:
        """Number of pages in a state."""
        return self._counts[state]

    def counts(self) -> dict[str, int]:
        """Number of pages by state name (lower case)."""
        return {s.name.lower(): self._counts[s] for s in State}

    def check(self) -> None:
        """Raises: KVPageError if the books do not agree with themselves."""
        counts = [0] * len(State)
        for page in range(self.num):
            counts[self.state(page)] += 1
            for owner in self._holders[page]:
                if page not in self._owned.get(owner, ()):
                    raise KVPageError(f"{self.unit} {page} names {owner}, who does not own it")
        if counts != self._counts or sum(counts) != self.num:
            raise KVPageError(f"{self.unit} counts {self._counts} are not the true {counts}")
        free = set(self._free)
        if len(free) != len(self._free) or len(free) != counts[State.FREE]:
            raise KVPageError(f"the free list of {self.unit}s is wrong")
        if any(self.state(page) for page in free):
            raise KVPageError(f"a {self.unit} on the free list is held")
        for owner, pages in self._owned.items():
            if not pages or any(owner not in self._holders[page] for page in pages):
                raise KVPageError(f"{owner} owns {self.unit}s that do not name it")

    # ---- changing --------------------------------------------------------------------------------

    def _set(self, page: int, owner: Owner, state: State | None) -> None:
        """Set (None: end) the hold of one owner on one page, and account for it."""
        before = self.state(page)
        if state is None:
            del self._holders[page][owner]
            owned = self._owned[owner]
            del owned[page]
            if not owned:
                del self._owned[owner]
        else:
            self._holders[page][owner] = state
            self._owned.setdefault(owner, {})[page] = None
        self._account(page, before)

    def _account(self, page: int, before: State) -> None:
        after = self.state(page)
        if before != after:
            self._counts[before] -= 1
            self._counts[after] += 1
            if after is State.FREE:
                self._free.append(page)

    def _hold(self, page: int, owner: Owner) -> State:
        state = self._holders[page].get(owner)
        if state is None:
            raise KVPageError(f"{owner} does not hold {self.unit} {page}")
        return state

    def reserve(self, owner: Owner, num: int) -> list[int]:
        """``num`` free pages for an owner, all or none. Raises: OutOfPages."""
        if num > len(self._free):
            raise OutOfPages(f"{num} {self.unit}s wanted, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(num)]
        for page in pages:
            self._set(page, owner, State.RESERVED)
        return pages

    def share(self, owner: Owner, pages: Iterable[int]) -> None:
        """Make an owner one more holder of pages with valid content (active).

        Raises: KVPageError if a page has no valid content, or is the owner's already.
        """
        for page in pages:
            if not self.has_content(page):
                name = self.state(page).name
                raise KVPageError(f"{self.unit} {page} is {name} and cannot be shared")
            if owner in self._holders[page]:
                raise KVPageError(f"{owner} holds {self.unit} {page} already")
            self._set(page, owner, State.ACTIVE)

    def activate(self, owner: Owner, pages: Iterable[int]) -> None:
        """Reserved -> active. Pages that are active already stay so."""
        for page in pages:
            if self._hold(page, owner) not in (State.RESERVED, State.ACTIVE):
                raise KVPageError(f"{self.unit} {page} is not reserved")
            self._set(page, owner, State.ACTIVE)

    def publish(self, owner: Owner, pages: Iterable[int]) -> None:
        """Active -> published."""
        for page in pages:
            if self._hold(page, owner) is not State.ACTIVE:
                raise KVPageError(f"{self.unit} {page} is not active")
            self._set(page, owner, State.PUBLISHED)

    def quarantine(self, owner: Owner) -> int:
        """All of an owner's pages -> quarantined. Returns: how many."""
        pages = self.owned(owner)
        for page in pages:
            self._set(page, owner, State.QUARANTINED)
        return len(pages)

    def release(self, owner: Owner, pages: Iterable[int] | None = None) -> int:
        """End an owner's hold on the given pages (None: all that it has). Returns: how many."""
        ended = self.owned(owner) if pages is None else list(pages)
        for page in ended:
            self._hold(page, owner)
            self._set(page, owner, None)
        return len(ended)

    def cache(self, page: int) -> None:
        """Keep a page's content beyond its owners. The page must have valid content."""
        before = self.state(page)
        if not self.has_content(page):
            raise KVPageError(f"{self.unit} {page} is {before.name} and cannot be cached")
        self._is_cached[page] = 1
        self._account(page, before)

    def uncache(self, page: int) -> None:
        """Let a page go when its owners do; free at once if it has none."""
        if not self._is_cached[page]:
            raise KVPageError(f"{self.unit} {page} is not cached")
        before = self.state(page)
        self._is_cached[page] = 0
        self._account(page, before)


class Books:
    """Pages and slots of a pool together, and what was given up while somebody still touches it.

    A *reason* names who: "step" (the engine runs on it), "pull" (a copy writes to it), "draft" (the
    draft process may write to the slot, it never touches pages), "peer" (a peer may read it).
    """

    def __init__(self, num_pages: int, num_slots: int) -> None:
        self.pages = Ledger(num_pages, "page")
        self.slots = Ledger(num_slots, "slot")
        self._held: dict[Owner, set[str]] = {}

    def free(self, owner: Owner, reasons: Iterable[str] = ()) -> int:
        """Release an owner's pages and slots, or quarantine them until every reason has ended.

        Returns: number of pages.
        """
        num = len(self.pages.owned(owner))
        holds = set(reasons)
        if holds:
            self._held.setdefault(owner, set()).update(holds)
            self.pages.quarantine(owner)
            self.slots.quarantine(owner)
        self._settle(owner)
        return num

    def unhold(self, owners: Iterable[Owner], reason: str) -> None:
        """``reason`` has ended for these owners (for those that were not given up: nothing)."""
        for owner in owners:
            if owner in self._held:
                self._held[owner].discard(reason)
                self._settle(owner)

    def _settle(self, owner: Owner) -> None:
        holds = self._held.get(owner, set())
        if holds <= {"draft"}:
            self.pages.release(owner)
        if not holds:
            self._held.pop(owner, None)
            self.slots.release(owner)

    def is_held(self, owner: Owner) -> bool:
        return owner in self._held

    def check(self) -> None:
        """Raises: KVPageError if pages, slots or quarantines do not agree."""
        self.pages.check()
        self.slots.check()

    def stats(self) -> dict[str, float]:
        """For heartbeats and gauges: pages_free, slots_active ..."""
        return {
            f"{ledger.unit}s_{name}": float(num)
            for ledger in (self.pages, self.slots)
            for name, num in ledger.counts().items()
        }
