"""What a prefix hit saves on the GPU, at real width: one rank of four with random weights.

    python -P tests/engine/gpu/bench_prefix_cache.py --out DIR [--budget-s 240]

``hit``: a prompt of 8,192 tokens computed, computed without the cache, found whole, found with 64
more tokens behind it, and found in host memory after it was evicted. ``replay``: conversations of
several turns that share nine tenths of their prompts, with and without the cache, at growing
concurrency; one prefill chunk and one decode step in turns on the one GPU, pages copied from pool
to pool. Writes DIR/prefix-cache.json after every row. Without a GPU it runs small on the engine's
CPU twin (times mean nothing there). Collectives of the group are not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decant.engine.execute import execute_prefill
from decant.engine.gpu.engine import GpuEngine
from decant.engine.gpu.layout import GpuLayout
from decant.engine.gpu.model import GpuModel
from decant.engine.gpu.ops import Ops
from decant.engine.gpu.pool import GpuPool
from decant.engine.gpu.slice import make_slice
from decant.engine.host_tier import HostTier
from decant.engine.interface import SlotRows, StepPlan
from decant.engine.model_shape import parse_shape
from decant.engine.prefill_scheduler import PrefillLimits, PrefillScheduler, ToRouter
from decant.engine.synthetic import config_table
from decant.protocol.messages import KVRelease, Prefill, Prefilled

Report = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Tokens, unless the name says otherwise."""

    width: str
    layers: int
    tp: int
    page: int
    pages: int  # of prefill's pool; decode has twice as many
    slots: int
    chunk: int
    prefix: int  # of "hit"
    more: int
    times: int
    shared: int  # of "replay": what all prompts begin with
    own: int  # of each first turn
    turn: int  # of each later one
    output: int
    turns: int
    concurrency: tuple[int, ...]
    rounds: int  # conversations of each client

    @property
    def context(self) -> int:
        longest = self.shared + self.own + self.turns * (self.turn + self.output)
        return max(self.prefix + self.more, longest)


REAL = Sizes(
    "real", 43, 4, 1024, 256, 48, 2048, 8192, 64, 5, 7168, 736, 64, 32, 4, (2, 8, 24), 2,
)  # fmt: skip
TWIN = Sizes("tiny", 3, 1, 128, 12, 6, 128, 128, 8, 1, 128, 10, 6, 3, 2, (2,), 1)


class Bench:
    """A slice of the model, and engines of prefill and decode on it."""

    def __init__(self, sizes: Sizes, device: torch.device, kernels: set[str] | None) -> None:
        self.sizes, self.device = sizes, device
        self.shape = parse_shape(config_table(sizes.layers, sizes.width))
        weights = make_slice(self.shape, device, sizes.tp)
        model = GpuModel(self.shape, weights, Ops.create(self.shape, device, kernels))
        self.layout = GpuLayout(self.shape, sizes.page, 3)
        self.prefill = self._engine(model, "prefill", sizes.pages)
        self.decode = self._engine(model, "decode", 2 * sizes.pages)
        self.enabled = sorted(model.ops.enabled)
        self._number = 0
        if device.type == "cuda":
            for num in (1, 2, 4, 8, 16, 32):
                if num <= 2 * max(sizes.concurrency):
                    self.decode.runner.capture(num, 1)

    def _engine(self, model: GpuModel, name: str, pages: int) -> GpuEngine:
        tag = f"decant-bench-{os.getpid()}-{name}"
        pool = GpuPool.create(tag, self.layout, pages, self.sizes.slots, self.device)
        context = self.sizes.context + self.sizes.page
        return GpuEngine(model, pool, context, 3, "slice", self.sizes.chunk)

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()

    def scheduler(self, cache: bool, tier: HostTier | None = None) -> PrefillScheduler:
        """With empty books: the pool's content is forgotten."""
        engine = self.prefill
        limits = PrefillLimits(
            engine.num_pages,
            engine.num_slots,
            engine.page_tokens,
            engine.max_context,
            engine.vocab_size,
            self.sizes.chunk,
        )
        made = PrefillScheduler(limits, engine.pools()[0].epoch, cache, "bench", tier)
        made.peers({"d1"})
        return made

    def name(self) -> str:
        self._number += 1
        return f"r{self._number}"

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


# -- hit -------------------------------------------------------------------------------------------


def prefill_ms(
    bench: Bench, scheduler: PrefillScheduler, ids: list[int], tier: HostTier | None = None
) -> tuple[float, int]:
    """Milliseconds from its start to the last publication of a lane; tokens that were skipped."""
    name, cached = bench.name(), -1
    bench.synchronize()
    began = time.perf_counter()
    scheduler.prefill(Prefill(name, 1, 0, "decode-0", "d1"), array("i", ids), 0.0)
    while (plan := scheduler.plan(0.0)) is not None:
        scheduler.apply(execute_prefill(bench.prefill, plan, tier), 0.0)
    bench.synchronize()
    took = (time.perf_counter() - began) * 1e3
    for action in scheduler.take():
        if isinstance(action, ToRouter) and isinstance(action.message, Prefilled):
            cached = action.message.num_cached_tokens
    scheduler.released(KVRelease(name, 1, 0))
    scheduler.take()
    return took, cached


