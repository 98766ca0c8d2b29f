"""Schedules: seeded, in order, with the rate and spread that they promise."""

from __future__ import annotations

import statistics

import pytest

from decant.loadgen import arrivals, lengths
from decant.protocol.errors import InvalidRequest

NS = 1_000_000_000


def gaps(times: list[int]) -> list[int]:
    return [b - a for a, b in zip(times, times[1:], strict=False)]


@pytest.mark.parametrize("kind", arrivals.KINDS)
def test_same_seed_same_schedule(kind: str) -> None:
    one, two, other = (arrivals.schedule(kind, 10, seed, num=200, rate_to=20) for seed in (1, 1, 2))
    assert one == two
    assert one == sorted(one)
    assert len(one) == 200
    assert (one != other) == (kind not in ("constant", "burst"))


def test_constant_is_exact() -> None:
    assert arrivals.schedule("constant", 4, 0, num=3) == [0, NS // 4, NS // 2]


def test_constant_does_not_drift() -> None:
    assert arrivals.schedule("constant", 3, 0, num=3_000_001)[-1] == 1_000_000 * NS


def test_poisson_mean_and_spread() -> None:
    """Exponential gaps: mean = standard deviation = 1 / rate (5 sigma of 20,000 gaps)."""
    found = gaps(arrivals.schedule("poisson", 100, 5, num=20_001))
    assert statistics.mean(found) == pytest.approx(NS / 100, rel=0.036)
    assert statistics.stdev(found) == pytest.approx(NS / 100, rel=0.06)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_gamma_spread(burstiness: float) -> None:
    """Coefficient of variation = 1 / sqrt(burstiness)."""
    found = gaps(arrivals.schedule("gamma", 100, 5, num=40_001, burstiness=burstiness))
    variation = statistics.stdev(found) / statistics.mean(found)
    assert variation == pytest.approx(burstiness**-0.5, rel=0.08)


def test_burst() -> None:
    times = arrivals.schedule("burst", 8, 0, num=8, burst_size=4)
    assert times == [0] * 4 + [NS // 2] * 4


def test_ramp_has_the_expected_numbers() -> None:
    """From 0 to 200/s in 10 s: 250 in the first half, 750 in the second, then 200/s."""
    times = arrivals.schedule("ramp", 1e-9, 3, duration_s=10, rate_to=200)
    first = sum(t < 5 * NS for t in times)
    assert first == pytest.approx(250, abs=80)
    assert len(times) - first == pytest.approx(750, abs=140)


def test_ramp_down_is_a_ramp_too() -> None:
    times = arrivals.schedule("ramp", 200, 3, duration_s=10, rate_to=2)
    assert times == sorted(times)
    assert sum(t < 5 * NS for t in times) > 2 * sum(t >= 5 * NS for t in times)


def test_duration_ends_it() -> None:
    assert arrivals.schedule("constant", 10, 0, duration_s=0.5) == [i * NS // 10 for i in range(5)]


@pytest.mark.parametrize(
    "bad",
    [
        {"kind": "sometimes"},
        {"rate": 0},
        {"rate": -1},
        {"rate": float("nan")},
        {"rate": float("inf")},
        {"num": 0},
        {"kind": "gamma", "burstiness": 0},
        {"kind": "burst", "burst_size": 0},
        {"kind": "ramp"},
    ],
)
def test_bad_numbers_are_refused(bad: dict[str, float]) -> None:
    good: dict[str, object] = {"kind": "poisson", "rate": 1.0, "num": 5, "seed": 0}
    with pytest.raises(InvalidRequest):
        arrivals.schedule(**{**good, **bad})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [("7", 7, 7), ("uniform:3:9", 3, 9), ("normal:100:10", 20, 180), ("lognormal:100:1", 1, 9999)],
)
def test_lengths(text: str, low: int, high: int) -> None:
    from random import Random

    draw = lengths.parse(text)
    found = [draw(Random(i)) for i in range(300)]
    assert low <= min(found) <= max(found) <= high
    assert (len(set(found)) == 1) == (text == "7")


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "nan", "uniform:5", "uniform:9:3", "zipf:1:2", "1:2", "normal:1:2:3"]
)
def test_bad_lengths(text: str) -> None:
    with pytest.raises(InvalidRequest):
        lengths.parse(text)


def test_lengths_are_bounded() -> None:
    from random import Random

    draw = lengths.parse("normal:5:100", 50)
    assert {1, 50} <= {draw(Random(i)) for i in range(200)}
