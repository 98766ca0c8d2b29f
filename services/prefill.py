"""Prefill process: chunks of prompts in, KV pages out. Samples nothing, knows no client.

Control comes from the router (RouterLink); decode processes connect to our ROUTER socket, say
Hello, get KVReady / KVGone and answer KVRelease. What is decided is in
``engine/prefill_scheduler.py``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable

import structlog

from decant.engine.execute import execute_prefill
from decant.engine.host_tier import HostTier, TierStats
from decant.engine.interface import Engine
from decant.engine.prefill_scheduler import PrefillLimits, PrefillScheduler, ToDecode, ToRouter
from decant.protocol.config import Config
from decant.protocol.errors import ProtocolError
from decant.protocol.messages import (
    Cancel,
    Drain,
    FlushCache,
    Heartbeat,
    Hello,
    KVRelease,
    Lost,
    Message,
    Peers,
    Prefill,
)
from decant.protocol.wire import Envelope, Sender, unpack_ids
from decant.services import failpoints, metrics
from decant.services.link import RouterLink
from decant.services.process import build, loop_lag_ms, run, stop
from decant.services.serving_metrics import PageGauge, PrefillMetrics, TierMetrics
from decant.services.sockets import Outbox, RouterSocket
from decant.services.worker import WorkThread, drained, flushed, now_ms

TICK_S = 0.5
MAX_DECODES = 64  # connections whose identity is kept, dead ones included
MAX_EARLY = 4096  # messages kept for decodes that did not say Hello yet

log = structlog.get_logger()


class PrefillService:
    """One prefill group, seen from rank 0."""

    def __init__(self, config: Config, instance: str, engine: Engine, thread: WorkThread) -> None:
        """Raises: ConfigError if the tier's file cannot be made."""
        self.config, self.engine, self.thread = config, engine, thread
        room = config.prefill
        self.tier: HostTier | None = None
        if room.prefix_cache and room.tier_memory_mb:
            folder = room.tier_folder or config.run_dir
            self.tier = HostTier(room.tier_memory_mb << 20, room.tier_file_mb << 20, folder)
        self.sender = Sender(instance)
        pools = engine.pools()
        self.scheduler = PrefillScheduler(
            PrefillLimits(
                engine.num_pages,
                engine.num_slots,
                engine.page_tokens,
                engine.max_context,
                engine.vocab_size,
                config.prefill.chunk_tokens,
                cache_pages=config.prefill.cache_pages,
            ),
            pools[0].epoch,
            config.prefill.prefix_cache,
            f"{engine.model_hash}/{engine.kv_layout_hash}",
            self.tier,
        )
        self.num_steps = 0
        self.is_busy = False
        self._drain_s = config.router.drain_s
        self._wake = asyncio.Event()
        self._socket = RouterSocket(self.sender, config.endpoint(instance))
        self._outbox = Outbox(self._socket.send)
        self._identities: dict[str, bytes] = {}  # of decodes, by incarnation
        self._early: dict[str, list[Message]] = {}  # for decodes that did not say Hello yet
        hello = Hello(
            "prefill",
            instance,
            os.getpid(),
            build(),
            model_hash=engine.model_hash,
            kv_layout_hash=engine.kv_layout_hash,
            endpoint=config.endpoint(instance),
            pools=pools,
            limits={
                "num_slots": engine.num_slots,
                "num_pages": engine.num_pages,
                "page_tokens": engine.page_tokens,
                "max_context": engine.max_context,
                "vocab_size": engine.vocab_size,
            },
        )
        self.link = RouterLink(
            config, self.sender, hello, self._on_router, self._beat, self._on_peers, self._on_new
        )
        self._to_router = Outbox(self.link.send)
        self._router = ""
        self._is_useless, self._num_corrupt = False, 0  # as last told
        self._registry = metrics.registry("prefill", instance)
        self._metrics = PrefillMetrics(self._registry)
        stats = self.tier.stats if self.tier is not None else TierStats()
        TierMetrics(self._registry, stats, self._restored_tokens)
        PageGauge(self._registry, self.scheduler.books.pages.counts, lambda: engine.num_pages)

    def _restored_tokens(self) -> int:
        cache = self.scheduler.cache
        return cache.num_restored_tokens if cache is not None else 0

    async def run(self) -> None:
        """Until the stop event, then drain."""
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(coroutine)
                for coroutine in (
                    self.link.run(),
                    self._listen(),
                    self._outbox.run(),
                    self._to_router.run(),
                    self._step_forever(),
                    self._tick(),
                    metrics.serve(self._registry, self.config.metrics_path(self.sender.source)),
                )
            ]
            await stop().wait()
            await self._drain()
            for task in background:
                task.cancel()
        self.link.close()
        self._socket.close()
        if self.tier is not None:
            await self.thread.run(self.tier.close)

    async def _drain(self) -> None:
        """Finish what is there and let decode fetch it; hand back the rest."""
        self.scheduler.is_draining = True
        self.link.beat()
        if not await drained(lambda: self.scheduler.is_idle, self._drain_s):
            self.scheduler.hand_back("this prefill process is draining")
            self._flush()
        await flushed(lambda: len(self._to_router), lambda: len(self._outbox))

    async def _step_forever(self) -> None:
        while True:
            self._wake.clear()
            plan = self.scheduler.plan(now_ms())
            if plan is None:
                self.is_busy = False
                await self._wake.wait()
                continue
            self.is_busy = True
            if plan.is_first and self.scheduler.cache is not None:
                self._metrics.lookup(len(plan.lane.ids), plan.lane.num_cached)
            began_ns = time.monotonic_ns()
            failpoints.hit("prefill.before_chunk")
            output = await self.thread.run(execute_prefill, self.engine, plan, self.tier)
            failpoints.hit("prefill.after_chunk")
            self.num_steps += 1
            self._metrics.step(plan.num_tokens, time.monotonic_ns() - began_ns)
            self.scheduler.apply(output, now_ms())
            self._flush()
            failpoints.hit("prefill.after_publish")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.scheduler.tick(now_ms())
            self._flush()
            for state, gauge in (
                ("queued", self._metrics.waiting),
                ("computing", self._metrics.running),
                ("published", self._metrics.published),
            ):
                gauge.set(self.scheduler.count(state))
            self._watch_cache()

    def _watch_cache(self) -> None:
        cache = self.scheduler.cache
        if cache is None:
            return
        if cache.is_useless and not self._is_useless:
            log.warning("prompts repeat prefixes, but the prefix cache finds none of them")
        if cache.num_corrupt > self._num_corrupt:
            log.error("cached pages changed", times=cache.num_corrupt - self._num_corrupt)
            self._metrics.corrupt.inc(cache.num_corrupt - self._num_corrupt)
        self._is_useless, self._num_corrupt = cache.is_useless, cache.num_corrupt
        self._metrics.useless.set(self._is_useless)

    def _flush(self) -> None:
        """Send what the scheduler decided, and wake the stepping task."""
        for action in self.scheduler.take():
            if isinstance(action, ToRouter):
                self._to_router.post(action.message, action.blobs)
                if isinstance(action.message, Lost):
                    self._metrics.lost.labels(action.message.code or "other").inc()
            else:
                self._to_decode(action)
        self._wake.set()

    def _to_decode(self, action: ToDecode) -> None:
        identity = self._identities.get(action.peer)
        if identity is not None:
            self._outbox.post(identity, action.message)
        elif sum(map(len, self._early.values())) < MAX_EARLY:
            self._early.setdefault(action.peer, []).append(action.message)

    async def _listen(self) -> None:
        """Messages of decode processes."""
        while True:
            envelope = await self._socket.receive()
            incarnation = envelope.header.incarnation
            self._identities[incarnation] = envelope.identity
            for message in self._early.pop(incarnation, ()):
                self._outbox.post(envelope.identity, message)
            if isinstance(envelope.body, KVRelease):
                failpoints.hit("prefill.before_free")
                self.scheduler.released(envelope.body)
                self._flush()

    async def _on_router(self, envelope: Envelope) -> None:
        body = envelope.body
        if isinstance(body, Prefill):
            try:
                ids = unpack_ids(envelope.blobs[0] if envelope.blobs else b"")
            except ProtocolError as error:
                log.warning("bad Prefill", rid=body.request_id, error=error.message)
                return
            self.scheduler.prefill(body, ids, now_ms())
            failpoints.hit("prefill.after_queued")
        elif isinstance(body, Cancel):
            self.scheduler.cancel(body)
        elif isinstance(body, FlushCache):
            log.info("prefix cache flushed", entries=self.scheduler.flush())
        elif isinstance(body, Drain):
            self._drain_s = body.timeout_s
            stop().set()
        self._flush()

    async def _on_peers(self, peers: Peers) -> None:
        decodes = {p.incarnation for p in peers.peers if p.service == "decode"}
        # NOTE: a restarted router does not know a decode yet that keeps its connection to us and
        # so says no second Hello: its identity must not be forgotten for being absent once.
        gone = [i for i in self._identities if i not in decodes]
        for incarnation in gone[: max(0, len(self._identities) - MAX_DECODES)]:
            del self._identities[incarnation]
        self._early = {i: v for i, v in self._early.items() if i in decodes}
        self.scheduler.peers(decodes)
        self._flush()

    async def _on_new(self, router: str) -> None:
        if self._router:
            log.info("another router, all work is void", router=router)
            self._to_router.clear()
            self.scheduler.reset()
            self._flush()
        self._router = router

    def _beat(self) -> Heartbeat:
        return Heartbeat(
            self.num_steps,
            self.is_busy,
            loop_lag_ms=loop_lag_ms(),
            stats=self.scheduler.stats(),
            is_draining=stop().is_set(),
        )


async def serve(config: Config, instance: str, load: Callable[[], Engine]) -> None:
    """Load the engine, serve until stopped, close it."""
    # NOTE: here, in the main thread and before any other thread: with several ranks it forks.
    engine = load()
    thread = WorkThread("engine")
    try:
        try:
            log.info("engine loaded", num_pages=engine.num_pages, num_slots=engine.num_slots)
            await PrefillService(config, instance, engine, thread).run()
        finally:
            await asyncio.shield(thread.run(engine.close))
    finally:
        thread.close()


async def main(config: Config, instance: str) -> None:
    """The prefill process."""
    from decant.engine.load import load_engine

    config = dataclasses.replace(config, instance=instance)
    await serve(config, instance, lambda: load_engine(config, "prefill"))


if __name__ == "__main__":
    run("prefill", main)
