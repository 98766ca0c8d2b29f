"""Prefill and decode schedulers together, over real bytes, in random orders of events.

Every stream must equal what the model gives without any of the machinery, and afterwards every page
and slot must be free again.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from cluster import Cluster, Job
from fake_engine import EOS, FakeDraft, reference_tokens

from decant.engine.acceptance import DepthController
from decant.engine.execute import execute_prefill
from decant.engine.interface import Scores
from decant.protocol.errors import NotServed
from decant.protocol.messages import (
    EndChoice,
    Finished,
    KVReady,
    KVRelease,
    Lost,
    Message,
    Prefill,
    Prefilled,
    PromptLogprobs,
    ReplayFrom,
    Reserve,
    Sampling,
)


@contextmanager
def cluster(**settings: object) -> Iterator[Cluster]:
    result = Cluster(**settings)  # type: ignore[arg-type]
    try:
        yield result
    finally:
        result.close()


def some_prompt(seed: int, num: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 48) for _ in range(num)]


def check(job: Job) -> None:
    """The client has exactly the model's tokens."""
    for choice in range(job.num_choices):
        want = reference_tokens(job.prompt, job.sampling, choice)
        assert job.outputs[choice] == want, (job.request_id, choice)
        is_eos = want[-1] == EOS and not job.sampling.ignore_eos
        ends = is_eos or want[-1] in job.sampling.stop_token_ids
        assert job.reasons[choice] == ("stop" if ends else "length")


def jobs(seed: int, num: int, **sampling: object) -> list[Job]:
    rng = random.Random(seed)
    return [
        Job(
            f"r{i}",
            some_prompt(seed * 100 + i, rng.choice([1, 5, 127, 128, 129, 200, 256, 300, 400])),
            Sampling(
                seed=rng.getrandbits(63),
                temperature=rng.choice([0.0, 0.7, 1.0]),
                max_tokens=rng.choice([1, 2, 30, 90]),
                top_p=rng.choice([1.0, 0.95]),
                presence_penalty=rng.choice([0.0, 0.5]),
                stop_token_ids=[9] if i % 3 == 0 else [],
                **sampling,  # type: ignore[arg-type]
            ),
            num_choices=rng.choice([1, 1, 3]),
        )
        for i in range(num)
    ]


@pytest.mark.parametrize("seed", range(6))
def test_every_stream_is_exact_in_any_order_of_events(seed: int) -> None:
    with cluster(seed=seed) as c:
        for job in jobs(seed, 12):
            c.submit(job)
        c.run()
        for job in c.jobs.values():
            check(job)
        assert c.decode.speculation.num_accepted > 20
        c.settle()


@pytest.mark.parametrize("num_drafts", [0, 1, 2, 3])
def test_speculation_does_not_change_tokens(num_drafts: int) -> None:
    """k = 0 .. 3 against the reference, 40 seeds each, greedy and sampled."""
    with cluster(seed=num_drafts, num_drafts=num_drafts, num_pages=60, num_slots=20) as c:
        for seed in range(40):
            s = Sampling(seed=seed, temperature=seed % 4 / 2, max_tokens=40, ignore_eos=True)
            c.submit(Job(f"r{seed}", some_prompt(seed, 20 + seed), s))
        c.run()
        for job in c.jobs.values():
            check(job)
        assert (c.decode.speculation.num_drafted > 0) == (num_drafts > 0)
        c.settle()


def test_changing_depth_does_not_change_tokens() -> None:
    class Jumping(DepthController):
        def choose(self, batch: int) -> int:
            return rng.randrange(self.max_depth + 1)

    rng = random.Random(5)
    with cluster(depth=Jumping(3)) as c:
        for job in jobs(77, 10):
            c.submit(job)
        c.run()
        for job in c.jobs.values():
            check(job)
        c.settle()


