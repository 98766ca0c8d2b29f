"""A set of scripted processes around a real router and a real RequestClient, on real sockets.

The scripted workers have no model: the token at output position p of choice c is a pure function of
the prompt (``token``), so every transcript can be checked. Their pids are those of child processes
that only sleep: killing or fencing one is seen by the router as with a real worker, and the harness
takes the scripted worker down with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from decant.protocol import messages as m
from decant.protocol.config import Config, GatewayConfig, RouterConfig
from decant.protocol.wire import Envelope, Sender, pack_ids, unpack_ids
from decant.services.link import RouterLink
from decant.services.requests import Delta, RequestClient, Stream, new_request_id
from decant.services.router import Router
from decant.services.sockets import PeerGone, RouterSocket


def token(prompt: Sequence[int], choice: int, position: int) -> int:
    """What the scripted model says."""
    return (sum(prompt) * 31 + choice * 1009 + position * 7) % 50000


class Worker:
    """Base: a process with a pid, a link to the router, and a ``die`` that takes both."""

    service = ""
    limits = {"num_slots": 16, "vocab_size": 50000}

    def __init__(self, world: World, instance: str, endpoint: str = "") -> None:
        self.world, self.instance = world, instance
        self.sender = Sender(instance)
        self.tasks: list[asyncio.Task[Any]] = []
        self.has_fallen = asyncio.Event()
        self.is_busy, self.step, self.is_silent = False, 0, False
        self.endpoint = endpoint
        self.received: list[m.Message] = []
        self.peers: list[m.Peers] = []

    async def start(self) -> None:
        self.child = await asyncio.create_subprocess_exec("sleep", "1000")
        hello = m.Hello(
            self.service,
            self.instance,
            self.child.pid,
            "test",
            model_hash="model",
            kv_layout_hash="layout" if self.service in ("prefill", "decode") else "",
            endpoint=self.endpoint,
            limits=self.limits,
        )
        self.link = RouterLink(
            self.world.config,
            self.sender,
            hello,
            self._handle,
            self._beat,
            on_peers=self.on_peers,
            on_router=self.on_router,
        )
        self.tasks.append(asyncio.create_task(self.link.run()))
        self.tasks.append(asyncio.create_task(self._follow_child()))

    def _beat(self) -> m.Heartbeat:
        return m.Heartbeat(self.step, self.is_busy, stats=self.stats())

    def stats(self) -> dict[str, float]:
        return {}

    async def _handle(self, envelope: Envelope) -> None:
        self.received.append(envelope.body)
        await self.handle(envelope)

    async def handle(self, envelope: Envelope) -> None:
        raise NotImplementedError

    async def on_router(self, incarnation: str) -> None:
        pass

    async def on_peers(self, peers: m.Peers) -> None:
        self.peers.append(peers)

    async def send(self, body: m.Message) -> None:
        if not self.is_silent:
            with contextlib.suppress(PeerGone):
                await self.link.send(body)

    async def _follow_child(self) -> None:
        await self.child.wait()
        tasks = [t for t in self.tasks if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # only then their sockets may go
        self.link.close()
        self.fallen()
        self.has_fallen.set()

    def fallen(self) -> None:
        pass

    async def die(self) -> None:
        """kill -9; or, if that is to be its own fault, an abort."""
        is_own = self.child.pid in self.world.own_faults
        with contextlib.suppress(ProcessLookupError):
            self.child.send_signal(signal.SIGABRT if is_own else signal.SIGKILL)
        await self.has_fallen.wait()

    def go_silent(self) -> None:
        """SIGSTOP: the pid lives, nothing is heard."""
        self.is_silent = True
        self.tasks[0].cancel()


class Prefiller(Worker):
    service = "prefill"
    delay_s = 0.005

    def __init__(self, world: World, instance: str) -> None:
        super().__init__(world, instance)
        self.jobs: dict[str, asyncio.Task[None]] = {}

    async def handle(self, envelope: Envelope) -> None:
        body = envelope.body
        if isinstance(body, m.Prefill):
            job = asyncio.create_task(self._run(body, unpack_ids(envelope.blobs[0])))
            self.jobs[f"{body.request_id}/{body.lane}"] = job
            self.tasks.append(job)
        elif isinstance(body, m.Cancel):
            for key in [k for k in self.jobs if k.startswith(body.request_id)]:
                self.jobs.pop(key).cancel()
            await self.send(m.Cancelled(body.request_id, body.attempt))

    async def _run(self, body: m.Prefill, ids: array[int]) -> None:
        await asyncio.sleep(self.delay_s)
        self.step += 1
        decode = self.world.find(body.decode)
        if isinstance(decode, Decoder) and decode.sender.incarnation == body.decode_incarnation:
            decode.handed_off(body.request_id, body.attempt, body.lane)
        await self.send(m.Prefilled(body.request_id, body.attempt, body.lane, 4))


@dataclass
class Held:
    """One reservation."""

    reserve: m.Reserve
    prompt: array[int]
    emitted: array[int]
    out: dict[int, list[int]] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None


class Decoder(Worker):
    service = "decode"
    step_s = 0.004
    max_tokens_held = 100000

    def __init__(self, world: World, instance: str) -> None:
        super().__init__(world, instance)
        self.held: dict[tuple[str, int], Held] = {}  # request, lane
        self.attempts: dict[str, int] = {}
        self.tokenizer_of: dict[str, str] = {}
        self.refuse: list[str] = []  # reasons for the next reservations
        self.ended: list[tuple[str, int, int]] = []  # EndChoice: request, attempt, choice

    def stats(self) -> dict[str, float]:
        return {"pages_reserved": float(len(self.held))}

    async def handle(self, envelope: Envelope) -> None:
        body = envelope.body
        match body:
            case m.Reserve():
                await self._reserve(body, unpack_ids(envelope.blobs[0]))
            case m.Cancel():
                for key in [k for k in self.held if k[0] == body.request_id]:
                    if self.held[key].reserve.attempt <= body.attempt:
                        self._drop(key)
                await self.send(m.Cancelled(body.request_id, body.attempt))
            case m.EndChoice():
                self.ended.append((body.request_id, body.attempt, body.choice))

    async def on_router(self, incarnation: str) -> None:
        for key in list(self.held):
            self._drop(key)

    def _drop(self, key: tuple[str, int]) -> None:
        held = self.held.pop(key)
        if held.task is not None and held.task is not asyncio.current_task():
            held.task.cancel()

    async def _reserve(self, body: m.Reserve, ids: array[int]) -> None:
        named = body.request_id, body.attempt, body.lane
        if self.refuse:
            reason = self.refuse.pop(0)
            await self.send(m.Refused(*named, reason, "it does not fit" if reason else ""))
            return
        if sum(len(h.prompt) for h in self.held.values()) + len(ids) > self.max_tokens_held:
            await self.send(m.Refused(*named, "busy"))
            return
        prompt, emitted = ids[: body.num_prompt_tokens], ids[body.num_prompt_tokens :]
        self.held[body.request_id, body.lane] = Held(body, prompt, emitted)
        self.tokenizer_of[body.request_id] = body.tokenizer
        await self.send(m.Reserved(*named))

    def handed_off(self, request_id: str, attempt: int, lane: int) -> None:
        held = self.held.get((request_id, lane))
        if held is not None and held.reserve.attempt == attempt:
            held.task = asyncio.create_task(self._decode(held))
            self.tasks.append(held.task)

    async def _decode(self, held: Held) -> None:
        given = held.reserve
        named = given.request_id, given.attempt
        await self.send(m.Decoding(*named, given.lane))
        limit = given.sampling.max_tokens
        held.out = {c: list(held.emitted) for c in given.choices}
        while any(len(ids) < limit for ids in held.out.values()):
            await asyncio.sleep(self.step_s)
            if self.is_silent:
                continue
            self.step += 1
            for choice, ids in held.out.items():
                if len(ids) < limit:
                    start = len(ids)
                    for position in range(start, min(limit, start + 2)):
                        ids.append(token(held.prompt, choice, position))
                    self._push(held, choice, start)
        for choice, ids in held.out.items():
            finished = m.Finished(*named, choice, "length", len(ids), 4, 3, 2)
            await self.send(finished)

    def _push(self, held: Held, choice: int, start: int) -> None:
        given, ids = held.reserve, held.out[choice]
        reason = "length" if len(ids) >= given.sampling.max_tokens else ""
        run = m.TokenRun(given.request_id, given.attempt, choice, start, len(ids) - start, reason)
        tokenizer = self.world.find(self.tokenizer_of[given.request_id])
        if isinstance(tokenizer, Tokenizer):
            tokenizer.tokens(run, ids[start:])

    def replay(self, request_id: str, attempt: int, choice: int, start: int, who: str) -> None:
        for (held_id, _), held in self.held.items():
            if held_id == request_id and held.reserve.attempt == attempt and choice in held.out:
                self.tokenizer_of[request_id] = who
                if len(held.out[choice]) > start:
                    self._push(held, choice, start)


class Tokenizer(Worker):
    """Text is one word per id. Encodes JSON lists of ids only."""

    service = "tokenizer"

    def __init__(self, world: World, instance: str) -> None:
        super().__init__(world, instance, world.config.endpoint(instance))
        self.streams: dict[str, tuple[bytes, int, list[int]]] = {}  # identity, attempt, ends
        self.is_mute = False
        self.stop_at = 0  # choice 0 ends by a stop string after so many ids; 0: it does not

    async def start(self) -> None:
        await super().start()
        self.socket = RouterSocket(self.sender, self.endpoint)
        self.tasks.append(asyncio.create_task(self._read()))
        self.tasks.append(asyncio.create_task(self._ask_again()))

    def fallen(self) -> None:
        self.socket.close()

    async def handle(self, envelope: Envelope) -> None:
        pass

    async def _read(self) -> None:
        while True:
            envelope = await self.socket.receive()
            body = envelope.body
            self.received.append(body)
            match body:
                case m.Encode() if not self.is_mute:
                    if b"[" not in body.prompt:
                        failed = m.Failed(body.request_id, 1, "invalid_request", "not ids", 400)
                        await self.socket.send(envelope.identity, failed)
                        continue
                    ids = [int(x) for x in body.prompt.strip(b"[]").split(b",")]
                    if not body.count_only:
                        ends = [0] * body.output.num_choices
                        self.streams[body.request_id] = envelope.identity, 1, ends
                    encoded = m.Encoded(body.request_id, 1, len(ids))
                    await self.socket.send(envelope.identity, encoded, (pack_ids(ids),))
                case m.OpenStream():
                    ends = [c.num_ids for c in body.choices]
                    self.streams[body.request_id] = envelope.identity, body.attempt, ends
                    self._ask(body.request_id)
                case m.CloseStream():
                    self.streams.pop(body.request_id, None)
                case m.Detokenize():
                    pieces = [f" {i}" for i in unpack_ids(envelope.blobs[0])]
                    text = m.Text(body.request_id, "".join(pieces), pieces)
                    await self.socket.send(envelope.identity, text)

    async def _ask_again(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            for request_id in list(self.streams):
                self._ask(request_id)

    def _ask(self, request_id: str) -> None:
        _, attempt, ends = self.streams[request_id]
        for worker in self.world.workers:
            if isinstance(worker, Decoder) and worker.child.returncode is None:
                for choice, end in enumerate(ends):
                    worker.replay(request_id, attempt, choice, end, self.instance)

    def tokens(self, run: m.TokenRun, ids: list[int]) -> None:
        stream = self.streams.get(run.request_id)
        if stream is None or self.is_mute or self.child.returncode is not None:
            return
        identity, attempt, ends = stream
        if attempt != run.attempt or run.start > ends[run.choice]:
            return
        fresh = ids[ends[run.choice] - run.start :]
        if not fresh and not run.finish_reason:
            return
        reason = run.finish_reason
        if self.stop_at and not run.choice:
            if ends[0] >= self.stop_at:
                return
            fresh = fresh[: self.stop_at - ends[0]]
            reason = "stop" if ends[0] + len(fresh) == self.stop_at else reason
        delta = m.TextDelta(
            run.request_id,
            run.attempt,
            run.choice,
            ends[run.choice],
            len(fresh),
            "".join(f" {i}" for i in fresh),
            finish_reason=reason,
        )
        ends[run.choice] += len(fresh)
        job = self.socket.send(identity, m.TextDeltas([delta]), (pack_ids(fresh),))
        self.tasks.append(asyncio.create_task(self._quietly(job)))

    @staticmethod
    async def _quietly(job: Any) -> None:
        with contextlib.suppress(PeerGone):
            await job


KINDS: dict[str, type[Worker]] = {"prefill": Prefiller, "decode": Decoder, "tokenizer": Tokenizer}


class World:
    """Router, gateway and workers. Change ``router_config`` before ``start``."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir
        self.router_config: dict[str, Any] = {
            "heartbeat_s": 0.1,
            "suspect_s": 0.5,
            "dead_s": 1.5,
            "stall_s": 1.5,
            "canary": False,
        }
        self.workers: list[Worker] = []
        self.own_faults: set[int] = set()  # pids that "ended by themselves"
        self.router_tasks: list[asyncio.Task[Any]] = []
        self.client_task: asyncio.Task[None] | None = None

    @property
    def config(self) -> Config:
        return Config(
            run_dir=self.run_dir,
            router=RouterConfig(**self.router_config),
            gateway=GatewayConfig(queue_timeout_s=20.0, request_timeout_s=60.0),
        )

    def find(self, instance: str) -> Worker | None:
        """The running worker of this name."""
        for worker in reversed(self.workers):
            if worker.instance == instance and worker.child.returncode is None:
                return worker
        return None

    async def start(self, *instances: str, is_awaited: bool = True) -> None:
        """Router, client and these workers; returns when the set is ready."""
        self.start_router()
        self.client = RequestClient(self.config, Sender("gateway-0"), "test")
        self.client_task = asyncio.create_task(self.client.run())
        for instance in instances or ("tokenizer-0", "prefill-0", "decode-0"):
            await self.add(instance)
        if is_awaited:
            await self.until(lambda: self.client.is_ready)

    async def add(self, instance: str) -> Worker:
        worker = KINDS[instance.rpartition("-")[0]](self, instance)
        await worker.start()
        self.workers.append(worker)
        return worker

    def start_router(self) -> None:
        self.router = Router(self.config, "router", lambda pid: pid in self.own_faults)
        self.router_tasks = [
            asyncio.create_task(job)
            for job in (
                self.router.read(),
                self.router.outbox.run(),
                self.router.tick(),
                self.router.judge(),
            )
        ]

    async def stop_router(self) -> None:
        """As if killed: nobody is told."""
        for task in self.router_tasks:
            task.cancel()
        await asyncio.gather(*self.router_tasks, return_exceptions=True)
        self.router.close()
        await asyncio.sleep(0.05)  # libzmq unlinks the socket file in its own thread

    async def stop(self) -> None:
        await self.stop_router()
        if self.client_task is not None:
            self.client_task.cancel()
            await asyncio.gather(self.client_task, return_exceptions=True)
        for worker in self.workers:
            await worker.die()
        await asyncio.sleep(0)

    async def until(self, condition: Any, timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {self.client.why}"
            await asyncio.sleep(0.01)

    async def generate(
        self, prompt: Sequence[int], max_tokens: int = 20, n: int = 1, **rest: Any
    ) -> Stream:
        text = str(list(prompt)).replace(" ", "").encode()
        output = m.Output(num_choices=n)
        encoded = await self.client.encode(new_request_id(), "ids", text, output)
        return await self.client.generate(encoded, m.Sampling(max_tokens=max_tokens), **rest)

    async def collect(self, stream: Stream) -> tuple[list[list[int]], m.Closed]:
        """Read to the end; check that nothing is missing or repeated, in ids and text."""
        ids: list[list[int]] = [[] for _ in stream.ids]
        text = [""] * len(ids)
        closed: m.Closed | None = None
        async for event in stream:
            if isinstance(event, Delta):
                assert event.text.start == len(ids[event.text.choice])
                ids[event.text.choice].extend(event.ids)
                text[event.text.choice] += event.text.content
            elif isinstance(event, m.Failed):
                raise AssertionError(f"{event.code}: {event.message}")
            else:
                closed = event
        assert closed is not None
        for choice, got in enumerate(ids):
            expected = [token(stream.prompt.ids, choice, p) for p in range(len(got))]
            assert got == expected
            assert text[choice] == "".join(f" {i}" for i in expected)
        return ids, closed

    async def assert_clean(self) -> None:
        """No record, no reservation, no stream is left anywhere."""
        dispatcher = self.router.dispatcher

        def is_clean() -> bool:
            held = [
                w.held
                for w in self.workers
                if isinstance(w, Decoder) and w.child.returncode is None
            ]
            return (
                not dispatcher.records
                and not any(held)
                and not self.client.num_streams
                and not len(dispatcher.admission)
            )

        await self.until(is_clean)


@pytest.fixture
def run_dir() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="decant-") as path:
        os.chmod(path, 0o700)
        yield str(Path(path))


@pytest.fixture
async def world(run_dir: str) -> AsyncIterator[World]:
    world = World(run_dir)
    yield world
    await world.stop()
