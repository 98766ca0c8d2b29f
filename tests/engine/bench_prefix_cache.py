"""What the prefix cache of prefill costs when nothing hits, and what a hit saves.

    python -P tests/engine/bench_prefix_cache.py [--json FILE]

The demo model prefills random prompts in one process, with and without the cache, taking turns;
processor time of the whole lane (scheduling, hashes, steps, checksums, snapshots, evictions), so
that other load matters little. The pool's memory was touched and its slots are full before. The
cost is the median of the ratios of neighbours. Then the same prompts again: found in the pool, in
the tier's memory, in its file. TTFT over real processes: ``tests/e2e/compare_prefix_cache.py``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from array import array

from decant.engine.execute import execute_prefill
from decant.engine.host_tier import HostTier
from decant.engine.interface import Engine
from decant.engine.load import load_engine
from decant.engine.prefill_scheduler import PrefillLimits, PrefillScheduler
from decant.protocol.config import Config, build
from decant.protocol.messages import KVRelease, Prefill
from decant.services.preflight import read_profile

FEW = 8 << 20  # bytes of a tier's memory that one prompt fills


class Lanes:
    """One scheduler over the engine, and the tier behind it."""

    def __init__(
        self, engine: Engine, config: Config, cache: bool, tier: HostTier | None = None
    ) -> None:
        limits = PrefillLimits(
            engine.num_pages,
            engine.num_slots,
            engine.page_tokens,
            engine.max_context,
            engine.vocab_size,
            config.prefill.chunk_tokens,
        )
        self.engine, self.tier = engine, tier
        epoch = engine.pools()[0].epoch
        self.scheduler = PrefillScheduler(limits, epoch, cache, "bench", tier)
        self.scheduler.peers({"d1"})
        self._number = 0

    def prefill(self, ids: array[int]) -> float:
        """Processor seconds of one lane."""
        self._number += 1
        name = f"r{self._number}"
        began = time.process_time()
        self.scheduler.prefill(Prefill(name, 1, 0, "decode-0", "d1"), ids, 0.0)
        while (plan := self.scheduler.plan(0.0)) is not None:
            self.scheduler.apply(execute_prefill(self.engine, plan, self.tier), 0.0)
        self.scheduler.released(KVRelease(name, 1, 0))
        self.scheduler.take()
        return time.process_time() - began

    def evict(self) -> None:
        """Everything, to the tier."""
        cache = self.scheduler.cache
        assert cache is not None
        cache.make_room(self.engine.num_pages, self.engine.num_slots)
        self.prefill(array("i", range(3, 11)))
        if self.tier is not None:
            self.tier.wait_written()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", default="100=40,500=16,1100=10,2000=8", help="tokens=pairs,...")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    config: Config = build(Config, read_profile("demo"))
    engine = load_engine(config, "prefill")
    rng = random.Random(1)

    def some(num: int) -> array[int]:
        return array("i", (rng.randrange(3, engine.vocab_size) for _ in range(num)))

    for slot in range(engine.num_slots):
        engine.clear_slot(slot)
    for page in range(1, engine.num_pages):
        engine.copy_page(0, page)
    # Schedulers keep books of the same pool: each must not find what another wrote there.
    both = {cache: Lanes(engine, config, cache) for cache in (False, True)}
    for _ in range(engine.num_slots):
        both[True].prefill(some(40))
    rows = []
    for pair in args.pairs.split(","):
        length, num = map(int, pair.split("="))
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for i in range(num + 1):
            for cache in (False, True) if i % 2 else (True, False):
                took = both[cache].prefill(some(length))
                if i:
                    seconds[cache].append(took)
        ratios = [b / a for a, b in zip(seconds[False], seconds[True], strict=True)]
        rows.append(
            {
                "tokens": length,
                "without_ms": statistics.median(seconds[False]) * 1e3,
                "with_ms": statistics.median(seconds[True]) * 1e3,
                "cost_percent": (statistics.median(ratios) - 1) * 100,
            }
        )
        print(json.dumps(rows[-1]))
    hits: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        tiers = {"memory": HostTier(256 << 20), "file": HostTier(FEW, 256 << 20, folder)}
        for level, tier in tiers.items():
            lanes = Lanes(engine, config, True, tier)
            for _ in range(2):
                ids, more = some(2000), some(50)
                hits.setdefault("computed", []).append(lanes.prefill(ids))
                hits.setdefault("found in the pool", []).append(lanes.prefill(ids))
                lanes.evict()
                other = some(2000)  # fills a small memory, so that the file has to be read
                lanes.prefill(other)
                lanes.evict()
                hits.setdefault(f"found in the tier's {level}", []).append(lanes.prefill(ids))
                hits.setdefault("50 more, found in the pool", []).append(lanes.prefill(ids + more))
            tier.close()
    found = {what: statistics.median(v) * 1e3 for what, v in hits.items()}
    print(json.dumps(found))
    if args.json:
        with open(args.json, "w") as out:
            json.dump({"misses": rows, "hits_of_2000_tokens_ms": found}, out, indent=1)
    engine.close()


if __name__ == "__main__":
    main()
