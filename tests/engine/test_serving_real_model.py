"""The schedulers over the real CPU engine: whatever the machinery does, the tokens are the same.

A stream is compared with the plainest way to get it: alone, own prefill in one chunk, no drafts, no
cache, step by step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, Job

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
    decode=DecodeConfig(pages=40, slots=12, max_batch=6),
    draft=DraftConfig(num_drafts=3),
    kv=KVConfig(page_tokens=128, max_drafts=3),
)


def start(**settings: int) -> Cluster:
    engines = (load_engine(CONFIG, "prefill"), load_engine(CONFIG, "decode"), load_draft(CONFIG))
    return Cluster(engines=engines, **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plain() -> Iterator[Cluster]:
    """No hand-off, no drafts, no cache, one chunk, one at a time."""
    cluster = start(num_drafts=0, chunk_tokens=1024)
    yield cluster
    cluster.close()


def tokens(plain: Cluster, job: Job) -> dict[int, list[int]]:
    """What the choices of a job must be."""
    result = {}
    for choice in range(job.num_choices):
        name = f"{job.request_id}/{choice}/{len(plain.jobs)}"
        # n = choice + 1, and the last one of it: the noise is keyed by the choice
        reference = Job(name, job.prompt, job.sampling, choice + 1, local=True)
        plain.submit(reference)
        plain.run()
        plain.cancel(reference)
        plain.run()
        result[choice] = reference.outputs[choice]
    return result


def prompt(seed: int, num: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 150) for _ in range(num)]


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_all_of_it_gives_the_plain_tokens(plain: Cluster, num_drafts: int) -> None:
    """Hand-off, chunks, batches, n = 2, cache, drafts, preemption, in random order."""
    cluster = start(seed=num_drafts, num_drafts=num_drafts, chunk_tokens=90)
    lengths = [5, 127, 128, 129, 131, 200, 256, 257]
    for i, length in enumerate(lengths):
        s = Sampling(
            seed=i,
            temperature=[0.0, 0.8][i % 2],
            top_p=[1.0, 0.95][i // 4],
            max_tokens=20,
            frequency_penalty=[0.0, 0.3][i % 3 == 2],
        )
        cluster.submit(Job(f"r{i}", prompt(i // 2, length), s, num_choices=1 + (i % 4 == 3)))
    cluster.run()
    for job in cluster.jobs.values():
        assert job.outputs == tokens(plain, job), job.request_id
    assert (cluster.decode.speculation.num_accepted > 0) == (num_drafts > 0)
    cluster.settle()
    cluster.close()


@pytest.mark.parametrize("length", [127, 128, 255, 386])
def test_a_cached_prefix_changes_no_token(plain: Cluster, length: int) -> None:
    """Whole and partial hits at the edges of blocks and pages."""
    cluster = start(num_drafts=2)
    s = Sampling(seed=length, temperature=0.7, max_tokens=12)
    for name, more, num_cached in (("first", 0, 0), ("again", 0, None), ("turn", 70, None)):
        job = cluster.submit(Job(name, prompt(1, length) + prompt(2, more), s))
        cluster.run()
        for _ in range(60):
            cluster.step()
        assert job.num_cached == (length if num_cached is None else num_cached)
        assert job.outputs == tokens(plain, job), name
    cluster.settle()
    cluster.close()


def test_resumed_streams_go_on_with_the_same_tokens(plain: Cluster) -> None:
    """A loss in mid-stream: prompt and output so far are prefilled again, in chunks."""
    cluster = start(num_drafts=3)
    jobs = []
    for i in range(3):
        s = Sampling(seed=i, temperature=0.9, max_tokens=16, presence_penalty=0.2)
        jobs.append(cluster.submit(Job(f"r{i}", prompt(i, 60 + 35 * i), s, num_choices=1 + i % 2)))
    while min(len(o) for job in jobs for o in job.outputs.values()) < 6:
        cluster.step()
    cluster.decode.hand_back("a test")
    cluster._collect()
    cluster.run()
    for job in jobs:
        assert job.num_resumes > 0 or job.is_done
        assert job.outputs == tokens(plain, job)
    cluster.settle()
    cluster.close()
