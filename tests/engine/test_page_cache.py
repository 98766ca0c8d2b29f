"""The page cache of decode: only what it lacks travels, and what it has is checked before use."""

from __future__ import annotations

import random
from array import array

import pytest
from cluster import Cluster, Job
from fake_engine import PAGE_TOKENS, reference_tokens

from decant.engine.kv_pages import Ledger
from decant.engine.page_cache import PageCache
from decant.protocol.errors import KVPageError
from decant.protocol.messages import Sampling


def ids(seed: int, num: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 48) for _ in range(num)]


def run(c: Cluster, name: str, prompt: list[int], salt: str = "", n: int = 1, num: int = 4) -> int:
    """Run a request to its end and check it. Returns: pages that travelled."""
    s = Sampling(seed=1, temperature=0.8, max_tokens=num, ignore_eos=True)
    before = c.num_pulled_pages
    job = c.submit(Job(name, prompt, s, n, salt=salt))
    c.run()
    for _ in range(200):
        c.step()
    for choice in range(n):
        assert job.outputs[choice] == reference_tokens(prompt, s, choice)
    c.cancel(job)
    c.run()
    return c.num_pulled_pages - before


def test_a_turn_pulls_only_the_pages_that_decode_does_not_have() -> None:
    c = Cluster()
    assert run(c, "a", ids(1, 300)) == 3
    assert run(c, "b", ids(1, 300) + ids(2, 100)) == 2  # 400 tokens: four pages, two are here
    assert run(c, "c", ids(1, 300) + ids(2, 100)) == 1  # the open one always travels
    assert run(c, "d", ids(1, 128)) == 0
    assert run(c, "e", ids(3, 128)) == 1
    assert run(c, "f", ids(1, 128), salt="another tenant") == 1
    assert c.decode.flush() > 0
    assert run(c, "g", ids(1, 300)) == 3
    c.settle()
    c.close()


def test_the_answer_is_kept_as_well() -> None:
    """Pages that decode filled by itself count for the next turn, once they are sealed."""
    c = Cluster()
    s = Sampling(seed=1, temperature=0.8, max_tokens=300, ignore_eos=True)
    answer = reference_tokens(ids(1, 200), s)
    assert run(c, "a", ids(1, 200), num=300) == 2
    assert run(c, "b", ids(1, 200) + answer + ids(2, 30)) == 2  # of 530 tokens: 499 are known
    assert run(c, "c", ids(1, 200), num=300, n=3) == 1
    c.settle()
    c.close()


@pytest.mark.parametrize("is_answer", [False, True])
def test_a_page_that_changed_is_noticed_and_not_used(is_answer: bool) -> None:
    c = Cluster()
    prompt = ids(1, 300)
    run(c, "a", prompt, num=200)
    if is_answer:
        s = Sampling(seed=1, temperature=0.8, max_tokens=200, ignore_eos=True)
        prompt += reference_tokens(prompt, s)
    cache = c.decode.cache
    assert cache is not None
    kept = cache.lookup(cache.digests(array("i", prompt), ""))
    assert len(kept) == (3 if is_answer else 2)
    c.fake_decode.pool.pages[kept[-1][0]][PAGE_TOKENS // 2] ^= 1
    run(c, "b", prompt + ids(2, 50))  # lost, resumed, exact
    assert c.jobs["b"].num_resumes == 1
    assert cache.num_corrupt > 0
    run(c, "c", prompt + ids(2, 50))
    assert c.jobs["c"].num_resumes == 0
    c.settle()
    c.close()


@pytest.mark.parametrize("seed", range(6))
def test_random_conversations_in_a_small_pool(seed: int) -> None:
    """Turns, forks, cancels, preemption, drafts: exact tokens, and nothing is held at the end."""
    rng = random.Random(seed)
    c = Cluster(seed=seed, num_pages=rng.choice([14, 20]), num_drafts=rng.choice([0, 3]))
    talks = [ids(100 + i, rng.choice([100, 128, 260])) for i in range(3)]
    for i in range(16):
        talk = rng.choice(talks)
        s = Sampling(seed=i, max_tokens=rng.choice([1, 20, 150]), ignore_eos=True)
        job = c.submit(Job(f"r{i}", list(talk), s, num_choices=rng.choice([1, 1, 2])))
        for _ in range(rng.randrange(250)):
            c.step()
        if rng.random() < 0.15 and not job.is_done:
            c.cancel(job)
        elif rng.random() < 0.6 and len(talk) < 500:
            talk += reference_tokens(talk, s) + ids(i, rng.choice([1, 40, 128]))
    c.run()
    for job in c.jobs.values():
        if not job.is_cancelled:
            for choice in range(job.num_choices):
                assert job.outputs[choice] == reference_tokens(job.prompt, job.sampling, choice)
    cache = c.decode.cache
    assert cache is not None and cache.num_hit_pages > 3 and cache.num_corrupt == 0
    c.settle()
    c.close()


def test_room_is_made_of_what_nobody_holds_oldest_and_last_first() -> None:
    pages = Ledger(4)
    cache = PageCache(pages, 2, "m")
    held = pages.reserve("a", 4)
    pages.activate("a", held)
    digests = cache.digests(array("i", range(1, 9)), "")
    assert cache.offer(digests, held, [10, 11, 12, 13]) is None
    assert not cache.make_room(1)  # all are held
    pages.release("a", held[1:])
    assert cache.make_room(1)
    assert cache.lookup(digests) == list(zip(held[:3], [10, 11, 12], strict=True))
    assert pages.reserve("b", 1) == [held[3]]
    assert cache.make_room(2) and not cache.make_room(3)
    assert cache.lookup(digests) == [(held[0], 10)]
    pages.check()


def test_a_seal_that_comes_late_is_ignored() -> None:
    pages = Ledger(2)
    cache = PageCache(pages, 2, "m", max_pages=1)
    (page,) = pages.reserve("a", 1)
    with pytest.raises(KVPageError):
        cache.offer([b"d"], [page], None)  # nothing valid is in it
    pages.activate("a", [page])
    first = cache.offer([b"d"], [page], None)
    assert first is not None and first.pages == (page,)
    assert cache.lookup([b"d"]) == []  # not sealed
    cache.clear()
    again = cache.offer([b"d"], [page], None)
    assert again is not None
    cache.sealed(first, [1])
    assert cache.lookup([b"d"]) == []
    cache.sealed(again, [2])
    assert cache.lookup([b"d"]) == [(page, 2)]
    (other,) = pages.reserve("b", 1)
    pages.activate("b", [other])
    assert cache.offer([b"e"], [other], [3]) is None
    assert len(cache) == 1 and cache.lookup([b"d"]) == []  # max_pages: the older one went
