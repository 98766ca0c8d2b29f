"""With and without the prefix caches, over the real CPU engine: the same bits of pages, slot and
logits at decode, and the same tokens.

A conversation has two turns. The second one finds the first prompt at prefill, and at decode also
the pages that decode's own steps filled; it is compared with the same prompt in a set without
caches and with other chunks. Random conversations overlap, are cancelled and lose prefill.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from cluster import Cluster, Job

from decant.engine.host_tier import HostTier
from decant.engine.load import load_draft, load_engine
from decant.protocol.config import (
    Config,
    DecodeConfig,
    DraftConfig,
    KVConfig,
    ModelConfig,
    PrefillConfig,
)
from decant.protocol.messages import Sampling

MODEL = Path(__file__).parents[1] / "golden" / "trunk-topk"
CONFIG = Config(
    model=ModelConfig(path=str(MODEL), max_context=1024),
    prefill=PrefillConfig(pages=24, slots=8),
    decode=DecodeConfig(pages=24, slots=8, max_batch=6),
    draft=DraftConfig(num_drafts=3),
    kv=KVConfig(page_tokens=128, max_drafts=3),
)
Bits = tuple[list[int], int, bytes]


def start(
    decode_pages: int = 24, prefill_pages: int = 24, prefill_slots: int = 8, **settings: object
) -> Cluster:
    config = replace(
        CONFIG,
        decode=replace(CONFIG.decode, pages=decode_pages),
        prefill=replace(CONFIG.prefill, pages=prefill_pages, slots=prefill_slots),
    )
    engines = (load_engine(config, "prefill"), load_engine(config, "decode"), load_draft(config))
    return Cluster(engines=engines, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def cached() -> Iterator[Cluster]:
    cluster = start(num_drafts=3, chunk_tokens=90)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def plain() -> Iterator[Cluster]:
    cluster = start(num_drafts=0, cache=False, chunk_tokens=256)
    yield cluster
    cluster.close()


def prompt(seed: int, num: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 150) for _ in range(num)]


def run(c: Cluster, ids: list[int], s: Sampling, n: int = 1) -> tuple[Job, Bits]:
    """One request alone. Returns: it, and what decode had when the hand-off was complete: crc32
    of each page's live rows and of the slot's, and the logits of the last position.
    """
    job = c.submit(Job(f"r{len(c.jobs)}", list(ids), s, n))
    while not c.decode._complete:
        c.step()
    lane, engine = c.decode._complete[0], c.decode_engine
    tokens = engine.page_tokens
    pages = lane.pages[: -(-len(ids) // tokens)]
    bits = (
        [
            engine.page_checksum(page, min(tokens, len(ids) - i * tokens))
            for i, page in enumerate(pages)
        ],
        engine.slot_checksum(lane.slots[0], len(ids)),
        engine.head([lane.slots[0]]).tobytes(),
    )
    c.run()
    c.cancel(job)
    c.run()
    for _ in range(30):  # seals, snapshots, releases
        c.step()
    return job, bits


def converse(cached: Cluster, plain: Cluster, length: int, n: int = 1) -> None:
    s = Sampling(seed=length, temperature=0.8, max_tokens=13, ignore_eos=True)
    first = prompt(length, length)
    before, same = run(cached, first, s, n), run(plain, first, s, n)
    assert before[1] == same[1] and before[0].outputs == same[0].outputs
    second = first + before[0].outputs[0] + prompt(length + 1, 21)
    hits = cached.decode.cache.num_hit_pages  # type: ignore[union-attr]
    after, same = run(cached, second, s, n), run(plain, second, s, n)
    assert after[1] == same[1] and after[0].outputs == same[0].outputs
    assert after[0].num_cached == length and same[0].num_cached == 0
    want = (length + 13 - 1) // 128
    assert cached.decode.cache.num_hit_pages - hits == want  # type: ignore[union-attr]


@pytest.mark.parametrize("length", [33, 115, 117, *range(126, 134), 179, 180, 243, 257, 270])
def test_bits_and_tokens_are_equal(cached: Cluster, plain: Cluster, length: int) -> None:
    """Every length mod 4; around pages, chunks, and where the answer fills a page."""
    converse(cached, plain, length)


@pytest.mark.slow
@pytest.mark.parametrize("length", range(128, 256))
def test_bits_are_equal_at_every_length_mod_128(
    cached: Cluster, plain: Cluster, length: int
) -> None:
    converse(cached, plain, length)


def test_choices_share_what_is_cached(cached: Cluster, plain: Cluster) -> None:
    converse(cached, plain, 210, n=3)


def test_a_cancel_in_the_middle_of_a_prefill_leaves_a_good_cache(
    cached: Cluster, plain: Cluster
) -> None:
    s = Sampling(seed=3, max_tokens=5, ignore_eos=True)
    talk = prompt(77, 400)
    run(cached, talk[:300], s)
    job = cached.submit(Job("cancelled", talk, s))
    while not any(lane.num_computed > 300 for lane in cached.prefill.lanes.values()):
        cached.step()
    cached.cancel(job)
    cached.run()
    after, same = run(cached, talk + prompt(78, 30), s), run(plain, talk + prompt(78, 30), s)
    assert after[1] == same[1] and after[0].outputs == same[0].outputs
    assert after[0].num_cached >= 300


def test_a_preempted_stream_finds_its_pages_and_goes_on(plain: Cluster) -> None:
    """More than the pool holds: the youngest give way, come back, and find what is still there."""
    c = start(decode_pages=8, seed=1, num_drafts=2, chunk_tokens=90)
    try:
        jobs = []
        for i in range(4):
            s = Sampling(seed=i, temperature=0.7, max_tokens=125, ignore_eos=True)
            jobs.append(c.submit(Job(f"p{i}", prompt(i % 3, 135 + 2 * i), s)))
        c.run()
        assert c.decode.num_preempted > 0
        for job in jobs:
            assert job.outputs == run(plain, job.prompt, job.sampling)[0].outputs
        c.settle()
    finally:
        c.close()


@pytest.mark.parametrize("level", ["memory", "file"])
def test_bits_are_equal_when_the_prefix_comes_from_the_tier(
    plain: Cluster, level: str, tmp_path: Path
) -> None:
    """Three slots: the next prompts push a snapshot out of the pool."""
    few = 2 * len(plain.prefill_engine.save_slot(0, 259))  # bytes: the next ones fill it
    tier = HostTier(64 << 20 if level == "memory" else few, 64 << 20, str(tmp_path))
    c = start(prefill_slots=3, tier=tier, num_drafts=3, chunk_tokens=90)
    try:
        for length in (130, 257) if level == "memory" else (259,):
            s = Sampling(seed=length, temperature=0.8, max_tokens=13, ignore_eos=True)
            first = prompt(length, length)
            before = run(c, first, s)[0]
            for i in range(4):
                run(c, prompt(5000 + i, 40), replace_max(s, 1))
                tier.wait_written()
            second = first + before.outputs[0] + prompt(length + 1, 21)
            restored = tier.stats.num_restored
            after, same = run(c, second, s), run(plain, second, s)
            assert after[1] == same[1] and after[0].outputs == same[0].outputs
            assert after[0].num_cached == length
            assert tier.stats.num_restored > restored
        assert c.prefill.cache is not None and c.prefill.cache.num_corrupt == 0
        c.settle()
    finally:
        c.close()
        tier.close()


def replace_max(s: Sampling, max_tokens: int) -> Sampling:
    return msgspec.structs.replace(s, max_tokens=max_tokens)


@pytest.mark.parametrize(
    "seed", [pytest.param(i, marks=pytest.mark.slow if i > 1 else ()) for i in range(24)]
)
def test_random_conversations(plain: Cluster, seed: int) -> None:
    """Three talks overlap, with choices, drafts, cancels in mid-prefill, and deaths of prefill;
    pools so small that pages are evicted and streams preempted."""
    rng = random.Random(seed)
    tier = HostTier(rng.choice([1, 4, 64]) << 20) if seed % 2 else None
    c = start(
        decode_pages=rng.choice([12, 24]),
        prefill_pages=rng.choice([10, 24]),
        prefill_slots=rng.choice([3, 8]),
        seed=seed,
        num_drafts=rng.choice([0, 2, 3]),
        chunk_tokens=rng.choice([60, 90, 128, 256]),
        tier=tier,
    )
    shared = prompt(9000 + seed, rng.choice([100, 128, 150]))
    talks = [shared + prompt(9100 + 10 * seed + i, rng.randrange(1, 140)) for i in range(3)]
    try:
        for i in range(9):
            talk = rng.choice(talks)
            talk += prompt(9500 + 100 * seed + i, rng.randrange(1, 60))
            s = Sampling(
                seed=i,
                temperature=rng.choice([0.0, 0.9]),
                max_tokens=rng.randrange(1, 14),
                ignore_eos=True,
            )
            job = c.submit(Job(f"r{i}", list(talk), s, rng.choice([1, 1, 2])))
            end = rng.random()
            for _ in range(rng.randrange(40)):
                c.step()
            if end < 0.15 and not job.is_done:
                c.cancel(job)
            elif end < 0.3:
                c.kill_prefill()
            elif end < 0.7:
                c.run()
                talk += job.outputs[0]
            del talk[420:]
        c.run()
        for job in c.jobs.values():
            if not job.is_cancelled:
                same = run(plain, job.prompt, job.sampling, job.num_choices)[0]
                assert job.outputs == same.outputs, job.request_id
        assert c.prefill.cache is not None and c.prefill.cache.num_corrupt == 0
        assert c.decode.cache is not None and c.decode.cache.num_corrupt == 0
        c.settle()
    finally:
        c.close()
        if tier is not None:
            tier.close()


def test_bits_are_equal_after_the_death_of_prefill(plain: Cluster) -> None:
    """kill -9 in the middle of a second turn: decode still has the first turn's pages, prefill
    computes everything anew, over a pool full of what was there before."""
    c = start(num_drafts=3, chunk_tokens=90)
    try:
        s = Sampling(seed=5, temperature=0.8, max_tokens=13, ignore_eos=True)
        first = prompt(400, 300)
        second = first + run(c, first, s)[0].outputs[0] + prompt(401, 200)
        job = c.submit(Job("killed", list(second), s))
        while not any(lane.num_computed > 300 for lane in c.prefill.lanes.values()):
            c.step()
        c.kill_prefill()
        c.run()
        assert job.num_resumes >= 1 and job.num_cached == 0
        hits = c.decode.cache.num_hit_pages  # type: ignore[union-attr]
        after, same = run(c, second + [7], s), run(plain, second + [7], s)
        assert after[1] == same[1] and after[0].outputs == same[0].outputs
        assert job.outputs == run(plain, second, s)[0].outputs
        assert after[0].num_cached == len(second)
        assert c.decode.cache.num_hit_pages - hits == len(second) // 128  # type: ignore[union-attr]
        c.settle()
    finally:
        c.close()


def test_nothing_is_left_held(cached: Cluster) -> None:
    """After all of the above: caches aside, every page and slot is free."""
    assert cached.prefill.cache is not None and cached.prefill.cache.num_corrupt == 0
    assert cached.decode.cache is not None and cached.decode.cache.num_corrupt == 0
    cached.settle()
