"""ZeroMQ sockets with our options and envelopes. One socket, one reading task; sends are serialised
by a lock.

Every wait has a bound: a send that finds its peer's queue full for ``SEND_TIMEOUT_S`` raises, it
does not wait for ever.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import zmq
import zmq.asyncio

from decant.protocol.errors import ProtocolError
from decant.protocol.messages import Hello, Message
from decant.protocol.wire import MAX_FRAME_BYTES, Envelope, Sender, parse
from decant.services import capture, failpoints

CONTROL_QUEUE = 1000  # messages, each way
SEND_TIMEOUT_S = 5.0
OUTBOX_SIZE = 8192  # messages


class PeerGone(ProtocolError):
    """The addressed peer is not connected, or its queue stayed full."""


def context() -> zmq.asyncio.Context:
    """One context per process."""
    return zmq.asyncio.Context.instance()


class _Socket:
    _num_envelope = 0  # frames before the header: the identity on a ROUTER

    def __init__(
        self, kind: int, sender: Sender, endpoint: str, queue: int = CONTROL_QUEUE
    ) -> None:
        self.sender = sender
        self.endpoint = endpoint
        self._capture = capture.from_environment()
        self.num_bad_frames = 0
        self._lock = asyncio.Lock()
        self._socket: zmq.asyncio.Socket = context().socket(kind)
        for option, value in (
            (zmq.SNDHWM, queue),
            (zmq.RCVHWM, queue),
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
            (zmq.RECONNECT_IVL, 50),
            (zmq.RECONNECT_IVL_MAX, 1000),
        ):
            self._socket.setsockopt(option, value)

    async def _send(self, frames: list[bytes | memoryview]) -> None:
        async with self._lock:
            if failpoints.IS_ON:
                held_s = failpoints.fate("link.send")
                if held_s is None:
                    return
                await asyncio.sleep(held_s)
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await self._socket.send_multipart(frames)
                if self._capture:
                    self._capture.write("out", self.endpoint, frames[self._num_envelope :])
            except TimeoutError as error:
                raise PeerGone(f"send queue full for {SEND_TIMEOUT_S} s") from error
            except zmq.ZMQError as error:
                if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                    raise PeerGone("the peer is not connected") from error
                if self._socket.closed:
                    raise PeerGone("the socket is closed") from error
                raise

    async def _receive(self) -> list[bytes]:
        frames = await self._socket.recv_multipart()
        if self._capture:
            self._capture.write("in", self.endpoint, frames[self._num_envelope :])
        return frames

    def close(self) -> None:
        """Close at once; unsent messages are dropped."""
        self._socket.close(0)


class Dealer(_Socket):
    """Connects to one RouterSocket and reconnects for ever. While there is no connection, sends
    wait, bounded.
    """

    def __init__(self, sender: Sender, endpoint: str, queue: int = CONTROL_QUEUE) -> None:
        super().__init__(zmq.DEALER, sender, endpoint, queue)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.connect(endpoint)

    async def send(
        self, body: Message, blobs: Sequence[bytes | memoryview] = (), traceparent: str = ""
    ) -> None:
        """Raises: PeerGone."""
        await self._send(self.sender.frames(body, blobs, traceparent))

    async def receive(self) -> Envelope:
        """The next good message; bad frames are counted and dropped."""
        while True:
            frames = await self._receive()
            try:
                return parse(frames)
            except ProtocolError:
                self.num_bad_frames += 1


class RouterSocket(_Socket):
    """Binds an endpoint. Peers are addressed by the identity of a message that they sent."""

    _num_envelope = 1

    def __init__(self, sender: Sender, endpoint: str, queue: int = CONTROL_QUEUE) -> None:
        super().__init__(zmq.ROUTER, sender, endpoint, queue)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(endpoint)

    async def send(
        self,
        identity: bytes,
        body: Message,
        blobs: Sequence[bytes | memoryview] = (),
        traceparent: str = "",
    ) -> None:
        """Raises: PeerGone."""
        await self._send([identity, *self.sender.frames(body, blobs, traceparent)])

    async def receive(self) -> Envelope:
        """The next good message with its sender's identity; bad frames are counted and dropped."""
        while True:
            given: list[zmq.Frame] = await self._socket.recv_multipart(copy=False)
            identity, *frames = (frame.bytes for frame in given)
            if self._capture:
                self._capture.write("in", self.endpoint, frames)
            try:
                envelope = parse(frames, identity)
            except ProtocolError:
                self.num_bad_frames += 1
                continue
            if isinstance(envelope.body, Hello):
                return replace(envelope, pid=peer_pid(given[0]))
            return envelope


def peer_pid(frame: zmq.Frame) -> int:
    """The process that opened the connection that a frame came by, as the kernel says (libzmq ends
    a Unix socket's address with ``:uid:gid:pid``); 0 if it does not.
    """
    try:
        return int(str(frame.get("Peer-Address")).rsplit(":", 3)[3])
    except (zmq.ZMQError, IndexError, ValueError):
        return 0


class Outbox:
    """Sends in order on one socket without making the caller wait. Run ``run()`` as a task.

    send: the socket's send. on_lost: called with the arguments of a send that raised PeerGone.
    Bounded: ``post`` refuses when ``size`` messages wait.
    """

    def __init__(
        self,
        send: Callable[..., Awaitable[None]],
        on_lost: Callable[..., None] | None = None,
        size: int = OUTBOX_SIZE,
    ) -> None:
        self.num_lost = 0
        self._send, self._on_lost, self._size = send, on_lost, size
        self._queue: deque[tuple[Any, ...]] = deque()
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._queue)

    def post(self, *arguments: Any) -> bool:
        """Queue one send. False: the queue is full and the message is dropped and counted."""
        if len(self._queue) >= self._size:
            self.num_lost += 1
            return False
        self._queue.append(arguments)
        self._wake.set()
        return True

    def clear(self) -> None:
        """Forget what waits (its addressee is gone)."""
        self._queue.clear()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            while self._queue:
                arguments = self._queue.popleft()
                try:
                    await self._send(*arguments)
                except PeerGone:
                    self.num_lost += 1
                    if self._on_lost:
                        self._on_lost(*arguments)
            self._wake.clear()
            await self._wake.wait()
