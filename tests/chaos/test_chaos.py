"""Random kills, cancels and overload against the real set; answers compared with fault-free ones.

Short forms run with ``make test``. ``make chaos`` runs the same with DECANT_CHAOS_SCALE=N, which
multiplies requests; the seed is printed and can be set with DECANT_CHAOS_SEED.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from real_set import RealSet

from decant.services.client import ApiError

SCALE = float(os.environ.get("DECANT_CHAOS_SCALE", "1"))
SEED = int(os.environ.get("DECANT_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
TIMEOUT_S = 200 + 60 * SCALE
USERS = 6
KILL_PERIOD_S = 3.0
VICTIMS = ["decode-0", "prefill-0", "draft-0", "tokenizer-0", "router-0"]


@dataclass(frozen=True)
class Job:
    """One request; the same job has the same answer, whatever happens meanwhile."""

    prompt: str
    fields: tuple[tuple[str, Any], ...]

    def ask(self, real_set: RealSet) -> str:
        return real_set.chat(self.prompt, **dict(self.fields))[0]


def make_jobs(num: int, rng: random.Random) -> list[Job]:
    """Greedy and seeded requests of different lengths and kinds."""
    jobs = []
    for i in range(num):
        numbers = " ".join(str(rng.randrange(100)) for _ in range(rng.randrange(3, 9)))
        kind = rng.choice(["Sort these numbers: {}", "Copy this: {}", "Reverse this: {}", "{}"])
        fields: dict[str, Any] = {"max_tokens": rng.randrange(20, 100), "ignore_eos": True}
        if i % 2:
            fields |= {"temperature": 1.0, "top_p": 0.95, "seed": rng.randrange(10**6)}
        if i % 5 == 0:
            fields |= {"frequency_penalty": 0.5, "presence_penalty": 0.3}
        jobs.append(Job(kind.format(numbers), tuple(fields.items())))
    return jobs


@dataclass
class Tally:
    """What became of the requests."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, job: Job, expected: str, real_set: RealSet) -> None:
        start = time.monotonic()
        try:
            got = job.ask(real_set)
        except ApiError as error:
            with self.lock:
                self.failed.append(f"{error.status} {error.message}")
            return
        with self.lock:
            self.longest_s = max(self.longest_s, time.monotonic() - start)
            if got == expected:
                self.right += 1
            else:
                self.wrong.append(f"{job}: wanted {expected!r}, got {got!r}")


@pytest.fixture(autouse=True)
def seed_is_told() -> None:
    print(f"seed {SEED}, scale {SCALE}")


@pytest.fixture(scope="module")
def rng() -> Iterator[random.Random]:
    yield random.Random(SEED)


@pytest.mark.timeout(TIMEOUT_S)
def test_random_kills(real_set: RealSet, rng: random.Random) -> None:
    """Kill -9 of a random process other than the gateway every 3 s: nothing fails, hangs, differs
    or leaks."""
    jobs = make_jobs(12, rng)
    with ThreadPoolExecutor(USERS) as pool:
        oracle = list(pool.map(lambda job: job.ask(real_set), jobs))
    tally, done = Tally(), threading.Event()
    max_kills = int(5 * SCALE)
    kills: Counter[str] = Counter()

    def kill() -> None:
        while kills.total() < max_kills and not done.wait(KILL_PERIOD_S):
            if victims := ready_processes(real_set):
                name = rng.choice(victims)
                real_set.kill(name)
                kills[name] += 1

    killer = threading.Thread(target=kill)
    killer.start()
    num = int(36 * SCALE)
    try:
        with ThreadPoolExecutor(USERS) as pool:
            for i in range(num):
                pool.submit(tally.run, jobs[i % len(jobs)], oracle[i % len(jobs)], real_set)
    finally:
        done.set()
        killer.join()
    print(f"{num} requests, {sum(kills.values())} kills {dict(kills)}: {tally.right} right,"
          f" {len(tally.wrong)} wrong, {len(tally.failed)} failed,"
          f" longest {tally.longest_s:.1f} s")  # fmt: skip
    assert sum(kills.values()) >= 2
    assert not tally.failed, tally.failed[:3]
    assert not tally.wrong, tally.wrong[:3]
    assert tally.right == num


def ready_processes(real_set: RealSet) -> list[str]:
    """Whom to kill: processes that work. Killing whoever is still starting would, on a machine
    slower than the period, never let a decode process live."""
    try:
        state = real_set.state()
    except ApiError:
        return []
    ready = [p["instance"] for p in state["processes"] if p["is_ready"]]
    return [name for name in (*ready, "router-0") if name in VICTIMS]


def start_stream(real_set: RealSet, body: dict[str, Any]) -> http.client.HTTPConnection:
    host, _, port = real_set.url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    data = json.dumps({"model": real_set.model, "stream": True, **body})
    connection.request("POST", "/v1/chat/completions", data, {"Content-Type": "application/json"})
    return connection


@pytest.mark.timeout(TIMEOUT_S)
def test_cancels_at_random_phases(real_set: RealSet, rng: random.Random) -> None:
    """Clients that leave in the queue, in prefill, in decode: all pages return within 2 s."""
    real_set.wait_clean()

    def leave(seed: int) -> None:
        own = random.Random(seed)
        words = " ".join(str(own.randrange(1000)) for _ in range(own.choice([5, 100, 500])))
        body = {
            "messages": [{"role": "user", "content": words}],
            "max_tokens": 2000,
            "ignore_eos": True,
            "n": own.choice([1, 1, 2]),
        }
        connection = start_stream(real_set, body)
        time.sleep(own.choice([0.0, 0.02, 0.1, 0.3, 1.0]))
        if own.random() < 0.3 and connection.sock:
            connection.sock.settimeout(0.5)
            with suppress(OSError, http.client.HTTPException):
                connection.getresponse().readline()
        connection.close()

    num = int(60 * SCALE)
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(leave, [rng.randrange(10**9) for _ in range(num)]))
    start = time.monotonic()
    real_set.wait_clean(10.0)
    took = time.monotonic() - start
    print(f"{num} cancels, clean after {took:.2f} s")
    assert took < 2.0 or os.getloadavg()[0] > 4


@pytest.mark.timeout(TIMEOUT_S)
def test_overload_is_refused_at_once(start_set: Callable[..., RealSet], rng: random.Random) -> None:
    """More requests than the gateway admits: 429 or 503 with Retry-After, the others are served."""
    small = start_set("gateway.max_requests=8", "router.max_queued=4")
    try:
        answers: list[tuple[int, float, str]] = []

        def ask() -> None:
            start = time.monotonic()
            body = {
                "messages": [{"role": "user", "content": "What is 4 + 5?"}],
                "max_tokens": 40,
                "ignore_eos": True,
            }
            connection = start_stream(small, body)
            try:
                response = connection.getresponse()
                took = time.monotonic() - start
                text = response.read().decode()
                retry = response.getheader("Retry-After") or ""
                if response.status == 200:
                    assert "[DONE]" in text and '"error"' not in text, text[-300:]
                answers.append((response.status, took, retry))
            finally:
                connection.close()

        with ThreadPoolExecutor(40) as pool:
            for job in [pool.submit(ask) for _ in range(int(120 * SCALE))]:
                job.result()
        counts = Counter(status for status, _, _ in answers)
        print(f"statuses {dict(counts)}")
        assert set(counts) <= {200, 429, 503}
        assert counts[200] >= 8
        assert counts[429] + counts[503] > 0
        assert all(retry for status, _, retry in answers if status != 200)
        small.wait_clean()
    finally:
        small.stop()
