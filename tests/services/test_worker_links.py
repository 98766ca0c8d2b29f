"""PeerLinks: connections follow the membership, and close after the tasks that use them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from decant.protocol.messages import Heartbeat, Hello, Peer
from decant.protocol.wire import Envelope, Sender
from decant.services.sockets import RouterSocket
from decant.services.worker import PeerLinks


async def test_a_socket_closes_after_the_tasks_that_use_it(tmp_path: Path) -> None:
    """A handler that is still ending when its peer goes can send; the TaskGroup lives on."""
    endpoint = f"ipc://{tmp_path}/peer.sock"
    server = RouterSocket(Sender("prefill-0"), endpoint)
    began, ended = asyncio.Event(), asyncio.Event()

    async def handle(peer: Peer, envelope: Envelope) -> None:
        dealer = links._links[peer.incarnation][0]
        began.set()
        try:
            await asyncio.sleep(10)
        finally:
            await asyncio.sleep(0.02)
            assert not dealer._socket.closed
            await dealer.send(Heartbeat())
            ended.set()

    async with asyncio.TaskGroup() as tasks:
        hello = Hello("decode", "decode-0", 1, "")
        links = PeerLinks(tasks, Sender("decode-0"), hello, handle)
        new, gone = links.follow([Peer("prefill", "prefill-0", "p1", endpoint)])
        assert [p.incarnation for p in new] == ["p1"] and not gone
        envelope = await asyncio.wait_for(server.receive(), 5)
        dealer = links._links["p1"][0]
        await server.send(envelope.identity, Heartbeat())
        await asyncio.wait_for(began.wait(), 5)
        assert [p.incarnation for p in links.follow([])[1]] == ["p1"]
        await asyncio.wait_for(ended.wait(), 5)
        await asyncio.sleep(0.02)
        assert dealer._socket.closed
    server.close()
