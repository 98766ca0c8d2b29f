"""A gateway's connections to all tokenizers: one per incarnation, made and closed as Peers says.

Knows who is alive and who has how many streams, and asks one-shot questions (Encode, Detokenize),
again elsewhere if a tokenizer dies over them. Knows nothing of what a stream contains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from decant.protocol import messages as m
from decant.protocol.errors import NotReady
from decant.protocol.wire import Envelope, Sender
from decant.services.sockets import Dealer, Outbox


class TokenizerLink:
    """The connection to one incarnation of a tokenizer."""

    def __init__(self, peer: m.Peer, socket: Dealer) -> None:
        self.peer, self.socket = peer, socket
        self.outbox = Outbox(socket.send)
        self.tasks: list[asyncio.Task[None]] = []
        self.num_streams = 0


class TokenizerLinks:
    def __init__(
        self,
        sender: Sender,
        hello: m.Hello,
        handle: Callable[[TokenizerLink, Envelope], None],
        on_gone: Callable[[TokenizerLink], None],
    ) -> None:
        """handle: gets what is no answer to ``ask``."""
        self._sender, self._hello, self._handle, self._on_gone = sender, hello, handle, on_gone
        self._links: dict[str, TokenizerLink] = {}  # by incarnation
        self._has_any = asyncio.Event()
        self._waiters: dict[str, asyncio.Future[Envelope]] = {}

    def __contains__(self, link: TokenizerLink) -> bool:
        return self._links.get(link.peer.incarnation) is link

    def follow(self, peers: m.Peers) -> None:
        """Connect to who is new, drop who is gone."""
        live = {p.incarnation: p for p in peers.peers if p.service == "tokenizer" and p.endpoint}
        for incarnation, link in list(self._links.items()):
            if incarnation in live:
                link.peer = live[incarnation]
            else:
                self._drop(link)
        for incarnation, peer in live.items():
            if incarnation not in self._links:
                self._add(peer)

    def pick(self) -> TokenizerLink | None:
        """The tokenizer with the fewest streams; a draining one only if there is no other."""
        return min(
            self._links.values(), key=lambda t: (t.peer.is_draining, t.num_streams), default=None
        )

    async def ask(
        self,
        request_id: str,
        body: m.Message,
        blobs: Sequence[bytes],
        timeout_s: float,
        traceparent: str = "",
    ) -> tuple[Envelope, TokenizerLink]:
        """Send and wait for Encoded, Text or Failed of this request.

        Raises: NotReady after ``timeout_s`` or if the tokenizer's queue is full.
        """
        loop = asyncio.get_running_loop()
        is_answered = False
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    await self._has_any.wait()
                    link = self.pick()
                    assert link is not None
                    answer = self._waiters[request_id] = loop.create_future()
                    if not link.outbox.post(body, blobs, traceparent):
                        raise NotReady("the tokenizer's queue is full")
                    reader = link.tasks[1]
                    await asyncio.wait({answer, reader}, return_when=asyncio.FIRST_COMPLETED)
                    if answer.done():
                        is_answered = True
                        return answer.result(), link
        except TimeoutError as error:
            raise NotReady(f"no tokenizer answered within {timeout_s:g} s") from error
        finally:
            self._waiters.pop(request_id, None)
            if not is_answered:  # it may answer later and hold a stream for nobody
                for link in self._links.values():
                    link.outbox.post(m.CloseStream(request_id))

    def close(self) -> None:
        for link in list(self._links.values()):
            self._drop(link)

    def _add(self, peer: m.Peer) -> None:
        link = TokenizerLink(peer, Dealer(self._sender, peer.endpoint))
        self._links[peer.incarnation] = link
        link.outbox.post(self._hello)
        link.tasks = [
            asyncio.create_task(link.outbox.run()),
            asyncio.create_task(self._read(link)),
        ]
        self._has_any.set()

    def _drop(self, link: TokenizerLink) -> None:
        self._links.pop(link.peer.incarnation, None)
        for task in link.tasks:
            task.cancel()
        # NOTE: a task that is just about to run must not find its socket closed.
        ended = asyncio.gather(*link.tasks, return_exceptions=True)
        ended.add_done_callback(lambda _: link.socket.close())
        if not self._links:
            self._has_any.clear()
        self._on_gone(link)

    async def _read(self, link: TokenizerLink) -> None:
        while True:
            envelope = await link.socket.receive()
            if envelope.header.incarnation != link.peer.incarnation:
                continue
            if isinstance(envelope.body, m.Encoded | m.Text | m.Failed):
                waiter = self._waiters.get(envelope.body.request_id)
                if waiter is not None and not waiter.done():
                    waiter.set_result(envelope)
                    continue
            self._handle(link, envelope)
