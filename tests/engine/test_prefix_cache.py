"""The prefix cache: hits are exact, reported truthfully, bounded, and never cross a salt."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest
from cluster import Cluster, Job
from fake_engine import reference_tokens

from decant.engine.kv_pages import Books
from decant.engine.prefix_cache import CUT_FROM, MIN_TOKENS, WINDOW_REPEATS, PrefixCache
from decant.protocol.messages import Sampling


def ids(seed: int, num: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 48) for _ in range(num)]


def run(c: Cluster, name: str, prompt: list[int], salt: str = "", **sampling: int) -> Job:
    s = Sampling(seed=1, temperature=0.8, **{"max_tokens": 4, **sampling})  # type: ignore[arg-type]
    job = c.submit(Job(name, prompt, s, salt=salt))
    c.run()
    for _ in range(200):
        c.step()
    assert job.outputs[0] == reference_tokens(prompt, s)
    return job


def test_a_conversation_pays_for_its_new_tokens_only() -> None:
    c = Cluster()
    history: list[int] = ids(1, 450)
    assert run(c, "t0", history).num_cached == 0
    for turn in range(1, 4):
        history += ids(turn + 1, 150)
        before = c.fake_prefill.num_prefilled
        want = len(history) - 150
        assert run(c, f"t{turn}", history).num_cached == want
        assert c.fake_prefill.num_prefilled - before == len(history) - want
    c.settle()
    c.close()


def test_a_turn_whose_first_prompt_ended_otherwise_hits_the_cut() -> None:
    """As when the last tokens open a part that history leaves out."""
    c = Cluster()
    history = ids(1, 450)
    run(c, "a", history)
    assert run(c, "b", history[:-1] + ids(2, 100)).num_cached == 384
    c.settle()
    c.close()


@pytest.mark.parametrize("num", [5, 32, 100, 127, 128, 129, 256, 257, 384, 390])
def test_the_same_prompt_again(num: int) -> None:
    """At every edge of page and block; a prompt that is cached whole is not computed at all."""
    c = Cluster()
    first = run(c, "a", ids(1, num))
    again = run(c, "b", ids(1, num))
    assert (first.num_cached, again.num_cached) == (0, num if num >= MIN_TOKENS else 0)
    c.settle()
    c.close()


def test_a_prefix_that_prompts_share_hits_from_the_third_on() -> None:
    c = Cluster()
    system = ids(1, 300)
    cached = [run(c, f"r{i}", system + ids(10 + i, 140)).num_cached for i in range(4)]
    assert cached == [0, 0, 256, 256]
    c.settle()
    c.close()


def test_salt_and_model_separate() -> None:
    c = Cluster()
    assert run(c, "a", ids(1, 300), salt="x").num_cached == 0
    assert run(c, "b", ids(1, 300), salt="y").num_cached == 0
    assert run(c, "c", ids(1, 300), salt="x").num_cached == 300
    c.settle()
    c.close()
    books = Books(1, 1)
    some = array("i", ids(1, 128))
    digests = {
        PrefixCache(books, 128, model, layout).digests(some, salt)[1]
        for model, layout, salt in (("m", "l", ""), ("n", "l", ""), ("m", "k", ""), ("m", "l", "s"))
    }
    assert len(digests) == 4


@pytest.mark.parametrize("seed", range(8))
def test_random_conversations_in_any_order(seed: int) -> None:
    """Shared prefixes, cancels, a small pool: exact tokens, truthful counts, nothing leaks."""
    rng = random.Random(seed)
    c = Cluster(seed=seed, prefill_pages=rng.choice([8, 14, 24]))
    roots = [ids(100 + i, rng.choice([128, 200, 260])) for i in range(3)]
    for i in range(24):
        prompt = list(rng.choice(roots))
        prompt += ids(rng.randrange(6), rng.choice([0, 1, 100, 128, 300]))
        if rng.random() < 0.3:
            roots.append(prompt[: rng.randrange(1, len(prompt) + 1)])
        s = Sampling(seed=i, max_tokens=rng.choice([1, 5, 20]))
        job = c.submit(Job(f"r{i}", prompt, s, num_choices=rng.choice([1, 1, 2])))
        for _ in range(rng.randrange(120)):
            c.step()
        if rng.random() < 0.2 and not job.is_done:
            c.cancel(job)
    c.run()
    for job in c.jobs.values():
        if not job.is_cancelled:
            for choice in range(job.num_choices):
                assert job.outputs[choice] == reference_tokens(job.prompt, job.sampling, choice)
            assert 0 <= job.num_cached <= len(job.prompt) + 20
    cache = c.prefill.cache
    assert cache is not None
    assert cache.num_hits > 3
    c.settle()
    c.close()


def test_a_busy_pool_evicts_but_never_what_a_lane_holds() -> None:
    c = Cluster(prefill_pages=8)
    for i in range(6):
        run(c, f"r{i}", ids(i, 380))
    cache = c.prefill.cache
    assert cache is not None
    assert cache.num_evicted > 0
    assert len(cache) > 0
    job = c.submit(Job("long", ids(50, 1000), Sampling(max_tokens=2)))  # needs the whole pool
    c.run()
    assert job.outputs[0] == reference_tokens(job.prompt, job.sampling)
    c.settle()
    c.close()


def test_a_prompt_that_needs_the_whole_pool_gives_up_what_it_hits() -> None:
    """Its prefix has an open page, for which there is no room beside the prompt."""
    c = Cluster(prefill_pages=8)
    first = ids(1, 300)
    run(c, "a", first)
    assert run(c, "b", first + ids(2, 724)).num_cached == 0  # eight pages
    c.settle()
    c.close()


def test_a_snapshot_costs_no_chunk_more_unless_the_prompt_is_long() -> None:
    cache = PrefixCache(Books(1, 1), 256, "m", "l")

    def points(seed: int, num: int) -> list[int]:
        some = array("i", ids(seed, num))
        return cache.points(cache.digests(some, ""), num, 0, 256)

    assert points(1, 20) == []
    assert points(2, 100) == [100]
    assert points(3, 200) == [200]  # 128 + 72 would be two chunks
    assert points(4, 300) == [256, 300]
    assert points(5, 700) == [700]
    assert points(6, CUT_FROM + 76) == [1024, 1100]
    assert points(7, 9000) == [4096, 8192, 8960, 9000]
    assert points(2, 100) == [100]
    assert points(5, 690) == [640, 690]  # the part that the two share, seen before


def test_without_cache_nothing_is_kept() -> None:
    c = Cluster(cache=False)
    run(c, "a", ids(1, 300))
    assert run(c, "b", ids(1, 300)).num_cached == 0
    c.settle()
    c.close()


@pytest.mark.parametrize("what", ["page", "open page", "slot"])
@pytest.mark.parametrize("more", [0, 70])
def test_what_changed_in_the_cache_is_noticed_and_not_used(what: str, more: int) -> None:
    """One flipped bit: the lane begins again without the entry; nobody sees it, nothing leaks."""
    c = Cluster()
    prompt = ids(1, 450)
    run(c, "a", prompt)
    cache = c.prefill.cache
    assert cache is not None
    entry = cache.lookup(cache.digests(array("i", prompt), ""), array("i", prompt))
    assert entry is not None and entry.num_tokens == 450
    pool = c.fake_prefill.pool
    if what == "slot":
        pool.slots[entry.slot]["ring"][440 % 160] ^= np.uint64(1)
    else:
        pool.pages[entry.pages[1 if what == "page" else 3], 5] ^= 1
    assert run(c, "b", prompt + ids(2, more)).num_cached < 450
    assert cache.num_corrupt == 1 and c.jobs["b"].num_resumes == 0
    assert run(c, "c", prompt + ids(2, more)).num_cached == 450 + more
    assert cache.num_corrupt == 1
    c.settle()
    c.close()


def test_flush_forgets_but_does_not_touch_what_is_held() -> None:
    c = Cluster()
    run(c, "a", ids(1, 300))
    job = c.submit(Job("b", ids(1, 300) + ids(2, 500), Sampling(max_tokens=5)))
    while not (c.prefill.lanes and next(iter(c.prefill.lanes.values())).pages):
        c.step()
    assert c.prefill.flush() > 0
    c.run()
    assert job.num_cached == 300
    assert job.outputs[0] == reference_tokens(job.prompt, job.sampling)
    c.prefill.flush()
    assert c.prefill.stats()["pages_cached"] == 0
    assert run(c, "c", ids(1, 300)).num_cached == 0
    c.settle()
    c.close()


def test_a_budget_bounds_what_is_kept() -> None:
    c = Cluster(cache_pages=5)
    for i in range(4):
        run(c, f"r{i}", ids(i, 300))
        assert c.prefill.stats()["pages_cached"] <= 5
        assert c.decode.stats()["pages_cached"] <= 5
    assert run(c, "again", ids(3, 300)).num_cached == 300
    c.settle()
    c.close()


def test_a_cache_that_never_hits_though_prefixes_repeat_says_so() -> None:
    def look(hit: int) -> None:
        some = array("i", ids(1, 300))
        cache.points(cache.digests(some, ""), 300, hit, 256)

    cache = PrefixCache(Books(1, 1), 256, "m", "l")
    for i in range(40):
        some = array("i", ids(100 + i, 300))
        cache.points(cache.digests(some, ""), 300, 0, 256)
    assert not cache.is_useless  # nothing repeats
    for _ in range(WINDOW_REPEATS + 1):
        assert not cache.is_useless
        look(0)
    assert cache.is_useless
    look(300)
    assert not cache.is_useless