def test_speculation_saves_steps() -> None:
    steps = {}
    for num_drafts in (0, 3):
        draft = FakeDraft(wrong_of_16=1)
        with cluster(num_drafts=num_drafts, draft=draft) as c:
            s = Sampling(seed=3, max_tokens=200, ignore_eos=True)
            job = c.submit(Job("r", some_prompt(1, 50), s))
            # In order, as the service does it: the draft answers before the next step.
            while not job.is_done:
                c.step()
                if c._proposal:
                    c.answer()
            steps[num_drafts] = c.decode._step
            check(job)
    assert steps[3] < 0.45 * steps[0]


@pytest.mark.parametrize("seed", range(2))
def test_preemption_is_invisible(seed: int) -> None:
    """A pool that cannot hold all: the youngest give way and come back."""
    with cluster(seed=seed, num_pages=9, num_slots=8) as c:
        for i in range(7):
            s = Sampling(seed=i, max_tokens=230, ignore_eos=True)
            c.submit(Job(f"r{i}", some_prompt(i, 100 + i), s))
        c.run()
        for job in c.jobs.values():
            check(job)
        assert c.decode.num_preempted > 0
        c.settle()


def test_the_oldest_is_never_preempted() -> None:
    with cluster(num_pages=5, num_slots=4) as c:
        s = Sampling(max_tokens=300, ignore_eos=True)
        first = c.submit(Job("first", some_prompt(1, 100), s))
        while not first.outputs[0]:
            c.step()
        for i in range(3):
            c.submit(Job(f"r{i}", some_prompt(i, 100), s))
        c.run()
        assert first.num_resumes == 0
        assert c.decode.num_preempted > 0
        c.settle()


@pytest.mark.parametrize("seed", range(20))
def test_cancel_at_any_moment_frees_everything(seed: int) -> None:
    """Cancels at random moments beside streams that go on; local prefill and n = 3 among them."""
    with cluster(seed=seed) as c:
        rng = random.Random(seed)
        for job in jobs(seed, 8):
            job.local = rng.random() < 0.25
            c.submit(job)
        victims = rng.sample(list(c.jobs.values()), 4)
        for victim in victims:
            for _ in range(rng.randrange(150)):
                c.step()
            if not victim.is_done:
                c.cancel(victim)
        c.run()
        for job in c.jobs.values():
            if not job.is_cancelled:
                check(job)
        c.settle()


def test_cancel_is_idempotent_and_answers_for_the_unknown() -> None:
    with cluster() as c:
        job = c.submit(Job("r", some_prompt(1, 300), Sampling(max_tokens=5)))
        c.run()
        c.cancel(job)
        c.run()
        job.is_acknowledged.clear()
        c.cancel(job)
        c.run()
        unknown = c.jobs["u"] = Job("u", [3], Sampling())
        c.cancel(unknown)
        c.run()
        c.settle()


@pytest.mark.parametrize("bad", [1, 2, 3])
def test_a_failed_pull_is_resumed(bad: int) -> None:
    with cluster(seed=bad) as c:
        c.fake_decode.bad_pulls = bad
        for job in jobs(bad, 6):
            c.submit(job)
        c.run()
        for job in c.jobs.values():
            check(job)
        assert sum(job.num_resumes for job in c.jobs.values()) >= 1
        c.settle()


def test_a_torn_page_is_noticed() -> None:
    with cluster(cache=False) as c:  # else the cache would keep what the test breaks
        job = c.submit(Job("r", some_prompt(1, 300), Sampling(max_tokens=5)))
        while not c._pulls:
            c.step()
        c.fake_prefill.pool.pages[c._pulls[0].source[0], 3] += 1  # after its checksum
        c.run()
        check(job)
        assert job.num_resumes == 1
        assert any("checksum" in line for line in c.log)


