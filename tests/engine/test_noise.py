"""The noise of a draw: known Philox vectors, distribution, independence of what is not its key."""

from __future__ import annotations

import numpy as np

from decant.engine.noise import gumbel, philox


def test_known_vectors() -> None:
    """Random123's kat_vectors for philox4x32-10, those whose fourth counter word is ours (0)."""
    assert philox(0, 0, 0, 1)[0].tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_blocks_do_not_depend_on_how_many() -> None:
    assert np.array_equal(philox(7, 1, 30, 100)[:13], philox(7, 1, 30, 13))
    assert np.array_equal(gumbel(7, 1, 30, 403)[:50], gumbel(7, 1, 30, 50))


def test_every_part_of_the_key_matters() -> None:
    keys = [(1, 0, 0), (2, 0, 0), (1 + 2**32, 0, 0), (-1, 0, 0), (1, 1, 0), (1, 0, 1), (1, 1, 1)]
    drawn = {gumbel(*key, 8).tobytes() for key in keys}
    assert len(drawn) == len(keys)
    assert np.array_equal(gumbel(-1, 0, 0, 8), gumbel(2**64 - 1, 0, 0, 8))


def test_distribution() -> None:
    """Standard Gumbel: mean = Euler's constant, variance = pi^2 / 6; argmax is uniform."""
    x = np.concatenate([gumbel(5, 0, p, 2304) for p in range(200)]).astype(np.float64)
    assert np.isfinite(x).all()
    assert abs(x.mean() - 0.57722) < 0.01
    assert abs(x.var() - np.pi**2 / 6) < 0.02
    wins = np.bincount([int(gumbel(9, 0, p, 8).argmax()) for p in range(4000)], minlength=8)
    assert ((wins - 500) ** 2 / 500).sum() < 24.3  # chi-square, 7 degrees of freedom, p = 0.001
