"""One request as the router sees it: a pure state machine. Events in, decisions out; no sockets, no
clock of its own (``now`` in seconds comes with every event).

States of the record, and of each lane (messages.py says what a lane is)::

    QUEUED -> RESERVING -> PREFILLING -> HANDOFF -> DECODING -> DONE      lanes, as workers report
    RESUMING    an attempt was lost: the older one is cancelled, the gateway is asked what it has
    CANCELLING  over for the client; the workers that held it have not all said Cancelled
    CLOSED      nobody holds anything; the record can be forgotten

Every worker that was sent work of an attempt becomes a *debtor*: it owes a ``Cancelled`` (or its
death) for that attempt. Cancels are repeated until then, through resumes and beyond the end of the
request; CLOSED means no debtor is left, so no reservation can leak. Every state has a deadline
(``tick``) and therefore an owner.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from decant.protocol import messages as m
from decant.protocol.errors import ContextTooLong, DeadlineExceeded, NotServed, QueueFull
from decant.services.affinity import digests
from decant.services.debts import Debts
from decant.services.decisions import (
    Count,
    Decision,
    Dequeue,
    Enqueue,
    Proved,
    Ref,
    State,
    ToGateway,
    ToWorker,
)

ASK_AGAIN_S = 1.0  # between two AskEmitted
ASK_FOR_S = 40.0  # without an answer the gateway does not want it any more
RESERVE_S = 10.0  # for Reserved or Refused
PREFILL_S = 120.0  # for Prefilled, plus one second for each PREFILL_TOKENS_PER_S tokens
HANDOFF_S = 15.0  # from Prefilled to Decoding, plus one second for each HANDOFF_TOKENS_PER_S
HANDOFF_TOKENS_PER_S = 10_000
PREFILL_TOKENS_PER_S = 100
DONE_S = 30.0  # after decode's last token, for the gateway's Cancel(finished); then it is asked
ACCOUNTS_S = 0.25  # after Cancel(finished), for decode's Finished
DOUBT_S = 8.0  # without a token in DECODING, as the gateway says
ISOLATE_S = 0.5  # a suspect that decodes alone for so long did not kill at once
MAX_PREEMPTIONS = 256
BACKOFF_S = (0.02, 1.0)  # after Refused(busy): first, longest
ID_BYTES = 4
LOST_STATUS = {e.code: e.status for e in (ContextTooLong, DeadlineExceeded, NotServed)}


@dataclass
class Lane:
    lane: int
    choices: list[int]
    state: State = State.QUEUED
    decode: Ref | None = None
    prefill: Ref | None = None
    since_s: float = 0.0
    num_refusals: int = 0
    finished: set[int] = field(default_factory=set)


class Record:
    """One request. Methods that end in decisions return them in the order to carry them out."""

    def __init__(
        self,
        generate: m.Generate,
        prompt: bytes,
        emitted: bytes,
        gateway: str,
        now: float,
        max_resumes: int = 16,
        timeout_s: float = 600.0,
        queue_timeout_s: float = 60.0,
        traceparent: str = "",
    ) -> None:
        """prompt, emitted: blobs of Generate. gateway: incarnation; empty for the router's canary,
        which is never resumed. timeout_s applies where the request has no deadline.

        Raises: ValueError if the blobs do not fit the counts in ``generate``.
        """
        self.generate, self.prompt, self.gateway = generate, prompt, gateway
        self.request_id, self.attempt = generate.request_id, generate.attempt
        self.tokenizer = generate.tokenizer
        self.traceparent = traceparent
        self.state = State.QUEUED  # RESUMING, CANCELLING, CLOSED, or QUEUED: see ``stage``
        self.lanes: dict[int, Lane] = {}
        self.num_resumes = self.num_preemptions = 0
        self.suspicion = 0  # deaths of a worker's own making in a step that contained us
        self.suspect_in: set[str] = set()  # services of those workers
        self.alone_in: frozenset[str] = frozenset()  # placed in isolation at these
        self.failed: m.Failed | None = None
        self._max_resumes = max_resumes
        self._num_fruitless = 0  # resumes since the client got a token
        self._num_emitted = 0  # ids that the client had at the last resume
        self._born_s = now
        self._deadline_s = generate.deadline_ms / 1e3 if generate.deadline_ms else now + timeout_s
        self._queue_until_s = now + queue_timeout_s
        self._was_placed = False
        self._since_s = now
        self._asked_s = 0.0
        self._doubted = (0, 0, 0.0)  # attempt, ids that the client had, when
        self._resume_at_s = 0.0
        self._decoding_s = 0.0  # since when all unfinished lanes decode; 0: they do not
        self._debts = Debts()
        self._prefixes: list[bytes] | None = None
        self._is_closed_told = False
        self._is_cleared = False
        self._end_reason = ""
        self._finished: dict[int, m.Finished] = {}
        self._num_cached = -1
        self._stages_ms: dict[str, float] = {}
        self._choices: list[m.ChoiceState] = []
        self._ids: dict[int, bytes] = {}
        if len(prompt) != generate.num_prompt_tokens * ID_BYTES or not prompt:
            raise ValueError("the prompt's ids do not match num_prompt_tokens")
        self._take(generate.emitted, emitted)

    # ---- reading

    @property
    def stage(self) -> State:
        """The record's own state, or that of the lane that is least far."""
        if self.state >= State.RESUMING:
            return self.state
        return min((lane.state for lane in self.lanes.values()), default=State.DONE)

    @property
    def salt(self) -> str:
        """Whose cached prefixes it may share: those of its key and of the salt that it names."""
        given = self.generate
        return f"{given.tenant}\x1f{given.cache_salt}" if given.tenant else given.cache_salt

    @property
    def prefixes(self) -> list[bytes]:
        """Digests of the prompt's prefixes, for placement; computed once."""
        if self._prefixes is None:
            self._prefixes = digests(self.prompt, self.salt)
        return self._prefixes

    @property
    def is_canary(self) -> bool:
        return not self.gateway

    @property
    def is_suspect(self) -> bool:
        """Has to run alone (after a worker died of itself with it)."""
        return self.suspicion > 0 and not self._is_cleared and self.state < State.CANCELLING

    @property
    def is_cleared(self) -> bool:
        """Was a suspect, and survived by itself."""
        return self.suspicion > 0 and self._is_cleared

    def is_at(self, worker: Ref) -> bool:
        """A lane of the present attempt is placed there."""
        return any(worker in (x.decode, x.prefill) for x in self.lanes.values())

    def is_held_by(self, worker: Ref) -> bool:
        return worker in self._debts

    def debtors(self) -> list[Ref]:
        """Workers that may hold something of any attempt."""
        return self._debts.workers()

    def num_tokens(self, lane: int) -> int:
        """Length of the sequence that a lane prefills."""
        return self.generate.num_prompt_tokens + len(self._lane_ids(lane)) // ID_BYTES

    # ---- the gateway's events

    def start(self, now: float) -> list[Decision]:
        """Right after construction (and ``inherit``): queue the lanes."""
        out: list[Decision] = []
        if not self.is_canary:
            out.append(ToGateway(m.Queued(self.request_id, self.attempt)))
        return out + self._open_lanes(now)

    def inherit(self, workers: list[Ref], now: float) -> list[Decision]:
        """An earlier attempt may live at these workers (the router was restarted): cancel it."""
        for worker in workers:
            self._debts.owe(worker, self.attempt - 1)
        return self._orders(self._debts.call(self.attempt - 1, now), "superseded")

    def resubmitted(
        self, generate: m.Generate, emitted: bytes, now: float
    ) -> tuple[list[Decision], bool]:
        """Generate of a known request. Returns: decisions, and whether it was news."""
        if self.state >= State.CANCELLING or generate.attempt < self.attempt:
            return [Count("stale", ("generate",))], False
        if generate.attempt == self.attempt:
            queued = ToGateway(m.Queued(self.request_id, self.attempt))
            return [queued, *self._doubt(generate, now)], False
        out = self._drop_attempt(generate.attempt, now)
        try:
            self._take(generate.emitted, emitted)
        except ValueError as error:
            return out + self.fail("invalid_request", str(error), 400, now, False), True
        self.tokenizer = generate.tokenizer or self.tokenizer
        self.state = State.QUEUED
        return [*out, ToGateway(m.Queued(self.request_id, self.attempt))] + self._open_lanes(
            now
        ), True

    def _doubt(self, generate: m.Generate, now: float) -> list[Decision]:
        """The gateway submits an accepted request again if no token comes. Twice without progress
        while we believe that it decodes: some word of a worker was lost.
        """
        seen = sum(c.num_ids for c in generate.emitted)
        before, self._doubted = self._doubted, (self.attempt, seen, now)
        is_same = before[:2] == (self.attempt, seen)
        if not is_same or self.stage is not State.DECODING:
            return []
        if now - before[2] < DOUBT_S:
            self._doubted = before
            return []
        return self.lose("no_tokens", now)

    def cancel(self, reason: str, now: float) -> list[Decision]:
        """The gateway, or the administrator, ends the request, whatever the attempt."""
        if self.state is State.CLOSED:
            return []
        if self.state is State.CANCELLING:
            return [ToGateway(self._closed())] if self._is_closed_told else []
        return self._end(reason, now)

    def emitted(self, body: m.Emitted, ids: bytes, now: float) -> list[Decision]:
        """What the client has: the answer to AskEmitted, or news of a moved stream."""
        if body.attempt != self.attempt or self.state >= State.CANCELLING:
            return [Count("stale", ("emitted",))]
        self.tokenizer = body.tokenizer or self.tokenizer
        if self.state is not State.RESUMING:
            return []
        try:
            self._take(body.choices, ids)
        except ValueError as error:
            return self.fail("internal_error", f"the gateway's answer: {error}", 500, now)
        self.state, self._since_s = State.QUEUED, now
        return self._open_lanes(now)

    def credit(self, body: m.StreamCredit) -> list[Decision]:
        """Pass the client's window on to decode."""
        if body.attempt != self.attempt or self.state >= State.RESUMING:
            return []
        workers = {lane.decode for lane in self.lanes.values() if lane.decode is not None}
        return [ToWorker(worker, body) for worker in sorted(workers)]

    def end_choice(self, body: m.EndChoice) -> list[Decision]:
        """A choice needs no more tokens: tell the decode that runs it."""
        if body.attempt != self.attempt or self.state >= State.RESUMING:
            return []
        return [
            ToWorker(lane.decode, body)
            for lane in self.lanes.values()
            if lane.decode is not None and body.choice in set(lane.choices) - lane.finished
        ]

    def gateway_died(self, now: float) -> list[Decision]:
        return self.cancel("client_gone", now)

    # ---- placement

    def place(
        self,
        lane: int,
        decode: Ref,
        prefill: Ref,
        now: float,
        alone_in: frozenset[str] = frozenset(),
    ) -> list[Decision]:
        """A queued lane gets its workers: reserve on decode first. alone_in: services where it
        will be computed with no other request.
        """
        here = self.lanes[lane]
        assert here.state is State.QUEUED and self.state is State.QUEUED
        if not self._was_placed:
            self._stages_ms["queue"] = (now - self._born_s) * 1e3
            self._was_placed = True
        here.state, here.decode, here.prefill, here.since_s = State.RESERVING, decode, prefill, now
        self.alone_in = alone_in
        self._debts.owe(decode, self.attempt)
        given = self.generate
        body = m.Reserve(
            self.request_id,
            self.attempt,
            lane,
            here.choices,
            given.num_prompt_tokens,
            given.sampling,
            self.tokenizer,
            prefill.instance,
            int(self._deadline_s * 1e3),
            given.grammar,
            given.priority,
            self.traceparent,
            self.salt,
        )
        return [ToWorker(decode, body, (self.prompt + self._lane_ids(lane),))]

    # ---- the workers' events

    def heard(self, worker: Ref, body: m.Message, now: float) -> list[Decision]:
        """A message of a living worker about this request."""
        attempt: int = getattr(body, "attempt", -1)
        if isinstance(body, m.Cancelled):
            return self._cancelled(worker, body, now)
        if attempt != self.attempt or self.state >= State.RESUMING:
            if self.state is State.CANCELLING and isinstance(body, m.Finished):
                self._finished.setdefault(body.choice, body)  # late accounts
                return self._settle(now)
            out: list[Decision] = [Count("stale", (type(body).__name__.lower(),))]
            if worker not in self._debts:
                # It may hold something that we do not know to be there: it becomes a debtor.
                self._debts.owe(worker, attempt)
                out += self._orders(self._debts.call(attempt, now), "superseded")
            return out
        if isinstance(body, m.Preempted):
            if not any(lane.decode == worker for lane in self.lanes.values()):
                return [Count("stale", ("preempted",))]
            return self._preempted(now)
        if isinstance(body, m.Finished):
            return self._finished_choice(worker, body, now)
        if isinstance(body, m.Lost):
            return self._lost(worker, body, now)
        lane = self.lanes.get(getattr(body, "lane", -1))
        if lane is None or worker not in (lane.decode, lane.prefill):
            return [Count("stale", (type(body).__name__.lower(),))]
        match body:
            case m.Reserved() if lane.state is State.RESERVING and worker == lane.decode:
                return self._reserved(lane, now)
            case m.Refused() if lane.state is State.RESERVING and worker == lane.decode:
                return self._refused(lane, body, now)
            case m.Prefilled() if worker == lane.prefill:
                if self._num_cached < 0:
                    self._num_cached = body.num_cached_tokens
                if lane.state is State.PREFILLING:
                    self._stage(lane, State.HANDOFF, "prefill", now)
                return []
            case m.Decoding() if worker == lane.decode:
                return self._decoding(lane, now)
        return [Count("stale", (type(body).__name__.lower(),))]

    def scored(
        self, worker: Ref, body: m.PromptLogprobs, blobs: tuple[bytes, ...]
    ) -> list[Decision]:
        """Scores of the prompt, for the gateway."""
        lane = self.lanes.get(body.lane)
        is_ours = body.attempt == self.attempt and self.state < State.RESUMING
        if not is_ours or lane is None or lane.prefill != worker or self.is_canary:
            return [Count("stale", ("promptlogprobs",))]
        return [ToGateway(body, blobs)]

    def send_failed(self, worker: Ref, now: float) -> list[Decision]:
        """Work could not be sent to a worker that lives as far as we know."""
        if self.state < State.RESUMING and any(
            worker in (lane.decode, lane.prefill) and lane.state < State.DONE
            for lane in self.lanes.values()
        ):
            return self.lose("unreachable", now)
        return []

    def worker_died(self, worker: Ref, is_own_fault: bool, now: float) -> list[Decision]:
        """An incarnation is gone for good (fenced if it had to be): it holds nothing any more.

        is_own_fault: it ended by itself, so what it was computing is suspect.
        """
        self._debts.died(worker)
        if self.state in (State.CANCELLING, State.CLOSED):
            return self._settle(now)
        if self.state is State.RESUMING:
            return []
        # In HANDOFF, the loss of prefill matters as well: decode may not have all pages yet.
        hit = [
            lane
            for lane in self.lanes.values()
            if (lane.decode == worker and lane.state < State.DONE)
            or (lane.prefill == worker and lane.state <= State.HANDOFF)
        ]
        if not hit:
            return []
        computed = (
            lane.state >= State.PREFILLING
            and (lane.decode == worker or lane.state is State.PREFILLING)
            for lane in hit
        )
        service = worker.instance.rpartition("-")[0] or worker.instance
        if is_own_fault and any(computed):
            if service in self.alone_in:
                message = "the request ended the process that computed it twice"
                return self.fail("poison_request", message, 500, now, is_retryable=False)
            self.suspicion += 1
            self.suspect_in.add(service)
            self._is_cleared = False
        return self.lose(f"{service}_died", now)

    # ---- time

    def tick(self, now: float) -> list[Decision]:
        """Deadlines and repetitions. Call it several times a second."""
        out = self._orders(self._debts.due(now), "superseded")
        if self.state is State.CANCELLING:
            return out + self._settle(now)
        if self.state is State.CLOSED:
            return out
        stage = self.stage
        if now > self._deadline_s and stage is not State.DONE:
            message = f"the request's deadline passed in {stage.name.lower()}"
            return out + self.fail(
                DeadlineExceeded.code, message, DeadlineExceeded.status, now, False
            )
        if self.state is State.RESUMING:
            if now - self._since_s > ASK_FOR_S:
                return out + self._end("client_gone", now)
            if now - self._asked_s > ASK_AGAIN_S:
                out.append(self._ask(now))
            return out
        if stage is State.QUEUED and not self._was_placed and now > self._queue_until_s:
            message = "the request waited too long in the queue"
            return out + self.fail(QueueFull.code, message, QueueFull.status, now, True, 5.0)
        if stage is State.DONE:
            if not self._since_s:
                self._since_s = now
            if now - self._since_s > DONE_S:
                return out + self.lose("end_not_confirmed", now)
            return out
        handoff_s = HANDOFF_S + self.generate.num_prompt_tokens / HANDOFF_TOKENS_PER_S
        limit_s = PREFILL_S + self.generate.num_prompt_tokens / PREFILL_TOKENS_PER_S
        for lane in self.lanes.values():
            waited_s = now - lane.since_s
            if lane.state is State.RESERVING and waited_s > RESERVE_S:
                return out + self.lose("reserve_timeout", now)
            if lane.state is State.PREFILLING and waited_s > limit_s:
                return out + self.lose("prefill_timeout", now)
            if lane.state is State.HANDOFF and waited_s > handoff_s:
                return out + self.lose("handoff_timeout", now)
        # NOTE: only the first suspicion passes by surviving; a second one runs alone to its end.
        if self.is_suspect and self.suspicion == 1 and 0 < self._decoding_s < now - ISOLATE_S:
            self._is_cleared, self.alone_in, self.suspect_in = True, frozenset(), set()
        return out

    # ---- ends and losses

    def fail(
        self,
        code: str,
        message: str,
        status: int,
        now: float,
        is_retryable: bool = True,
        retry_after_s: float = 0.0,
    ) -> list[Decision]:
        """Tell the gateway Failed, then end."""
        if self.state >= State.CANCELLING:
            return []
        self.failed = m.Failed(
            self.request_id,
            self.attempt,
            code,
            message,
            status,
            retry_after_s=retry_after_s,
            is_retryable=is_retryable,
        )
        told: list[Decision] = [Count("failed", (code,))]
        if not self.is_canary:
            told.append(ToGateway(self.failed))
        return told + self._end("failed", now)

    def lose(self, cause: str, now: float, resume_at_s: float = 0.0) -> list[Decision]:
        """The attempt cannot go on: raise it, cancel the older one, ask the gateway what it has."""
        if self.state >= State.RESUMING:
            return []
        stage = self.stage
        if self.is_canary:
            return self.fail("canary_lost", cause, 500, now)
        if cause != "preempted":
            self.num_resumes += 1
            self._num_fruitless += 1
            if self._num_fruitless > self._max_resumes:
                message = (
                    f"the request was interrupted {self._num_fruitless} times without a new token,"
                    f" last: {cause}"
                )
                return self.fail("too_many_resumes", message, 500, now)
        out: list[Decision] = [Count("resumes", (cause, stage.name.lower()))]
        out += self._drop_attempt(self.attempt + 1, now)
        self.state, self._since_s, self._resume_at_s = State.RESUMING, now, resume_at_s
        return [*out, self._ask(now)]

    # ---- inside: lanes

    def _reserved(self, lane: Lane, now: float) -> list[Decision]:
        assert lane.decode is not None and lane.prefill is not None
        self._stage(lane, State.PREFILLING, "reserve", now)
        self._debts.owe(lane.prefill, self.attempt)
        given = self.generate
        body = m.Prefill(
            self.request_id,
            self.attempt,
            lane.lane,
            lane.decode.instance,
            lane.decode.incarnation,
            int(self._deadline_s * 1e3),
            self.salt,
            given.priority,
            self.traceparent,
            given.sampling.prompt_logprobs,
        )
        return [ToWorker(lane.prefill, body, (self.prompt + self._lane_ids(lane.lane),))]

    def _refused(self, lane: Lane, body: m.Refused, now: float) -> list[Decision]:
        if body.reason == "too_large":
            message = body.message or "the request does not fit into the KV pool"
            return self.fail(ContextTooLong.code, message, ContextTooLong.status, now, False)
        first, longest = BACKOFF_S
        wait_s = min(longest, first * 2 ** min(lane.num_refusals, 10))
        lane.num_refusals += 1
        lane.state, lane.decode, lane.prefill = State.QUEUED, None, None
        lane.since_s = now
        self.alone_in = frozenset()
        return [
            Count("refused", (body.reason,)),
            Enqueue(lane.lane, now + wait_s, self.num_resumes + self.num_preemptions > 0),
        ]

    def _decoding(self, lane: Lane, now: float) -> list[Decision]:
        if lane.state not in (State.PREFILLING, State.HANDOFF):
            return [Count("stale", ("decoding",))]
        self._stage(lane, State.DECODING, "handoff", now)
        if all(x.state >= State.DECODING for x in self.lanes.values()):
            self._decoding_s = now
        return [] if self.is_canary else self._proof(lane)

    @staticmethod
    def _proof(lane: Lane) -> list[Decision]:
        assert lane.decode is not None and lane.prefill is not None
        return [Proved(lane.decode, lane.prefill)]

    def _finished_choice(self, worker: Ref, body: m.Finished, now: float) -> list[Decision]:
        lane = next((x for x in self.lanes.values() if body.choice in x.choices), None)
        if lane is None or lane.decode != worker or lane.state < State.PREFILLING:
            return [Count("stale", ("finished",))]
        if body.choice in lane.finished:
            return [Count("stale", ("finished",))]
        lane.finished.add(body.choice)
        self._finished.setdefault(body.choice, body)
        if lane.finished >= set(lane.choices):
            # NOTE: Decoding may have been overtaken or lost; Finished says more.
            self._stage(lane, State.DONE, "decode", now)
        if self.stage is State.DONE:
            self._since_s = now
            if self.is_canary:
                return self._proof(lane) + self._end("finished", now)
        return []

    def _lost(self, worker: Ref, body: m.Lost, now: float) -> list[Decision]:
        """Whatever the lane that is named: the worker has let go of the whole attempt."""
        is_hit = any(
            lane.decode == worker or (lane.prefill == worker and lane.state <= State.HANDOFF)
            for lane in self.lanes.values()
            if lane.state < State.DONE
        )
        if not is_hit:
            return [Count("stale", ("lost",))]
        if body.code:
            status = LOST_STATUS.get(body.code, 500)
            return self.fail(body.code, body.reason, status, now, status >= 500)
        return self.lose("lost_by_worker", now)

    def _preempted(self, now: float) -> list[Decision]:
        self.num_preemptions += 1
        if self.num_preemptions > MAX_PREEMPTIONS:
            return self.fail("out_of_pages", "the request was preempted too often", 503, now)
        wait_s = min(2.0, 0.1 * 2 ** min(self.num_preemptions - 1, 8))
        return [Count("preempted"), *self.lose("preempted", now, now + wait_s)]

    def _stage(self, lane: Lane, state: State, name: str, now: float) -> None:
        """Enter a state; ``name`` is the accounts' word for the one that ends."""
        self._stages_ms[name] = self._stages_ms.get(name, 0.0) + (now - lane.since_s) * 1e3
        lane.state, lane.since_s = state, now

    def _open_lanes(self, now: float) -> list[Decision]:
        """Lanes of a new attempt: one for all choices if none has ids, else one for each that is
        unfinished.
        """
        todo = [c.choice for c in self._choices if not c.is_finished]
        is_fresh = len(todo) == len(self._choices) and not any(self._ids.values())
        groups = [todo] if is_fresh else [[choice] for choice in todo]
        self.lanes = {g[0]: Lane(g[0], g, since_s=now) for g in groups}
        self._decoding_s = 0.0
        is_resume = self.num_resumes + self.num_preemptions > 0 or bool(self.generate.emitted)
        at = max(now, self._resume_at_s)
        self._resume_at_s = 0.0
        self._since_s = now
        return [Enqueue(lane, at, is_resume) for lane in self.lanes]

    def _lane_ids(self, lane: int) -> bytes:
        return self._ids.get(lane, b"")

    def _take(self, choices: list[m.ChoiceState], ids: bytes) -> None:
        """Note what the client has. Raises: ValueError."""
        count = self.generate.num_choices
        states = {i: m.ChoiceState(i, 0) for i in range(count)}
        taken: dict[int, bytes] = {}
        begin = 0
        for choice in choices:
            if choice.choice not in states or choice.choice in taken or choice.num_ids < 0:
                raise ValueError(f"choice {choice.choice} of {count}")
            end = begin + choice.num_ids * ID_BYTES
            states[choice.choice], taken[choice.choice] = choice, ids[begin:end]
            begin = end
        if begin != len(ids):
            raise ValueError(f"{len(ids)} bytes of ids, {begin} announced")
        self._choices, self._ids = list(states.values()), taken
        num_emitted = sum(state.num_ids + state.is_finished for state in states.values())
        if num_emitted > self._num_emitted:
            self._num_emitted, self._num_fruitless = num_emitted, 0

    # ---- inside: debts and ends

    def _orders(self, cancels: list[tuple[Ref, int]], reason: str) -> list[Decision]:
        return [ToWorker(w, m.Cancel(self.request_id, a, reason)) for w, a in cancels]

    def _cancelled(self, worker: Ref, body: m.Cancelled, now: float) -> list[Decision]:
        self._debts.answered(worker, body.attempt)
        return self._settle(now)

    def _drop_attempt(self, attempt: int, now: float) -> list[Decision]:
        """From now on only ``attempt`` counts."""
        called = self._debts.call(self.attempt, now)
        out: list[Decision] = [Dequeue(), *self._orders(called, "superseded")]
        self.attempt, self.lanes = attempt, {}
        self.alone_in, self._decoding_s = frozenset(), 0.0
        return out

    def _ask(self, now: float) -> Decision:
        self._asked_s = now
        return ToGateway(m.AskEmitted(self.request_id, self.attempt, self.tokenizer))

    def _end(self, reason: str, now: float) -> list[Decision]:
        called = self._debts.call(self.attempt, now)
        out: list[Decision] = [Dequeue(), *self._orders(called, reason)]
        self.state, self._since_s, self._end_reason = State.CANCELLING, now, reason
        return out + self._settle(now)

    def _settle(self, now: float) -> list[Decision]:
        """In CANCELLING: tell Closed as soon as the accounts are complete (or will not be), and be
        CLOSED once no worker owes anything.
        """
        if self.state is not State.CANCELLING:
            return []
        out: list[Decision] = []
        has_accounts = (
            self._end_reason != "finished"
            or not self._debts
            or len(self._finished) == self.generate.num_choices
            or now - self._since_s > ACCOUNTS_S
        )
        if has_accounts and not self._is_closed_told:
            self._is_closed_told = True
            if not self.is_canary:
                out.append(ToGateway(self._closed()))
        if not self._debts:
            self.state = State.CLOSED
        return out

    def _closed(self) -> m.Closed:
        ends = self._finished.values()
        return m.Closed(
            self.request_id,
            self.attempt,
            max(0, self._num_cached),
            sum(e.num_drafted for e in ends),
            sum(e.num_accepted for e in ends),
            sum(e.num_steps for e in ends),
            self.num_resumes + self.num_preemptions,
            {name: round(ms, 3) for name, ms in self._stages_ms.items()},
        )
