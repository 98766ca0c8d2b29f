"""The rows of the reliability table (docs/reliability.md) that kill, stall and restart processes.

Each takes a stage, a seed and how much of it; returns one flat result. ``num`` counts requests,
``minutes`` bounds the time.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

import census
import mix
from mix import Ask
from nemesis import WORKERS, Nemesis
from real_set import decant
from stage import Result, Stage, p
from traffic import INCOMPLETE, Answer, Traffic

AT_ONCE = 8
MANY_AT_ONCE = 32
TRIALS = 8  # of one request, by a client that insists
LINKS = ("drop=0.01", "stall=0.01")  # what happens to messages

DECODE_POINTS = (
    "decode.before_reserve",
    "decode.after_reserve",
    "decode.before_pull",
    "decode.before_release",
    "decode.after_release",
    "decode.before_step",
    "decode.before_tokens",
    "decode.after_tokens",
)
PREFILL_POINTS = (
    "prefill.after_queued",
    "prefill.before_chunk",
    "prefill.after_chunk",
    "prefill.after_publish",
    "prefill.before_free",
)
DRAFT_POINTS = ("draft.before_propose", "draft.before_answer")
TOKENIZER_POINTS = tuple(
    f"tokenizer.{when}_{tag}"
    for tag in ("encode", "tokens", "close_stream")
    for when in ("before", "after")
)
ROUTER_POINTS = tuple(
    f"router.{when}_{tag}"
    for tag in ("generate", "reserved", "prefilled", "decoding", "finished", "cancel", "cancelled")
    for when in ("before", "after")
)
POINTS = DECODE_POINTS + PREFILL_POINTS + DRAFT_POINTS + TOKENIZER_POINTS + ROUTER_POINTS


def _again(asks: list[Ask], seed: int, num: int) -> Iterator[Ask]:
    """``num`` requests out of a few different ones, in a seeded order."""
    rng = Random(seed)
    return (rng.choice(asks) for _ in range(num))


def _waits(answers: list[Answer]) -> Result:
    ttft = [a.arrivals_s[0] - a.sent_s for a in answers if a.arrivals_s]
    gaps = [max(map(_gap, itertools.pairwise(a.arrivals_s)), default=0.0) for a in answers]
    return {"ttft_p99_s": round(p(ttft, 0.99), 2), "pause_max_s": round(max(gaps, default=0.0), 2)}


def _gap(pair: tuple[float, float]) -> float:
    return pair[1] - pair[0]


def _is_past(at_s: float) -> bool:
    return time.monotonic() > at_s


async def under(
    stage: Stage,
    asks: list[Ask],
    seed: int,
    num: int,
    deeds: int,
    minutes: float,
    period_s: float,
    victims: tuple[str, ...] = WORKERS,
    rest_s: float = 0.0,
    at_once: int = AT_ONCE,
) -> Result:
    """Load and kills until ``num`` requests are answered and ``deeds`` kills are done, or time is
    over.
    """
    await stage.learn(asks)
    end = time.monotonic() + minutes * 60
    nemesis = Nemesis(stage.real, seed, period_s, victims, rest_s=rest_s, until_s=end)
    began = time.monotonic()

    def is_over() -> bool:
        is_enough = len(nemesis.deeds) >= deeds and len(traffic.answers) >= num
        return time.monotonic() > end or is_enough

    async with stage.traffic() as traffic:
        async with nemesis:
            await traffic.many(_again(asks, seed, 1 << 30), at_once, is_over)
        answers = traffic.answers
    result: Result = {"seconds": round(time.monotonic() - began, 1), "deeds": len(nemesis.deeds)}
    result |= {"by_victim": nemesis.by_victim, **stage.compare(answers), **_waits(answers)}
    return result | await stage.rest(answers)


async def kills(
    stage: Stage,
    seed: int,
    num: int,
    minutes: float,
    period_s: float = 3.0,
    rest_s: float = 2.0,
) -> Result:
    """R1: kill -9 of a random process every three seconds, under every kind of request, three of
    four of them short.

    rest_s: a victim has been a member for so long, of a set that is ready; 0 kills whoever runs,
    also who is just starting, which on a machine that starts decode in more than some seconds
    leaves no time to serve anybody.
    """
    asks = mix.make(seed, stage.num_distinct // 3, stage.real.model)
    asks += mix.short(seed + 1, stage.num_distinct, stage.real.model)
    deeds = max(1, num // 20)
    return await under(
        stage, asks, seed, num, deeds, minutes, period_s, rest_s=rest_s, at_once=MANY_AT_ONCE
    )


async def gateways(stage: Stage, seed: int, num: int, minutes: float) -> Result:
    """R2: as R1, and gateways die as well (the set has two). A client loses what its gateway had:
    it must see so (a reset or an error, never an end that looks whole), and to ask again is enough.
    """
    asks = mix.make(seed, stage.num_distinct, stage.real.model)
    await stage.learn(asks)
    end = time.monotonic() + minutes * 60
    source = _again(asks, seed, num)
    victims = (*WORKERS, "gateway-0", "gateway-1")
    nemesis = Nemesis(stage.real, seed, 3.0, victims, rest_s=0.5, until_s=end)
    last: list[Answer] = []

    async def insist(traffic: Traffic) -> None:
        for ask in source:
            if time.monotonic() > end:
                return
            for trial in range(TRIALS):
                answer = await traffic.ask(ask)
                if answer.is_ok:
                    break
                await asyncio.sleep(min(4.0, 0.25 * 2**trial))
            last.append(answer)

    began = time.monotonic()
    async with stage.traffic() as traffic:
        async with nemesis, asyncio.TaskGroup() as tasks:
            for _ in range(MANY_AT_ONCE):
                tasks.create_task(insist(traffic))
        answers = traffic.answers
    failed = [a for a in answers if not a.is_ok]
    result: Result = {
        "seconds": round(time.monotonic() - began, 1),
        "deeds": len(nemesis.deeds),
        "by_victim": nemesis.by_victim,
        "tries": len(answers),
        "tries_failed": dict(Counter(a.code or a.error.partition(":")[0] for a in failed)),
        "truncated": sum(a.error == INCOMPLETE for a in failed),
        **stage.compare(last),
        **_waits(last),
    }
    await asyncio.to_thread(stage.real.wait_ready)
    # A gateway that died has lost the process that it starts for its first grammar.
    for ask in [a for a in asks if a.kind == "schema"] * 8:
        async with stage.traffic() as traffic:  # a connection of its own: either gateway
            assert (await traffic.ask(ask)).is_ok
    rest = await stage.rest([])
    if result["truncated"]:
        rest["faults"].append("an answer ended early without a sign of it")
    return result | rest


async def constrained(stage: Stage, seed: int, num: int, minutes: float) -> Result:
    """R12: decode dies while grammar, tools, n = 4, penalties and speculation are in use."""
    asks = mix.make(seed, stage.num_distinct // 2, stage.real.model, mix.CONSTRAINED)
    deeds = max(1, num // 20)
    return await under(stage, asks, seed, num, deeds, minutes, 4.0, ("decode-0",), 1.0)


async def flapping(stage: Stage, seed: int, num: int, minutes: float) -> Result:
    """R13: the draft dies every second, or as soon as it runs again."""
    asks = mix.make(seed, stage.num_distinct // 2, stage.real.model)
    deeds = max(3, num // 10)
    return await under(stage, asks, seed, num, deeds, minutes, 1.0, ("draft-0",), 0.2)


async def stops(stage: Stage, seed: int, num: int, minutes: float, stop_s: float = 20.0) -> Result:
    """R4: SIGSTOP of each process in turn, SIGCONT 20 s later; nobody speaks after its fence."""
    asks = mix.make(seed, stage.num_distinct // 2, stage.real.model)
    await stage.learn(asks)
    victims = list(WORKERS)
    Random(seed).shuffle(victims)
    answers: list[Answer] = []
    pauses = {}
    end = time.monotonic() + minutes * 60
    for victim in victims:
        if time.monotonic() > end:
            break
        nemesis = Nemesis(stage.real, seed, 0.5, (victim,), signal.SIGSTOP, stop_s, most=1)
        until = time.monotonic() + stop_s + 4.0
        async with stage.traffic() as traffic:
            async with nemesis:
                source = _again(asks, seed, 1 << 30)
                await traffic.many(source, 4, partial(_is_past, until))
            answers += traffic.answers
            waits = _waits(traffic.answers)  # its streams had perhaps no token yet
            pauses[victim] = max(waits["pause_max_s"], waits["ttft_p99_s"])
        await asyncio.to_thread(stage.real.wait_ready)
    result: Result = {"stopped": pauses, **stage.compare(answers)}
    return result | await stage.rest(answers)


async def cancels(stage: Stage, seed: int, num: int, minutes: float) -> Result:
    """R5: clients leave at random moments: before, in and after every phase."""
    rng = Random(seed)
    asks = mix.make(seed, stage.num_distinct, stage.real.model)
    asks += mix.long(seed + 1, stage.num_distinct, stage.real.model, 400)
    await stage.learn(asks[:9])  # what starts with its first use is there
    end = time.monotonic() + minutes * 60
    num_left = num_ended = num_decoding = 0
    answers: list[Answer] = []

    async def leave(traffic: Traffic) -> None:
        nonlocal num_left, num_ended, num_decoding
        while num_left < num and time.monotonic() < end:
            is_far, most = asyncio.Event(), rng.randint(1, 40)

            async def arrived(answer: Answer, far: asyncio.Event = is_far, at: int = most) -> None:
                if len(answer.arrivals_s) >= at:
                    far.set()

            task = asyncio.create_task(traffic.ask(rng.choice(asks), arrived))
            if rng.random() < 0.2:  # while it decodes, after some tokens
                other = asyncio.create_task(is_far.wait())
                await asyncio.wait({task, other}, return_when=asyncio.FIRST_COMPLETED)
                other.cancel()
            else:  # before and around the first token
                await asyncio.wait({task}, timeout=rng.choice([0.0, 0.01, 0.1, 0.5]) * rng.random())
            if task.done():
                num_ended += 1
                continue
            task.cancel()
            await asyncio.wait({task})
            num_left += 1
            num_decoding += is_far.is_set()

    began = time.monotonic()
    async with stage.traffic() as traffic:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(12):
                tasks.create_task(leave(traffic))
        answers = traffic.answers
    seconds = time.monotonic() - began
    failed = [a for a in answers if a.error.startswith("{") and a.code != "queue_full"]
    result: Result = {"seconds": round(seconds, 1), "cancelled": num_left, "ended": num_ended}
    result["cancelled_after_tokens"] = num_decoding
    result["failed"] = len(failed)
    result["errors"] = [f"{a.status} {a.error}" for a in failed[:3]]
    left_s = time.monotonic()
    rest = await stage.rest([])
    result["baseline_s"] = round(rest["clean_s"], 2)
    result["total_s"] = round(time.monotonic() - left_s, 2)
    return result | rest


async def rolling(stage: Stage, seed: int, num: int, minutes: float) -> Result:
    """R6: ``decant restart`` of every service in turn, again and again, under load."""
    asks = mix.make(seed, stage.num_distinct // 2, stage.real.model)
    await stage.learn(asks)
    async with stage.traffic() as traffic:
        calm = await traffic.many(_again(asks, seed, 40), 4)
    end = time.monotonic() + minutes * 60
    rounds, faults, is_over = 0, [], False
    async with stage.traffic() as traffic:
        load = asyncio.create_task(traffic.many(_again(asks, seed, 1 << 30), 4, lambda: is_over))
        try:
            while rounds < num and time.monotonic() < end:
                for service in ("tokenizer", "prefill", "decode", "draft", "router"):
                    done = await asyncio.to_thread(
                        decant, "restart", service, "--run-dir", str(stage.real.run_dir)
                    )
                    if done.returncode:
                        faults.append(f"restart {service}: {done.stderr[:300]}")
                rounds += 1
        finally:
            is_over = True
            await load
        answers = traffic.answers
    result: Result = {"rounds": rounds, "restarts": rounds * 5, **stage.compare(answers)}
    result |= {"calm_ttft_p99_s": _waits(calm)["ttft_p99_s"], **_waits(answers)}
    rest = await stage.rest(answers)
    rest["faults"] += faults
    return result | rest


async def poison(stage: Stage, seed: int, num: int, minutes: float) -> Result:
    """One request that ends decode in every step that holds it, among fifteen others.

    The set was started with ``poison_settings()``.
    """
    asks = mix.long(seed, 15, stage.real.model, 120)
    await stage.learn(asks)
    (bad,) = mix.long(seed + 1, 1, stage.real.model, 120)
    bad.body.update(seed=POISON_SEED, stream=False)  # so that its status is still to come
    del bad.body["stream_options"]
    async with stage.traffic() as traffic:
        others = [asyncio.create_task(traffic.ask(a)) for a in asks]
        await asyncio.sleep(0.3)
        answer = await traffic.ask(bad)
        answers = [await other for other in others]
    result: Result = {
        "poison": f"{answer.status} {answer.code} x-should-retry={answer.should_retry!r}",
        "is_failed": (answer.status, answer.code) == (500, "poison_request")
        and answer.should_retry == "false",
        **stage.compare(answers),
        **_waits(answers),
    }
    rest = await stage.rest([*answers, answer])
    if not result["is_failed"]:
        rest["faults"].append(f"the poison ended with {answer.error or answer.transcript}")
    return result | rest


POISON_SEED = 666_777


def poison_environment() -> dict[str, str]:
    return {"DECANT_FAILPOINT": f"decode.before_step:exit?{POISON_SEED}"}


async def points(
    stage: Stage, seed: int, num: int, minutes: float, folder: Path, which: tuple[str, ...] = POINTS
) -> Result:
    """R3: a death at every failpoint of every process, ``num`` times each.

    folder: the set's DECANT_FAILPOINT_DIR.
    """
    rng = Random(seed)
    asks = mix.make(seed, stage.num_distinct // 2, stage.real.model)
    await stage.learn(asks)
    end = time.monotonic() + minutes * 60
    answers: list[Answer] = []
    fired: list[str] = []
    silent: list[str] = []
    todo = [point for point in which for _ in range(num)]
    rng.shuffle(todo)
    slowest = (0.0, "")
    num_done = 0
    for point in todo:
        if time.monotonic() > end:
            break
        num_done += 1
        path = folder / point
        path.write_text(f"{rng.choice(['kill', 'kill', 'exit'])}@{rng.randint(1, 3)}")
        until = time.monotonic() + 20.0
        async with stage.traffic() as traffic:

            def is_over(path: Path = path, until: float = until) -> bool:
                return not path.exists() or time.monotonic() > until

            began = time.monotonic()
            await traffic.many(_again(asks, rng.randrange(1 << 30), 1 << 30), 4, is_over)
            answers += traffic.answers
        if path.exists():
            path.unlink()
            silent.append(point)
        else:
            fired.append(point)
        await asyncio.to_thread(stage.real.wait_ready)
        slowest = max(slowest, (time.monotonic() - began, point))
    result: Result = {
        "pairs": len(which),
        "planned": len(todo),
        "done": num_done,
        "fired": len(fired),
        "points": len(set(fired)),
        "silent": sorted(silent),
        "slowest_s": round(slowest[0], 1),
        "slowest": slowest[1],
        **stage.compare(answers),
    }
    return result | await stage.rest(answers)


async def lossy(stage: Stage, seed: int, num: int, minutes: float, folder: Path) -> Result:
    """R4: every process loses a share of the messages that it sends, then holds some for 0.2 to 2 s
    (with what comes after them).
    """
    asks = mix.make(seed, stage.num_distinct // 2, stage.real.model)
    await stage.learn(asks)
    answers: list[Answer] = []
    waits: Result = {}
    path = folder / "link.send"
    for name in LINKS:
        path.write_text(name)
        end = time.monotonic() + minutes * 60 / len(LINKS)
        async with stage.traffic() as traffic:

            def is_over(traffic: Traffic = traffic, end: float = end) -> bool:
                return time.monotonic() > end or len(traffic.answers) >= num

            await traffic.many(_again(asks, seed, 1 << 30), AT_ONCE, is_over)
            answers += traffic.answers
            waits[name] = _waits(traffic.answers)
        path.unlink()
        await asyncio.to_thread(stage.real.wait_ready)
    fences = await asyncio.to_thread(census.log_events, stage.real, "router-0", "fencing")
    result: Result = {"links": waits, "fenced": len(fences), **stage.compare(answers)}
    return result | await stage.rest(answers)


async def recovery(stage: Stage, seed: int, num: int, minutes: float) -> Result:
    """From the death of decode to the next token of each of eight streams, ``num`` times."""
    end = time.monotonic() + minutes * 60
    waits: list[float] = []
    answers: list[Answer] = []
    rounds = 0
    asks = mix.long(seed, 8, stage.real.model, 300)
    await stage.learn(asks)
    while rounds < num and time.monotonic() < end:
        rounds += 1
        async with stage.traffic() as traffic:
            tasks = [asyncio.create_task(traffic.ask(a)) for a in asks]
            while sum(bool(a.arrivals_s) for a in traffic.answers) < len(asks):
                await asyncio.sleep(0.05)
            await asyncio.to_thread(stage.real.kill, "decode-0")
            killed_s = time.monotonic()
            found = [await task for task in tasks]
        answers += found
        # NOTE: what was under way to the client still arrives at once; the pause begins after it.
        for answer in found:
            gaps = [
                (b - a, b)
                for a, b in itertools.pairwise(answer.arrivals_s)
                if b > killed_s and a < killed_s + 1.0
            ]
            if gaps:
                waits.append(max(gaps)[1] - killed_s)
        await asyncio.to_thread(stage.real.wait_ready)
    result: Result = {
        "rounds": rounds,
        "recovered_streams": len(waits),
        "recovery_p50_s": round(p(waits, 0.5), 2),
        "recovery_max_s": round(max(waits, default=0.0), 2),
        **stage.compare(answers),
    }
    return result | await stage.rest(answers)


async def soak(stage: Stage, seed: int, num: int, minutes: float) -> Result:
    """R14: a little load as long as there is time, a kill every minute; memory must not grow."""
    asks = mix.make(seed, stage.num_distinct // 2, stage.real.model)
    await stage.learn(asks)
    async with stage.traffic() as traffic:  # caches fill
        await traffic.many(_again(asks, seed + 1, 60), 4)
    first = await asyncio.to_thread(census.take, stage.real)
    period_s = min(60.0, minutes * 10)
    result = await under(stage, asks, seed, 1 << 30, 1 << 30, minutes, period_s, at_once=2)
    last = await asyncio.to_thread(census.take, stage.real)
    result["rss_growth"] = {
        name: round(last.rss[name] / max(1, first.rss.get(name, 1)) - 1, 3) for name in last.rss
    }
    return result
