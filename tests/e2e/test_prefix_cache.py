"""Two prefill processes with small pools and a tier: turns go where their prefix is, what was
evicted comes back, and a kill changes no token."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from real_set import RealSet, decant

from decant.services.client import Figures

Talk = list[dict[str, Any]]
PREFILLS = ("prefill-0", "prefill-1")


@pytest.fixture(scope="module")
def pair(start_set: Callable[..., RealSet]) -> Iterator[RealSet]:
    real = start_set(
        "model.max_context=4096", "prefill.instances=2", "prefill.pages=24",
        "prefill.tier_memory_mb=48", "prefill.tier_file_mb=64",
    )  # fmt: skip
    yield real
    real.wait_clean()
    real.stop()


def words(seed: int, num: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(num))


def turn(
    real: RealSet, talk: Talk, seed: int, num: int = 20, **fields: Any
) -> tuple[Talk, str, Figures]:
    """The next turn of a conversation: it, the answer, the figures."""
    asked = [*talk, {"role": "user", "content": words(seed, num)}]
    content, reasoning, figures = real.api.chat(
        asked, lambda *_: None, model=real.model, temperature=0, max_tokens=12, ignore_eos=True,
        **fields,
    )  # fmt: skip
    assert not reasoning
    return [*asked, {"role": "assistant", "content": content}], content, figures


def cached(figures: Figures) -> int:
    return int(figures.usage["prompt_tokens_details"]["cached_tokens"])


def counters(real: RealSet, name: str) -> dict[str, float]:
    """A metric of both prefills."""
    _, text = real.api.call("GET", "/metrics")
    found = dict.fromkeys(PREFILLS, 0.0)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and sample.labels.get("instance") in found:
                found[sample.labels["instance"]] += sample.value
    return found


def start_talks(real: RealSet, seed: int, num: int = 4) -> list[Talk]:
    """First turns, asked together, so that both prefills get some."""
    with ThreadPoolExecutor(num) as pool:
        return list(pool.map(lambda i: turn(real, [], seed + i, 150)[0], range(num)))


def flush(real: RealSet) -> None:
    done = decant("admin", "flush_cache", "--run-dir", str(real.run_dir))
    assert done.returncode == 0, done.stderr


def test_a_turn_goes_to_the_prefill_that_has_its_prefix(pair: RealSet) -> None:
    pair.wait_ready()
    talks = start_talks(pair, 100)
    assert all(counters(pair, "decant_prefill_tokens_total").values())
    last = []
    for number in range(2):
        for i, talk in enumerate(talks):
            # One at a time: both are idle, and only the prefix speaks for one of them.
            talks[i], _, figures = turn(pair, talk, 200 + 10 * number + i)
            assert cached(figures) > figures.usage["prompt_tokens"] - 80, (number, i)
        last = [talk[-1]["content"] for talk in talks]
    assert all(counters(pair, "decant_prefix_cache_hits_total").values())
    flush(pair)
    for i, talk in enumerate(talks):
        _, content, figures = turn(pair, talk[:-2], 210 + i)
        assert (cached(figures), content) == (0, last[i])


def test_what_was_evicted_comes_back_from_the_tier(pair: RealSet) -> None:
    talks = start_talks(pair, 300)
    with ThreadPoolExecutor(8) as pool:  # more than the snapshots of both
        list(pool.map(lambda i: turn(pair, [], 400 + i, 60), range(24)))
    before = sum(counters(pair, "decant_tier_restored_tokens_total").values())
    answers = []
    for i, talk in enumerate(talks):
        _, content, figures = turn(pair, talk, 500 + i)
        assert cached(figures) > figures.usage["prompt_tokens"] - 80
        answers.append(content)
    restored = sum(counters(pair, "decant_tier_restored_tokens_total").values()) - before
    assert restored > 3 * 150
    assert not any(counters(pair, "decant_prefix_cache_corrupt_total").values())
    flush(pair)
    assert not any(counters(pair, "decant_tier_bytes").values())
    for i, talk in enumerate(talks):
        _, content, figures = turn(pair, talk, 500 + i)
        assert (cached(figures), content) == (0, answers[i])


@pytest.mark.parametrize("name", ["user_id", "cache_salt"])
def test_nobody_finds_what_another_user_computed(pair: RealSet, name: str) -> None:
    fields = [{name: "alice"}, {name: "bob"}, {name: "alice"}, {}]
    found = [cached(turn(pair, [], 900, 100, **f)[2]) for f in fields]
    assert found[0] == found[1] == found[3] == 0 < found[2]
    flush(pair)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_kill_of_one_prefill_costs_its_prefixes_only(pair: RealSet) -> None:
    talks = start_talks(pair, 600)
    with ThreadPoolExecutor(4) as pool:
        turns = [pool.submit(turn, pair, talk, 700 + i, 60) for i, talk in enumerate(talks)]
        pair.kill("prefill-1")
        answers = [t.result()[1] for t in turns]
    pair.wait_ready()
    flush(pair)
    for i, talk in enumerate(talks):
        talks[i], content, figures = turn(pair, talk, 700 + i, 60)
        assert (cached(figures), content) == (0, answers[i])
    for i, talk in enumerate(talks):
        assert cached(turn(pair, talk, 800 + i)[2]) > 150
