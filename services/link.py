"""A process's connection to the router: HELLO, heartbeats, membership, and the way back after
either side restarts.

Knows nothing of requests: whatever is not membership goes to the handler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from decant.protocol.config import Config
from decant.protocol.messages import Heartbeat, Hello, Message, Peer, Peers, Refuse, Welcome
from decant.protocol.wire import Envelope, Sender
from decant.services.sockets import Dealer, PeerGone

Handler = Callable[[Envelope], Awaitable[None]]
RETRY_S = 0.5


class RouterLink:
    """Run ``run()`` as a task. ``peers`` is the last membership; ``on_peers`` is called on every
    change, ``on_router`` when another
    router process answers (work of the old one is void)."""

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
        self.router = ""  # incarnation of the router that welcomed us; empty: none
        self.refused = ""  # its reason, if it refused us
        self._heartbeat = heartbeat
        self._handle = handle
        self._on_peers = on_peers
        self._on_router = on_router
        self._period_s = config.router.heartbeat_s
        self._socket = Dealer(sender, config.endpoint("router"))

    def find(self, service: str) -> list[Peer]:
        """Live processes of a service."""
        return [p for p in self.peers.peers if p.service == service]

    async def send(self, body: Message, blobs: Sequence[bytes | memoryview] = ()) -> None:
        """Raises: PeerGone if the router is away for longer than the send timeout."""
        await self._socket.send(body, blobs)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beat())
            tasks.create_task(self._read())

    async def _beat(self) -> None:
        while True:
            # NOTE: after a restart the router does not know us and answers a heartbeat with
            # nothing; Hello is cheap, so it is
            # sent until Welcome arrives, and again whenever the router says Refuse("unknown").
            with suppress(PeerGone):
                if not self.router:
                    await self._socket.send(self.hello)
                else:
                    await self._socket.send(self._heartbeat())
            await asyncio.sleep(self._period_s if self.router else min(RETRY_S, self._period_s))

    async def _read(self) -> None:
        last = ""
        while True:
            envelope = await self._socket.receive()
            body = envelope.body
            if isinstance(body, Welcome):
                self.router, self.refused, self._period_s = body.router, "", body.heartbeat_s
                if body.router != last:
                    last = body.router
                    if self._on_router:
                        await self._on_router(body.router)
            elif isinstance(body, Refuse):
                self.router, self.refused = "", body.reason
            elif isinstance(body, Peers):
                self.peers = body
                if self._on_peers:
                    await self._on_peers(body)
            else:
                await self._handle(envelope)

    def close(self) -> None:
        self._socket.close()
