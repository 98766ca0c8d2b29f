"""The router's mind: messages and deaths in, messages and fences out. Joins membership, admission
and the request records, pairs prefill with decode, and knows whether the set is ready.

No sockets and no processes here (``router.py`` has them): ``send`` and ``fence`` are given, time
comes from ``clock``; so the whole router runs in a test without either.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from decant.protocol import messages as m
from decant.protocol.config import Config
from decant.protocol.errors import InvalidRequest, NotReady, QueueFull
from decant.protocol.wire import Envelope
from decant.services import tracing
from decant.services.admission import Admission, Key, Waiting
from decant.services.canary import Canary
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
from decant.services.link import UNKNOWN
from decant.services.membership import Fence, Health, Member, Membership
from decant.services.placement import Placement
from decant.services.records import Record

NO_CHAIN_S = 60.0  # that long requests queue for a worker that is being started anew; then 503
START_S = 10.0  # the same after our own start: the workers of our predecessor are about to join
SETTLE_S = 5.0  # at most, for the processes that our predecessor knew
LOST_PREFILL_S = 5.0  # a lane that prefill should have, while it says that it is idle
PEERS_AGAIN_S = 5.0
MAX_TURN = 64
NEARLY_FULL = 4  # free places in the queue, of which gateways are told
MAX_CLOSED = 4096  # requests remembered, so that a late copy of Generate starts nothing
WORK = (m.Reserved, m.Refused, m.Prefilled, m.Decoding, m.Preempted, m.Finished, m.Lost)
TOLD = (*WORK, m.Reserve, m.Prefill, m.Queued, m.AskEmitted, m.Closed)
TOLD_FIELDS = (
    *("attempt", "lane", "choice", "reason", "num_cached_tokens", "num_handoff_bytes"),
    *("num_output_tokens", "num_resumes", "stages_ms"),
)
FULL = "the queue is full"
WORKERS = ("prefill", "decode")

log = structlog.get_logger()
Send = Callable[[Member, m.Message, Sequence[bytes]], None]


class Dispatcher:
    """Everything runs on one event loop; no method waits."""

    def __init__(
        self,
        config: Config,
        incarnation: str,
        send: Send,
        fence: Callable[[Member, str], None],
        clock: Callable[[], float] = time.monotonic,
        count: Callable[[str, tuple[str, ...]], None] = lambda what, labels: None,
        awaited: set[str] | None = None,
    ) -> None:
        """send: hands a message to the socket. fence: starts killing a process; whoever does it
        calls ``ended`` when it is gone. count: metrics (``decisions.Count``). awaited: incarnations
        that should join again; Peers is held back for them, a few seconds at most.
        """
        self.config, self.incarnation = config, incarnation
        self.membership = Membership(config.router, incarnation)
        self.admission = Admission(config.router)
        self.placement = Placement(self.membership)
        self.canary = Canary(config.router)
        self.records: dict[str, Record] = {}
        self.is_stopping = False
        self._send_to, self._fence, self._clock, self._count = send, fence, clock, count
        self._turns: list[str] = []  # requests that have not had their tick in this round
        self._placed: dict[str, Record] = {}  # requests that a worker has been given
        self._is_moving = True  # something happened that may let a lane be placed
        self._popped: dict[Key, Waiting] = {}  # placed, not reserved: where it stood in the queue
        self._closed: OrderedDict[str, int] = OrderedDict()  # request: attempt
        self._awaited, self._settled_s = set(awaited or ()), clock() + SETTLE_S
        self._complete_s = clock() + START_S - NO_CHAIN_S  # when the chain was complete last
        self._told: tuple[int, bool, str, int] | None = None
        self._told_s = 0.0

    # ---- readiness

    def why_not_ready(self) -> str:
        """One sentence; empty: ready."""
        if self.is_stopping:
            return "the router is stopping"
        missing = self.membership.missing()
        if missing:
            return missing
        objection = self.canary.objection(self._workers())
        if objection:
            return objection
        if not self.admission.is_open:
            return FULL
        return ""

    # ---- events

    def receive(self, envelope: Envelope) -> None:
        """Any message."""
        now, body, incarnation = self._clock(), envelope.body, envelope.header.incarnation
        if isinstance(body, m.Hello):
            self._hello(envelope, body, now)
        elif isinstance(body, m.Heartbeat):
            answer = self.membership.heartbeat(body, incarnation, now)
            self._reply(envelope, answer)
        else:
            member = self.membership.get(incarnation)
            if member is None or member.health is Health.FENCED:
                self._count("stale", (_name(body),))
                if member is None and not self.membership.was_alive(incarnation):
                    self._reply(envelope, m.Refuse(f"{UNKNOWN}, say Hello"))
            elif member.service in WORKERS:
                if isinstance(body, m.PromptLogprobs):
                    self._scored(member, body, envelope.blobs, now)
                else:
                    self._from_worker(member, body, now)
            else:
                self._from_gateway(member, envelope, now)
        self._after(now)

    def refuse(self, envelope: Envelope, why: str) -> None:
        """The sender of a Hello is not who it says it is; nobody's membership changes."""
        self._count("unexpected", ("hello",))
        self._reply(envelope, m.Refuse(why))

    def tick(self) -> None:
        """Several times a second: deadlines, repetitions, canary, and who waited for a time."""
        now = self._clock()
        # NOTE: a back-off, a pause after Refused(busy) and the budget of resumes end by time alone.
        self._is_moving = True
        for record in self._turn():
            self._do(record, record.tick(now), now)
            self._look_after(record, now)
        self._run_canary(now)
        self._after(now)

    def _turn(self) -> list[Record]:
        """The records of this tick: few are all looked at, of many a fifth each time."""
        if not self._turns:
            self._turns = list(self.records)
        number = max(MAX_TURN, len(self._turns) // 5 + 1)
        names, self._turns = self._turns[:number], self._turns[number:]
        return [self.records[name] for name in names if name in self.records]

    def _look_after(self, record: Record, now: float) -> None:
        """Work that prefill does not know of was lost on its way."""
        for lane in record.lanes.values():
            if lane.state is State.PREFILLING and now - lane.since_s > LOST_PREFILL_S:
                assert lane.prefill is not None
                member = self.membership.get(lane.prefill.incarnation)
                if member is not None and member.idle_s(now) > LOST_PREFILL_S:
                    self._do(record, record.lose("prefill_idle", now), now)
                    return

    def judge(self) -> None:
        """Once a heartbeat period: silence and stalls."""
        now = self._clock()
        for fence in self.membership.tick(now):
            self._kill(fence)
        self._after(now)

    def leaving(self, incarnation: str) -> Member | None:
        """Its process has ended (seen by pid), how is being found out; ``ended`` follows."""
        member = self.membership.get(incarnation)
        if member is not None and member.health is not Health.FENCED:
            member.health, member.fenced_why = Health.FENCED, "its process ended"
            self.membership.version += 1
            self._after(self._clock())
        return member

    def ended(self, incarnation: str, is_own_fault: bool = False) -> None:
        """It is certain that this process runs no more. Its work goes elsewhere."""
        now = self._clock()
        member = self.membership.exited(incarnation)
        if member is None:
            return
        log.info("process ended", who=member.instance, why=member.fenced_why, own=is_own_fault)
        ref = Ref(member.instance, incarnation)
        self.placement.freed(ref)
        is_tested = any(
            record.is_suspect and member.service in record.suspect_in and record.is_at(ref)
            for record in self.records.values()
        )
        for record in list(self.records.values()):
            if member.service in WORKERS:
                # Whom a suspect had beside it was cleared before: it is the suspect.
                is_accused = is_own_fault and (record.is_suspect or not is_tested)
                self._do(record, record.worker_died(ref, is_accused, now), now)
            elif record.gateway == incarnation:
                self._do(record, record.gateway_died(now), now)
        self._after(now)

    def unsent(self, member: Member, body: m.Message) -> None:
        """``send`` could not deliver this."""
        self._count("unsent", (_name(body),))
        if isinstance(body, m.Reserve | m.Prefill):
            record = self.records.get(body.request_id)
            if record is not None and record.attempt == body.attempt:
                now = self._clock()
                ref = Ref(member.instance, member.incarnation)
                self._do(record, record.send_failed(ref, now), now)
                self._after(now)

    def drain(self, instance: str, is_drained: bool) -> bool:
        """Administrator: no new work for this process (it is told to finish and exit), or again.
        False: unknown instance.
        """
        member = self.membership.drain(instance, is_drained)
        if member is None:
            return False
        if is_drained:
            self._send_to(member, m.Drain(self.config.router.drain_s), ())
        self._after(self._clock())
        return True

    def abort(self, request_id: str) -> bool:
        """Administrator: fail a request. False: there is none of this id."""
        record = self.records.get(request_id)
        if record is None or record.state >= State.CANCELLING:
            return False
        now = self._clock()
        message = "the administrator ended this request"
        self._do(record, record.fail("aborted", message, 500, now, False), now)
        self._after(now)
        return True

    def flush(self) -> list[str]:
        """Administrator: all prefix caches are to be forgotten. Returns: the workers told."""
        workers = [member for service in WORKERS for member in self.membership.of(service)]
        for member in workers:
            self._send_to(member, m.FlushCache(), ())
        self.placement.affinity.clear()
        return [member.instance for member in workers]

    # ---- messages

    def _hello(self, envelope: Envelope, hello: m.Hello, now: float) -> None:
        incarnation = envelope.header.incarnation
        is_new = self.membership.get(incarnation) is None
        answer, fences = self.membership.hello(hello, incarnation, envelope.identity, now)
        self._reply(envelope, answer)
        for fence in fences:
            self._kill(fence)
        if isinstance(answer, m.Refuse):
            log.warning("refused", who=hello.instance, why=answer.reason)
            return
        if is_new:
            log.info("joined", who=hello.instance, pid_of=hello.pid, incarnation=incarnation)
        self._awaited.discard(incarnation)
        member = self.membership.get(incarnation)
        assert member is not None
        if self._is_settled(now):
            self._send_to(member, self._peers(), ())

    def _from_worker(self, member: Member, body: m.Message, now: float) -> None:
        self._is_moving = True
        ref = Ref(member.instance, member.incarnation)
        request_id = getattr(body, "request_id", "")
        record = self.records.get(request_id)
        if isinstance(body, m.Finished | m.Preempted | m.Cancelled):
            self.placement.freed(ref)
        if record is not None:
            if isinstance(body, m.Refused):
                self._refused(ref, body, now)
            self._tell(record, body, who=member.instance)
            self._do(record, record.heard(ref, body, now), now)
        elif isinstance(body, WORK):
            # Of a request that is closed or that an earlier router knew: nobody wants it.
            self._count("stale", (_name(body),))
            if not isinstance(body, m.Refused):
                self._send_to(member, m.Cancel(request_id, body.attempt, "superseded"), ())
        elif not isinstance(body, m.Cancelled):
            self._count("unexpected", (_name(body),))

    def _scored(
        self, member: Member, body: m.PromptLogprobs, blobs: tuple[bytes, ...], now: float
    ) -> None:
        record = self.records.get(body.request_id)
        if record is not None:
            ref = Ref(member.instance, member.incarnation)
            self._do(record, record.scored(ref, body, blobs), now)

    def _refused(self, ref: Ref, body: m.Refused, now: float) -> None:
        if body.reason == "draining":
            member = self.membership.get(ref.incarnation)
            if member is not None:
                self.membership.drain(member.instance, True)
        elif body.reason == "busy":
            self.placement.refused(ref, now)

    def _from_gateway(self, member: Member, envelope: Envelope, now: float) -> None:
        body = envelope.body
        match body:
            case m.Generate():
                self._generate(member, body, envelope, now)
            case m.Cancel():
                record = self._owned(member, body.request_id)
                if record is not None:
                    self._do(record, record.cancel(body.reason, now), now)
                else:
                    self._send_to(member, m.Closed(body.request_id, body.attempt), ())
            case m.Emitted():
                record = self._owned(member, body.request_id)
                if record is not None:
                    ids = envelope.blobs[0] if envelope.blobs else b""
                    self._do(record, record.emitted(body, ids, now), now)
            case m.StreamCredit():
                record = self._owned(member, body.request_id)
                if record is not None:
                    self._do(record, record.credit(body), now)
            case m.EndChoice():
                record = self._owned(member, body.request_id)
                if record is not None:
                    self._do(record, record.end_choice(body), now)
            case _:
                self._count("unexpected", (_name(body),))

    def _owned(self, member: Member, request_id: str) -> Record | None:
        record = self.records.get(request_id)
        return record if record is not None and record.gateway == member.incarnation else None

    def _generate(self, member: Member, body: m.Generate, envelope: Envelope, now: float) -> None:
        blobs = [*envelope.blobs, b"", b""]
        known = self.records.get(body.request_id)
        if known is not None:
            if known.gateway == member.incarnation:
                decisions, _ = known.resubmitted(body, blobs[1], now)
                self._do(known, decisions, now)
            else:
                error = InvalidRequest("another request has this id")
                self._send_to(member, _failed(body, error.code, error.message, 400), ())
            return
        if self.is_stopping:
            return  # the gateway gets no answer and brings it to our successor
        if self._closed.get(body.request_id, -1) >= body.attempt:
            self._count("stale", ("generate",))
            self._send_to(member, m.Closed(body.request_id, self._closed[body.request_id]), ())
            return
        try:
            if body.attempt == 1:
                self._check_open(now)
                turned_away = self.admission.admit(body.tenant)
                if turned_away and (victim := self.records.get(turned_away)) is not None:
                    wait_s = self.admission.retry_after_s()
                    message = "the queue is full and this key has the most requests in it"
                    out = victim.fail(QueueFull.code, message, QueueFull.status, now, True, wait_s)
                    self._do(victim, out, now)
            record = self._record(body, blobs[0], blobs[1], member.incarnation, now, envelope)
        except (QueueFull, NotReady) as error:
            self._count("failed", (error.code,))
            failed = _failed(body, error.code, error.message, error.status, error.retry_after_s)
            self._send_to(member, failed, ())
            return
        except ValueError as error:
            failed = _failed(body, InvalidRequest.code, str(error), InvalidRequest.status)
            self._send_to(member, failed, ())
            return
        self._start(record, now)

    def _check_open(self, now: float) -> None:
        """Raises: NotReady if no chain has existed for a while."""
        missing = self.membership.missing()
        if missing and now - self._complete_s > NO_CHAIN_S:
            raise NotReady(missing, 5.0)

    def _record(
        self,
        body: m.Generate,
        prompt: bytes,
        emitted: bytes,
        gateway: str,
        now: float,
        envelope: Envelope | None = None,
    ) -> Record:
        config = self.config
        return Record(
            body,
            prompt,
            emitted,
            gateway,
            now,
            config.router.max_resumes,
            config.gateway.request_timeout_s,
            config.gateway.queue_timeout_s,
            envelope.header.traceparent if envelope is not None else "",
        )

    def _start(self, record: Record, now: float) -> None:
        self.records[record.request_id] = record
        if not record.is_canary:
            trace = tracing.trace_id(record.traceparent)
            log.info("generate", rid=record.request_id, attempt=record.attempt, trace=trace)
        if record.attempt > 1:
            workers = [
                Ref(x.instance, x.incarnation)
                for service in WORKERS
                for x in self.membership.of(service)
            ]
            self._do(record, record.inherit(workers, now), now)
        self._do(record, record.start(now), now)

    # ---- decisions

    def _do(self, record: Record, decisions: list[Decision], now: float) -> None:
        for decision in decisions:
            match decision:
                case ToGateway(body, blobs):
                    member = self.membership.get(record.gateway)
                    if member is not None:
                        self._send_to(member, body, blobs)
                    self._tell(record, body)
                case ToWorker(worker, body, blobs):
                    member = self.membership.get(worker.incarnation)
                    if member is not None and member.health is not Health.FENCED:
                        self._send_to(member, body, blobs)
                        if isinstance(body, m.Reserve | m.Prefill):
                            self._tell(record, body, to=worker.instance)
                case Enqueue():
                    self._enqueue(record, decision)
                case Dequeue():
                    self.admission.remove(record.request_id)
                    for key in [k for k in self._popped if k.request_id == record.request_id]:
                        del self._popped[key]
                case Proved(decode, prefill):
                    self.canary.proved(now)
                    self.membership.proved(decode.incarnation)
                    self.membership.proved(prefill.incarnation)
                case Count(what, labels):
                    self._count(what, labels)
                    if what in ("resumes", "failed"):
                        log.info(what, rid=record.request_id, attempt=record.attempt, why=labels)
        if record.state is State.CLOSED:
            self._forget(record)

    def _tell(self, record: Record, body: m.Message, **more: str) -> None:
        """One line of log per change of a request's state: what ``decant trace`` reads."""
        if record.is_canary or not isinstance(body, TOLD):
            return
        facts: dict[str, Any] = {k: getattr(body, k) for k in TOLD_FIELDS if hasattr(body, k)}
        log.info(_name(body), rid=record.request_id, **more, **facts)

    def _enqueue(self, record: Record, wanted: Enqueue) -> None:
        self._is_moving = True
        key = Key(record.request_id, wanted.lane)
        before = self._popped.pop(key, None)
        if before is not None:
            self.admission.put_back(before, wanted.not_before_s)
            return
        given = record.generate
        self.admission.push(
            key,
            given.tenant,
            given.priority,
            given.num_prompt_tokens + given.sampling.max_tokens * given.num_choices,
            wanted.not_before_s,
            wanted.is_resume or record.is_canary,
            record.is_suspect,
        )

    def _forget(self, record: Record) -> None:
        if self.records.pop(record.request_id, None) is None:
            return
        self._placed.pop(record.request_id, None)
        self._closed[record.request_id] = record.attempt
        while len(self._closed) > MAX_CLOSED:
            self._closed.popitem(last=False)
        if record.request_id == self.canary.request_id:
            self._count("canary", (self.canary.ended(record.failed),))

    def _reply(self, envelope: Envelope, body: m.Message) -> None:
        """Answer somebody who need not be a member."""
        hello = m.Hello("", envelope.header.source, 0, "")
        incarnation = envelope.header.incarnation
        member = self.membership.get(incarnation)
        if member is None:
            member = Member(hello, incarnation, envelope.identity, 0.0, 0.0, 0.0)
        self._send_to(member, body, ())

    def _kill(self, fence: Fence) -> None:
        log.warning("fencing", who=fence.member.instance, why=fence.why)
        self._count("fenced", (fence.member.service,))
        self._fence(fence.member, fence.why)

    # ---- placement and canary

    def pump(self) -> None:
        """Place what can be placed; call it often while something waits."""
        self._is_moving = True
        self._pump(self._clock())

    def _pump(self, now: float) -> None:
        if not self._is_moving or not len(self.admission):
            return
        self._is_moving = False
        self.placement.count(self._placed.values())
        while (waiting := self.admission.next(now)) is not None:
            record = self.records[waiting.key.request_id]
            number = waiting.key.lane
            chosen = self.placement.choose(record, record.lanes[number], now)
            if chosen is None:
                return  # nobody overtakes: a large request would wait for ever
            self._popped[waiting.key] = self.admission.pop(waiting.key, now)
            self._placed[record.request_id] = record
            num = len(record.lanes[number].choices)
            alone_in = self.placement.alone_in(record, num, *chosen)
            self._do(record, record.place(number, *chosen, now, alone_in), now)

    def _workers(self) -> list[list[Member]]:
        return [self.membership.usable(service) for service in WORKERS]

    def _run_canary(self, now: float) -> None:
        workers = self._workers()
        generate = None if self.is_stopping else self.canary.due(workers, not self.records, now)
        if generate is not None:
            prompt = self.canary.blob(workers)
            self._start(self._record(generate, prompt, b"", "", now), now)

    # ---- after every event

    def _after(self, now: float) -> None:
        if not self.membership.missing():
            self._complete_s = now
        self._is_moving |= self._told is None or self._told[0] != self.membership.version
        self._pump(now)
        why = self.why_not_ready()
        state = self.membership.version, not why, why, self.admission.num_free(NEARLY_FULL)
        if not self._is_settled(now):
            return
        if state != self._told or now - self._told_s > PEERS_AGAIN_S:
            if self._told is not None and state[1:3] != self._told[1:3]:
                log.info("readiness", is_ready=not why, why=why)
            self._told, self._told_s = state, now
            peers = self._peers()
            for member in self.membership.all():
                if member.health is not Health.FENCED:
                    self._send_to(member, peers, ())

    def _is_settled(self, now: float) -> bool:
        if self._awaited and now >= self._settled_s:
            log.warning("some processes did not join again", number=len(self._awaited))
            self._awaited.clear()
        return not self._awaited

    def _peers(self) -> m.Peers:
        why = self.why_not_ready()
        retry_after_s = self.admission.retry_after_s() if why == FULL else 0.0
        num_free = self.admission.num_free(NEARLY_FULL)
        peers = self.membership.peers()
        return m.Peers(peers, not why, why, why == FULL, retry_after_s, num_free)

    # ---- for the administrator and the metrics (see ``router_state.py``)

    def now(self) -> float:
        """The time by which everything here is judged."""
        return self._clock()

    @property
    def num_requests(self) -> int:
        """Requests that are not closed, the canary left out."""
        return sum(not r.is_canary for r in self.records.values())

    def stages(self) -> Counter[str]:
        """Requests by state."""
        return Counter(r.stage.name.lower() for r in self.records.values())


def _name(body: m.Message) -> str:
    return str(body.__struct_config__.tag)


def _failed(
    body: m.Generate, code: str, message: str, status: int, retry_after_s: float = 0.0
) -> m.Failed:
    return m.Failed(
        body.request_id, body.attempt, code, message, status, retry_after_s=retry_after_s
    )
