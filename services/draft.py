"""Draft process: runs the MTP layer for decode. Knows slots and rows, nothing of requests.

Decode connects to our ROUTER socket and sends Propose, one at a time; we answer Drafts. Its pools
are mapped as soon as the router names it (Peers): the MTP window rings live there.
"""

from __future__ import annotations

import asyncio
import os
import time
from array import array
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import structlog

from decant.engine.interface import DraftEngine, DraftSlot
from decant.protocol.config import Config
from decant.protocol.errors import HandoffError, ProtocolError
from decant.protocol.messages import Drafts, Drain, Heartbeat, Hello, Peers, Propose
from decant.protocol.wire import Envelope, Sender, pack_ids, unpack_ids
from decant.services import failpoints, metrics
from decant.services.link import RouterLink
from decant.services.process import build, loop_lag_ms, run, stop
from decant.services.serving_metrics import DraftMetrics
from decant.services.sockets import PeerGone, RouterSocket
from decant.services.worker import WorkThread

HC_MULT = 4  # residual streams
MAX_WAITING = 64  # proposals; a decode has one in flight

log = structlog.get_logger()


def draft_slots(envelope: Envelope, max_drafts: int, num_slots: int) -> list[DraftSlot]:
    """A Propose with its arrays. Raises: ProtocolError if they do not fit together."""
    body, blobs = envelope.body, envelope.blobs
    assert isinstance(body, Propose)
    num_rows = sum(slot.num_rows for slot in body.slots)
    if len(blobs) != 2 or any(
        slot.num_rows < 1 or not 0 <= slot.slot < num_slots or slot.start < 0 or slot.num_drafts < 0
        for slot in body.slots
    ):
        raise ProtocolError("Propose has two blobs, at least one row a slot, and known slots")
    tokens = unpack_ids(blobs[1])
    row_bytes, rest = divmod(len(blobs[0]), max(num_rows, 1))
    if len(tokens) != num_rows or rest or row_bytes % (4 * HC_MULT):
        raise ProtocolError(f"{num_rows} rows with {len(blobs[0])} bytes, {len(tokens)} tokens")
    # NOTE: a copy, since the frame is read-only memory and engines want to own what they get.
    width = row_bytes // (4 * HC_MULT)  # 0: streams are where the slots are
    streams = np.frombuffer(blobs[0], np.float32).reshape(num_rows, HC_MULT, width).copy()
    result, at = [], 0
    for slot in body.slots:
        end = at + slot.num_rows
        result.append(
            DraftSlot(
                slot.slot,
                slot.start,
                tuple(tokens[at:end]),
                streams[at:end],
                min(slot.num_drafts, max_drafts),
                slot.mtp_valid_from,
                slot.seed,
                slot.choice,
                slot.temperature,
                slot.top_p,
                slot.top_k,
                slot.min_p,
            )
        )
        at = end
    return result


class DraftService:
    """One draft group, seen from rank 0."""

    def __init__(
        self, config: Config, instance: str, engine: DraftEngine, thread: WorkThread
    ) -> None:
        self.config, self.engine, self.thread = config, engine, thread
        self.sender = Sender(instance)
        self.num_steps = 0
        self.is_busy = False
        self._attached: dict[str, int] = {}  # decode incarnations, with their number of slots
        self._waiting: asyncio.Queue[Envelope] = asyncio.Queue(MAX_WAITING)
        self._socket = RouterSocket(self.sender, config.endpoint(instance))
        hello = Hello(
            "draft",
            instance,
            os.getpid(),
            build(),
            model_hash=engine.model_hash,
            kv_layout_hash=engine.kv_layout_hash,
            endpoint=config.endpoint(instance),
            limits={"max_drafts": engine.max_drafts},
        )
        self.link = RouterLink(
            config, self.sender, hello, self._on_router, self._beat, self._on_peers
        )
        self._registry = metrics.registry("draft", instance)
        self._metrics = DraftMetrics(self._registry)

    async def run(self) -> None:
        """Until the stop event: decode goes on without drafts, so there is nothing to drain."""
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(coroutine)
                for coroutine in (
                    self.link.run(),
                    self._listen(),
                    self._propose_forever(),
                    metrics.serve(self._registry, self.config.metrics_path(self.sender.source)),
                )
            ]
            await stop().wait()
            for task in background:
                task.cancel()
        self.link.close()
        self._socket.close()

    async def _listen(self) -> None:
        while True:
            envelope = await self._socket.receive()
            if isinstance(envelope.body, Propose):
                # NOTE: when full the oldest goes: its decode has stopped waiting long ago.
                if self._waiting.full():
                    self._waiting.get_nowait()
                self._waiting.put_nowait(envelope)

    async def _propose_forever(self) -> None:
        while True:
            self.is_busy = not self._waiting.empty()
            envelope = await self._waiting.get()
            self.is_busy = True
            failpoints.hit("draft.before_propose")
            body = envelope.body
            assert isinstance(body, Propose)
            peer = envelope.header.incarnation
            drafts: list[list[int]] = [[] for _ in body.slots]
            began_ns = time.monotonic_ns()
            if peer in self._attached:
                try:
                    num_slots = self._attached[peer]
                    slots = draft_slots(envelope, self.engine.max_drafts, num_slots)
                    drafts = await self.thread.run(self.engine.propose, peer, slots)
                except (ProtocolError, ValueError, IndexError) as error:
                    # NOTE: decode goes on without drafts: a bad proposal costs nothing but speed.
                    log.warning("bad Propose", error=str(error))
            failpoints.hit("draft.before_answer")
            ids = array("i", [token for some in drafts for token in some])
            self.num_steps += 1
            self._metrics.propose(len(drafts), len(ids), time.monotonic_ns() - began_ns)
            answer = Drafts(body.step, [len(some) for some in drafts])
            with suppress(PeerGone):
                await self._socket.send(envelope.identity, answer, [pack_ids(ids)])

    async def _on_router(self, envelope: Envelope) -> None:
        if isinstance(envelope.body, Drain):
            stop().set()

    async def _on_peers(self, peers: Peers) -> None:
        decodes = {p.incarnation: p for p in peers.peers if p.service == "decode"}
        for gone in set(self._attached) - set(decodes):
            del self._attached[gone]
            await self.thread.run(self.engine.detach, gone)
        for incarnation, peer in decodes.items():
            if incarnation not in self._attached and peer.pools:
                try:
                    await self.thread.run(self.engine.attach, incarnation, peer.pools)
                    self._attached[incarnation] = peer.pools[0].num_slots
                except HandoffError as error:
                    log.warning("cannot map", peer=peer.instance, error=error.message)

    def _beat(self) -> Heartbeat:
        return Heartbeat(
            self.num_steps,
            self.is_busy,
            loop_lag_ms=loop_lag_ms(),
            stats={"waiting": float(self._waiting.qsize())},
            is_draining=stop().is_set(),
        )


async def serve(config: Config, instance: str, load: Callable[[], DraftEngine]) -> None:
    """Load the MTP layer, serve until stopped, close it."""
    # NOTE: here, in the main thread and before any other thread: with several ranks it forks.
    engine = load()
    thread = WorkThread("engine")
    try:
        try:
            await DraftService(config, instance, engine, thread).run()
        finally:
            await asyncio.shield(thread.run(engine.close))
    finally:
        thread.close()


async def main(config: Config, instance: str) -> None:
    """The draft process."""
    from decant.engine.load import load_draft

    await serve(config, instance, lambda: load_draft(config))


if __name__ == "__main__":
    run("draft", main)
