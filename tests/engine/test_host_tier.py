"""The tier behind the prefix cache: what was evicted comes back exact, or not at all."""

from __future__ import annotations

import os
import random
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import Cluster, Job
from fake_engine import reference_tokens

from decant.engine.execute import execute_prefill
from decant.engine.host_tier import FILE_BLOCK, HostTier, Snapshot
from decant.engine.prefill_scheduler import PrefillScheduler
from decant.protocol.errors import ConfigError
from decant.protocol.messages import Prefill, Sampling

MEGABYTE = 1 << 20
TALK = 300
FEW = 20_000  # bytes of memory: the other prompts fill it


def ids(seed: int, num: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 48) for _ in range(num)]


MakeTier = Callable[..., HostTier]


@pytest.fixture
def make_tier(tmp_path: Path) -> Iterator[MakeTier]:
    made = []

    def make(memory_bytes: int = MEGABYTE, file_bytes: int = 0) -> HostTier:
        made.append(HostTier(memory_bytes, file_bytes, str(tmp_path)))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


@pytest.fixture(params=["memory", "file"])
def tier(request: pytest.FixtureRequest, make_tier: MakeTier) -> HostTier:
    """Memory for everything; or for no whole prefix, so that it comes from the file."""
    if request.param == "memory":
        return make_tier()
    return make_tier(FEW, 200 * FILE_BLOCK)


def run(c: Cluster, name: str, prompt: list[int], salt: str = "") -> Job:
    s = Sampling(seed=1, temperature=0.8, max_tokens=4)
    job = c.submit(Job(name, prompt, s, salt=salt))
    c.run()
    for _ in range(200):
        c.step()
    assert job.outputs[0] == reference_tokens(prompt, s)
    return job


def push_out(c: Cluster, first: int) -> None:
    """Fill prefill's pool and the tier's memory with other prompts; the file keeps up."""
    assert c.tier is not None
    for i in range(10 * first, 10 * first + 7):
        run(c, f"other-{i}", ids(1000 + i, 380))
        c.tier.wait_written()


def test_a_turn_whose_prefix_was_evicted_finds_it_in_the_tier(tier: HostTier) -> None:
    c = Cluster(prefill_pages=8, tier=tier)
    cache = c.prefill.cache
    assert cache is not None
    talk = ids(1, TALK)
    run(c, "a", talk)
    push_out(c, 1)
    assert cache.lookup(cache.digests(array("i", talk), ""), array("i", talk)) is None
    before = c.fake_prefill.num_prefilled
    assert run(c, "b", talk + ids(2, 50)).num_cached == TALK
    assert c.fake_prefill.num_prefilled - before == 50
    assert cache.num_restored_tokens == TALK and cache.num_corrupt == 0
    if tier.stats.file_bytes:
        assert tier.stats.memory_bytes <= FEW
    c.settle()
    c.close()


def test_only_what_the_pool_lacks_is_read(make_tier: MakeTier) -> None:
    c = Cluster(prefill_pages=8, tier=make_tier())
    assert c.tier is not None
    talk = ids(1, 600)
    run(c, "a", talk[:TALK])
    run(c, "b", talk)
    push_out(c, 1)
    run(c, "a again", talk[:TALK])  # three records: two pages are full, one is open, and the slot
    restored = c.tier.stats.num_restored
    assert restored == 4
    assert run(c, "b again", talk + ids(2, 9)).num_cached == 600
    assert c.tier.stats.num_restored - restored == 2 + 1 + 1  # pages 2 and 3, the open one, slot
    c.settle()
    c.close()


def test_nobody_finds_what_another_salt_left(tier: HostTier) -> None:
    c = Cluster(prefill_pages=8, tier=tier)
    run(c, "a", ids(1, TALK), salt="alice")
    push_out(c, 1)
    assert run(c, "b", ids(1, TALK), salt="bob").num_cached == 0
    push_out(c, 2)
    assert run(c, "c", ids(1, TALK), salt="alice").num_cached == TALK
    c.settle()
    c.close()


