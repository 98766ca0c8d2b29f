"""What the prefix caches cost a request that finds nothing in them.

``python -P tests/e2e/compare_prefix_cache.py [--json FILE]`` starts two sets, with and without
caches, and sends prompts of random words to both in turns, each prompt once. Pools and snapshots
are full before the measurement begins, so every request also evicts. The cost is the median over
pairs of (TTFT with - TTFT without) / TTFT without. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from real_set import RealSet  # noqa: E402

OFF = ["prefill.prefix_cache=false", "decode.prefix_cache=false"]
QUIET = ["gateway.port=0", "router.canary=false"]
NUM = {100: 48, 500: 20, 1100: 12, 2000: 10}  # prompt tokens, about: pairs
WARM = 40  # more than the demo profile's slots of prefill
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def prompt(rng: random.Random, num_tokens: int) -> str:
    """Random letters, which the vocabulary cuts into about a token each with their spaces."""
    return " ".join(rng.choice(LETTERS) for _ in range(num_tokens))


def ttft_ms(real: RealSet, text: str) -> tuple[float, int]:
    """And the number of prompt tokens. Raises: AssertionError if anything was cached."""
    figures = real.chat(text, max_tokens=2, ignore_eos=True)[2]
    details = figures.usage.get("prompt_tokens_details") or {}
    assert details.get("cached_tokens", 0) < 32, "a random prompt was found"
    return figures.ttft_ms, int(figures.usage["prompt_tokens"])


def measure(sets: dict[str, RealSet], num_tokens: int, num: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    took: dict[str, list[float]] = {name: [] for name in sets}
    size = 0
    for i in range(num):
        text = prompt(rng, num_tokens)
        for name in sorted(sets, reverse=bool(i % 2)):
            ms, size = ttft_ms(sets[name], text)
            took[name].append(ms)
    costs = [100 * (a - b) / b for a, b in zip(took["with"], took["without"], strict=True)]
    low, middle, high = statistics.quantiles(costs, n=4)
    return {
        "prompt_tokens": size,
        "pairs": num,
        "with_ms": round(statistics.median(took["with"]), 2),
        "without_ms": round(statistics.median(took["without"]), 2),
        "cost_percent": round(middle, 2),
        "cost_percent_quartiles": [round(low, 2), round(high, 2)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="TTFT with and without prefix caches, no hits")
    parser.add_argument("--json", help="write the result here")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of pairs")
    args = parser.parse_args()
    sets: dict[str, RealSet] = {}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="dcnt-") as folder:
        try:
            for name, pairs in (("with", []), ("without", OFF)):
                sets[name] = RealSet(Path(folder) / name, [*QUIET, *pairs])
            rng = random.Random(1)
            for _ in range(WARM):
                text = prompt(rng, 60)
                for real in sets.values():
                    ttft_ms(real, text)
            rows = []
            for i, (num_tokens, num) in enumerate(NUM.items()):
                rows.append(measure(sets, num_tokens, max(2, round(args.scale * num)), 10 + i))
                print(json.dumps(rows[-1]), flush=True)
        finally:
            for real in sets.values():
                real.stop()
    if args.json:
        result = {"cores": len(os.sched_getaffinity(0)), "load_average": load, "rows": rows}
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
