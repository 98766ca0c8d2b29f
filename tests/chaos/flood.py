"""The rows of the reliability table that flood: more requests than can be served, and readers that
do not read.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import time
from collections import Counter
from functools import partial
from random import Random

import census
import mix
from stage import Result, Stage, p
from traffic import Answer

OVERLOAD = ("router.max_queued=8", "gateway.max_requests=40", "router.canary=false")
CUT_WAIT_S = 60.0  # for readers that are cut, and a part of a second for each of them
CUT_EACH_S = 1.0  # they share decode's steps
# All of them hold a slot: they would wait in the queue, in front of the others, else.
SLOW = (
    *("gateway.slow_reader_s=4", "gateway.max_requests=256", "decode.slots=232"),
    *("decode.pages=512", "prefill.pages=256"),
)
REFUSAL_S = 0.1
STREAMS = 12


class Meter:
    """Processors that each process kept busy, the client (this process) included."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._last = self._now()

    def _now(self) -> dict[str, float]:
        return {**census.cpu_s(self._stage.real), "client": time.process_time()}

    def read(self, seconds: float) -> Result:
        """Since the last reading, ``seconds`` ago."""
        last, self._last = self._last, self._now()
        return {n: round((s - last.get(n, 0)) / seconds, 2) for n, s in self._last.items()}


def _is_past(at_s: float) -> bool:
    return time.monotonic() > at_s


async def overload(stage: Stage, seed: int, num: int, minutes: float) -> Result:
    """R7: five times what can be served, open loop; who is refused is told so at once.

    The peak is measured before and after, half of it each time, for other jobs of the machine may
    come or go meanwhile; the processors that the set had say whether they did.
    """
    asks = mix.make(seed, 40, stage.real.model, mix.PLAIN)
    await stage.learn(asks)
    rng = Random(seed)
    calm_s = max(8.0, minutes * 60 / 5)
    meter = Meter(stage)

    async def calm() -> tuple[float, Result]:
        """Answers a second, and the processors for it."""
        began = time.monotonic()
        async with stage.traffic() as traffic:
            source = (rng.choice(asks) for _ in range(1 << 30))
            is_over = partial(_is_past, began + calm_s / 2)
            found = await traffic.many(source, STREAMS, is_over)
        seconds = time.monotonic() - began
        return sum(a.is_ok for a in found) / seconds, meter.read(seconds)

    first, first_cpus = await calm()
    before = await asyncio.to_thread(census.take, stage.real)
    flood_s = max(10.0, minutes * 60 * 3 / 5)
    async with stage.traffic() as traffic:
        began, tasks = time.monotonic(), []
        due = began
        while due < began + flood_s:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.append(asyncio.create_task(traffic.ask(rng.choice(asks))))
            due += rng.expovariate(5 * first)
        await asyncio.wait(tasks)
        seconds = time.monotonic() - began
        answers = traffic.answers
        flood_cpus = meter.read(seconds)
    after = await asyncio.to_thread(census.take, stage.real)
    last, last_cpus = await calm()
    peak = (first + last) / 2
    refused = [a for a in answers if a.status in (429, 503)]
    served = [a for a in answers if a.status not in (429, 503)]
    faults = []
    silent = [a for a in refused if not a.retry_after]
    if silent:
        faults.append(f"{len(silent)} refusals without Retry-After")
    goodput = sum(a.is_ok for a in served) / seconds
    result: Result = {
        "peak_per_s": [round(first, 2), round(last, 2)],
        "offered_per_s": round(len(answers) / seconds, 2),
        "goodput_per_s": round(goodput, 2),
        "goodput_share": round(goodput / peak, 3) if peak else 0,
        "statuses": dict(Counter(a.status for a in answers)),
        "refusal_p50_ms": round(p([a.ended_s - a.sent_s for a in refused], 0.5) * 1e3, 1),
        "refusal_p99_ms": round(p([a.ended_s - a.sent_s for a in refused], 0.99) * 1e3, 1),
        "cpus_calm": [first_cpus, last_cpus],
        "cpus_flood": flood_cpus,
        "rss_growth_mb": {
            name: round((after.rss[name] - size) / 1e6, 1) for name, size in before.rss.items()
        },
        **stage.compare(served),
    }
    rest = await stage.rest(answers)
    rest["faults"] += faults
    return result | rest