@pytest.mark.parametrize("what", ["page", "open", "slot"])
def test_a_record_that_changed_is_a_miss(tier: HostTier, what: str) -> None:
    """One flipped bit in memory or in the file: recomputed, never used, and gone."""
    c = Cluster(prefill_pages=8, tier=tier)
    talk = ids(1, TALK)
    run(c, "a", talk)
    push_out(c, 1)
    cache = c.prefill.cache
    assert cache is not None
    digests = cache.digests(array("i", talk), "")
    snapshot = tier.find(digests, array("i", talk), 128, 0)
    assert snapshot is not None and snapshot.num_tokens == TALK
    name = {"page": snapshot.pages[1], "open": snapshot.open_page, "slot": snapshot.slot}[what]
    record = tier._records[name]
    # A live row of the slot: the state of the last position.
    at = 8 * ((TALK - 1) % 160) if what == "slot" else 5
    if record.data is not None:
        changed = bytearray(record.data)
        changed[at] ^= 1
        record.data = bytes(changed)
    for block in record.blocks[:1]:
        (old,) = os.pread(tier._file, 1, block * FILE_BLOCK + at)
        os.pwrite(tier._file, bytes([old ^ 1]), block * FILE_BLOCK + at)
    assert run(c, "b", talk + ids(2, 50)).num_cached == 0
    assert cache.num_corrupt == 1 and c.jobs["b"].num_resumes == 0
    assert not {*snapshot.pages, snapshot.open_page, snapshot.slot} & set(tier._records)
    assert run(c, "c", talk + ids(2, 50)).num_cached == TALK + 50
    assert cache.num_corrupt == 1
    c.settle()
    c.close()


def test_flush_forgets_the_tier_too(tier: HostTier) -> None:
    c = Cluster(prefill_pages=8, tier=tier)
    run(c, "a", ids(1, TALK))
    push_out(c, 1)
    assert len(tier) > 0
    c.prefill.flush()
    tier.wait_written()
    assert len(tier) == tier.stats.memory_bytes == tier.stats.file_bytes == 0
    assert run(c, "b", ids(1, TALK)).num_cached == 0
    c.settle()
    c.close()