@pytest.mark.parametrize("seed", range(5))
def test_prefill_death_loses_only_its_lanes(seed: int) -> None:
    with cluster(seed=seed) as c:
        for job in jobs(seed, 8):
            c.submit(job)
        for _ in range(60 + 40 * seed):
            c.step()
        # p1 is gone, with what it said and what was said to it; the pool stays mapped until detach
        for name in ("p>d", "d>p", "r>p", "p>r"):
            c.links[name].clear()
        if c._prefill_step:
            c.end_prefill()
        c.prefill.take()
        c.prefill.reset()
        c.prefill.peers(set())
        c.prefill.take()
        c.prefill.peers({"d1"})
        c.decode.peers({"prefill-0": "p2"})
        c.decode_engine.attach("p2", c.prefill_engine.pools())
        original = c._at_decode

        def at_decode(message: Message) -> None:
            if isinstance(message, KVReady):
                c.decode.kv_ready("p2", message, c.now_ms)
            else:
                original(message)

        c._at_decode = at_decode  # type: ignore[method-assign]
        for job in c.jobs.values():  # the router: resume what was not decoding yet
            if not job.is_done and job not in c._waiting and not any(job.outputs.values()):
                c._resume(job)
        c.run()
        for job in c.jobs.values():
            check(job)
        c.settle()


def test_decode_death_frees_prefill() -> None:
    with cluster() as c:
        c.submit(Job("r", some_prompt(1, 400), Sampling(max_tokens=5)))
        while not c.prefill.stats()["pages_published"]:
            c.step()
        c.prefill.peers({"d2"})
        if c._prefill_step:
            assert c.prefill.stats()["pages_quarantined"]
            c.end_prefill()
        assert c.prefill.stats()["pages_published"] == c.prefill.stats()["pages_quarantined"] == 0
        assert c.prefill.is_idle
        assert any("decode process is gone" in str(a) for a in c.prefill.take())


def test_draft_death_changes_nothing() -> None:
    with cluster() as c:
        job = c.submit(
            Job("r", some_prompt(1, 60), Sampling(seed=8, max_tokens=150, ignore_eos=True))
        )
        while len(job.outputs[0]) < 20:
            c.step()
        while not c._proposal:
            c.step()
        c._proposal = None  # never answered
        num = c.decode.speculation.num_drafted
        for _ in range(60):
            c.step()
        assert c.decode.speculation.num_drafted - num <= 3  # k = 0 while it is silent
        c.decode.speculation.has_draft = False
        c.decode.speculation.gone()
        for _ in range(30):
            c.step()
        c.decode.speculation.has_draft = True  # it is back
        c.run()
        check(job)
        assert c.decode.speculation.num_drafted > num
        c.settle()


def test_parked_requests_keep_pages_and_take_no_steps() -> None:
    with cluster() as c:
        s = Sampling(max_tokens=120, ignore_eos=True)
        job = c.submit(Job("r", some_prompt(1, 60), s))
        other = c.submit(Job("o", some_prompt(2, 60), s))
        while len(job.outputs[0]) < 10:
            c.step()
        c.park(job, False)
        while c.links["r>d"]:
            c.step()
        while not other.is_done:
            c.step()
        num = len(job.outputs[0])
        for _ in range(100):
            c.step()
        assert len(job.outputs[0]) == num < 120
        assert c.decode.stats()["pages_active"] > 0
        c.park(job, True)
        c.run()
        check(job)
        c.settle()


def test_shared_pages_survive_the_first_choice_that_ends() -> None:
    with cluster(num_slots=16) as c:
        s = Sampling(seed=4, max_tokens=60, temperature=1.5)
        job = c.submit(Job("r", some_prompt(3, 260), s, num_choices=12))
        c.run()
        check(job)
        lengths = {len(o) for o in job.outputs.values()}
        assert len(lengths) > 3  # they did end at different times
        c.settle()


def test_requests_that_can_never_fit_are_refused() -> None:
    with cluster(num_pages=6, num_slots=4) as c:
        big = c.submit(Job("big", some_prompt(1, 700), Sampling(max_tokens=100)))
        wide = c.submit(Job("wide", some_prompt(1, 10), Sampling(max_tokens=1), num_choices=5))
        ids = c.submit(Job("ids", [3, 48], Sampling(max_tokens=1)))
        bias = c.submit(Job("bias", [3], Sampling(logit_bias={48: 1.0})))
        nan = c.submit(Job("nan", [3], Sampling(temperature=float("nan"))))
        fits = c.submit(Job("fits", some_prompt(1, 600), Sampling(max_tokens=100)))
        c.run()
        assert [big.failed, wide.failed, fits.failed] == ["too_large", "too_large", ""]
        assert [ids.failed, bias.failed, nan.failed] == ["protocol_error"] * 3
        check(fits)
        c.settle()


