"""Decode's scheduler: reservations, hand-offs, continuous batching, growth, preemption, cancel.

A pure object: events in (messages, results, time), decisions out (``take()``, ``plan()``); no
sockets, no threads, no clock. The service runs the plans in the engine thread and the pulls in
another; a cancel that comes meanwhile quarantines what they touch until they return.

Life of a lane: ``reserve`` -> ``kv_ready``... (pulls) or own chunks -> complete -> admitted by the
next ``plan``: forked into one sequence per choice, whose first token is drawn from the head. Then
every ``plan`` takes up to ``max_batch`` sequences, round robin, with their drafts. Results are
independent of batching, so order is free; round robin is fair.
"""

from __future__ import annotations

from array import array
from collections import deque

import numpy as np

from decant.engine.acceptance import DepthController, accept
from decant.engine.chunk_credit import ChunkCredit
from decant.engine.decode_batch import (
    Action,
    Advance,
    DecodePlan,
    Limits,
    Outgoing,
    Proposal,
    StepOutput,
    ToPrefill,
    ToRouter,
)
from decant.engine.handoff import Pull
from decant.engine.interface import PrefillChunk, SlotRows, StepPlan
from decant.engine.kv_pages import Books, pages_for
from decant.engine.page_cache import PageCache, Seal
from decant.engine.reservation import (
    fork,
    make_lane,
    malformed,
    max_length,
    pages_wanted,
    refusal,
)
from decant.engine.sampler import Draw
from decant.engine.sequence import Lane, Request, Sequence, SequenceOwner
from decant.engine.speculation import Speculation
from decant.protocol.errors import (
    DeadlineExceeded,
    EngineError,
    HandoffError,
    OutOfPages,
    ProtocolError,
)
from decant.protocol.messages import (
    Cancel,
    Cancelled,
    Decoding,
    EndChoice,
    Finished,
    KVGone,
    KVReady,
    KVRelease,
    Lost,
    Message,
    Preempted,
    Refused,
    ReplayFrom,
    Reserve,
    Reserved,
    StreamCredit,
    TokenRun,
)


