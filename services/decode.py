"""Decode process: admit hand-offs, step the engine, stream accepted tokens.

Control comes from the router (RouterLink). Dealers go to every prefill (KVReady in, KVRelease out),
every tokenizer (Tokens out, ReplayFrom in) and to the draft (Propose out, Drafts in). What is
decided is in ``engine/decode_scheduler.py``; here are sockets, threads and time.

Two threads: one runs the engine's steps and draws tokens, one maps pools and copies pages, so a
hand-off goes on beside the steps.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

import structlog

from decant.engine.acceptance import DepthController
from decant.engine.decode_batch import Limits, Mask, Proposal, ToPrefill, ToRouter
from decant.engine.decode_scheduler import DecodeScheduler
from decant.engine.execute import execute_decode, execute_pull, execute_seal
from decant.engine.handoff import Pull
from decant.engine.interface import Engine
from decant.engine.page_cache import Seal
from decant.engine.sampler import Sampler
from decant.protocol.config import Config
from decant.protocol.errors import DeadlineExceeded, HandoffError, ProtocolError
from decant.protocol.messages import (
    Cancel,
    Decoding,
    Drafts,
    Drain,
    EndChoice,
    FlushCache,
    Heartbeat,
    Hello,
    KVGone,
    KVReady,
    Lost,
    Message,
    Peer,
    Peers,
    Preempted,
    ReplayFrom,
    Reserve,
    StreamCredit,
    Tokens,
)
from decant.protocol.wire import Envelope, Sender, pack_ids, unpack_ids
from decant.services import failpoints, metrics
from decant.services.link import RouterLink
from decant.services.process import build, loop_lag_ms, run, stop
from decant.services.serving_metrics import DecodeMetrics, PageGauge
from decant.services.sockets import Outbox
from decant.services.worker import (
    PeerLinks,
    WorkThread,
    drained,
    flushed,
    now_ms,
)

TICK_S = 0.5

log = structlog.get_logger()


class DecodeService:
    """One decode group, seen from rank 0."""

    def __init__(
        self,
        config: Config,
        instance: str,
        engine: Engine,
        thread: WorkThread,
        tasks: asyncio.TaskGroup,
        mask: Mask | None = None,
    ) -> None:
        self.config, self.engine, self.thread = config, engine, thread
        self.sender = Sender(instance)
        self.copies = WorkThread("copies")
        pools = engine.pools()
        num_drafts = min(config.draft.num_drafts, engine.max_drafts) if config.draft.enabled else 0
        self.scheduler = DecodeScheduler(
            Limits(
                engine.num_pages,
                engine.num_slots,
                engine.page_tokens,
                engine.max_context,
                engine.vocab_size,
                engine.eos_token_id,
                config.decode.max_batch,
                config.decode.growth_tokens,
                num_drafts,
                config.prefill.chunk_tokens,
                pools[0].page_bytes,
                pools[0].slot_bytes,
                config.decode.cache_pages,
                config.decode.tpot_budget_ms / 1e3,
            ),
            DepthController(num_drafts, config.draft.adaptive),
            config.decode.prefix_cache,
            f"{engine.model_hash}/{engine.kv_layout_hash}",
        )
        self.sampler = Sampler(engine.vocab_size, engine.eos_token_id)
        self.num_steps = 0
        self.is_busy = False
        self._mask = mask
        self._drain_s = config.router.drain_s
        self._wake = asyncio.Event()
        self._answered = asyncio.Event()  # the open proposal is answered, or void
        self._proposed_ms = 0.0
        hello = Hello(
            "decode",
            instance,
            os.getpid(),
            build(),
            model_hash=engine.model_hash,
            kv_layout_hash=engine.kv_layout_hash,
            pools=pools,
            limits={
                "num_slots": engine.num_slots,
                "num_pages": engine.num_pages,
                "page_tokens": engine.page_tokens,
                "max_context": engine.max_context,
                "vocab_size": engine.vocab_size,
                "max_batch": config.decode.max_batch,
            },
        )
        self._tasks = tasks
        self.link = RouterLink(
            config, self.sender, hello, self._on_router, self._beat, self._on_peers, self._on_new
        )
        self._to_router = Outbox(self.link.send)
        self._prefills = PeerLinks(tasks, self.sender, hello, self._on_prefill)
        self._tokenizers = PeerLinks(tasks, self.sender, hello, self._on_tokenizer)
        self._drafts = PeerLinks(tasks, self.sender, hello, self._on_draft)
        self._draft = ""  # incarnation of the draft that we use
        self._router = ""
        self._cache_told = 0, 0, 0  # pages hit, missed, corrupt
        self._registry = metrics.registry("decode", instance)
        self._metrics = DecodeMetrics(self._registry, num_drafts)
        PageGauge(self._registry, self.scheduler.pages.counts, lambda: engine.num_pages)
        self._transport = pools[0].kind

    # ---- life ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until the stop event, then drain."""
        background = [
            self._tasks.create_task(coroutine)
            for coroutine in (
                self.link.run(),
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
        for links in (self._prefills, self._tokenizers, self._drafts):
            links.close()
        self.link.close()
        self.copies.close()

    async def _drain(self) -> None:
        """Finish what is there; hand back the rest."""
        self.scheduler.is_draining = True
        self.link.beat()
        if not await drained(lambda: self.scheduler.is_idle, self._drain_s):
            self.scheduler.hand_back("this decode process is draining")
            self._flush()
        await flushed(
            lambda: len(self._to_router),
            lambda: self._prefills.num_waiting,
            lambda: self._tokenizers.num_waiting,
        )

    async def _step_forever(self) -> None:
        while True:
            self._wake.clear()
            plan = self.scheduler.plan()
            self._flush(is_wake=False)
            if plan is None:
                self.is_busy = False
                await self._wake.wait()
                continue
            self.is_busy = True
            has_draft = self.scheduler.speculation.is_on
            if failpoints.IS_ON:
                failpoints.hit("decode.before_step", [s.sampling.seed for s in plan.sequences])
            output = await self.thread.run(
                execute_decode, self.engine, self.sampler, plan, self._mask, has_draft
            )
            self.num_steps += 1
            drawn_ns = time.monotonic_ns()
            failpoints.hit("decode.before_tokens")
            num_before = self.scheduler.num_tokens
            proposal = self.scheduler.apply(output)
            if proposal:
                self._propose(proposal)  # NOTE: before the tokens, everybody waits for it
            self._flush(drawn_ns=drawn_ns)
            failpoints.hit("decode.after_tokens")
            self._metrics.step(
                len(plan.sequences) + len(plan.firsts),
                self.scheduler.num_tokens - num_before,
                int(output.elapsed_s * 1e9),
            )
            for num_drafted, num_accepted in self.scheduler.speculation.take_verified():
                self._metrics.verified(num_drafted, num_accepted)
            if proposal:
                await self._wait_for_drafts()

    def _propose(self, proposal: Proposal) -> None:
        self._answered.clear()
        self._proposed_ms = now_ms()
        self._metrics.planned_drafts.set(max(s.num_drafts for s in proposal.message.slots))
        blobs = [proposal.streams.tobytes(), pack_ids(proposal.next_tokens)]
        if not self._drafts.post(self._draft, proposal.message, blobs):
            self.scheduler.speculation.gone()
            self._answered.set()

    async def _wait_for_drafts(self) -> None:
        """Bounded. A late answer still counts for the draft's window; until it comes, k = 0."""
        try:
            async with asyncio.timeout(self.config.draft.timeout_ms / 1e3):
                await self._answered.wait()
        except TimeoutError:
            self._metrics.draft_timeouts.inc()
        self._metrics.draft_wait.observe((now_ms() - self._proposed_ms) / 1e3)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.scheduler.tick(now_ms())
            self._flush()
            stats = self.scheduler.stats()
            self._metrics.running.set(stats["sequences"])
            self._metrics.waiting.set(stats["lanes"])
            self._metrics.parked.set(stats["parked"])
            self._watch_cache()

    def _watch_cache(self) -> None:
        cache, told = self.scheduler.cache, self._cache_told
        if cache is not None:
            now = cache.num_hit_pages, cache.num_missed_pages, cache.num_corrupt
            if now[2] > told[2]:
                log.error("cached pages changed", pages=now[2] - told[2])
            for counter, here, before in zip(self._metrics.cache, now, told, strict=True):
                counter.inc(here - before)
            self._cache_told = now

    # ---- out -------------------------------------------------------------------------------------

    def _flush(self, is_wake: bool = True, drawn_ns: int = 0) -> None:
        """Send and start what the scheduler decided, and wake the stepping task.

        drawn_ns: when the step ended whose tokens these are; 0 for others.
        """
        for action in self.scheduler.take():
            if isinstance(action, ToRouter):
                self._to_router.post(action.message)
                self._count(action.message)
            elif isinstance(action, ToPrefill):
                self._prefills.post(action.peer, action.message)
            elif isinstance(action, Seal):
                self._tasks.create_task(self._seal(action))
            else:
                self._tasks.create_task(self._pull(action))
        for instance, outgoing in self.scheduler.take_tokens().items():
            message = Tokens(self.num_steps, outgoing.runs, drawn_ns)
            blob = pack_ids(outgoing.ids)
            for incarnation, peer in self._tokenizers.peers.items():
                if peer.instance == instance:
                    self._tokenizers.post(incarnation, message, [blob])
        if is_wake:
            self._wake.set()

    def _count(self, message: Message) -> None:
        if isinstance(message, Decoding) and message.num_handoff_bytes:
            self._metrics.handed_off(self._transport, message.num_handoff_bytes, message.handoff_ms)
        elif isinstance(message, Preempted):
            self._metrics.preempted.inc()
        elif isinstance(message, Lost) and message.code == DeadlineExceeded.code:
            self._metrics.expired.inc()

    async def _pull(self, pull: Pull) -> None:
        """Copy pages in the copying thread."""

        def copy() -> None:
            failpoints.hit("decode.before_pull")
            execute_pull(self.engine, pull)

        error = ""
        try:
            await self.copies.run(copy)
        except HandoffError as failure:
            error = failure.message
            self._metrics.handoff_failures.labels("pull").inc()
            log.warning("a hand-off failed", rid=pull.key[0], attempt=pull.key[1], error=error)
        failpoints.hit("decode.before_release")
        self.scheduler.pulled(pull, error, now_ms())
        self._flush()
        failpoints.hit("decode.after_release")

    async def _seal(self, seal: Seal) -> None:
        self.scheduler.sealed(seal, await self.copies.run(execute_seal, self.engine, seal))

    # ---- in --------------------------------------------------------------------------------------

    async def _on_router(self, envelope: Envelope) -> None:
        body = envelope.body
        if isinstance(body, Reserve):
            try:
                ids = unpack_ids(envelope.blobs[0] if envelope.blobs else b"")
            except ProtocolError as error:
                log.warning("bad Reserve", rid=body.request_id, error=error.message)
                return
            failpoints.hit("decode.before_reserve")
            self.scheduler.reserve(body, ids)
            self._flush()
            failpoints.hit("decode.after_reserve")
        elif isinstance(body, Cancel):
            self.scheduler.cancel(body)
        elif isinstance(body, StreamCredit):
            self.scheduler.credit(body)
        elif isinstance(body, EndChoice):
            self.scheduler.end_choice(body)
        elif isinstance(body, FlushCache):
            log.info("page cache flushed", pages=self.scheduler.flush())
        elif isinstance(body, Drain):
            self._drain_s = body.timeout_s
            stop().set()
        self._flush()

    async def _on_prefill(self, peer: Peer, envelope: Envelope) -> None:
        body = envelope.body
        if envelope.header.incarnation != peer.incarnation:
            return  # its successor on the same endpoint, which Peers will name soon
        if isinstance(body, KVReady):
            pool = peer.pools[0]
            is_ours = body.epoch == pool.epoch and -1 <= body.slot < pool.num_slots
            if not is_ours or not all(0 <= page < pool.num_pages for page in body.pages):
                gone = KVGone(body.request_id, body.attempt, body.lane, "pages of another pool")
                self.scheduler.kv_gone(peer.incarnation, gone)
            else:
                self.scheduler.kv_ready(peer.incarnation, body, now_ms())
        elif isinstance(body, KVGone):
            self.scheduler.kv_gone(peer.incarnation, body)
        self._flush()

    async def _on_tokenizer(self, peer: Peer, envelope: Envelope) -> None:
        if isinstance(envelope.body, ReplayFrom):
            self._metrics.replays.inc()
            self.scheduler.replay(peer.instance, envelope.body)
            self._flush()

    async def _on_draft(self, peer: Peer, envelope: Envelope) -> None:
        body = envelope.body
        if not isinstance(body, Drafts) or peer.incarnation != self._draft:
            return
        try:
            ids = unpack_ids(envelope.blobs[0] if envelope.blobs else b"")
        except ProtocolError as error:
            log.warning("bad Drafts", error=error.message)
            return
        if self.scheduler.speculation.answered(body.step, body.counts, ids):
            self.scheduler.speculation.depth.drafted(len(ids), (now_ms() - self._proposed_ms) / 1e3)
        if not self.scheduler.speculation.is_due:
            self._answered.set()
            self._wake.set()  # pages may have come out of quarantine

    async def _on_peers(self, peers: Peers) -> None:
        def of(service: str) -> list[Peer]:
            return [p for p in peers.peers if p.service == service]

        new, gone = self._prefills.follow(p for p in of("prefill") if p.pools)
        # In the copying thread: after the copies under way, before those to come.
        for peer in gone:
            self._tasks.create_task(self.copies.run(self.engine.detach, peer.incarnation))
        for peer in new:
            self._tasks.create_task(self._attach(peer))
        self.scheduler.peers({p.instance: p.incarnation for p in of("prefill")})
        self._tokenizers.follow(of("tokenizer"))
        self._drafts.follow(of("draft") if self.config.draft.enabled else [])
        self._choose_draft()
        self._flush()

    def _choose_draft(self) -> None:
        """Our draft is the one of our number; any other if there is none."""
        if self._draft in self._drafts.peers:
            return
        number = self.sender.source.rpartition("-")[2]
        candidates = sorted(
            self._drafts.peers.values(),
            key=lambda p: (p.instance.rpartition("-")[2] != number, p.instance),
        )
        self._draft = candidates[0].incarnation if candidates else ""
        self.scheduler.speculation.has_draft = bool(self._draft)
        self.scheduler.speculation.gone()
        self._answered.set()

    async def _attach(self, peer: Peer) -> None:
        try:
            await self.copies.run(self.engine.attach, peer.incarnation, peer.pools)
        except HandoffError as error:  # its hand-offs will fail and be tried elsewhere
            log.warning("cannot map", peer=peer.instance, error=error.message)

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


async def serve(
    config: Config, instance: str, load: Callable[[], Engine], mask: Mask | None = None
) -> None:
    """Load the engine, serve until stopped, close it."""
    # NOTE: here, in the main thread and before any other thread: with several ranks it forks.
    engine = load()
    thread = WorkThread("engine")
    try:
        try:
            log.info("engine loaded", num_pages=engine.num_pages, num_slots=engine.num_slots)
            async with asyncio.TaskGroup() as tasks:
                await DecodeService(config, instance, engine, thread, tasks, mask).run()
        finally:
            await asyncio.shield(thread.run(engine.close))
    finally:
        thread.close()


async def main(config: Config, instance: str) -> None:
    """The decode process."""
    from decant.engine.load import load_engine
    from decant.services.grammar import Masks

    await serve(config, instance, lambda: load_engine(config, "decode"), Masks.load(config))


if __name__ == "__main__":
    run("decode", main)
