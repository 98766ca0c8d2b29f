"""Prefill's scheduler: queue, chunks, publication, prefix cache, withdrawal.

A pure object: events in (messages, results, time), decisions out (``take()``, ``plan()``). One
chunk of one lane a step; before each chunk the lane with the largest ``priority`` (then the first
to arrive) is taken, as in the router's queue, so an urgent lane overtakes between chunks.

Pages of a lane: reserved when it starts (all or none), active once computed, published when
offered, and free (or cached) when decode sent KVRelease or its incarnation is dead. A lane given up
before that is quarantined until then.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from decant.engine.handoff import Key, Offer, OfferState
from decant.engine.host_tier import HostTier, Move
from decant.engine.interface import PrefillChunk, Scores, StepPlan
from decant.engine.kv_pages import Books, State, pages_for
from decant.engine.prefix_cache import Entry, PrefixCache
from decant.protocol.errors import ContextTooLong, DeadlineExceeded, NotServed
from decant.protocol.messages import (
    Cancel,
    Cancelled,
    KVRelease,
    Lost,
    Message,
    Prefill,
    Prefilled,
    PromptLogprobs,
)


@dataclass(frozen=True)
class PrefillLimits:
    num_pages: int
    num_slots: int
    page_tokens: int
    max_context: int
    vocab_size: int
    chunk_tokens: int
    max_queued: int = 1024  # lanes; more are handed back to the router
    cache_pages: int = 0  # of the prefix cache at most; 0: as many as nobody else wants


@dataclass(frozen=True)
class ToRouter:
    """Send to the router."""

    message: Message
    blobs: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class ToDecode:
    """Send to a decode process."""

    peer: str  # incarnation
    message: Message


Action = ToRouter | ToDecode


@dataclass(eq=False)
class Lane:
    """One prefill."""

    message: Prefill
    ids: array[int]
    order: int
    arrived_ms: float
    offer: Offer
    started_ms: float = 0.0
    pages: list[int] = field(default_factory=list)  # empty: queued
    slot: int = -1
    num_computed: int = 0
    num_cached: int = 0  # tokens skipped thanks to the prefix cache
    hit: Entry | None = None  # to copy before the first chunk
    digests: list[bytes] = field(default_factory=list)
    points: list[int] = field(default_factory=list)  # snapshots to come, ascending
    checksums: list[int] = field(default_factory=list)  # of the pages published
    is_dropped: bool = False

    @property
    def key(self) -> Key:
        return self.message.request_id, self.message.attempt, self.message.lane


@dataclass(frozen=True)
class PrefillPlan:
    """One step. In order: moves between pool and tier, clear or copy slot, copy the open page,
    check what was copied, compute, checksum (and check what the cache gave), snapshot.
    """

    step: StepPlan
    lane: Lane
    clear_slot: int = -1
    slot_copy: tuple[int, int, int] | None = None  # source, target, num_tokens
    page_copy: tuple[int, int] | None = None
    end: int = 0  # tokens processed after it
    publish: tuple[tuple[int, int], ...] = ()  # page, live tokens: to be checksummed
    is_last: bool = False  # checksum of the slot, too
    snapshot: tuple[int, int, int] | None = None  # source, target, num_tokens
    open_page: int = -1  # that the snapshot cuts; -1: it ends with a page
    hit: Entry | None = None  # where slot, open page and the first published pages come from
    moves: tuple[Move, ...] = ()

    @property
    def num_tokens(self) -> int:
        return 0 if self.step.chunk is None else len(self.step.chunk.token_ids)

    @property
    def is_first(self) -> bool:
        """The first of its lane."""
        return self.clear_slot >= 0 or self.slot_copy is not None


@dataclass(frozen=True)
class PrefillOutput:
    checksums: list[int]  # of plan.publish
    slot_checksum: int = 0  # at the end of the plan, if it is the last or has a snapshot
    open_checksum: int = 0  # of the snapshot's open page
    is_corrupt: bool = False  # plan.hit is not what it was: nothing of this step counts
    is_missing: bool = False  # plan.hit did not come back from the tier: as if it were corrupt
    scores: Scores | None = None  # of the chunk's tokens, if the request wants them


class PrefillScheduler:
    """All lanes of one prefill group."""

    def __init__(
        self,
        limits: PrefillLimits,
        epoch: int,
        cache: bool,
        hashes: str = "",
        tier: HostTier | None = None,
    ) -> None:
        """epoch: of our pool. hashes: model and layout, for the cache's keys. tier: for what it
        evicts.
        """
        self.limits = limits
        self.books = Books(limits.num_pages, limits.num_slots)
        self.cache: PrefixCache | None = None
        if cache:
            self.cache = PrefixCache(
                self.books, limits.page_tokens, hashes, "", limits.cache_pages, tier
            )
        self.lanes: dict[Key, Lane] = {}  # queued, computing, or published and not released
        self.is_draining = False
        self.num_tokens = 0  # computed
        self._epoch = epoch
        self._decodes: set[str] = set()
        self._withdrawn: dict[Key, str] = {}  # owed a KVRelease by this decode incarnation
        self._actions: list[Action] = []
        self._running: PrefillPlan | None = None
        self._order = self._step = 0

    # ---- what the service collects ---------------------------------------------------------------

    def take(self) -> list[Action]:
        """Messages to send, in order."""
        actions, self._actions = self._actions, []
        return actions

    @property
    def is_idle(self) -> bool:
        """Nothing is queued, computed or waiting for its release: drained."""
        return self._running is None and not self.lanes and not self._withdrawn

    def stats(self) -> dict[str, float]:
        """For heartbeats: pages and slots by state, lanes by state, cache counters."""
        return {
            **self.books.stats(),
            **{s: float(self.count(s)) for s in ("queued", "computing", "published")},
            "cache_entries": float(len(self.cache) if self.cache is not None else 0),
            "cache_hits": float(self.cache.num_hits if self.cache is not None else 0),
            "cache_misses": float(self.cache.num_misses if self.cache is not None else 0),
        }

    def count(self, state: str) -> int:
        """Lanes that are "queued", "computing", or "published" (complete, not released)."""
        is_open = [lane for lane in self.lanes.values() if lane.offer.state is OfferState.OPEN]
        queued = sum(not lane.pages for lane in is_open)
        return {
            "queued": queued,
            "computing": len(is_open) - queued,
            "published": len(self.lanes) - len(is_open),
        }[state]

    def _tell(self, message: Message) -> None:
        self._actions.append(ToRouter(message))

    # ---- events ----------------------------------------------------------------------------------

    def prefill(self, message: Prefill, ids: array[int], now_ms: float) -> None:
        """A lane to fill. Idempotent."""
        key = (message.request_id, message.attempt, message.lane)
        if key in self.lanes or key in self._withdrawn:
            return
        self._drop_older(message.request_id, message.attempt - 1)
        limits = self.limits
        why, code = "", ""
        if self.is_draining:
            why = "this prefill process is draining"
        elif message.decode_incarnation not in self._decodes:
            why = "the decode process is gone"
        elif len(self.lanes) >= limits.max_queued:
            why = "the prefill queue is full"
        elif not ids or len(ids) > limits.max_context or not _fits(ids, limits):
            why, code = f"a sequence of {len(ids)} tokens does not fit", ContextTooLong.code
        self._order += 1
        offer = Offer(key, self._epoch, limits.page_tokens, len(ids))
        lane = self.lanes[key] = Lane(message, ids, self._order, now_ms, offer)
        if why:
            self._lose(lane, why, code)

    def cancel(self, message: Cancel) -> None:
        """Stop and withdraw everything of this attempt and older ones; always answered."""
        num = self._drop_older(message.request_id, message.attempt)
        self._tell(Cancelled(message.request_id, message.attempt, num))

    def _drop_older(self, request_id: str, attempt: int) -> int:
        num = 0
        for lane in list(self.lanes.values()):
            if lane.message.request_id == request_id and lane.message.attempt <= attempt:
                num += self._drop(lane, "cancelled")
        return num

    def released(self, message: KVRelease) -> None:
        """Decode reads no more of a lane: it has everything, or gave up."""
        key = (message.request_id, message.attempt, message.lane)
        if key in self._withdrawn:
            del self._withdrawn[key]
            self.books.unhold([key], "peer")
        elif key in self.lanes:
            lane = self.lanes[key]
            lane.offer.close()
            self._drop(lane, "released")

    def peers(self, decodes: set[str]) -> None:
        """Incarnations of the live decode processes. Lanes for dead ones are freed."""
        self._decodes = set(decodes)
        for key, decode in list(self._withdrawn.items()):
            if decode not in decodes:
                del self._withdrawn[key]
                self.books.unhold([key], "peer")
        for lane in list(self.lanes.values()):
            if lane.message.decode_incarnation not in decodes:
                lane.offer.close()
                if not lane.is_dropped:
                    self._lose(lane, "the decode process is gone")

    def reset(self) -> None:
        """Another router: it knows none of our work."""
        for lane in list(self.lanes.values()):
            self._drop(lane, "another router")
        self._actions = [a for a in self._actions if not isinstance(a, ToRouter)]

    def hand_back(self, reason: str) -> None:
        """The drain time is over: the router shall resume the rest elsewhere."""
        for lane in list(self.lanes.values()):
            if lane.offer.state is OfferState.OPEN and not lane.is_dropped:
                self._lose(lane, reason)

    def flush(self) -> int:
        """Forget the prefix cache (what lanes hold stays theirs). Returns: number of entries."""
        return self.cache.clear() if self.cache is not None else 0

    def tick(self, now_ms: float) -> None:
        """Deadlines of lanes that are not complete. Call at least once a second."""
        for lane in list(self.lanes.values()):
            deadline = lane.message.deadline_ms
            is_open = lane.offer.state is OfferState.OPEN and not lane.is_dropped
            if deadline and now_ms > deadline and is_open:
                self._lose(lane, "the deadline passed", DeadlineExceeded.code)

    def _lose(self, lane: Lane, reason: str, code: str = "") -> None:
        """Let go of the whole attempt, as Lost means it."""
        message = lane.message
        for other in list(self.lanes.values()):
            if (other.message.request_id, other.message.attempt) == lane.key[:2]:
                self._drop(other, reason)
        self._tell(Lost(message.request_id, message.attempt, message.lane, reason, code))

    def _drop(self, lane: Lane, reason: str) -> int:
        """Free a lane; quarantine what decode may still read or the running step writes."""
        lane.is_dropped = True
        del self.lanes[lane.key]
        reasons = set()
        gone = lane.offer.withdraw(reason)
        if gone:
            reasons.add("peer")
            self._withdrawn[lane.key] = lane.message.decode_incarnation
            self._actions.append(ToDecode(lane.message.decode_incarnation, gone))
        if self._running and self._running.lane is lane:
            reasons.add("step")
        return self.books.free(lane.key, reasons)

    # ---- steps -----------------------------------------------------------------------------------

    def plan(self, now_ms: float) -> PrefillPlan | None:
        """The next chunk; None: nothing to do until the next event."""
        assert self._running is None
        lanes = [lane for lane in self.lanes.values() if lane.offer.state is OfferState.OPEN]
        lanes.sort(key=lambda lane: (-lane.message.priority, lane.order))
        may_start = True  # a lane that waits for pages is not overtaken by smaller ones
        for lane in lanes:
            if not lane.pages and may_start:
                may_start = self._start(lane, now_ms)
            if lane.pages:
                self._running = self._plan(lane)
                return self._running
        return None

    def _start(self, lane: Lane, now_ms: float) -> bool:
        """Pages and a slot for a queued lane, as many as possible from the cache."""
        pages, slots, page_tokens = self.books.pages, self.books.slots, self.limits.page_tokens
        hit: Entry | None = None
        if self.cache is not None:
            lane.digests = lane.digests or self.cache.digests(lane.ids, lane.message.cache_salt)
            if lane.message.prompt_logprobs < 0:  # scores come only from what is computed
                hit = self.cache.lookup(lane.digests, lane.ids)
                hit = self.cache.restore(lane.digests, lane.ids, hit) or hit
        shared = list(hit.pages[: hit.num_tokens // page_tokens]) if hit else []
        pages.share(lane.key, shared)
        num = pages_for(len(lane.ids), page_tokens) - len(shared)
        if not self._make_room(num, 1, hit):
            pages.release(lane.key)
            if hit is None or self._is_shared():
                return False
            # The pool is ours alone, but too small for the prompt beside what it hits.
            hit, shared, num = None, [], pages_for(len(lane.ids), page_tokens)
            if not self._make_room(num, 1, None):
                return False
        lane.pages = shared + pages.reserve(lane.key, num)
        lane.slot = slots.reserve(lane.key, 1)[0]
        lane.started_ms, lane.hit = now_ms, hit
        if self.cache is not None:
            self.cache.count(hit)
            lane.num_cached = lane.num_computed = hit.num_tokens if hit else 0
            lane.points = self.cache.points(
                lane.digests, len(lane.ids), lane.num_cached, self.limits.chunk_tokens
            )
        return True

    def _is_shared(self) -> bool:
        """Whether anything of the pool is held and will come free."""
        return any(
            ledger.num_free + ledger.count(State.CACHED) < ledger.num
            for ledger in (self.books.pages, self.books.slots)
        )

    def _make_room(self, num_pages: int, num_slots: int, keep: Entry | None) -> bool:
        if self.cache is not None:
            return self.cache.make_room(num_pages, num_slots, keep)
        return self.books.pages.num_free >= num_pages and self.books.slots.num_free >= num_slots

    def _plan(self, lane: Lane) -> PrefillPlan:
        page_tokens = self.limits.page_tokens
        start, length = lane.num_computed, len(lane.ids)
        end = min(length, start + self.limits.chunk_tokens, *lane.points[:1])
        self._step += 1
        chunk = None
        if end > start:
            chunk = PrefillChunk(
                lane.slot,
                start,
                np.array(lane.ids[start:end], np.int32),
                tuple(lane.pages[: pages_for(end, page_tokens)]),
                lane.ids[end] if end < length else -1,
                lane.message.prompt_logprobs,
            )
        slot_copy = page_copy = snapshot = None
        hit, lane.hit = lane.hit, None
        if hit:
            slot_copy = (hit.slot, lane.slot, hit.num_tokens)
            full, open_tokens = divmod(hit.num_tokens, page_tokens)
            if open_tokens:
                page_copy = (hit.pages[full], lane.pages[full])
        if self.cache is not None and lane.points[:1] == [end]:
            lane.points.pop(0)
            slot = self.cache.reserve_slot(self.cache.key(lane.digests, lane.ids, end), hit)
            if slot >= 0:
                snapshot = (lane.slot, slot, end)
        open_page = lane.pages[end // page_tokens] if snapshot and end % page_tokens else -1
        return PrefillPlan(
            StepPlan(self._step, (), chunk),
            lane,
            lane.slot if start == 0 else -1,
            slot_copy,
            page_copy,
            end,
            tuple(
                (lane.pages[page], min(page_tokens, end - page * page_tokens))
                for page in lane.offer.due(end)
            ),
            end == length,
            snapshot,
            open_page,
            hit,
            self.cache.take_moves() if self.cache is not None else (),
        )

    def apply(self, output: PrefillOutput, now_ms: float) -> None:
        """The running step ended."""
        plan = self._running
        assert plan is not None
        self._running, lane = None, plan.lane
        self.books.unhold([lane.key], "step")
        self.num_tokens += plan.num_tokens
        if output.is_corrupt or output.is_missing:
            self._restart(plan, output.is_corrupt)
            return
        if lane.is_dropped:
            if plan.snapshot and self.cache is not None:
                self.cache.abandon(plan.snapshot[1])
            return
        lane.num_computed = plan.end
        if lane.message.prompt_logprobs >= 0:
            if output.scores is None:
                why = "this engine does not score prompts"
                self._lose(lane, why, NotServed.code)
                return
            self._tell_scores(lane, plan, output.scores)
        pages = self.books.pages
        done = lane.pages[: pages_for(plan.end, self.limits.page_tokens)]
        pages.activate(lane.key, done[lane.offer.num_published :])
        if plan.snapshot and self.cache is not None:
            _, slot, num_tokens = plan.snapshot
            key = self.cache.key(lane.digests, lane.ids, num_tokens)
            sums = (lane.checksums + output.checksums, output.open_checksum, output.slot_checksum)
            self.cache.insert(lane.digests, key, num_tokens, slot, lane.pages, *sums)
        if plan.publish:
            lane.checksums += output.checksums
            due = [page for page, _ in plan.publish]
            pages.publish(lane.key, due)
            ready = lane.offer.publish(
                due,
                output.checksums,
                plan.end,
                lane.slot if plan.is_last else -1,
                output.slot_checksum,
            )
            self._actions.append(ToDecode(lane.message.decode_incarnation, ready))
        if plan.is_last:
            self._tell(
                Prefilled(
                    *lane.key,
                    lane.num_cached,
                    lane.started_ms - lane.arrived_ms,
                    now_ms - lane.started_ms,
                )
            )

    def _tell_scores(self, lane: Lane, plan: PrefillPlan, scores: Scores) -> None:
        chunk = plan.step.chunk
        assert chunk is not None
        arrays = (scores.logprobs, scores.ranks, scores.top_ids, scores.top_logprobs)
        body = PromptLogprobs(*lane.key, chunk.start + 1, lane.message.prompt_logprobs)
        self._actions.append(ToRouter(body, tuple(x.tobytes() for x in arrays)))

    def _restart(self, plan: PrefillPlan, is_changed: bool) -> None:
        """What the cache gave is not what it was. Nothing of the lane is published yet (its first
        pages are exactly those that were checked), so it begins again without that entry.
        """
        assert self.cache is not None and plan.hit is not None
        if plan.snapshot:
            self.cache.abandon(plan.snapshot[1])
        self.cache.distrust(plan.hit, is_changed)
        lane = plan.lane
        if not lane.is_dropped:
            self.books.free(lane.key)
            lane.pages, lane.points, lane.slot = [], [], -1
            lane.num_computed = lane.num_cached = 0


def _fits(ids: array[int], limits: PrefillLimits) -> bool:
    """Whether a sequence can ever be prefilled here."""
    num_pages = pages_for(len(ids), limits.page_tokens)
    return num_pages <= limits.num_pages and min(ids) >= 0 and max(ids) < limits.vocab_size