def measure_hits(bench: Bench) -> Report:
    """Medians over several prompts; see the module."""
    sizes, rng = bench.sizes, random.Random(1)

    def ids(num: int) -> list[int]:
        return [rng.randrange(3, bench.shape.vocab_size) for _ in range(num)]

    tier = HostTier(8 << 30)
    plain, cached = bench.scheduler(False), bench.scheduler(True, tier)
    took: dict[str, list[float]] = {}

    def note(what: str, result: tuple[float, int], want: int) -> None:
        assert result[1] == want, f"{what}: {result[1]} tokens were skipped, not {want}"
        took.setdefault(what, []).append(result[0])

    prefill_ms(bench, plain, ids(sizes.prefix))  # compiles, captures, allocates
    for _ in range(sizes.times):
        prompt, more = ids(sizes.prefix), ids(sizes.more)
        # The two keep books of one pool: the one with the cache starts anew after the other.
        note("without_cache", prefill_ms(bench, plain, prompt), 0)
        note("turn_without_cache", prefill_ms(bench, plain, prompt + more), 0)
        cached.flush()
        note("computed", prefill_ms(bench, cached, prompt, tier), 0)
        note("found", prefill_ms(bench, cached, prompt, tier), sizes.prefix)
        note("turn_found", prefill_ms(bench, cached, prompt + more, tier), sizes.prefix)
        cache = cached.cache
        assert cache is not None
        cache.make_room(bench.prefill.num_pages, bench.prefill.num_slots)  # evicts everything
        prefill_ms(bench, cached, ids(8), tier)  # saves it
        again = prefill_ms(bench, cached, prompt + ids(sizes.more), tier)
        note("turn_found_in_host_memory", again, sizes.prefix)
    tier.close()
    ms = {what: statistics.median(values) for what, values in took.items()}
    return {
        "prefix_tokens": sizes.prefix,
        "more_tokens": sizes.more,
        "ms": {what: round(value, 3) for what, value in ms.items()},
        "skipped": round(1 - ms["found"] / ms["computed"], 4),
        "turn_skipped": round(1 - ms["turn_found"] / ms["turn_without_cache"], 4),
        "miss_cost": round(ms["computed"] / ms["without_cache"] - 1, 4),
    }


# -- replay ----------------------------------------------------------------------------------------


@dataclass
class Client:
    """One conversation after the other, one request at a time."""

    seed: int
    ids: list[int] = field(default_factory=list)
    turn: int = 0
    rounds: int = 0
    name: str = ""
    slot: int = -1  # at decode; -1: in prefill
    pages: list[int] = field(default_factory=list)
    num_output: int = 0
    sent: float = 0.0
    first: float = 0.0


