"""The router process: one ROUTER socket for control, and the hands of ``dispatch.Dispatcher``.

It binds the control endpoint that every other process connects to; it knows nothing of text and
HTTP, apart from the page for the administrator (``admin.py``).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from functools import partial

import structlog

from decant.protocol import messages as m
from decant.protocol.config import Config
from decant.protocol.wire import Sender
from decant.services import admin, failpoints, mps, process
from decant.services.dispatch import Dispatcher
from decant.services.membership import Member
from decant.services.reaper import ExitReason, Reaper, may_name, supervisord_says, unknown
from decant.services.roster import Roster
from decant.services.router_metrics import RouterMetrics
from decant.services.sockets import Outbox, RouterSocket

BUSY_TICK_S, IDLE_TICK_S = 0.02, 0.1  # with and without a queue
RECORD_TICK_S = 0.1
DRAIN_S = 2.0
MAX_BATCH = 64  # messages read before other tasks get their turn

log = structlog.get_logger()


async def main(config: Config, instance: str) -> None:
    """Router process: membership, admission, records; until SIGTERM."""
    router = Router(config, instance, supervisord_says(config))
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(job)
                for job in (
                    router.read(),
                    router.outbox.run(),
                    router.tick(),
                    router.judge(),
                    admin.serve(router.dispatcher, router.metrics, config),
                )
            ]
            await process.stop().wait()
            await router.drain()
            for task in running:
                task.cancel()
    finally:
        router.close()


class Router:
    """Sockets and processes around a Dispatcher. One coroutine reads, one sends."""

    def __init__(self, config: Config, instance: str, exit_reason: ExitReason = unknown) -> None:
        self.config = config
        self._noted = 0  # membership version in the roster
        self.sender = Sender(instance)
        self.socket = RouterSocket(self.sender, config.endpoint("router"))
        self.outbox = Outbox(self._send, self._lost)
        self.metrics = RouterMetrics(instance)
        self.roster = Roster(config)
        self.dispatcher = Dispatcher(
            config,
            self.sender.incarnation,
            self._post,
            self._fence,
            count=self.metrics.count,
            awaited=self.roster.read(),
        )
        self.metrics.attach(self.dispatcher, self.outbox, self.socket)
        self.reaper = Reaper(self.dispatcher.leaving, self.dispatcher.ended, exit_reason)

    async def read(self) -> None:
        for number in itertools.count():
            if number % MAX_BATCH == 0:
                await asyncio.sleep(0)  # a receive that finds a message does not yield
            envelope = await self.socket.receive()
            if failpoints.IS_ON:
                failpoints.hit(f"router.before_{envelope.body.__struct_config__.tag}")
            if isinstance(envelope.body, m.Hello) and not may_name(envelope.pid, envelope.body.pid):
                self.dispatcher.refuse(
                    envelope, f"its Hello names process {envelope.body.pid}, which did not send it"
                )
                continue
            self.dispatcher.receive(envelope)
            if failpoints.IS_ON:  # decided, not sent
                failpoints.hit(f"router.after_{envelope.body.__struct_config__.tag}")
            if isinstance(envelope.body, m.Hello):
                member = self.dispatcher.membership.get(envelope.header.incarnation)
                if member is not None:
                    self.reaper.watch(member.incarnation, member.hello.pid)

    async def tick(self) -> None:
        """Timers of records, and the queue's back-offs in between."""
        due = 0.0
        while True:
            now = time.monotonic()
            if now >= due:
                due = now + RECORD_TICK_S
                self.dispatcher.tick()
                self._note_members()
            else:
                self.dispatcher.pump()
            await asyncio.sleep(BUSY_TICK_S if len(self.dispatcher.admission) else IDLE_TICK_S)

    def _note_members(self) -> None:
        version = self.dispatcher.membership.version
        if version != self._noted:
            self._noted = version
            self.roster.write(self.dispatcher.membership.all())

    async def judge(self) -> None:
        while True:
            await asyncio.sleep(self.config.router.heartbeat_s)
            self.dispatcher.judge()

    async def drain(self) -> None:
        """Take no new request, let what is nearly done end. The rest the gateways bring to our
        successor at once: a short pause of all streams rather than none for newcomers.
        """
        self.dispatcher.is_stopping = True
        deadline = time.monotonic() + min(DRAIN_S, self.config.router.drain_s)
        while self.dispatcher.num_requests and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    def close(self) -> None:
        self.reaper.close()
        self.socket.close()

    def _post(self, member: Member, body: m.Message, blobs: Sequence[bytes]) -> None:
        self.outbox.post(member, body, blobs)

    async def _send(self, member: Member, body: m.Message, blobs: Sequence[bytes]) -> None:
        await self.socket.send(member.identity, body, blobs)

    def _lost(self, member: Member, body: m.Message, blobs: Sequence[bytes]) -> None:
        self.dispatcher.unsent(member, body)

    def _fence(self, member: Member, why: str) -> None:
        before = None
        if self.config.gpu.mps and member.service in ("prefill", "decode", "draft"):
            before = partial(mps.fence, self.config, member.instance)
        self.reaper.fence(member.incarnation, before)


if __name__ == "__main__":
    process.run("router", main)