class DecodeScheduler:
    """All requests of one decode group."""

    def __init__(
        self,
        limits: Limits,
        depth: DepthController | None = None,
        cache: bool = False,
        hashes: str = "",
    ) -> None:
        """cache: keep full pages for later requests. hashes: model and layout, for its keys."""
        self.limits = limits
        self.books = Books(limits.num_pages, limits.num_slots)
        self.pages, self.slots = self.books.pages, self.books.slots
        self.cache: PageCache | None = None
        if cache:
            self.cache = PageCache(self.pages, limits.page_tokens, hashes, limits.cache_pages)
        depth = depth or DepthController(limits.max_drafts, is_adaptive=False)
        self.speculation = Speculation(depth, self.books, limits.vocab_size)
        self.requests: dict[str, Request] = {}
        self.is_draining = False
        self.num_preempted = self.num_tokens = 0
        self._ready: deque[Sequence] = deque()  # live sequences, next to run first
        self._complete: deque[Lane] = deque()  # to admit
        self._local: deque[Lane] = deque()  # that we prefill by ourselves
        self.credit_for_chunks = ChunkCredit(limits.tpot_budget_s, limits.chunk_tokens)
        self._prefills: dict[str, str] = {}  # instance -> incarnation
        self._actions: list[Action] = []
        self._outgoing: dict[str, Outgoing] = {}
        self._pulling: dict[tuple[str, int, int], Lane] = {}  # by lane key, dropped ones too
        self._running: DecodePlan | None = None
        self._order = 0
        self._step = 0

    # ---- what the service collects ---------------------------------------------------------------

    def take(self) -> list[Action]:
        """Messages to send and pulls to start, in order."""
        actions, self._actions = self._actions, []
        return actions

    def take_tokens(self) -> dict[str, Outgoing]:
        """Tokens to send, by tokenizer."""
        outgoing, self._outgoing = self._outgoing, {}
        return outgoing

    @property
    def num_running(self) -> int:
        """Sequences in the batch or waiting for their turn."""
        return len(self._ready)

    @property
    def is_idle(self) -> bool:
        """Nothing is held: drained."""
        return self._running is None and not any(
            r.lanes or any(not s.finish_reason for s in r.sequences.values())
            for r in self.requests.values()
        )

    def stats(self) -> dict[str, float]:
        """For heartbeats: pages and slots by state, numbers of sequences."""
        return {
            **self.books.stats(),
            "sequences": float(len(self._ready)),
            "lanes": float(sum(len(r.lanes) for r in self.requests.values())),
            "parked": float(sum(r.is_parked for r in self.requests.values())),
            "preempted": float(self.num_preempted),
            "cache_hit_pages": float(self.cache.num_hit_pages if self.cache else 0),
            "cache_missed_pages": float(self.cache.num_missed_pages if self.cache else 0),
        }

    def _tell(self, message: Message) -> None:
        self._actions.append(ToRouter(message))

    # ---- reservations ----------------------------------------------------------------------------

    def reserve(self, message: Reserve, ids: array[int]) -> None:
        """Slot and pages for a lane and all its choices, or Refused. Idempotent."""
        key = (message.request_id, message.attempt, message.lane)
        request = self.requests.get(message.request_id)
        if request and request.attempt > message.attempt:
            return  # stale
        if request and request.attempt < message.attempt:
            self._drop(request)
            request = None
        if request and (
            message.lane in request.lanes
            or not request.sequences.keys().isdisjoint(message.choices)
        ):
            self._tell(Reserved(*key))
            return
        wrong = malformed(self.limits, message, ids)
        if wrong:
            if request:
                self._drop(request)
            self._tell(Lost(*key, reason=wrong, code=ProtocolError.code))
            return
        digests, kept = self._find(message, ids)
        why, text = "draining", "this decode process is draining"
        if not self.is_draining:
            why, text = refusal(self.limits, self.books, len(self._ready), message, ids, len(kept))
        if why:
            self.pages.release((*key[:2], message.choices[0]))
            self._tell(Refused(*key, reason=why, message=text))
            return
        if self.cache is not None:
            self.cache.make_room(pages_wanted(self.limits, message, len(ids), len(kept)))
            self.cache.count(len(kept), len(digests))
        if request is None:
            self._order += 1
            request = Request(
                message.request_id,
                message.attempt,
                self._order,
                message.tokenizer,
                message.deadline_ms,
                message.cache_salt,
            )
            self.requests[message.request_id] = request
        peer = self._prefills.get(message.prefill, "")
        lane = make_lane(self.limits, self.books, request, message, ids, peer, kept)
        lane.digests = digests
        if lane.intake is None:
            self._local.append(lane)
        request.lanes[message.lane] = lane
        self._tell(Reserved(*key))

    def _find(self, message: Reserve, ids: array[int]) -> tuple[list[bytes], list[tuple[int, int]]]:
        """Digests of the sequence's full pages, and those that are here: (page, checksum), held
        from now on by the lane's first choice.
        """
        if self.cache is None:
            return [], []
        digests = self.cache.digests(ids, message.cache_salt)
        kept = self.cache.lookup(digests) if message.prefill else []
        owner = message.request_id, message.attempt, message.choices[0]
        self.pages.share(owner, [page for page, _ in kept])
        return digests, kept

    # ---- the page cache --------------------------------------------------------------------------

    def flush(self) -> int:
        """Forget the page cache (what requests hold stays theirs). Returns: number of pages."""
        return self.cache.clear() if self.cache is not None else 0

    def sealed(self, seal: Seal, checksums: list[int]) -> None:
        """The copying thread computed these."""
        if self.cache is not None:
            self.cache.sealed(seal, checksums)

    def _keep(self, sequence: Sequence) -> None:
        """A sequence ends: its full pages stay for the next turn. The last token was drawn, not
        processed, so nothing will write to them, a running step included.
        """
        if self.cache is None:
            return
        num_tokens = (len(sequence.ids) - 1) // self.limits.page_tokens * self.limits.page_tokens
        digests = self.cache.digests(sequence.ids[:num_tokens], sequence.request.salt)
        seal = self.cache.offer(digests, sequence.pages, None)
        if seal:
            self._actions.append(seal)

    # ---- hand-off --------------------------------------------------------------------------------

    def _lane(self, message: KVReady | KVGone) -> Lane | None:
        request = self.requests.get(message.request_id)
        if request is None or request.attempt != message.attempt:
            return None
        lane = request.lanes.get(message.lane)
        return lane if lane and lane.intake and not lane.intake.is_complete else None

    def kv_ready(self, peer: str, message: KVReady, now_ms: float) -> None:
        """Prefill (incarnation ``peer``) published pages."""
        lane = self._lane(message)
        if lane is None or lane.intake is None:
            key = message.request_id, message.attempt, message.lane
            if key not in self._pulling:  # else the release follows the pull
                self._actions.append(ToPrefill(peer, KVRelease(*key, is_ok=False)))
            return
        lane.began_ms = lane.began_ms or now_ms
        try:
            pull = lane.intake.ready(peer, message)
        except HandoffError as error:
            self._lose(lane.request, lane.message.lane, str(error))
            return
        if pull:
            self._start(lane, pull)

    def _start(self, lane: Lane, pull: Pull) -> None:
        self._pulling[lane.key] = lane
        self._actions.append(pull)

    def kv_gone(self, peer: str, message: KVGone) -> None:
        """Prefill will not complete a lane."""
        lane = self._lane(message)
        if lane:
            self._lose(lane.request, message.lane, f"prefill withdrew: {message.reason}")
        elif (message.request_id, message.attempt, message.lane) not in self._pulling:
            key = message.request_id, message.attempt, message.lane
            self._actions.append(ToPrefill(peer, KVRelease(*key, is_ok=False)))

    def pulled(self, pull: Pull, error: str, now_ms: float) -> None:
        """A pull returned; ``error`` is empty if all bytes arrived and match."""
        lane = self._pulling.pop(pull.key)
        intake = lane.intake
        assert intake is not None
        if error and self.cache is not None:
            self.cache.distrust(pull.kept)
        if lane.request.is_dropped:
            intake.is_pulling = False
            self._close(lane)
            self.books.unhold([lane.owner(choice) for choice in lane.slots], "pull")
            return
        if error:
            intake.is_pulling = False
            self._lose(lane.request, lane.message.lane, error)
            return
        lane.num_pulled_bytes += len(pull.target) * self.limits.page_bytes
        following = intake.pulled(pull)
        if following:
            self._start(lane, following)
        if intake.is_complete:
            lane.num_pulled_bytes += self.limits.slot_bytes
            self._close(lane)
            self._complete.append(lane)
            self._tell(Decoding(*lane.key, lane.num_pulled_bytes, now_ms - lane.began_ms))

    def _close(self, lane: Lane) -> None:
        release = lane.intake.close() if lane.intake else None
        if release and lane.intake:
            self._actions.append(ToPrefill(lane.intake.peer, release))

    def peers(self, prefills: dict[str, str]) -> None:
        """Live prefill processes, instance -> incarnation. Lanes of a dead one are lost."""
        self._prefills = dict(prefills)
        alive = set(prefills.values())
        for request in list(self.requests.values()):
            for lane in list(request.lanes.values()):
                intake = lane.intake
                if intake and not intake.is_complete and intake.peer and intake.peer not in alive:
                    intake.is_owing = False  # nobody is left to tell
                    if not request.is_dropped:
                        self._lose(request, lane.message.lane, "the prefill process is gone")

    # ---- ends ------------------------------------------------------------------------------------

    def cancel(self, message: Cancel) -> None:
        """Free everything of this attempt and older ones; always answered."""
        request = self.requests.get(message.request_id)
        num = 0
        if request and request.attempt <= message.attempt:
            num = self._drop(request, keeps=True)
        self._tell(Cancelled(message.request_id, message.attempt, num))

    def reset(self) -> None:
        """Another router: it knows none of our work."""
        for request in list(self.requests.values()):
            self._drop(request, keeps=True)
        self._actions = [a for a in self._actions if not isinstance(a, ToRouter)]
        self._outgoing = {}

    def hand_back(self, reason: str) -> None:
        """The drain time is over: the router shall resume the rest elsewhere."""
        for request in list(self.requests.values()):
            lanes = list(request.lanes) or [0]
            if request.lanes or any(not s.finish_reason for s in request.sequences.values()):
                self._lose(request, lanes[0], reason)

    def _lose(self, request: Request, lane: int, reason: str, code: str = "") -> None:
        self._drop(request)
        self._tell(Lost(request.request_id, request.attempt, lane, reason, code))

    def _drop(self, request: Request, keeps: bool = False) -> int:
        """Forget a request; what a step, a pull or the draft still touches is quarantined.

        keeps: the content is good, so full pages stay in the cache. Returns: number of its pages,
        quarantined ones included.
        """
        request.is_dropped = True
        del self.requests[request.request_id]
        num = 0
        for lane in request.lanes.values():
            self._close(lane)
            for choice in lane.slots:
                num += self._free(lane.owner(choice), lane)
        for sequence in request.sequences.values():
            if not sequence.finish_reason:
                if keeps:
                    self._keep(sequence)
                num += self._free(sequence.owner)
        self._ready = deque(s for s in self._ready if s.request is not request)
        self._complete = deque(lane for lane in self._complete if lane.request is not request)
        self._local = deque(lane for lane in self._local if lane.request is not request)
        return num

    def _free(self, owner: SequenceOwner, lane: Lane | None = None) -> int:
        """Release an owner's pages and slot, or quarantine them until nobody touches them."""
        holds = set()
        plan = self._running
        if plan and (
            any(s.owner == owner for s in (*plan.sequences, *plan.firsts))
            or (lane is not None and plan.lane is lane)
        ):
            holds.add("step")
        if lane is not None and lane.key in self._pulling:
            holds.add("pull")
        if self.speculation.touches(owner):
            holds.add("draft")
        return self.books.free(owner, holds)

    def tick(self, now_ms: float) -> None:
        """Deadlines. Call at least once a second."""
        for request in list(self.requests.values()):
            if request.deadline_ms and now_ms > request.deadline_ms:
                lanes = list(request.lanes) or [0]
                if request.lanes or any(not s.finish_reason for s in request.sequences.values()):
                    code = DeadlineExceeded.code
                    self._lose(request, lanes[0], "the deadline passed", code)

    # ---- the stream ------------------------------------------------------------------------------

    def credit(self, message: StreamCredit) -> None:
        """The client reads again, or is stuck: a parked request keeps its pages, takes no steps."""
        request = self.requests.get(message.request_id)
        if request and request.attempt == message.attempt:
            request.is_parked = not message.is_open

    def end_choice(self, message: EndChoice) -> None:
        """The client has all that it wants of a choice (a stop string): free it, go on with the
        others. Unknown ones, and those that have ended, are ignored.
        """
        request = self.requests.get(message.request_id)
        if request is None or request.attempt != message.attempt:
            return
        sequence = request.sequences.get(message.choice)
        if sequence is not None and not sequence.finish_reason:
            self._finish(sequence, "stop")

    def replay(self, tokenizer: str, message: ReplayFrom) -> None:
        """Send the tokens of a choice again, from now on to whoever asks."""
        request = self.requests.get(message.request_id)
        if request is None or request.attempt != message.attempt:
            return
        request.tokenizer = tokenizer
        sequence = request.sequences.get(message.choice)
        if sequence is None or not 0 <= message.start <= sequence.num_output:
            return
        if message.start < sequence.num_output or sequence.finish_reason:
            self._emit(request, *sequence.run(message.start))

    def _emit(self, request: Request, run: TokenRun, ids: array[int]) -> None:
        if request.tokenizer:
            outgoing = self._outgoing.setdefault(request.tokenizer, Outgoing())
            outgoing.runs.append(run)
            outgoing.ids.extend(ids)

    # ---- steps -----------------------------------------------------------------------------------

    def plan(self) -> DecodePlan | None:
        """The next step; None: nothing to do until the next event."""
        assert self._running is None
        chosen = self._choose()  # NOTE: first, it may preempt a complete lane
        page_copies: list[tuple[int, int]] = []
        slot_copies: list[tuple[int, int, int]] = []
        firsts: list[Sequence] = []
        while self._complete:
            firsts += self._admit(self._complete.popleft(), page_copies, slot_copies)
        chunk, lane, clear_slot = self._chunk(sum(1 + len(s.drafts) for s in chosen))
        if not (chosen or firsts or chunk):
            return None
        self._step += 1
        rows = tuple(
            SlotRows(s.slot, len(s.ids) - 1, (s.ids[-1], *s.drafts), tuple(s.pages)) for s in chosen
        )
        self._running = DecodePlan(
            StepPlan(self._step, rows, chunk),
            tuple(chosen),
            tuple(firsts),
            tuple(page_copies),
            tuple(slot_copies),
            clear_slot,
            lane,
        )
        return self._running

    def _choose(self) -> list[Sequence]:
        """Sequences of the next step, round robin, with pages for all their rows."""
        chosen: list[Sequence] = []
        waiting: list[Sequence] = []
        for _ in range(len(self._ready)):
            if len(chosen) >= self.limits.max_batch or not self._ready:
                break
            sequence = self._ready.popleft()
            waiting.append(sequence)  # so that a preemption in _grow finds it in neither
            if not sequence.request.is_parked and self._grow(sequence):
                chosen.append(sequence)
        is_chosen = set(map(id, chosen))
        passed = [s for s in waiting if id(s) not in is_chosen]
        chosen = [s for s in chosen if not s.request.is_dropped]
        # Who was passed over (parked, no page) comes first next time, who runs comes last.
        self._ready.extendleft(s for s in reversed(passed) if not s.request.is_dropped)
        self._ready.extend(chosen)
        return chosen

    def _grow(self, sequence: Sequence) -> bool:
        """Pages for the sequence's rows: fewer drafts if need be, else by preempting the youngest.

        False: it cannot run now.
        """
        while not sequence.request.is_dropped:
            have = len(sequence.pages) * self.limits.page_tokens
            if len(sequence.ids) + len(sequence.drafts) <= have:
                return True
            try:
                pages = self.pages.reserve(sequence.owner, 1)
            except OutOfPages:
                if self.cache is not None and self.cache.make_room(1):
                    continue
                if len(sequence.ids) <= have:
                    sequence.drafts = sequence.drafts[: have - len(sequence.ids)]
                    return True
                if self.pages.counts()["quarantined"]:
                    return False  # some come free as soon as a pull returns
                self._preempt(max(self.requests.values(), key=_youth))
                continue
            self.pages.activate(sequence.owner, pages)
            sequence.pages += pages
        return False

    def _preempt(self, request: Request) -> None:
        self.num_preempted += 1
        self._drop(request, keeps=True)
        self._tell(Preempted(request.request_id, request.attempt))

    def _admit(
        self,
        lane: Lane,
        page_copies: list[tuple[int, int]],
        slot_copies: list[tuple[int, int, int]],
    ) -> list[Sequence]:
        """Sequences of a complete lane, which draw their first token in this step."""
        del lane.request.lanes[lane.message.lane]
        is_full = len(lane.ids) >= max_length(self.limits, lane.message)
        copies: tuple[list[tuple[int, int]], list[tuple[int, int, int]]] = ([], [])
        sequences = fork(self.limits, self.books, lane, *copies)
        if self.cache is not None and lane.intake is not None:
            self.cache.offer(lane.digests, lane.pages, lane.intake.checksums)
        lane.request.sequences.update({s.choice: s for s in sequences})
        if is_full:  # no room for a single token
            for sequence in sequences:
                self._finish(sequence, "length")
                self._emit(lane.request, *sequence.run(sequence.num_output))
            return []
        page_copies += copies[0]
        slot_copies += copies[1]
        self._ready.extend(sequences)
        return sequences

    def _chunk(self, num_rows: int) -> tuple[PrefillChunk | None, Lane | None, int]:
        """The next piece of our own prefill beside decode rows, if any."""
        num_tokens = self.credit_for_chunks.grant(num_rows) if self._local else 0
        if not num_tokens:
            return None, None, -1
        lane = self._local[0]
        start, first = lane.num_computed, lane.message.choices[0]
        slot, ids = lane.slots[first], lane.ids
        end = min(len(ids), start + num_tokens)
        chunk = PrefillChunk(
            slot,
            start,
            np.array(ids[start:end], np.int32),
            tuple(lane.pages[: pages_for(end, self.limits.page_tokens)]),
            ids[end] if end < len(ids) else -1,
        )
        return chunk, lane, -1 if start else slot

    def apply(self, output: StepOutput) -> Proposal | None:
        """The running step ended. Returns: what to ask the draft, if anything."""
        plan = self._running
        assert plan is not None
        self._running = None
        owners = [s.owner for s in (*plan.sequences, *plan.firsts)]
        if plan.lane:
            owners += [plan.lane.owner(choice) for choice in plan.lane.slots]
        self.books.unhold(owners, "step")
        if plan.lane and plan.step.chunk and not plan.lane.request.is_dropped:
            self._computed(plan.lane, len(plan.step.chunk.token_ids))
        num_before = self.num_tokens
        advances: list[Advance] = []
        for i, (sequence, draw) in enumerate(zip(plan.firsts, output.first_draws, strict=True)):
            streams = None if output.first_streams is None else output.first_streams[i : i + 1]
            if self._take_draws(sequence, [draw]):
                advances.append(Advance(sequence, len(sequence.ids) - 2, 1, streams))
        at = 0
        for sequence, rows in zip(plan.sequences, plan.step.decode, strict=True):
            num = len(rows.token_ids)
            draws = output.draws[at : at + num]
            tokens = accept(rows.token_ids[1:], [d.token_id for d in draws])
            streams = None if output.streams is None else output.streams[at : at + len(tokens)]
            at += num
            if sequence.request.is_dropped or sequence.finish_reason:
                continue
            self.speculation.verified(sequence, num - 1, len(tokens) - 1)
            if self._take_draws(sequence, draws[: len(tokens)]):
                advances.append(Advance(sequence, rows.start, len(tokens), streams))
        self.credit_for_chunks.stepped(
            plan.num_rows,
            len(plan.step.chunk.token_ids) if plan.step.chunk else 0,
            len(plan.sequences),
            self.num_tokens - num_before - len(plan.firsts),
            output.elapsed_s,
        )
        if plan.step.chunk is None and plan.num_rows:
            self.speculation.depth.stepped(plan.num_rows, output.elapsed_s)
        batch = min(len(self._ready), self.limits.max_batch)
        return self.speculation.propose(self._step, advances, batch)

    def _computed(self, lane: Lane, num_tokens: int) -> None:
        lane.num_computed += num_tokens
        if lane.num_computed == len(lane.ids):
            self._local.remove(lane)
            self._complete.append(lane)
            self._tell(Decoding(*lane.key))

    def _take_draws(self, sequence: Sequence, draws: list[Draw]) -> bool:
        """Append drawn tokens up to the end of the choice, if it is among them, and emit them.

        False: the sequence was dropped, or has ended.
        """
        request, s = sequence.request, sequence.sampling
        if request.is_dropped or sequence.finish_reason:
            return False
        start, new, reason = sequence.num_output, array("i"), ""
        for draw in draws:
            token = draw.token_id
            if token < 0:
                code = EngineError.code
                self._lose(request, sequence.choice, "the model's logits are not finite", code)
                return False
            sequence.ids.append(token)
            new.append(token)
            if draw.logprob:
                sequence.logprobs.append(draw.logprob)
            if (
                token == self.limits.eos_token_id and not s.ignore_eos
            ) or token in s.stop_token_ids:
                reason, sequence.stop_token_id = "stop", token
            elif len(sequence.ids) >= sequence.max_length:
                reason = "length"
            if reason:
                break
        self.num_tokens += len(new)
        if sequence.history:
            sequence.history.extend(new)
        if reason:
            self._finish(sequence, reason)
        self._emit(request, *sequence.run(start))
        return not reason

    def _finish(self, sequence: Sequence, reason: str) -> None:
        """A choice ended: its pages are free, its ids stay until Cancel."""
        sequence.finish_reason = reason
        if sequence in self._ready:
            self._ready.remove(sequence)
        self._keep(sequence)
        self._free(sequence.owner)
        self._tell(
            Finished(
                sequence.request.request_id,
                sequence.request.attempt,
                sequence.choice,
                reason,
                sequence.num_output,
                sequence.num_drafted,
                sequence.num_accepted,
                sequence.num_steps,
            )
        )


def _youth(request: Request) -> tuple[bool, int]:
    """Sort key: among those that hold pages, the one that came last."""
    holds = bool(request.lanes) or any(not s.finish_reason for s in request.sequences.values())
    return holds, request.order