def test_a_step_takes_at_most_max_batch_and_nobody_starves() -> None:
    with cluster(max_batch=2, num_slots=8) as c:
        s = Sampling(max_tokens=40, ignore_eos=True)
        group = [c.submit(Job(f"r{i}", some_prompt(i, 30), s)) for i in range(6)]
        while not all(job.outputs[0] for job in group):
            c.step()
            if c._decode_step:
                assert len(c._decode_step.sequences) <= 2
        spread = [len(job.outputs[0]) for job in group]
        c.run()
        for job in group:
            check(job)
        assert max(spread) < 40
        c.settle()


def test_replay_gives_the_same_tokens_again() -> None:
    with cluster() as c:
        job = c.submit(Job("r", some_prompt(1, 30), Sampling(max_tokens=20, logprobs=2)))
        c.run()
        c.decode.replay("tokenizer-1", ReplayFrom("r", 1, 0, 5))
        outgoing = c.decode.take_tokens()
        assert list(outgoing) == ["tokenizer-1"]
        run = outgoing["tokenizer-1"].runs[0]
        assert outgoing["tokenizer-1"].ids.tolist() == job.outputs[0][5:]
        assert (run.start, run.finish_reason) == (5, job.reasons[0])
        assert [p.token_id for p in run.logprobs] == job.outputs[0][5:]
        for stale in (ReplayFrom("r", 2, 0, 0), ReplayFrom("x", 1, 0, 0), ReplayFrom("r", 1, 7, 0)):
            c.decode.replay("tokenizer-1", stale)
        assert not c.decode.take_tokens()


def test_the_larger_priority_is_prefilled_first_between_chunks_too() -> None:
    with cluster(chunk_tokens=100, cache=False) as c:

        def chunk_of(request_id: str = "", priority: int = 0) -> str:
            if request_id:
                body = Prefill(request_id, 1, 0, "decode-0", "d1", priority=priority)
                c.prefill.prefill(body, array("i", some_prompt(1, 300)), 0.0)
            plan = c.prefill.plan(0.0)
            assert plan is not None
            c.prefill.apply(execute_prefill(c.prefill_engine, plan), 0.0)
            return plan.lane.key[0]

        assert chunk_of("low", -5) == "low"
        assert chunk_of("first") == "first"
        assert chunk_of("second") == "first"
        assert chunk_of("urgent", 5) == "urgent"
        assert [chunk_of() for _ in range(8)] == (
            ["urgent"] * 2 + ["first"] + ["second"] * 3 + ["low"] * 2
        )


def test_scores_come_chunk_by_chunk_and_only_from_what_is_computed() -> None:
    with cluster(chunk_tokens=100) as c:
        ids = some_prompt(1, 300)

        def run(request_id: str, prompt_logprobs: int, has_scores: bool = True) -> list[Message]:
            body = Prefill(request_id, 1, 0, "decode-0", "d1", prompt_logprobs=prompt_logprobs)
            c.prefill.prefill(body, array("i", ids), 0.0)
            told: list[Message] = []
            while (plan := c.prefill.plan(0.0)) is not None:
                assert plan.step.chunk is None or plan.step.chunk.num_top == prompt_logprobs
                output = execute_prefill(c.prefill_engine, plan)
                if has_scores:
                    none = np.zeros(0, np.float32)
                    ids_of_none = np.zeros(0, np.int32)
                    scores = Scores(none, ids_of_none, ids_of_none[:, None], none[:, None])
                    output = replace(output, scores=scores)
                c.prefill.apply(output, 0.0)
                told += [a.message for a in c.prefill.take() if hasattr(a, "blobs")]
            c.prefill.released(KVRelease(request_id, 1, 0))
            return told

        assert [type(x) for x in run("plain", -1)] == [Prefilled]
        told = run("scored", 2)
        starts = [x.start for x in told if isinstance(x, PromptLogprobs)]
        assert starts[0] == 1 and starts == sorted(starts) and len(starts) >= 3
        assert isinstance(told[-1], Prefilled) and told[-1].num_cached_tokens == 0
        (again,) = run("plain again", -1)
        assert isinstance(again, Prefilled) and again.num_cached_tokens > 0
        (lost,) = run("an engine without scores", 0, has_scores=False)
        assert isinstance(lost, Lost) and lost.code == NotServed.code


