"""The hand-off of one lane from prefill to decode: a state machine for each side.

Pure objects: messages and results in, decisions out; no sockets, no clock, no bytes.

    prefill (Offer)   OPEN --publish--> OPEN --publish last--> COMPLETE --KVRelease--> CLOSED
                      OPEN, COMPLETE --withdraw--> WITHDRAWN --KVRelease--> CLOSED
    decode (Intake)   WAITING --KVReady--> PULLING --pulled--> WAITING ... --last pulled--> COMPLETE
                      any --close--> CLOSED (at once, or when the pull under way has ended)

Somebody owns the pages at every moment: from the first KVReady on decode owes prefill exactly one
KVRelease, and prefill changes nothing of what it published before that arrives or decode's
incarnation is dead. No timer frees a page.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from decant.engine.kv_pages import pages_for
from decant.protocol.errors import HandoffError
from decant.protocol.messages import KVGone, KVReady, KVRelease

Key = tuple[str, int, int]  # request_id, attempt, lane


class OfferState(enum.Enum):
    OPEN = "open"  # prefill still computes
    COMPLETE = "complete"  # all is published
    WITHDRAWN = "withdrawn"  # will not be completed; decode may still read what was published
    CLOSED = "closed"  # decode reads no more


class Offer:
    """Prefill's side: what was published of one lane, and whether it may be freed."""

    def __init__(self, key: Key, epoch: int, page_tokens: int, num_tokens: int) -> None:
        self.key = key
        self.state = OfferState.OPEN
        self.num_published = 0  # pages
        self._epoch, self._page_tokens, self._num_tokens = epoch, page_tokens, num_tokens

    def due(self, num_processed: int) -> range:
        """Page numbers of the lane that may be published after ``num_processed`` tokens: the
        finished ones, and at the end the open one too.
        """
        if num_processed >= self._num_tokens:
            return range(self.num_published, pages_for(self._num_tokens, self._page_tokens))
        return range(self.num_published, num_processed // self._page_tokens)

    def publish(
        self,
        pages: Sequence[int],
        checksums: Sequence[int],
        num_processed: int,
        slot: int = -1,
        slot_checksum: int = 0,
    ) -> KVReady:
        """The message for the pages of ``due(num_processed)``."""
        assert self.state is OfferState.OPEN and len(pages) == len(self.due(num_processed))
        first = self.num_published
        self.num_published += len(pages)
        is_last = num_processed >= self._num_tokens
        if is_last:
            self.state = OfferState.COMPLETE
        return KVReady(
            *self.key,
            epoch=self._epoch,
            first_page=first,
            pages=list(pages),
            checksums=list(checksums),
            num_tokens=num_processed,
            is_last=is_last,
            slot=slot if is_last else -1,
            slot_checksum=slot_checksum if is_last else 0,
        )

    def withdraw(self, reason: str) -> KVGone | None:
        """Give up. None: decode was told nothing yet (or is told already), so nothing is owed."""
        if self.state in (OfferState.WITHDRAWN, OfferState.CLOSED):
            return None
        if not self.num_published:
            self.state = OfferState.CLOSED
            return None
        self.state = OfferState.WITHDRAWN
        return KVGone(*self.key, reason=reason)

    def close(self) -> None:
        """KVRelease arrived, or decode's incarnation is dead: decode reads no more."""
        self.state = OfferState.CLOSED


@dataclass(frozen=True)
class Pull:
    """Copy pages (and at the end the slot) from a peer's pool into our own."""

    key: Key
    peer: str  # incarnation of the exporter
    source: tuple[int, ...]
    target: tuple[int, ...]
    num_tokens: tuple[int, ...]  # live tokens of each page
    checksums: tuple[int, ...]
    source_slot: int = -1  # -1: no slot in this pull
    target_slot: int = -1
    slot_tokens: int = 0
    slot_checksum: int = 0
    kept: tuple[int, ...] = ()  # our own pages that are taken instead of copying ...
    kept_checksums: tuple[int, ...] = ()  # ... if they still are what they were

    @property
    def is_last(self) -> bool:
        return self.source_slot >= 0


class Intake:
    """Decode's side: pulls in order, one at a time, until the lane is complete."""

    def __init__(
        self,
        key: Key,
        peer: str,
        pages: Sequence[int],
        slot: int,
        num_tokens: int,
        page_tokens: int,
        kept_checksums: Sequence[int] = (),
    ) -> None:
        """pages, slot: where the lane goes in our pool. peer: prefill's incarnation; empty: not
        known yet, the first KVReady tells it. kept_checksums: of the first pages, which are there
        already and full.
        """
        self.key = key
        self.peer = peer
        self.is_complete = False
        self.is_owing = False  # a KVRelease is owed
        self.is_pulling = False
        self.is_closed = False
        self._pages, self._slot = tuple(pages), slot
        self._num_tokens, self._page_tokens = num_tokens, page_tokens
        self._kept = tuple(kept_checksums)
        self.checksums: list[int] = []  # of the pages announced, as they are in our pool
        self._num_known = 0  # pages announced
        self._tokens_known = 0
        self._waiting: deque[Pull] = deque()

    def ready(self, peer: str, message: KVReady) -> Pull | None:
        """A publication. Returns: the pull to start now, or None (one is under way).

        Raises: HandoffError if it does not continue what was announced before.
        """
        self.is_owing = True
        self.peer = self.peer or peer
        first, end = message.first_page, message.first_page + len(message.pages)
        want_end = (
            pages_for(self._num_tokens, self._page_tokens)
            if message.is_last
            else message.num_tokens // self._page_tokens
        )
        if (
            peer != self.peer
            or first != self._num_known
            or end != want_end
            or end > len(self._pages)
            or len(message.checksums) != len(message.pages)
            or not self._tokens_known <= message.num_tokens <= self._num_tokens
            or (message.is_last and message.num_tokens != self._num_tokens)
            or (message.is_last and message.slot < 0)
            or self.is_complete
            or self.is_closed
        ):
            raise HandoffError(
                f"pages {first}..{end} after {message.num_tokens} tokens do not continue "
                f"{self._num_known} pages of {self._num_tokens} tokens"
            )
        self._num_known, self._tokens_known = end, message.num_tokens
        begin = min(max(first, len(self._kept)), end)  # of what has to travel
        kept, checksums = self._kept[first:begin], tuple(message.checksums[begin - first :])
        self.checksums += (*kept, *checksums)
        pull = Pull(
            self.key,
            peer,
            tuple(message.pages[begin - first :]),
            self._pages[begin:end],
            tuple(
                min(self._page_tokens, message.num_tokens - page * self._page_tokens)
                for page in range(begin, end)
            ),
            checksums,
            message.slot if message.is_last else -1,
            self._slot if message.is_last else -1,
            message.num_tokens if message.is_last else 0,
            message.slot_checksum if message.is_last else 0,
            self._pages[first:begin],
            kept,
        )
        self._waiting.append(pull)
        return self._next()

    def _next(self) -> Pull | None:
        if self.is_pulling or self.is_closed or not self._waiting:
            return None
        self.is_pulling = True
        return self._waiting.popleft()

    def pulled(self, pull: Pull) -> Pull | None:
        """A pull ended well. Returns: the next one. ``is_complete`` turns True after the last."""
        self.is_pulling = False
        if pull.is_last and not self.is_closed:
            self.is_complete = True
        return self._next()

    def close(self) -> KVRelease | None:
        """No more of this lane (complete or given up). Returns: the release that is owed, to be
        sent now; None while a pull is under way (call again after it) or if nothing is owed.
        """
        self.is_closed = True
        self._waiting.clear()
        if self.is_pulling or not self.is_owing:
            return None
        self.is_owing = False
        return KVRelease(*self.key, is_ok=self.is_complete)
