"""Prefill, decode and draft as real processes over real sockets, with a scripted router."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import pytest
from fake_engine import reference_tokens
from scripted_router import Job, ScriptedRouter

from decant.protocol.messages import Cancel, Drain, FlushCache, Peers, Sampling

ALL = ("prefill-0", "decode-0", "draft-0")


def prompt(seed: int, num: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 48) for _ in range(num)]


def check(*jobs: Job) -> None:
    for job in jobs:
        for choice in range(job.num_choices):
            want = reference_tokens(job.prompt, job.sampling, choice)
            assert job.outputs[choice] == want, (job.request_id, choice)


def some_jobs(num: int, max_tokens: int = 40) -> list[Job]:
    return [
        Job(
            f"r{i}",
            prompt(i, [3, 128, 200, 300, 450][i % 5]),
            Sampling(seed=i, temperature=[0.0, 1.0][i % 2], max_tokens=max_tokens),
            num_choices=3 if i % 4 == 3 else 1,
        )
        for i in range(num)
    ]


async def test_streams_are_exact_and_everything_is_freed(tmp_path: Path) -> None:
    async with ScriptedRouter(tmp_path) as router:
        await router.up(*ALL)
        jobs = [await router.submit(job) for job in some_jobs(10)]
        jobs.append(await router.submit(Job("local", prompt(9, 300), Sampling(), is_local=True)))
        await router.done(*jobs)
        check(*jobs)
        assert max(router.num_tokens_messages.values()) == 1  # one a step
        await router.until(lambda: all(len(j.finished) == j.num_choices for j in jobs), "Finished")
        accepted = sum(f.num_accepted for j in jobs for f in j.finished.values())
        drafted = sum(f.num_drafted for j in jobs for f in j.finished.values())
        assert 0.3 < accepted / drafted < 1
        for name, num_cached in (("first", 0), ("again", 450)):
            job = await router.submit(Job(name, prompt(77, 450), Sampling(max_tokens=3)))
            await router.done(job)
            await router.until(lambda job=job: job.num_cached >= 0, "Prefilled")  # type: ignore[misc]
            assert job.num_cached == num_cached
            check(job)
        beats = router.beats
        assert all(beats[i].stats["pages_cached"] > 0 for i in ("prefill-0", "decode-0"))
        for instance in ("prefill-0", "decode-0"):
            await router.send(instance, FlushCache())
            await router.until(lambda i=instance: not beats[i].stats["pages_cached"], "flush")  # type: ignore[misc]
        await router.replay(jobs[0], 0, 0)
        before = sum(router.num_tokens_messages.values())
        await router.until(lambda: sum(router.num_tokens_messages.values()) > before, "a replay")
        await router.baseline()
        for process in router.processes.values():
            process.terminate()
        for instance, process in router.processes.items():
            assert process.wait(10) == 0, instance
        assert not list(Path("/dev/shm").glob(f"{router.config.shm_prefix}*"))


@pytest.mark.parametrize("phase", ["reserving", "prefilling", "decoding"])
async def test_cancel_in_every_phase(tmp_path: Path, phase: str) -> None:
    async with ScriptedRouter(tmp_path, "step_s=0.004") as router:
        await router.up(*ALL)
        jobs = []
        for i in range(12):
            s = Sampling(seed=i, max_tokens=200, ignore_eos=True)
            job = await router.submit(Job(f"r{i}", prompt(i, 380), s, num_choices=1 + 2 * (i % 2)))
            jobs.append(job)
            await router.until(lambda job=job: job.phase == phase or job.failed, phase)  # type: ignore[misc]
            await asyncio.sleep(0.003 * i)
            await router.cancel(job)
        await router.baseline()


async def test_draft_killed_in_mid_stream_changes_only_speed(tmp_path: Path) -> None:
    async with ScriptedRouter(tmp_path) as router:
        await router.up(*ALL)
        s = Sampling(seed=5, max_tokens=600, ignore_eos=True)
        job = await router.submit(Job("r", prompt(1, 50), s))
        await router.until(lambda: len(job.outputs[0]) > 30, "tokens")
        router.processes["draft-0"].send_signal(signal.SIGSTOP)  # silent first: bounded wait
        num = len(job.outputs[0])
        await router.until(lambda: len(job.outputs[0]) > num + 30, "tokens without a draft")
        await router.kill("draft-0")
        await router.up("draft-0")
        await router.done(job)
        check(job)
        await router.baseline()


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_killed_worker_resumes_exactly(tmp_path: Path, victim: str) -> None:
    async with ScriptedRouter(tmp_path, "step_s=0.003") as router:
        await router.up(*ALL)
        jobs = [await router.submit(job) for job in some_jobs(8, 120)]
        await router.until(lambda: sum(len(j.outputs[0]) for j in jobs) > 40, "tokens")
        await router.kill(victim)
        await router.up(victim)
        for job in jobs:
            if not job.is_done and (victim == "decode-0" or not job.outputs[0]):
                await router.resume(job)
        await router.done(*jobs)
        check(*jobs)
        await router.baseline()


POINTS = [
    *("prefill.after_queued", "prefill.before_chunk", "prefill.after_chunk"),
    *("prefill.after_publish", "prefill.before_free"),
    *("decode.before_reserve", "decode.after_reserve", "decode.before_pull"),
    *("decode.before_release", "decode.after_release", "decode.before_step"),
    *("decode.before_tokens", "decode.after_tokens"),
    *("draft.before_propose", "draft.before_answer"),
]
QUICK = ("prefill.after_publish", "decode.before_release", "decode.before_tokens")


@pytest.mark.parametrize(
    "point", [pytest.param(p, marks=() if p in QUICK else pytest.mark.slow) for p in POINTS]
)
async def test_death_at_every_edge(tmp_path: Path, point: str) -> None:
    """kill -9 the fourth time a worker passes a point; a fresh one takes over; nothing changes."""
    victim = point.partition(".")[0] + "-0"
    async with ScriptedRouter(tmp_path) as router:
        router.start(victim, failpoint=f"{point}:kill@4")
        await router.up(*(set(ALL) - {victim}))
        await router.until(lambda: victim in router.beats, "the victim is up")
        jobs = [await router.submit(job) for job in some_jobs(8, 60)]
        await router.until(lambda: router.processes[victim].poll() is not None, "death")
        assert router.processes[victim].returncode == -signal.SIGKILL
        await router.kill(victim)
        await router.up(victim)
        for job in jobs:
            waits = victim == "decode-0" or (victim == "prefill-0" and job.phase != "decoding")
            if not job.is_done and waits:
                await router.resume(job)
        await router.done(*jobs)
        check(*jobs)
        await router.baseline()


async def test_preemption_over_sockets(tmp_path: Path) -> None:
    async with ScriptedRouter(tmp_path, pages=8) as router:
        await router.up(*ALL)
        jobs = [
            Job(f"r{i}", prompt(i, 100), Sampling(seed=i, max_tokens=220, ignore_eos=True))
            for i in range(6)
        ]
        for job in jobs:
            await router.submit(job)
        await router.done(*jobs)
        check(*jobs)
        assert router.beats["decode-0"].stats["preempted"] > 0
        await router.baseline()


async def test_parked_stream_stops_and_goes_on(tmp_path: Path) -> None:
    async with ScriptedRouter(tmp_path, "step_s=0.002") as router:
        await router.up(*ALL)
        s = Sampling(seed=2, max_tokens=300, ignore_eos=True)
        job = await router.submit(Job("r", prompt(1, 20), s))
        await router.until(lambda: len(job.outputs[0]) > 5, "tokens")
        await router.credit(job, False)
        await asyncio.sleep(0.3)
        num = len(job.outputs[0])
        await asyncio.sleep(0.3)
        assert len(job.outputs[0]) == num < 300
        await router.credit(job, True)
        await router.done(job)
        check(job)
        await router.baseline()


async def test_drain_finishes_what_is_there(tmp_path: Path) -> None:
    async with ScriptedRouter(tmp_path, "step_s=0.005") as router:
        await router.up(*ALL)
        s = Sampling(seed=2, max_tokens=60, ignore_eos=True)
        job = await router.submit(Job("r", prompt(1, 20), s))
        await router.until(lambda: len(job.outputs[0]) > 5, "tokens")
        await router.send("decode-0", Drain(20))
        await router.until(lambda: router.beats["decode-0"].is_draining, "draining is told")
        late = await router.submit(Job("late", prompt(1, 20), s))
        await router.done(job, late)
        check(job)
        assert late.failed == "draining"
        assert router.processes["decode-0"].wait(5) == 0


async def test_drain_hands_back_what_does_not_end(tmp_path: Path) -> None:
    async with ScriptedRouter(tmp_path, "step_s=0.02") as router:
        await router.up(*ALL)
        s = Sampling(seed=2, max_tokens=2000, ignore_eos=True)
        job = await router.submit(Job("r", prompt(1, 20), s))
        await router.until(lambda: len(job.outputs[0]) > 5, "tokens")
        await router.send("decode-0", Drain(0.3))
        await router.until(lambda: router.lost, "Lost")
        assert (router.lost[0].request_id, router.lost[0].code) == ("r", "")
        assert router.processes["decode-0"].wait(5) == 0


async def test_a_new_router_voids_the_work_of_the_old(tmp_path: Path) -> None:
    async with ScriptedRouter(tmp_path, "step_s=0.01") as router:
        await router.up(*ALL)
        s = Sampling(max_tokens=2000, ignore_eos=True)
        job = await router.submit(Job("r", prompt(1, 400), s))
        await router.until(lambda: len(job.outputs[0]) > 5, "tokens")
        router.jobs.clear()
        router.sender.incarnation = "f" * 32
        await router.until(lambda: router.logs().count("another router") == 2, "it is noticed")
        await router.baseline()
        fresh = await router.submit(Job("n", prompt(2, 400), Sampling(max_tokens=5)))
        await router.done(fresh)
        check(fresh)
        await router.baseline()


async def test_hand_offs_survive_a_router_that_learns_its_members_one_by_one(
    tmp_path: Path,
) -> None:
    """A restarted router's first Peers may lack the decode, which has no reason to say Hello to
    prefill again: prefill must still know the way to it."""
    async with ScriptedRouter(tmp_path) as router:
        await router.up("prefill-0", "decode-0")
        _, prefill = router.members["prefill-0"]
        await router.send("prefill-0", Peers([prefill], False, "no decode process has joined"))
        await router.tell_peers()
        job = await router.submit(Job("n", prompt(2, 400), Sampling(max_tokens=5)))
        await router.done(job, wait_s=15)
        check(job)
        await router.baseline()


async def test_cancel_of_the_unknown_is_answered(tmp_path: Path) -> None:
    async with ScriptedRouter(tmp_path) as router:
        await router.up("prefill-0", "decode-0")
        job = router.jobs["x"] = Job("x", [3], Sampling())
        for instance in ("prefill-0", "decode-0"):
            await router.send(instance, Cancel("x", 1))
        await router.until(lambda: job.acknowledged == {"prefill", "decode"}, "Cancelled")
