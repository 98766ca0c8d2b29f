"""What prefill, decode and draft share: threads for blocking calls, links to peers, drain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from decant.protocol.messages import Hello, Message, Peer
from decant.protocol.wire import Envelope, Sender
from decant.services.sockets import Dealer, Outbox

T = TypeVar("T")
FLUSH_S = 1.0  # for the last messages of a process that ends


def now_ms() -> float:
    """CLOCK_MONOTONIC of this host in milliseconds, as in ``deadline_ms``."""
    return time.monotonic_ns() / 1e6


class WorkThread:
    """One thread for blocking calls, in order. CUDA and torch keep state per thread, so all calls
    to an engine's step go through one of these."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Call in the thread and wait. Raises what the function raises."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    def close(self) -> None:
        """Wait for the call under way, drop the others."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class PeerLinks:
    """A dealer, an outbox and a reader for each live process of one service, by incarnation."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        sender: Sender,
        hello: Hello,
        handle: Callable[[Peer, Envelope], Awaitable[None]],
    ) -> None:
        self.peers: dict[str, Peer] = {}  # by incarnation
        self._tasks, self._sender, self._hello, self._handle = tasks, sender, hello, handle
        self._links: dict[str, tuple[Dealer, Outbox, list[asyncio.Task[None]]]] = {}

    def follow(self, peers: Iterable[Peer]) -> tuple[list[Peer], list[Peer]]:
        """Connect to who is new, close who is gone. Returns: both lists."""
        alive = {p.incarnation: p for p in peers if p.endpoint}
        new = [p for i, p in alive.items() if i not in self.peers]
        gone = [p for i, p in self.peers.items() if i not in alive]
        self.peers = alive
        for peer in gone:
            self._close(peer.incarnation)
        for peer in new:
            dealer = Dealer(self._sender, peer.endpoint)
            outbox = Outbox(dealer.send)
            outbox.post(self._hello)  # the peer's router socket learns our identity
            self._links[peer.incarnation] = (
                dealer,
                outbox,
                [
                    self._tasks.create_task(outbox.run()),
                    self._tasks.create_task(self._read(peer, dealer)),
                ],
            )
        return new, gone

    async def _read(self, peer: Peer, dealer: Dealer) -> None:
        while True:
            await self._handle(peer, await dealer.receive())

    def post(
        self, incarnation: str, body: Message, blobs: Sequence[bytes | memoryview] = ()
    ) -> bool:
        """Queue a message. False: the peer is gone, or too much waits for it."""
        link = self._links.get(incarnation)
        return link is not None and link[1].post(body, blobs)

    @property
    def num_waiting(self) -> int:
        return sum(len(outbox) for _, outbox, _ in self._links.values())

    def _close(self, incarnation: str) -> None:
        dealer, _, tasks = self._links.pop(incarnation)
        for task in tasks:
            task.cancel()
        # NOTE: a task that is still ending must not find its socket closed: a ZMQError in the
        # TaskGroup would end the process.
        ended = asyncio.gather(*tasks, return_exceptions=True)
        ended.add_done_callback(lambda _: dealer.close())

    def close(self) -> None:
        for incarnation in list(self._links):
            self._close(incarnation)


async def drained(is_idle: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until ``is_idle``, at most ``timeout_s``. Returns: whether it was reached."""
    deadline = time.monotonic() + timeout_s
    while not is_idle():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


async def flushed(*num_waiting: Callable[[], int]) -> None:
    """Give queued messages a moment to leave."""
    await drained(lambda: not any(num() for num in num_waiting), FLUSH_S)
    await asyncio.sleep(0.05)  # what ZeroMQ's own thread still holds
