"""What the prefix cache of prefill costs when nothing hits.

    python -P tests/engine/bench_prefix_cache.py [--json FILE]

The demo model prefills random prompts with and without the cache, taking turns; processor time of
the whole lane (scheduling, hashes, steps, checksums, snapshots), so that other load matters little.
Prints the medians, and the cost as the median of the ratios of neighbours.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from array import array

from decant.engine.execute import execute_prefill
from decant.engine.interface import Engine
from decant.engine.load import load_engine
from decant.engine.prefill_scheduler import PrefillLimits, PrefillScheduler
from decant.protocol.config import Config
from decant.protocol.messages import KVRelease, Prefill


def scheduler_of(engine: Engine, config: Config, cache: bool) -> PrefillScheduler:
    limits = PrefillLimits(
        engine.num_pages,
        engine.num_slots,
        engine.page_tokens,
        engine.max_context,
        engine.vocab_size,
        config.prefill.chunk_tokens,
    )
    scheduler = PrefillScheduler(limits, engine.pools()[0].epoch, cache, "bench")
    scheduler.peers({"d1"})
    return scheduler


def prefill(engine: Engine, scheduler: PrefillScheduler, name: str, ids: array[int]) -> float:
    """Processor seconds of one lane."""
    began = time.process_time()
    scheduler.prefill(Prefill(name, 1, 0, "decode-0", "d1"), ids, 0.0)
    while (plan := scheduler.plan(0.0)) is not None:
        scheduler.apply(execute_prefill(engine, plan), 0.0)
    scheduler.released(KVRelease(name, 1, 0))
    scheduler.take()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num", type=int, default=15)
    parser.add_argument("--lengths", default="100,500,2000")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    config = Config()
    engine = load_engine(config, "prefill")
    rng = random.Random(1)
    both = {cache: scheduler_of(engine, config, cache) for cache in (False, True)}
    rows = []
    for length in map(int, args.lengths.split(",")):
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for i in range(args.num + 1):
            # The two schedulers keep books of the same pool: each starts with an empty one.
            for cache in (False, True) if i % 2 else (True, False):
                ids = array("i", (rng.randrange(3, engine.vocab_size) for _ in range(length)))
                took = prefill(engine, both[cache], f"{length}/{i}", ids)
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
    if args.json:
        with open(args.json, "w") as out:
            json.dump(rows, out, indent=1)
    engine.close()


if __name__ == "__main__":
    main()