class Replay:
    """Closed loop over both engines."""

    def __init__(self, bench: Bench, cache: bool, concurrency: int) -> None:
        self.bench, self.sizes = bench, bench.sizes
        self.scheduler = bench.scheduler(cache)
        self.clients = [Client(i) for i in range(concurrency)]
        self.shared = self._ids(random.Random(7), self.sizes.shared)
        self.free_pages = list(range(bench.decode.num_pages))
        self.free_slots = list(range(bench.decode.num_slots))
        self.ttft_ms: list[float] = []
        self.tpot_ms: list[float] = []
        self.num_prompt = self.num_cached = self.num_done = 0

    def _ids(self, rng: random.Random, num: int) -> list[int]:
        return [rng.randrange(3, self.bench.shape.vocab_size) for _ in range(num)]

    def _send(self, client: Client) -> None:
        rng = random.Random(client.seed * 1000 + client.rounds * 100 + client.turn)
        if client.turn == 0:
            client.ids = self.shared + self._ids(rng, self.sizes.own)
        else:
            client.ids += self._ids(rng, self.sizes.turn)
        client.name, client.num_output, client.sent = self.bench.name(), 0, time.perf_counter()
        message = Prefill(client.name, 1, 0, "decode-0", "d1")
        self.scheduler.prefill(message, array("i", client.ids), 0.0)

    def _hand_off(self, client: Client) -> None:
        """Copy the lane to decode's pool, and draw its first token."""
        lane = self.scheduler.lanes[client.name, 1, 0]
        source, target = self.bench.prefill.pool, self.bench.decode.pool
        num = -(-(len(client.ids) + self.sizes.output) // self.sizes.page)
        client.pages = [self.free_pages.pop() for _ in range(num)]
        client.slot = self.free_slots.pop()
        with torch.inference_mode():
            for page, own in zip(lane.pages, client.pages, strict=False):
                target.pull_page(source, page, own)
            target.pull_slot(source, lane.slot, client.slot)
        self.scheduler.released(KVRelease(client.name, 1, 0))
        self._token(client, int(self.bench.decode.head([client.slot])[0].argmax()))

    def _token(self, client: Client, token: int) -> None:
        now = time.perf_counter()
        client.ids.append(token)
        client.num_output += 1
        if client.num_output == 1:
            client.first = now
            self.ttft_ms.append((now - client.sent) * 1e3)
        if client.num_output < self.sizes.output:
            return
        self.tpot_ms.append((now - client.first) * 1e3 / max(1, client.num_output - 1))
        self.free_pages += client.pages
        self.free_slots.append(client.slot)
        client.slot, client.pages = -1, []
        self.num_done += 1
        client.turn += 1
        if client.turn == self.sizes.turns:
            client.turn, client.rounds = 0, client.rounds + 1
        if client.rounds < self.sizes.rounds:
            self._send(client)

    def run(self) -> Report:
        engine, began = self.bench.decode, time.perf_counter()
        for client in self.clients:
            self._send(client)
        by_name = {}
        while any(c.rounds < self.sizes.rounds for c in self.clients):
            plan = self.scheduler.plan(0.0)
            if plan is not None:
                output = execute_prefill(self.bench.prefill, plan)
                self.scheduler.apply(output, 0.0)
            by_name = {c.name: c for c in self.clients}
            for action in self.scheduler.take():
                if isinstance(action, ToRouter) and isinstance(action.message, Prefilled):
                    client = by_name[action.message.request_id]
                    self.num_prompt += len(client.ids)
                    self.num_cached += action.message.num_cached_tokens
                    self._hand_off(client)
            active = [c for c in self.clients if c.slot >= 0]
            if active:
                rows = tuple(
                    SlotRows(c.slot, len(c.ids) - 1, (c.ids[-1],), tuple(c.pages)) for c in active
                )
                logits = engine.step(StepPlan(0, rows)).logits
                for client, row in zip(active, logits, strict=True):
                    self._token(client, int(row.argmax()))
        seconds = time.perf_counter() - began

        def percentiles(values: list[float]) -> dict[str, float]:
            return {f"p{q}": round(float(np.percentile(values, q)), 2) for q in (50, 99)}

        return {
            "requests": self.num_done,
            "seconds": round(seconds, 2),
            "requests_per_s": round(self.num_done / seconds, 3),
            "ttft_ms": percentiles(self.ttft_ms),
            "tpot_ms": percentiles(self.tpot_ms),
            "cached_share": round(self.num_cached / self.num_prompt, 4),
        }


def at_same_tpot(rows: list[Report]) -> list[Report]:
    """For each run without the cache: the best one with it whose p99 TPOT is no larger."""
    found = []
    for plain in (r for r in rows if not r["cache"]):
        bound = plain["tpot_ms"]["p99"]
        good = [r for r in rows if r["cache"] and r["tpot_ms"]["p99"] <= bound]
        best = max((r["requests_per_s"] for r in good), default=None)
        found.append(
            {
                "p99_tpot_ms": bound,
                "without_requests_per_s": plain["requests_per_s"],
                "with_requests_per_s": best,
            }
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="prefix hits and replay on a slice of the model")
    parser.add_argument("--out", default=".", help="folder of prefix-cache.json")
    parser.add_argument("--budget-s", type=float, default=240.0)
    parser.add_argument("--kernels", help='by commas, or "none"; default: all')
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    kernels = None
    if args.kernels:
        kernels = set() if args.kernels == "none" else set(args.kernels.split(","))
    elif not cuda:
        kernels = set()
    began, path = time.monotonic(), Path(args.out) / "prefix-cache.json"
    sizes = REAL if cuda else TWIN
    bench = Bench(sizes, device, kernels)
    report: Report = {
        "gpu": torch.cuda.get_device_name() if cuda else "none",
        "torch": torch.__version__,
        "layers": sizes.layers,
        "tp": sizes.tp,
        "kernels": bench.enabled,
        "page_bytes": bench.layout.page_bytes,
        "slot_bytes": bench.layout.slot_bytes,
        "loaded_s": round(time.monotonic() - began, 1),
    }

    def write() -> None:
        path.write_text(json.dumps(report, indent=1) + "\n")

    try:
        report["hit"] = measure_hits(bench)
        print(json.dumps(report["hit"]), flush=True)
        write()
        rows = report["replay"] = []
        # The largest concurrency last: what the budget does not cover is left out.
        for concurrency in sizes.concurrency:
            for cache in (True, False):
                if time.monotonic() - began > args.budget_s:
                    report["left_out"] = f"from {concurrency} clients, cache {cache}"
                    break
                row = Replay(bench, cache, concurrency).run()
                rows.append({"clients": concurrency, "cache": cache, **row})
                print(json.dumps(rows[-1]), flush=True)
                report["at_same_tpot"] = at_same_tpot(rows)
                write()
    finally:
        bench.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
