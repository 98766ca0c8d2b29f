"""One load-generating process: a ``Job`` on standard input, ``Progress`` and one ``Result`` on
standard output (each a 4-byte length and msgpack).

It does nothing but send, receive and take times; what the figures mean is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

import msgspec
import uvloop

from decant.loadgen.alarm import Alarm
from decant.loadgen.client import NEVER, Pool
from decant.loadgen.exchange import Exchange, body
from decant.loadgen.plan import Job, Progress, Record, Request, Result

REPORT_S = 0.25
WARM_CONNECTIONS = 64
Session = list[Request]


class Driver:
    """Sends a job's requests at their times and collects records.

    Open loop: the alarm rings at the next due time and everything due is sent, whatever is in
    flight. Closed loop: each of ``concurrency`` users takes the next session when its last ended.
    Later turns of a session follow ``think_ns`` after the answer.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.records: list[Record] = []
        self.finished = asyncio.Event()
        self._pool = Pool(job.target, self._on_done, self._send_due)
        self._alarm = Alarm(self._send_due)
        self._timed: deque[Request] = deque()
        self._waiting: deque[Session] = deque()  # closed loop
        self._later: dict[int, deque[Request]] = {}  # session -> turns to come
        self._history: dict[int, list[dict[str, str]]] = {}
        self._num_left = len(job.requests)
        self._num_in_flight = 0
        self._num_sent = self._num_done = self._num_failed = self._num_tokens = 0
        self._ttft: list[int] = []
        self._late: list[int] = []
        self._sort()

    def _sort(self) -> None:
        sessions: dict[int, Session] = {}
        firsts: list[Session] = []
        for request in self.job.requests:
            if request.session < 0:
                firsts.append([request])
            elif request.session in sessions:
                sessions[request.session].append(request)
            else:
                sessions[request.session] = [request]
                firsts.append(sessions[request.session])
        if self.job.concurrency:
            self._waiting.extend(firsts)
            return
        firsts.sort(key=lambda s: s[0].due_ns)
        for first, *rest in firsts:
            self._timed.append(first)
            if rest:
                self._later[first.session] = deque(rest)

    async def run(self) -> None:
        """Returns when every request has ended."""
        loop = asyncio.get_running_loop()
        num = self.job.concurrency or min(WARM_CONNECTIONS, len(self._timed))
        await self._pool.warm(min(num, self.job.max_in_flight))
        delay_s = (self.job.start_ns - time.monotonic_ns()) / 1e9
        if self.job.concurrency:
            await asyncio.sleep(max(0.0, delay_s))
            for _ in range(min(self.job.concurrency, len(self._waiting))):
                self._next_session()
        elif self._timed:
            self._await_due()
        expiry = loop.create_task(self._expire_forever())
        if self._num_left:
            await self.finished.wait()
        expiry.cancel()
        self._alarm.close()
        self._pool.close()

    def progress(self) -> Progress:
        """What happened since the last call."""
        ttft, self._ttft = self._ttft, []
        late, self._late = self._late, []
        return Progress(
            self._num_sent,
            self._num_done,
            self._num_failed,
            self._num_in_flight,
            self._num_tokens,
            ttft,
            late,
        )

    # ---- sending ---------------------------------------------------------------------------------

    def _await_due(self) -> None:
        self._pool.next_due_ns = self.job.start_ns + self._timed[0].due_ns
        self._alarm.set(self._pool.next_due_ns)

    def _send_due(self) -> None:
        timed, start = self._timed, self.job.start_ns
        self._pool.next_due_ns = NEVER
        while timed and start + timed[0].due_ns <= time.monotonic_ns():
            if self._num_in_flight >= self.job.max_in_flight:
                return  # the next answer calls again; the wait shows as lateness
            request = timed.popleft()
            self._send(request, start + request.due_ns)
        if timed:
            self._await_due()

    def _next_session(self) -> None:
        first, *rest = self._waiting.popleft()
        if rest:
            self._later[first.session] = deque(rest)
        self._send(first, 0)

    def _send(self, request: Request, due_ns: int) -> None:
        record = Record(request.index, request.content, request.slo, due_ns, turn=request.turn)
        data = body(self.job.target, request, self._history.get(request.session))
        exchange = Exchange(request, record, data, self._on_first(record))
        self._num_in_flight += 1
        self._num_sent += 1
        self._pool.send(exchange)
        if due_ns:
            self._late.append(record.sent_ns - due_ns)
        else:
            record.due_ns = record.sent_ns

    def _on_first(self, record: Record) -> Callable[[int], None]:
        return lambda now_ns: self._ttft.append(now_ns - record.sent_ns)

    # ---- receiving -------------------------------------------------------------------------------

    def _on_done(self, exchange: Exchange) -> None:
        record, request = exchange.record, exchange.request
        self.records.append(record)
        self._num_in_flight -= 1
        self._num_left -= 1
        self._num_done += 1
        self._num_failed += record.outcome not in ("ok", "cancelled")
        self._num_tokens += max(0, record.num_output_tokens)
        is_over = True
        if request.session >= 0:
            is_over = self._after_turn(exchange)
        if self.job.concurrency and is_over and self._waiting:
            self._next_session()
        elif self._timed and self._num_in_flight == self.job.max_in_flight - 1:
            self._send_due()
        if not self._num_left:
            self.finished.set()

    def _after_turn(self, exchange: Exchange) -> bool:
        """Start the session's next turn; True if it has none."""
        request, record = exchange.request, exchange.record
        later = self._later.get(request.session)
        if not later:
            self._later.pop(request.session, None)
            self._history.pop(request.session, None)
            return True
        if record.outcome != "ok":
            # without the answer the conversation cannot go on: its later turns count as lost too
            for left in self._later.pop(request.session):
                now = time.monotonic_ns()
                self.records.append(
                    Record(
                        left.index,
                        left.content,
                        left.slo,
                        now,
                        end_ns=now,
                        error="turn before it",
                        turn=left.turn,
                    )
                )
                self._num_left -= 1
                self._num_done += 1
                self._num_failed += 1
            self._history.pop(request.session, None)
            return True
        history = self._history.setdefault(request.session, [])
        history.append({"role": "user", "content": request.user})
        history.append({"role": "assistant", "content": exchange.text})
        turn = later.popleft()
        loop = asyncio.get_running_loop()
        due_ns = record.end_ns + turn.think_ns
        loop.call_later(
            max(0.0, (due_ns - time.monotonic_ns()) / 1e9), self._send_turn, turn, due_ns
        )
        return False

    def _send_turn(self, turn: Request, due_ns: int) -> None:
        self._send(turn, 0 if self.job.concurrency else due_ns)

    async def _expire_forever(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            self._pool.expire(time.monotonic_ns())


def write(stream: BinaryIO, message: Progress | Result) -> None:
    """One framed message: its tag (P or R), its length, its msgpack."""
    data = msgspec.msgpack.encode(message)
    tag = b"P" if isinstance(message, Progress) else b"R"
    stream.write(tag + len(data).to_bytes(4, "big") + data)
    stream.flush()


async def main(job: Job, out: BinaryIO) -> None:
    """Run the job; report as it goes."""
    driver = Driver(job)
    loop = asyncio.get_running_loop()

    over = asyncio.Event()

    async def report() -> None:
        while not over.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), REPORT_S)
            # the reader is our own parent; if it is slow, only this thread waits
            await loop.run_in_executor(None, write, out, driver.progress())

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(report())
        await driver.run()
        over.set()
    times = os.times()
    write(out, Result(driver.records, times.user + times.system))


def run() -> None:
    """Entry of ``python -P -m decant.loadgen.worker``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Job)
    # NOTE: a full collection walks every record and stops the loop for tens of milliseconds. What
    # is made per request has no cycles; the process lives for one run.
    gc.collect()
    gc.freeze()
    gc.disable()
    uvloop.run(main(job, sys.stdout.buffer))


if __name__ == "__main__":
    run()
