"""Runs a plan: splits it over worker processes, starts them on one clock, gathers their records.

The load runs in processes of its own so that drawing a progress bar never delays a request.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable

import msgspec

from decant.loadgen.plan import Job, Progress, Record, Request, Result, Target
from decant.protocol.errors import EngineError

START_DELAY_S = 1.0  # for the workers to read their plan and open connections


class RunResult(msgspec.Struct):
    records: list[Record]
    cpu_s: float  # of all workers


class WorkerDied(EngineError):
    """A load-generating process ended without its result; the run is void."""


def split(requests: list[Request], seats: list[int]) -> list[list[Request]]:
    """Deal requests to workers in proportion to ``seats`` (users of each, or all 1); the turns of
    a session stay together.
    """
    hands: list[list[Request]] = [[] for _ in seats]
    pattern = [number for number, n in enumerate(seats) for _ in range(n)]
    owners: dict[int, int] = {}
    turn = 0
    for request in requests:
        owner = owners.get(request.session, -1)
        if owner < 0:
            owner = pattern[turn % len(pattern)]
            turn += 1
            if request.session >= 0:
                owners[request.session] = owner
        hands[owner].append(request)
    return hands


def run(
    target: Target,
    requests: list[Request],
    *,
    concurrency: int = 0,
    workers: int = 1,
    max_in_flight: int = 10_000,
    on_progress: Callable[[int, Progress], None] | None = None,
) -> RunResult:
    """Send everything and wait for the end. ``on_progress`` gets a worker's number and its
    report.

    Raises: WorkerDied.
    """
    workers = max(1, min(workers, concurrency or workers, len(requests) or 1))
    return asyncio.run(_run(target, requests, concurrency, workers, max_in_flight, on_progress))


async def _run(
    target: Target,
    requests: list[Request],
    concurrency: int,
    workers: int,
    max_in_flight: int,
    on_progress: Callable[[int, Progress], None] | None,
) -> RunResult:
    start_ns = time.monotonic_ns() + round((START_DELAY_S + len(requests) * 5e-6) * 1e9)
    users = [concurrency // workers + (i < concurrency % workers) for i in range(workers)]

    def report(number: int, progress: Progress) -> None:
        if on_progress:
            on_progress(number, progress)

    tasks = []
    async with asyncio.TaskGroup() as group:
        for number, hand in enumerate(split(requests, users if concurrency else [1] * workers)):
            job = Job(target, hand, start_ns, users[number], max(1, max_in_flight // workers))
            tasks.append(group.create_task(_worker(job, number, report)))
    results = [task.result() for task in tasks]
    records = sorted((r for result in results for r in result.records), key=lambda r: r.index)
    return RunResult(records, sum(result.cpu_s for result in results))


async def _worker(job: Job, number: int, report: Callable[[int, Progress], None]) -> Result:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "decant.loadgen.worker",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(msgspec.msgpack.encode(job))
        await process.stdin.drain()
        process.stdin.close()
        while True:
            head = await process.stdout.readexactly(5)
            size = int.from_bytes(head[1:], "big")
            data = await process.stdout.readexactly(size)
            if head[:1] == b"R":
                return msgspec.msgpack.decode(data, type=Result)
            report(number, msgspec.msgpack.decode(data, type=Progress))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise WorkerDied(f"load worker {number} ended early, code {process.returncode}") from error
    finally:
        if process.returncode is None:
            try:
                await asyncio.wait_for(process.wait(), 2.0)
            except TimeoutError:
                process.kill()
                await process.wait()
