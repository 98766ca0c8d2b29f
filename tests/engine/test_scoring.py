"""Scores of a prompt: the same as decoding it token by token would give, whatever the chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from decant.engine.cpu_engine import CpuEngine
from decant.engine.interface import PrefillChunk, Scores, SlotRows, StepPlan
from decant.engine.sampler import Row, Sampler
from decant.engine.scoring import score
from decant.protocol.messages import Sampling, TokenLogprob

TABLE = (0, 1)
TOTAL = 142  # over the page's end; 1 more than a multiple of 3
IDS = np.random.default_rng(3).integers(0, 152, TOTAL).astype(np.int32)


@pytest.fixture(scope="module")
def engine(make_engine: Any) -> CpuEngine:
    made: CpuEngine = make_engine("trunk-topk")
    return made


def chunked(engine: CpuEngine, ids: Any, size: int) -> Scores:
    engine.clear_slot(0)
    parts = []
    for at in range(0, len(ids), size):
        following = int(ids[at + size]) if at + size < len(ids) else -1
        chunk = PrefillChunk(0, at, ids[at : at + size], TABLE, following, 3)
        scores = engine.step(StepPlan(0, (), chunk)).scores
        assert scores is not None
        parts.append(scores)
    return Scores(*(np.concatenate([getattr(p, f) for p in parts]) for f in Scores.__annotations__))


@pytest.fixture(scope="module")
def decoded(engine: CpuEngine) -> list[tuple[TokenLogprob, int]]:
    """Each token after the first under the model, with its rank, from decode rows."""
    engine.clear_slot(1)
    sampler, out = Sampler(engine.vocab_size, engine.eos_token_id), []
    for at in range(0, TOTAL - 1, 3):
        rows = SlotRows(1, at, tuple(int(i) for i in IDS[at : at + 3]), (2, 3))
        logits = engine.step(StepPlan(0, (rows,))).logits
        for row, token in zip(logits, IDS[at + 1 : at + 4], strict=True):
            forced = np.zeros(engine.vocab_size, np.bool_)
            forced[token] = True
            ask = Row(Sampling(logprobs=3, temperature=0.0), 0, 0, 0, allowed=forced)
            wanted = sampler.draw(row[None], [ask])[0].logprob
            assert wanted is not None
            out.append((wanted, 1 + int((row > row[token]).sum())))
    return out


@pytest.mark.parametrize("size", [13, 64, 256])
def test_chunks_score_as_decoding_does(
    size: int, engine: CpuEngine, decoded: list[tuple[TokenLogprob, int]]
) -> None:
    found = chunked(engine, IDS, size)
    assert found.logprobs.shape == (TOTAL - 1,) and found.top_ids.shape == (TOTAL - 1, 3)
    for at, (wanted, rank) in enumerate(decoded):
        assert found.logprobs[at] == np.float32(wanted.logprob)
        assert found.ranks[at] == rank
        assert found.top_ids[at].tolist() == wanted.top_ids
        assert found.top_logprobs[at].tolist() == np.array(wanted.top_logprobs, np.float32).tolist()


def test_nothing_is_scored_unless_asked_for(engine: CpuEngine) -> None:
    engine.clear_slot(0)
    chunk = PrefillChunk(0, 0, np.array([3, 4], np.int32), TABLE)
    assert engine.step(StepPlan(0, (), chunk)).scores is None


def test_a_single_token_has_no_score(engine: CpuEngine) -> None:
    engine.clear_slot(0)
    chunk = PrefillChunk(0, 0, np.array([3], np.int32), TABLE, -1, 2)
    scores = engine.step(StepPlan(0, (), chunk)).scores
    assert scores is not None and scores.logprobs.shape == (0,) and scores.top_ids.shape == (0, 2)


def test_probabilities_of_a_known_row() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.125]], np.float32))
    scores = score(logits, np.array([2], np.int32), 2)
    assert scores.ranks.tolist() == [3] and scores.top_ids.tolist() == [[0, 1]]
    assert np.allclose(np.exp(scores.logprobs), [0.125])
    assert np.allclose(np.exp(scores.top_logprobs), [[0.5, 0.25]])
