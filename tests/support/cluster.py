"""Prefill, decode, draft, a scripted router and a client in one thread, in any order of events.

The schedulers are the real ones, over fake engines with real bytes; links are queues, each in order
and ``run`` delivers from a random one. Steps and pulls are split in two (begin, end), so that
cancels and deaths fall in between. The client applies tokens as the gateway does and checks that
none is missing or repeated.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from fake_engine import MAX_DRAFTS, FakeDraft, FakeEngine

from decant.engine.acceptance import DepthController
from decant.engine.decode_batch import DecodePlan, Limits, Proposal, ToPrefill
from decant.engine.decode_batch import ToRouter as DecodeToRouter
from decant.engine.decode_scheduler import DecodeScheduler
from decant.engine.execute import (
    execute_decode,
    execute_prefill,
    execute_pull,
    execute_seal,
)
from decant.engine.handoff import Pull
from decant.engine.host_tier import HostTier
from decant.engine.interface import DraftEngine, DraftSlot, Engine
from decant.engine.page_cache import Seal
from decant.engine.prefill_scheduler import PrefillLimits, PrefillPlan, PrefillScheduler, ToRouter
from decant.engine.sampler import Sampler
from decant.protocol.errors import HandoffError
from decant.protocol.messages import (
    Cancel,
    Cancelled,
    Finished,
    KVGone,
    KVReady,
    KVRelease,
    Lost,
    Message,
    Preempted,
    Prefill,
    Prefilled,
    Refused,
    Reserve,
    Reserved,
    Sampling,
    StreamCredit,
)


@dataclass
class Job:
    """A request as the router and the client know it."""

    request_id: str
    prompt: list[int]
    sampling: Sampling
    num_choices: int = 1
    local: bool = False
    salt: str = ""
    attempt: int = 1
    outputs: dict[int, list[int]] = field(default_factory=dict)  # what the client has
    reasons: dict[int, str] = field(default_factory=dict)
    is_cancelled: bool = False
    is_acknowledged: set[str] = field(default_factory=set)
    refused: str = ""
    failed: str = ""
    num_cached: int = -1
    num_resumes: int = 0
    is_reserved: bool = False

    @property
    def is_done(self) -> bool:
        if self.is_cancelled:
            return self.is_acknowledged == {"prefill", "decode"}
        return bool(self.failed) or len(self.reasons) == self.num_choices

    @property
    def unfinished(self) -> list[int]:
        return [c for c in range(self.num_choices) if c not in self.reasons]


class Cluster:
    """See the module."""

    def __init__(
        self,
        seed: int = 0,
        num_pages: int = 40,
        num_slots: int = 12,
        num_drafts: int = MAX_DRAFTS,
        max_batch: int = 8,
        cache: bool = True,
        cache_pages: int = 0,
        prefill_pages: int = 24,
        draft: FakeDraft | None = None,
        depth: DepthController | None = None,
        chunk_tokens: int = 100,
        engines: tuple[Engine, Engine, DraftEngine] | None = None,
        tier: HostTier | None = None,
    ) -> None:
        """engines: for prefill, decode and draft; fakes if not given. With real ones, num_pages,
        num_slots and prefill_pages are theirs. tier: of prefill's cache."""
        self.tier = tier
        self.random = random.Random(seed)
        self.now_ms = 0.0
        self.prefill_engine: Engine = engines[0] if engines else FakeEngine(prefill_pages, 6)
        self.decode_engine: Engine = engines[1] if engines else FakeEngine(num_pages, num_slots)
        self.draft: DraftEngine = engines[2] if engines else draft or FakeDraft()
        self.draft.attach("d1", self.decode_engine.pools())
        shape = self.decode_engine
        self.decode_engine.attach("p1", self.prefill_engine.pools())
        self._prefill_name = "p1"  # incarnation
        self._new_prefill = partial(
            PrefillScheduler,
            PrefillLimits(
                self.prefill_engine.num_pages,
                self.prefill_engine.num_slots,
                shape.page_tokens,
                shape.max_context,
                shape.vocab_size,
                chunk_tokens,
                cache_pages=cache_pages,
            ),
            self.prefill_engine.pools()[0].epoch,
            cache,
            "fake",
            tier,
        )
        self.prefill = self._new_prefill()
        self.decode = DecodeScheduler(
            Limits(
                shape.num_pages,
                shape.num_slots,
                shape.page_tokens,
                shape.max_context,
                shape.vocab_size,
                shape.eos_token_id,
                max_batch,
                32,
                num_drafts,
                chunk_tokens,
                cache_pages=cache_pages,
            ),
            depth,
            cache,
            "fake",
        )
        self.decode.speculation.has_draft = True
        self.prefill.peers({"d1"})
        self.decode.peers({"prefill-0": "p1"})
        self.sampler = Sampler(shape.vocab_size, shape.eos_token_id)
        self.jobs: dict[str, Job] = {}
        self.log: list[str] = []
        self.links: dict[str, deque[Callable[[], None]]] = {
            name: deque() for name in ("r>d", "r>p", "p>d", "d>p", "p>r", "d>r", "d>t", "x>d")
        }
        self._waiting: deque[Job] = deque()  # for a reservation
        self._decode_step: DecodePlan | None = None
        self._prefill_step: PrefillPlan | None = None
        self._proposal: Proposal | None = None
        self._pulls: deque[Pull] = deque()
        self._seals: deque[Seal] = deque()
        self.num_pulled_pages = 0
        self.num_drafted = 0

    def close(self) -> None:
        self.prefill_engine.close()
        self.decode_engine.close()
        self.draft.close()

    @property
    def fake_prefill(self) -> FakeEngine:
        assert isinstance(self.prefill_engine, FakeEngine)
        return self.prefill_engine

    @property
    def fake_decode(self) -> FakeEngine:
        assert isinstance(self.decode_engine, FakeEngine)
        return self.decode_engine

    # ---- router ----------------------------------------------------------------------------------

    def submit(self, job: Job) -> Job:
        self.jobs[job.request_id] = job
        job.outputs = {c: [] for c in range(job.num_choices)}
        self._waiting.append(job)
        return job

    def _reserve(self, job: Job) -> None:
        """All lanes of an attempt: one for a fresh request, one a choice after a loss."""
        fresh = not any(job.outputs.values())
        lanes = [job.unfinished] if fresh else [[c] for c in job.unfinished]
        for choices in lanes:
            ids = array("i", job.prompt + job.outputs[choices[0]])
            message = Reserve(
                job.request_id,
                job.attempt,
                choices[0],
                choices,
                len(job.prompt),
                job.sampling,
                "tokenizer-0",
                "" if job.local else "prefill-0",
                cache_salt=job.salt,
            )
            self.links["r>d"].append(partial(self.decode.reserve, message, ids))

    def cancel(self, job: Job) -> None:
        job.is_cancelled = True
        if job in self._waiting:
            self._waiting.remove(job)
        message = Cancel(job.request_id, job.attempt)
        self.links["r>d"].append(lambda: self.decode.cancel(message))
        self.links["r>p"].append(lambda: self.prefill.cancel(message))

    def park(self, job: Job, is_open: bool) -> None:
        message = StreamCredit(job.request_id, job.attempt, is_open)
        self.links["r>d"].append(lambda: self.decode.credit(message))

    def _resume(self, job: Job) -> None:
        """A loss: free what is held elsewhere, then a new attempt from what the client has."""
        old = Cancel(job.request_id, job.attempt, "superseded")
        self.links["r>d"].append(lambda: self.decode.cancel(old))
        self.links["r>p"].append(lambda: self.prefill.cancel(old))
        job.attempt += 1
        job.num_resumes += 1
        if job not in self._waiting and job.unfinished:
            self._waiting.append(job)

    def _at_router(self, source: str, message: Message) -> None:
        job = self.jobs[message.request_id]  # type: ignore[attr-defined]
        self.log.append(f"{source}: {message}")
        if isinstance(message, Cancelled):
            if job.is_cancelled and message.attempt == job.attempt:
                job.is_acknowledged.add(source)
        elif message.attempt != job.attempt or job.is_cancelled:  # type: ignore[attr-defined]
            return
        elif isinstance(message, Reserved) and not job.local:
            ids = array("i", job.prompt + job.outputs[message.lane])
            work = Prefill(
                job.request_id, job.attempt, message.lane, "decode-0", "d1", cache_salt=job.salt
            )
            self.links["r>p"].append(lambda: self.prefill.prefill(work, ids, self.now_ms))
        elif isinstance(message, Refused):
            job.refused = message.reason
            if message.reason == "busy":
                self._resume(job)
            else:
                job.failed = message.reason
        elif isinstance(message, Prefilled):
            job.num_cached = message.num_cached_tokens
        elif isinstance(message, Preempted) or (isinstance(message, Lost) and not message.code):
            self._resume(job)
        elif isinstance(message, Lost):
            job.failed = message.code
        elif isinstance(message, Finished):
            pass  # the client learns it from the tokens

    def kill_prefill(self) -> None:
        """kill -9: what prefill said and heard is gone, so are its cache and tier. Its successor
        gets the pool as it is, and every unfinished request is resumed.
        """
        for name in ("p>d", "d>p", "r>p", "p>r"):
            self.links[name].clear()
        self._prefill_step = None
        if self.tier is not None:
            self.tier.clear()
        self.prefill = self._new_prefill()
        self.prefill.peers({"d1"})
        self._prefill_name = f"p{int(self._prefill_name[1:]) + 1}"
        self.decode_engine.attach(self._prefill_name, self.prefill_engine.pools())
        self.decode.peers({"prefill-0": self._prefill_name})
        for job in self.jobs.values():
            if job.is_cancelled and not job.is_done:
                self.cancel(job)
            elif not job.is_done and job not in self._waiting:
                self._resume(job)

    # ---- delivery --------------------------------------------------------------------------------

    def _collect(self) -> None:
        for action in self.decode.take():
            if isinstance(action, DecodeToRouter):
                self.links["d>r"].append(partial(self._at_router, "decode", action.message))
            elif isinstance(action, ToPrefill):
                self.links["d>p"].append(partial(self._at_prefill, action.message))
            elif isinstance(action, Seal):
                self._seals.append(action)
            else:
                self._pulls.append(action)
        for work in self.prefill.take():
            if isinstance(work, ToRouter):
                self.links["p>r"].append(partial(self._at_router, "prefill", work.message))
            else:
                self.links["p>d"].append(partial(self._deliver, work.message))
        for outgoing in self.decode.take_tokens().values():
            self.links["d>t"].append(partial(self._at_client, outgoing.runs, outgoing.ids))

    def _at_prefill(self, message: Message) -> None:
        assert isinstance(message, KVRelease)
        self.prefill.released(message)

    def _deliver(self, message: Message) -> None:
        self._at_decode(message)  # looked up late: a test may replace it

    def _at_decode(self, message: Message) -> None:
        if isinstance(message, KVReady):
            self.decode.kv_ready(self._prefill_name, message, self.now_ms)
        else:
            assert isinstance(message, KVGone)
            self.decode.kv_gone(self._prefill_name, message)

    def _at_client(self, runs: list, ids: array) -> None:  # type: ignore[type-arg]
        at = 0
        for run in runs:
            tokens = list(ids[at : at + run.num_ids])
            at += run.num_ids
            job = self.jobs[run.request_id]
            if run.attempt != job.attempt or job.is_cancelled:
                continue
            output = job.outputs[run.choice]
            assert run.start <= len(output), f"a gap: {run} after {len(output)}"
            assert output[run.start : run.start + run.num_ids] in ([], tokens), f"a repeat: {run}"
            assert run.choice not in job.reasons or run.start < len(output)
            output += tokens[len(output) - run.start :]
            if run.finish_reason:
                job.reasons[run.choice] = run.finish_reason

    def _events(self) -> list[Callable[[], None]]:
        """What may happen next."""
        events = [queue.popleft for queue in self.links.values() if queue]
        result: list[Callable[[], None]] = [partial(_call, pop) for pop in events]
        if self._waiting:
            result.append(lambda: self._reserve(self._waiting.popleft()))
        if self._pulls:
            result.append(self.pull)
        if self._seals:
            result.append(self.seal)
        result.append(self.end_decode if self._decode_step else self.begin_decode)
        result.append(self.end_prefill if self._prefill_step else self.begin_prefill)
        if self._proposal:
            result.append(self.answer)
        return result

    def step(self) -> None:
        """One random event."""
        self.now_ms += 1
        self.random.choice(self._events())()
        self._collect()
        self.decode.books.check()
        self.prefill.books.check()

    def run(self, max_events: int = 200_000) -> None:
        """Until every job is done."""
        for _ in range(max_events):
            if all(job.is_done for job in self.jobs.values()):
                return
            self.step()
        raise AssertionError(f"not done: {[j for j in self.jobs.values() if not j.is_done]}")

    def settle(self) -> None:
        """Forget finished requests, deliver everything, and check that nothing is held."""
        for job in self.jobs.values():
            if not job.is_cancelled:
                self.cancel(job)
        for _ in range(3000):
            self.step()
        assert not any(self.links.values())
        self.decode.flush()
        decode, prefill = self.decode.stats(), self.prefill.stats()
        assert decode["pages_free"] == self.decode.pages.num, decode
        assert decode["slots_free"] == self.decode.slots.num, decode
        cached = prefill["pages_cached"] + prefill["slots_cached"]
        if self.prefill.cache is not None:
            self.prefill.cache.clear()
        if self.tier is not None:
            assert not len(self.tier) and self.tier.stats.memory_bytes == 0
        prefill = self.prefill.stats()
        assert prefill["pages_free"] == self.prefill.books.pages.num, (prefill, cached)
        assert prefill["slots_free"] == self.prefill.books.slots.num, (prefill, cached)
        assert self.decode.is_idle and self.prefill.is_idle
        assert not self.decode.requests and not self.prefill.lanes

    # ---- engines ---------------------------------------------------------------------------------

    def begin_decode(self) -> None:
        self._decode_step = self.decode.plan()

    def end_decode(self) -> None:
        plan = self._decode_step
        assert plan
        self._decode_step = None
        output = execute_decode(
            self.decode_engine, self.sampler, plan, None, self.decode.speculation.has_draft
        )
        proposal = self.decode.apply(output)
        if proposal:
            self._proposal = proposal

    def begin_prefill(self) -> None:
        self._prefill_step = self.prefill.plan(self.now_ms)

    def end_prefill(self) -> None:
        plan = self._prefill_step
        assert plan
        self._prefill_step = None
        self.prefill.apply(execute_prefill(self.prefill_engine, plan, self.tier), self.now_ms)

    def pull(self) -> None:
        pull, engine = self._pulls.popleft(), self.decode_engine
        error = ""
        self.num_pulled_pages += len(pull.source)
        try:
            execute_pull(engine, pull)
        except HandoffError as failure:
            error = failure.message
        self.decode.pulled(pull, error, self.now_ms)

    def seal(self) -> None:
        seal = self._seals.popleft()
        self.decode.sealed(seal, execute_seal(self.decode_engine, seal))

    def answer(self) -> None:
        """The draft answers, perhaps long after decode gave up waiting."""
        proposal = self._proposal
        assert proposal
        self._proposal = None
        slots, at = [], 0
        for s in proposal.message.slots:
            tokens = tuple(proposal.next_tokens[at : at + s.num_rows])
            streams = np.asarray(proposal.streams[at : at + s.num_rows], np.float32)
            at += s.num_rows
            slots.append(
                DraftSlot(
                    s.slot,
                    s.start,
                    tokens,
                    streams,
                    s.num_drafts,
                    s.mtp_valid_from,
                    s.seed,
                    s.choice,
                    s.temperature,
                    s.top_p,
                    s.top_k,
                    s.min_p,
                )
            )
        drafts = self.draft.propose("d1", slots)
        self.num_drafted += sum(map(len, drafts))
        ids = array("i", [t for some in drafts for t in some])
        self.decode.speculation.answered(proposal.message.step, [len(d) for d in drafts], ids)


def _call(pop: Callable[[], Callable[[], None]]) -> None:
    pop()()
