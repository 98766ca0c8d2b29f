"""A router and a tokenizer for tests: real sockets, no policy. Starts the worker processes.

It welcomes everybody, tells everybody of everybody, reserves, starts prefills, resumes after a loss
from what the client has, and keeps the tokens as the gateway does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from decant.protocol.config import Config, DecodeConfig, DraftConfig, PrefillConfig, dump
from decant.protocol.messages import (
    Cancel,
    Cancelled,
    Finished,
    Heartbeat,
    Hello,
    Lost,
    Message,
    Peer,
    Peers,
    Preempted,
    Prefill,
    Prefilled,
    Refused,
    ReplayFrom,
    Reserve,
    Reserved,
    Sampling,
    StreamCredit,
    Tokens,
    Welcome,
)
from decant.protocol.wire import Envelope, Sender, pack_ids, unpack_ids
from decant.services.sockets import PeerGone, RouterSocket

WORKER = Path(__file__).parent / "fake_worker.py"


@dataclass
class Job:
    """A request as router and client know it."""

    request_id: str
    prompt: list[int]
    sampling: Sampling
    num_choices: int = 1
    is_local: bool = False
    attempt: int = 1
    outputs: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    finished: dict[int, Finished] = field(default_factory=dict)
    num_resumes: int = 0
    num_cached: int = -1
    failed: str = ""
    phase: str = "new"
    acknowledged: set[str] = field(default_factory=set)
    is_cancelled: bool = False

    @property
    def is_done(self) -> bool:
        return bool(self.failed) or len(self.reasons) == self.num_choices


class ScriptedRouter:
    """Use ``async with``."""

    def __init__(self, folder: Path, settings: str = "", drafts: int = 3, pages: int = 60) -> None:
        self.run_dir = folder / "r"
        self.run_dir.mkdir(mode=0o700, exist_ok=True)
        self.config = Config(
            run_dir=str(self.run_dir),
            prefill=PrefillConfig(pages=24, slots=6, chunk_tokens=100),
            decode=DecodeConfig(pages=pages, slots=12, max_batch=8),
            draft=DraftConfig(num_drafts=drafts, enabled=drafts > 0, timeout_ms=150),
        )
        self.file = folder / "config.toml"
        self.file.write_text(dump(self.config))
        self.settings = settings
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.jobs: dict[str, Job] = {}
        self.members: dict[str, tuple[bytes, Peer]] = {}  # by instance
        self.beats: dict[str, Heartbeat] = {}
        self.lost: list[Lost] = []
        self.num_tokens_messages: Counter[int] = Counter()

    async def __aenter__(self) -> ScriptedRouter:
        self.sender = Sender("router")
        self.socket = RouterSocket(self.sender, self.config.endpoint("router"))
        self.tokenizer_sender = Sender("tokenizer-0")
        self.tokenizer = RouterSocket(self.tokenizer_sender, self.config.endpoint("tokenizer-0"))
        self.decode_identity = b""
        self._tasks = [
            asyncio.create_task(self._route()),
            asyncio.create_task(self._tokens()),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        self.socket.close()
        self.tokenizer.close()
        for path in Path("/dev/shm").glob(f"{self.config.shm_prefix}*"):
            path.unlink()

    # ---- processes -------------------------------------------------------------------------------

    def start(self, *instances: str, failpoint: str = "") -> None:
        for instance in instances:
            role = instance.partition("-")[0]
            with (self.run_dir / f"{instance}.log").open("ab") as log:
                self.processes[instance] = subprocess.Popen(
                    [sys.executable, "-P", str(WORKER), role]
                    + ["--config", str(self.file), "--instance", instance],
                    stdout=log,
                    stderr=log,
                    env={
                        **os.environ,
                        "DECANT_FAKE": self.settings,
                        "DECANT_FAILPOINT": failpoint,
                        "OMP_NUM_THREADS": "1",
                    },
                )

    async def kill(self, instance: str) -> None:
        """kill -9, and tell the others."""
        process = self.processes[instance]
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.members.pop(instance, None)
        self.beats.pop(instance, None)
        await self.tell_peers()

    async def until(self, condition: Callable[[], object], what: str, wait_s: float = 30) -> None:
        deadline = time.monotonic() + wait_s
        while not condition():
            await asyncio.sleep(0.01)
            for task in self._tasks:
                if task.done():
                    task.result()
            if time.monotonic() > deadline:
                raise AssertionError(f"not reached: {what}; {self.logs()}")

    def logs(self) -> str:
        return "\n".join(p.read_text()[-3000:] for p in self.run_dir.glob("*.log"))

    async def up(self, *instances: str) -> None:
        self.start(*instances)
        await self.until(lambda: set(instances) <= set(self.beats), f"{instances} are up")

    # ---- membership ------------------------------------------------------------------------------

    async def tell_peers(self) -> None:
        peers = [peer for _, peer in self.members.values()]
        endpoint = self.config.endpoint("tokenizer-0")
        name = self.tokenizer_sender
        peers.append(Peer("tokenizer", "tokenizer-0", name.incarnation, endpoint))
        for identity, _ in list(self.members.values()):
            with suppress(PeerGone):
                await self.socket.send(identity, Peers(peers, True))

    async def send(self, instance: str, body: Message, ids: list[int] | None = None) -> None:
        if instance in self.members:
            with suppress(PeerGone):
                blobs = [pack_ids(ids)] if ids is not None else []
                await self.socket.send(self.members[instance][0], body, blobs)

    async def _route(self) -> None:
        while True:
            await self._handle(await self.socket.receive())

    async def _handle(self, envelope: Envelope) -> None:
        body, source = envelope.body, envelope.header.source
        if isinstance(body, Hello):
            peer = Peer(
                body.service, source, envelope.header.incarnation, body.endpoint, body.pools
            )
            self.members[source] = (envelope.identity, peer)
            await self.socket.send(envelope.identity, Welcome(self.sender.incarnation, 0.2))
            await self.tell_peers()
        elif isinstance(body, Heartbeat):
            self.beats[source] = body
            await self.socket.send(envelope.identity, Welcome(self.sender.incarnation, 0.2))
        elif isinstance(body, Cancelled):
            job = self.jobs.get(body.request_id)
            if job and body.attempt == job.attempt:
                job.acknowledged.add(source.partition("-")[0])
        else:
            await self._about_job(body)

    # ---- requests --------------------------------------------------------------------------------

    async def submit(self, job: Job) -> Job:
        self.jobs[job.request_id] = job
        job.outputs = {c: [] for c in range(job.num_choices)}
        await self._reserve(job)
        return job

    async def _reserve(self, job: Job) -> None:
        job.phase = "reserving"
        open_choices = [c for c in range(job.num_choices) if c not in job.reasons]
        fresh = not any(job.outputs.values())
        for choices in [open_choices] if fresh else [[c] for c in open_choices]:
            ids = job.prompt + job.outputs[choices[0]]
            message = Reserve(
                job.request_id,
                job.attempt,
                choices[0],
                choices,
                len(job.prompt),
                job.sampling,
                "tokenizer-0",
                "" if job.is_local else "prefill-0",
            )
            await self.send("decode-0", message, ids)

    async def cancel(self, job: Job) -> None:
        job.is_cancelled = True
        for instance in ("prefill-0", "decode-0"):
            await self.send(instance, Cancel(job.request_id, job.attempt))

    async def resume(self, job: Job) -> None:
        for instance in ("prefill-0", "decode-0"):
            await self.send(instance, Cancel(job.request_id, job.attempt, "superseded"))
        job.attempt += 1
        job.num_resumes += 1
        await self._reserve(job)

    async def credit(self, job: Job, is_open: bool) -> None:
        await self.send("decode-0", StreamCredit(job.request_id, job.attempt, is_open))

    async def replay(self, job: Job, choice: int, start: int) -> None:
        await self.tokenizer.send(
            self.decode_identity, ReplayFrom(job.request_id, job.attempt, choice, start)
        )

    async def _about_job(self, body: Message) -> None:
        job = self.jobs.get(getattr(body, "request_id", ""))
        if isinstance(body, Lost):
            self.lost.append(body)
        if job is None or job.is_cancelled or getattr(body, "attempt", 0) != job.attempt:
            return
        if isinstance(body, Reserved) and not job.is_local:
            job.phase = "prefilling"
            ids = job.prompt + job.outputs[body.lane]
            decode = self.members["decode-0"][1]
            message = Prefill(
                job.request_id, job.attempt, body.lane, "decode-0", decode.incarnation
            )
            await self.send("prefill-0", message, ids)
        elif isinstance(body, Prefilled):
            job.num_cached = body.num_cached_tokens
        elif isinstance(body, Refused) and body.reason != "busy":
            job.failed = body.reason
        elif isinstance(body, Preempted | Lost | Refused):
            if isinstance(body, Refused):
                await asyncio.sleep(0.02)
            await self.resume(job)
        elif isinstance(body, Finished):
            job.finished[body.choice] = body

    async def _tokens(self) -> None:
        while True:
            envelope = await self.tokenizer.receive()
            self.decode_identity = envelope.identity
            if isinstance(envelope.body, Tokens):
                self.num_tokens_messages[envelope.body.step] += 1
                self._apply(envelope.body, unpack_ids(envelope.blobs[0]))

    def _apply(self, tokens: Tokens, ids: array[int]) -> None:
        at = 0
        for run in tokens.runs:
            new = list(ids[at : at + run.num_ids])
            at += run.num_ids
            job = self.jobs.get(run.request_id)
            if job is None or run.attempt != job.attempt or job.is_cancelled:
                continue
            job.phase = "decoding"
            output = job.outputs[run.choice]
            assert run.start <= len(output), f"a gap: {run} after {len(output)}"
            old = output[run.start : run.start + run.num_ids]
            assert old == new[: len(old)], f"other tokens: {run}"
            output += new[len(old) :]
            if run.finish_reason:
                job.reasons[run.choice] = run.finish_reason
        assert at == len(ids)

    async def done(self, *jobs: Job, wait_s: float = 40) -> None:
        await self.until(lambda: all(job.is_done for job in jobs), "all requests end", wait_s)

    async def baseline(self) -> None:
        """Cancel everything; then no page and no slot is held."""
        for job in self.jobs.values():
            job.acknowledged.clear()
            await self.cancel(job)
        wanted = {i.partition("-")[0] for i in self.members if not i.startswith("draft")}
        for job in self.jobs.values():
            await self.until(lambda job=job: wanted <= job.acknowledged, "Cancelled")  # type: ignore[misc]

        def is_free() -> bool:
            decode, prefill = self.beats["decode-0"].stats, self.beats["prefill-0"].stats
            return (
                decode["pages_free"] + decode["pages_cached"] == self.config.decode.pages
                and decode["slots_free"] == self.config.decode.slots
                and prefill["pages_free"] + prefill["pages_cached"] == self.config.prefill.pages
                and prefill["slots_free"] + prefill["slots_cached"] == self.config.prefill.slots
            )

        await self.until(is_free, "every page is free", 10)
