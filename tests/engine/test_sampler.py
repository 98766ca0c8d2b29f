"""The sampler: follows the softmax, keyed by (seed, choice, position), independent of the batch."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decant.engine.interface import F32
from decant.engine.noise import gumbel, gumbel_rows
from decant.engine.sampler import History, Row, Sampler
from decant.protocol.messages import Sampling

VOCAB, EOS = 64, 1


def sampler(vocab: int = VOCAB) -> Sampler:
    return Sampler(vocab, EOS)


def some_logits(num: int, seed: int = 0, vocab: int = VOCAB) -> F32:
    return (np.random.default_rng(seed).standard_normal((num, vocab)) * 3).astype(np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max())
    return np.asarray(e / e.sum())


def chi_square(counts: np.ndarray, p: np.ndarray) -> float:
    """z value of the chi-square statistic (cells below 5 expected are pooled)."""
    expected = p * counts.sum()
    big = expected >= 5
    observed = np.append(counts[big], counts[~big].sum())
    wanted = np.append(expected[big], expected[~big].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    x2, df = float(((observed - wanted) ** 2 / wanted).sum()), len(wanted) - 1
    return float((x2 - df) / math.sqrt(2 * df))


def draws(s: Sampling, logits: F32, num: int) -> np.ndarray:
    rows = [Row(s, 0, position, 1) for position in range(num)]
    result = sampler().draw(np.repeat(logits, num, axis=0), rows)
    return np.bincount([d.token_id for d in result], minlength=VOCAB)


def truncated(s: Sampling, logits: F32) -> np.ndarray:
    """The distribution by the definition: sort, cut, renormalise."""
    p = softmax(logits / s.temperature)
    order = np.argsort(-p)
    keep = np.zeros(VOCAB, bool)
    num = s.top_k if s.top_k > 0 else VOCAB
    inside = p[order[:num]] / p[order[:num]].sum()
    before = np.concatenate([[0], np.cumsum(inside)[:-1]])
    keep[order[:num][before < s.top_p]] = True
    keep &= p >= s.min_p * p.max()
    return np.asarray(np.where(keep, p, 0) / p[keep].sum())


@pytest.mark.parametrize(
    "s",
    [
        Sampling(seed=1),
        Sampling(seed=2, temperature=0.6),
        Sampling(seed=3, temperature=1.7, top_p=0.9),
        Sampling(seed=4, top_k=5),
        Sampling(seed=5, top_k=20, top_p=0.8),
        Sampling(seed=6, min_p=0.1),
        Sampling(seed=7, temperature=2.5, top_k=30, top_p=0.95, min_p=0.02),
    ],
    ids=repr,
)
def test_follows_the_softmax(s: Sampling) -> None:
    logits = some_logits(1, 11)
    counts = draws(s, logits, 6_000)
    p = truncated(s, logits[0])
    assert counts[p == 0].sum() == 0
    assert abs(chi_square(counts, p)) < 4


def test_noise_rows_are_independent_and_gumbel() -> None:
    keys = [(7, 0, 5), (-3, 2, 2**32 - 1), (2**63 - 1, 1, 0)]
    for n in (1, 5, 64, 2304):
        rows = gumbel_rows(keys, n)
        assert rows.shape == (3, n)
        for row, key in zip(rows, keys, strict=True):
            assert (row == gumbel(*key, n)).all()
            assert (gumbel(*key, 2304)[:n] == row).all()
    noise = np.sort(gumbel_rows([(1, 0, p) for p in range(200)], 500).reshape(-1))
    expected = np.exp(-np.exp(-noise.astype(np.float64)))  # the distribution function
    assert np.abs(expected - (np.arange(len(noise)) + 0.5) / len(noise)).max() < 0.007


def test_a_wrong_distribution_is_found() -> None:
    logits = some_logits(1, 11)
    counts = draws(Sampling(seed=1, temperature=1.1), logits, 6_000)
    assert chi_square(counts, softmax(logits[0])) > 4


def test_seed_choice_and_position_are_keys() -> None:
    logits = np.zeros((1, VOCAB), np.float32)

    def token(seed: int, choice: int, position: int) -> int:
        row = Row(Sampling(seed=seed), choice, position, 1)
        return sampler().draw(logits, [row])[0].token_id

    base = [token(5, 0, p) for p in range(200)]
    assert base == [token(5, 0, p) for p in range(200)]
    for other in ([token(6, 0, p) for p in range(200)], [token(5, 1, p) for p in range(200)]):
        assert sum(a == b for a, b in zip(base, other, strict=True)) < 20  # 3 expected
    assert len(set(base)) > 40
    assert 0 <= token(-(2**63), 0, 0) < VOCAB


ROWS = st.builds(
    Row,
    st.builds(
        Sampling,
        seed=st.integers(-(2**63), 2**63 - 1),
        temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0, 5.0]),
        top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
        top_k=st.sampled_from([0, 0, 1, 3, 40]),
        min_p=st.sampled_from([0.0, 0.05, 0.5]),
        logprobs=st.sampled_from([-1, 0, 3]),
        min_tokens=st.sampled_from([0, 3]),
        logit_bias=st.sampled_from([{}, {3: 5.0, 9: -100.0}]),
    ),
    st.integers(0, 3),
    st.integers(0, 5000),
    st.integers(0, 5),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=9), st.integers(0, 2**31), st.booleans())
def test_rows_do_not_see_each_other(rows: list[Row], seed: int, is_flat: bool) -> None:
    logits = some_logits(len(rows), seed) * np.float32(0.001 if is_flat else 1)
    together = sampler().draw(logits, rows)
    for i, row in enumerate(rows):
        assert sampler().draw(logits[i : i + 1], [row]) == [together[i]]
    backwards = sampler().draw(np.ascontiguousarray(logits[::-1]), rows[::-1])
    assert backwards[::-1] == together


def test_logits_are_left_alone() -> None:
    logits = some_logits(2)
    before = logits.copy()
    s = Sampling(seed=1, top_p=0.5, logit_bias={3: 1.0}, min_tokens=4)
    sampler().draw(logits, [Row(s, 0, 1, 0)] * 2)
    assert (logits == before).all()


def test_greedy_takes_the_maximum_and_ignores_the_seed() -> None:
    logits = some_logits(5)
    for seed in (0, 1):
        rows = [Row(Sampling(seed=seed, temperature=0, top_p=0.1), 0, 3, 3)] * 5
        result = [d.token_id for d in sampler().draw(logits, rows)]
        assert result == logits.argmax(axis=1).tolist()


def greedy(logits: list[float], s: Sampling, **row: object) -> int:
    x = np.full((1, VOCAB), -50, np.float32)
    x[0, : len(logits)] = logits
    values: dict[str, object] = {"num_output": 9, **row}
    return sampler().draw(x, [Row(s, 0, 10, **values)])[0].token_id  # type: ignore[arg-type]


def test_penalties() -> None:
    flat = [0, 0, 3.0, 2.9, 2.8]

    def with_history(
        prompt: list[int], output: list[int], drafts: tuple[int, ...] = (), **s: float
    ) -> int:
        sampling = Sampling(temperature=0, **s)  # type: ignore[arg-type]
        return greedy(flat, sampling, history=History(VOCAB, prompt, output), drafts=drafts)

    assert with_history([], []) == 2
    assert with_history([], [2], presence_penalty=0.15) == 3
    assert with_history([2], [3], presence_penalty=0.15) == 2  # the prompt does not count
    assert with_history([], [2, 2, 2, 3], frequency_penalty=0.06) == 3
    assert with_history([], [2, 2, 2, 2, 3, 3], frequency_penalty=0.06) == 4
    assert with_history([2], [], repetition_penalty=1.05) == 3  # the prompt counts
    assert with_history([2], [3], repetition_penalty=1.2) == 4
    assert with_history([], [], (2,), presence_penalty=0.15) == 3  # accepted drafts count
    assert with_history([], [], (2, 3), repetition_penalty=1.2) == 4
    history = History(VOCAB, [], [])
    row = {"history": history, "drafts": (2,)}
    assert greedy(flat, Sampling(temperature=0, presence_penalty=1), **row) == 3
    assert history.counts.sum() == 0  # drafts may still be rejected


def test_bias_min_tokens_and_mask() -> None:
    s = Sampling(temperature=0, logit_bias={5: 100.0}, stop_token_ids=[7])
    assert greedy([0, 9.0, 3.0], s) == 5
    ends = Sampling(temperature=0, min_tokens=4, stop_token_ids=[2])
    assert greedy([0, 9.0, 8.0, 1.0], ends, num_output=3) == 3
    assert greedy([0, 9.0, 8.0, 1.0], ends, num_output=4) == EOS
    allowed = np.zeros(VOCAB, bool)
    allowed[[1, 3]] = True
    assert greedy([0, 0, 9.0, 8.0], Sampling(temperature=0), allowed=allowed) == 3
    allowed[3] = False  # the grammar allows the end alone: it wins over min_tokens
    assert greedy([0, 0, 9.0], ends, allowed=allowed, num_output=0) == EOS


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_numbers_give_no_token(bad: float) -> None:
    logits = some_logits(3)
    logits[1, 7 if bad != -np.inf else slice(None)] = bad
    for temperature in (0.0, 1.0):
        rows = [Row(Sampling(temperature=temperature, logprobs=2), 0, 1, 1)] * 3
        result = sampler().draw(logits, rows)
        assert [d.token_id >= 0 for d in result] == [True, False, True]


def test_logprobs_are_the_models() -> None:
    logits = some_logits(1)
    s = Sampling(seed=3, temperature=0.2, top_k=2, logprobs=4, presence_penalty=1.0)
    draw = sampler().draw(logits, [Row(s, 0, 5, 1, History(VOCAB, [], [3]))])[0]
    want = np.log(softmax(logits[0]))
    assert draw.logprob
    assert draw.logprob.token_id == draw.token_id
    assert draw.logprob.logprob == pytest.approx(want[draw.token_id], abs=1e-6)
    assert draw.logprob.top_ids == np.argsort(-want)[:4].tolist()
    assert draw.logprob.top_logprobs == pytest.approx(np.sort(want)[::-1][:4], abs=1e-6)


def test_cost_is_bounded() -> None:
    """Generous: catches a sort a token or a Python loop over the vocabulary, nothing finer."""
    big = Sampler(129_280, EOS, lambda keys, n: np.zeros((len(keys), n), np.float32))
    logits = some_logits(8, vocab=129_280) * np.float32(0.01)  # flat: the hard case for top-k
    rows = [Row(Sampling(top_k=2, top_p=0.9), 0, 1, 1)] * 8
    began = time.perf_counter()
    big.draw(logits, rows)
    assert time.perf_counter() - began < 3