def test_what_is_flushed_while_it_comes_back_is_a_miss_and_no_fault(make_tier: MakeTier) -> None:
    c = Cluster(prefill_pages=8, tier=make_tier())
    talk = ids(1, TALK)
    run(c, "a", talk)
    push_out(c, 1)
    scheduler: PrefillScheduler = c.prefill
    scheduler.prefill(Prefill("b", 1, 0, "decode-0", "d1"), array("i", talk + [5] * 60), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None and plan.hit is not None and any(m.is_restore for m in plan.moves)
    scheduler.flush()
    output = execute_prefill(c.prefill_engine, plan, c.tier)
    assert output.is_missing
    scheduler.apply(output, 0.0)
    assert scheduler.cache is not None and scheduler.cache.num_corrupt == 0
    again = scheduler.plan(0.0)
    assert again is not None and again.hit is None and again.lane.num_cached == 0
    scheduler.apply(execute_prefill(c.prefill_engine, again, c.tier), 0.0)
    scheduler.books.check()
    c.close()


@pytest.mark.parametrize("seed", range(6))
def test_random_conversations_over_a_small_pool(make_tier: MakeTier, seed: int) -> None:
    """Evictions in both directions, cancels, choices, flushes: exact tokens, nothing leaks."""
    rng = random.Random(seed)
    tier = make_tier(rng.choice([3000, 20_000, MEGABYTE]), rng.choice([0, 20, 200]) * FILE_BLOCK)
    c = Cluster(seed=seed, prefill_pages=rng.choice([8, 12]), tier=tier, cache_pages=seed % 2 * 6)
    roots = [ids(100 + i, rng.choice([128, 200, 260])) for i in range(4)]
    for i in range(30):
        prompt = list(rng.choice(roots))
        prompt += ids(rng.randrange(6), rng.choice([0, 1, 100, 128, 300]))
        if rng.random() < 0.4:
            roots.append(prompt[: rng.randrange(1, len(prompt) + 1)])
        s = Sampling(seed=i, max_tokens=rng.choice([1, 5, 20]))
        job = c.submit(Job(f"r{i}", prompt, s, num_choices=rng.choice([1, 1, 2])))
        for _ in range(rng.randrange(120)):
            c.step()
            assert tier.stats.memory_bytes <= tier._max_memory
        if rng.random() < 0.2 and not job.is_done:
            c.cancel(job)
        if i == 20:
            c.prefill.flush()
    c.run()
    for job in c.jobs.values():
        if not job.is_cancelled:
            for choice in range(job.num_choices):
                assert job.outputs[choice] == reference_tokens(job.prompt, job.sampling, choice)
    assert tier.stats.num_saved > 10
    assert c.prefill.cache is not None and c.prefill.cache.num_corrupt == 0
    c.settle()
    c.close()


def test_both_levels_are_bounded_and_lose_the_oldest(make_tier: MakeTier) -> None:
    tier = make_tier(10 * 1000, 4 * FILE_BLOCK)
    for i in range(30):
        snapshot = Snapshot((b"%d" % i, b""), 128, (), ())
        tier.put(b"%d" % i, bytes([i]) * 1000, snapshot)
        tier.wait_written()
        assert tier.stats.memory_bytes <= 10_000 and tier.stats.file_bytes <= 4 * FILE_BLOCK
    # The file has room for four records, all of which are among the ten in memory.
    assert sorted(tier._records) == sorted(b"%d" % i for i in range(20, 30))
    assert len(tier._tails) == 10 and tier.stats.num_dropped == 20
    assert tier.touch(b"20")
    tier.put(b"new", b"x" * 1000)
    assert tier.get(b"20") == bytes([20]) * 1000 and tier.get(b"21") is None
    tier.put(b"too large", b"x" * 10_001)
    assert tier.get(b"too large") is None


def test_the_file_holds_what_memory_lost(make_tier: MakeTier) -> None:
    tier = make_tier(FILE_BLOCK, 8 * FILE_BLOCK)
    size = FILE_BLOCK // 2 + 7
    for i in range(10):
        tier.put(b"%d" % i, bytes([i]) * size)
        tier.wait_written()
    assert tier.stats.memory_bytes == size
    assert [tier.get(b"%d" % i) for i in range(2, 10)] == [bytes([i]) * size for i in range(2, 10)]
    assert tier.get(b"1") is None
    assert tier.stats.file_bytes == 8 * FILE_BLOCK


def test_a_file_that_cannot_be_read_or_written_is_a_miss(make_tier: MakeTier) -> None:
    tier = make_tier(1000, 8 * FILE_BLOCK)
    tier.put(b"a", b"a" * 900)
    tier.wait_written()
    tier.put(b"b", b"b" * 900)
    os.ftruncate(tier._file, 0)
    assert tier.get(b"a") is None and tier.stats.num_failed == 1
    tier.wait_written()
    file, tier._file = tier._file, os.open("/dev/null", os.O_RDONLY)
    tier.put(b"c", b"c" * 900)
    tier.wait_written()
    assert tier.stats.num_failed == 2 and tier.get(b"c") == b"c" * 900
    os.close(tier._file)
    tier._file = file
    assert sum(len(r.blocks) for r in tier._records.values()) + len(tier._free) == 8


def test_the_file_has_no_name(make_tier: MakeTier, tmp_path: Path) -> None:
    """So that prompts are not on the disk any more when the process is gone, however it ended."""
    tier = make_tier(MEGABYTE, 8 * FILE_BLOCK)
    tier.put(b"a", b"a" * 900)
    tier.wait_written()
    assert tier.stats.file_bytes and not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="prefix cache"):
        HostTier(1, FILE_BLOCK, str(tmp_path / "nowhere"))


def test_a_record_without_a_row_is_kept_like_any_other(make_tier: MakeTier) -> None:
    tier = make_tier(1000, 8 * FILE_BLOCK)
    tier.put(b"empty", b"")
    tier.wait_written()
    tier.put(b"a", b"a" * 900)
    tier.put(b"b", b"b" * 900)
    assert tier.get(b"empty") == b"" and tier.stats.num_failed == 0
