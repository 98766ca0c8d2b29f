"""A process's connection to the router: HELLO, heartbeats, membership, and the way back after
either side restarts.

Knows nothing of requests: whatever is not membership goes to the handler.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from decant.protocol.config import Config
from decant.protocol.messages import Heartbeat, Hello, Message, Peer, Peers, Refuse, Welcome
from decant.protocol.wire import Envelope, Sender
from decant.services.sockets import Dealer, PeerGone

Handler = Callable[[Envelope], Awaitable[None]]
RETRY_S = 0.25  # between two Hellos
MISSED = 3  # heartbeats without an answer: the router is away
UNKNOWN = "unknown"  # first word of a Refuse that asks for Hello


class RouterLink:
    """Run ``run()`` as a task.

    ``router`` is the incarnation that welcomed us; empty: none, or it went silent. ``refused`` is
    the reason if it does not want us. ``peers`` is the last membership. ``on_peers`` is called on
    every change; ``on_router`` when another router process answers: work of the old one is void
    (the new one knows none of it), drop it. A router that was silent and comes back as the same
    process causes no call. ``hello`` may be replaced (more pools); the new one is sent by
    ``renew()``.
    """

    def __init__(
        self,
        config: Config,
        sender: Sender,
        hello: Hello,
        handle: Handler,
        heartbeat: Callable[[], Heartbeat],
        on_peers: Callable[[Peers], Awaitable[None]] | None = None,
        on_router: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self.hello = hello
        self.peers = Peers([])
        self.router = ""
        self.last_router = ""  # as ``router``, but stays while it is silent
        self.refused = ""
        self._heartbeat = heartbeat
        self._handle = handle
        self._on_peers = on_peers
        self._on_router = on_router
        self._period_s = config.router.heartbeat_s
        self._heard_s = time.monotonic()
        self._wake = asyncio.Event()
        self._socket = Dealer(sender, config.endpoint("router"))

    def find(self, service: str) -> list[Peer]:
        """Live processes of a service."""
        return [p for p in self.peers.peers if p.service == service]

    async def send(
        self, body: Message, blobs: Sequence[bytes | memoryview] = (), traceparent: str = ""
    ) -> None:
        """Raises: PeerGone if the router is away for longer than the send timeout."""
        await self._socket.send(body, blobs, traceparent)

    def renew(self) -> None:
        """Introduce ourselves again (``hello`` changed), soon."""
        self.router = ""
        self._wake.set()

    def beat(self) -> None:
        """Send a heartbeat now rather than at the next period (readiness or draining changed)."""
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beat())
            tasks.create_task(self._watch())
            tasks.create_task(self._read())

    async def _beat(self) -> None:
        while True:
            with suppress(PeerGone):
                await self._socket.send(self._heartbeat() if self.router else self.hello)
            self._wake.clear()
            pause_s = self._period_s if self.router else min(RETRY_S, self._period_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()

    async def _watch(self) -> None:
        """A silent router is away: its successor does not know us, so Hello is sent until Welcome
        arrives. NOTE: not in ``_beat``, whose sends wait while there is no connection.
        """
        while True:
            await asyncio.sleep(self._period_s)
            silent_s = time.monotonic() - self._heard_s
            if self.router and silent_s > MISSED * self._period_s + RETRY_S:
                self.router = ""
                self._wake.set()

    async def _read(self) -> None:
        while True:
            envelope = await self._socket.receive()
            body = envelope.body
            self._heard_s = time.monotonic()
            if isinstance(body, Welcome):
                self.router, self.refused, self._period_s = body.router, "", body.heartbeat_s
                if body.router != self.last_router:
                    self.last_router = body.router
                    if self._on_router:
                        await self._on_router(body.router)
                    self._wake.set()  # the first heartbeat says whether we are ready
            elif isinstance(body, Refuse):
                self.router = ""
                if body.reason.startswith(UNKNOWN):
                    self._wake.set()
                else:
                    self.refused = body.reason
            elif isinstance(body, Peers):
                self.peers = body
                if self._on_peers:
                    await self._on_peers(body)
            else:
                await self._handle(envelope)

    def close(self) -> None:
        self._socket.close()