def test_deadlines_are_kept_in_both_queues() -> None:
    with cluster() as c:
        ids = array("i", some_prompt(1, 50))
        c.decode.reserve(Reserve("r", 1, 0, [0], 50, Sampling(), "", "prefill-0", 100), ids)
        c.prefill.prefill(Prefill("r", 1, 0, "decode-0", "d1", 100), ids, 0)
        c.decode.tick(99)
        c.prefill.tick(99)
        assert len(c.decode.take()) == 1 and not c.prefill.take()
        c.decode.tick(101)
        c.prefill.tick(101)
        lost = [getattr(a, "message", None) for a in (*c.decode.take(), *c.prefill.take())]
        assert all(isinstance(m, Lost) and m.code == "deadline_exceeded" for m in lost)
        assert len(lost) == 2
        c.settle()


def test_a_new_router_voids_everything() -> None:
    with cluster() as c:
        for job in jobs(3, 6):
            c.submit(job)
        for _ in range(150):
            c.step()
        c.decode.reset()
        c.prefill.reset()
        for queue in (c.links["r>d"], c.links["r>p"], c._waiting):
            queue.clear()
        c.jobs.clear()
        for name in ("d>r", "p>r", "d>t"):
            c.links[name].clear()
        c.settle()


def test_draining_refuses_and_hands_back() -> None:
    with cluster() as c:
        job = c.submit(Job("r", some_prompt(1, 50), Sampling(max_tokens=400, ignore_eos=True)))
        while not job.outputs[0]:
            c.step()
        c.decode.is_draining = True
        late = c.submit(Job("late", some_prompt(2, 50), Sampling()))
        while not late.failed:
            c.step()
        assert late.failed == "draining"
        c.decode.hand_back("drain")
        actions = c.decode.take()
        assert any(isinstance(getattr(a, "message", None), Lost) for a in actions)
        assert not c.decode.requests


@pytest.mark.parametrize("seed", range(4))
def test_a_choice_that_needs_no_more_is_freed_while_the_others_go_on(seed: int) -> None:
    """At any moment of a step: its pages are free, its draws are void, the others are exact."""
    with cluster(seed=seed, num_pages=60) as c:
        s = Sampling(seed=seed, temperature=0.9, max_tokens=120, ignore_eos=True)
        job = c.submit(Job("r", some_prompt(seed, 300), s, num_choices=3))
        while len(job.outputs[1]) < 20 + seed:
            c.step()
        c.decode.end_choice(EndChoice("r", 9, 1))  # of another attempt: ignored
        c.decode.end_choice(EndChoice("r", 1, 1))
        ended = c.decode.requests["r"].sequences[1]
        (finished,) = [a.message for a in c.decode.take() if isinstance(a.message, Finished)]  # type: ignore[union-attr]
        assert (finished.choice, finished.reason) == (1, "stop")
        while c.links["d>t"]:
            c.links["d>t"].popleft()()
        job.reasons[1] = "stop"
        num = ended.num_output
        c.decode.end_choice(EndChoice("r", 1, 1))
        assert not c.decode.take()
        c.run()
        assert ended.num_output == num
        assert not c.decode.pages.owned(ended.owner) and not c.decode.slots.owned(ended.owner)
        for choice in (0, 2):
            assert job.outputs[choice] == reference_tokens(job.prompt, s, choice)
        c.settle()
