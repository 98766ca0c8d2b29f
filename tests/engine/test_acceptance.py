"""Acceptance by coupling, and the rule that chooses the depth."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from decant.engine.acceptance import DepthController, accept


@given(st.lists(st.integers(0, 3), max_size=5), st.lists(st.integers(0, 3), min_size=6, max_size=6))
def test_accepts_the_longest_equal_prefix_and_one_more(drafts: list[int], drawn: list[int]) -> None:
    drawn = drawn[: len(drafts) + 1]
    tokens = accept(drafts, drawn)
    num = len(tokens) - 1
    assert tokens == drawn[: num + 1]
    assert drafts[:num] == drawn[:num]
    assert num == len(drafts) or drafts[num] != drawn[num]


def simulate(acceptance: float, per_row_s: float, draft_s: float, batch: int = 4) -> list[int]:
    """Depths chosen in a world where time is linear and drafts hold with one probability."""
    rng, depth = random.Random(1), DepthController(3)
    chosen = []
    for _ in range(1500):
        k = depth.choose(batch)
        chosen.append(k)
        depth.stepped(batch * (1 + k), 0.01 + per_row_s * batch * (1 + k))
        if k:
            depth.drafted(batch * k, draft_s * batch * k)
        for _ in range(batch):
            num = 0
            while num < k and rng.random() < acceptance:
                num += 1
            depth.verified(k, num)
    return chosen[-500:]


def test_good_cheap_drafts_go_deep() -> None:
    assert sum(simulate(0.95, 0.0001, 0.0001)) / 500 > 2.9


def test_bad_drafts_are_not_asked_for() -> None:
    chosen = simulate(0.02, 0.001, 0.001)
    assert sum(chosen) / 500 < 0.2  # the probes only
    assert 3 in chosen  # which go on


def test_costly_rows_make_it_shallow() -> None:
    deep = sum(simulate(0.7, 0.0001, 0.0001)) / 500
    shallow = sum(simulate(0.7, 0.01, 0.003)) / 500
    assert shallow < deep - 1


def test_it_follows_a_change() -> None:
    depth = DepthController(3)
    for _ in range(400):
        depth.stepped(8, 0.01)
        depth.verified(3, 0)
    assert depth.acceptance[0] < 0.05
    for _ in range(400):
        depth.verified(3, 3)
    assert min(depth.acceptance) > 0.95


def test_fixed_depth_and_none() -> None:
    assert {DepthController(2, is_adaptive=False).choose(b) for b in range(1, 40)} == {2}
    assert {DepthController(0).choose(b) for b in range(1, 40)} == {0}