def _verbose(stage: Stage, seed: int) -> tuple[str, int, bytes]:
    """Host, port and the bytes of a streamed request with a long answer. Log probabilities make
    every token some kilobytes, so that buffers fill soon.
    """
    (ask,) = mix.long(seed, 1, stage.real.model, 6000)
    body = json.dumps({**ask.body, "logprobs": True, "top_logprobs": 20}).encode()
    host, _, port = stage.real.url.removeprefix("http://").partition(":")
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return host, int(port), head.encode() + body


def _not_reading(stage: Stage, seed: int) -> socket.socket:
    """A streamed request whose answer is never read."""
    host, port, data = _verbose(stage, seed)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(10)
    connection.connect((host, port))
    connection.sendall(data)
    return connection


async def _reading(stage: Stage, seed: int) -> None:
    """The same request by a client that reads, until it is cancelled."""
    host, port, data = _verbose(stage, seed)
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(data)
        while await reader.read(1 << 16):
            pass
    finally:
        writer.close()


def _itl(answers: list[Answer]) -> list[float]:
    return [b - a for answer in answers for a, b in itertools.pairwise(answer.arrivals_s)]


async def slow_readers(stage: Stage, seed: int, num: int, minutes: float) -> Result:
    """R8: ``num`` clients that never read, beside four that do. Their tokens must not come later
    than beside ``num`` clients that ask for the same and read.
    """
    asks = mix.make(seed, 20, stage.real.model, mix.PLAIN)
    await stage.learn(asks)
    seconds = max(6.0, minutes * 15)

    async def others() -> list[Answer]:
        until = time.monotonic() + seconds
        async with stage.traffic() as traffic:
            source = itertools.cycle(asks)
            return await traffic.many(source, 4, lambda: time.monotonic() > until)

    calm = await others()
    crowd = [asyncio.create_task(_reading(stage, seed + i)) for i in range(num)]
    crowded = await others()
    for task in crowd:
        task.cancel()
    await asyncio.wait(crowd)
    await asyncio.to_thread(stage.real.wait_clean, 60.0)
    before = await asyncio.to_thread(census.take, stage.real)
    connections = [await asyncio.to_thread(_not_reading, stage, seed + i) for i in range(num)]
    disturbed = await others()
    peak = await asyncio.to_thread(census.take, stage.real)
    growth = (peak.rss["gateway-0"] - before.rss["gateway-0"]) / 1e6
    # A slow machine needs longer until the answers fill the buffers.
    until = time.monotonic() + CUT_WAIT_S + CUT_EACH_S * num
    while True:
        cut = await asyncio.to_thread(census.log_events, stage.real, "gateway-0", "slow reader cut")
        if len(cut) >= num or time.monotonic() > until:
            break
        await asyncio.sleep(0.5)
    began = time.monotonic()
    for connection in connections:
        connection.close()
    result: Result = {
        "cut": len(cut),
        "readers": len(connections),
        "itl_p99_calm_ms": round(p(_itl(calm), 0.99) * 1e3, 1),
        "itl_p99_crowded_ms": round(p(_itl(crowded), 0.99) * 1e3, 1),
        "itl_p99_ms": round(p(_itl(disturbed), 0.99) * 1e3, 1),
        "gateway_rss_growth_mb": round(growth, 1),
        **stage.compare(calm + crowded + disturbed),
    }
    rest = await stage.rest(calm + crowded + disturbed, 60.0)
    if len(cut) < num:
        rest["faults"].append(f"only {len(cut)} of {num} slow readers were cut")
    if growth > 100:
        rest["faults"].append(f"the gateway grew by {growth:.0f} MB")
    result["gone_s"] = round(time.monotonic() - began, 1)
    return result | rest
