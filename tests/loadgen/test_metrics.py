"""Each metric against its definition, in small round numbers of nanoseconds."""

from __future__ import annotations

import pytest

from decant.loadgen import metrics
from decant.loadgen.metrics import Slo
from decant.loadgen.plan import Record


def record(**fields: object) -> Record:
    found = Record(0, outcome="ok", finish_reason="stop")
    for name, value in fields.items():
        setattr(found, name, value)
    return found


def test_ttft() -> None:
    """Start 100 ns, first token 110 ns: TTFT 10 ns."""
    assert metrics.ttft_ns(record(sent_ns=100, chunk_ns=[110, 130])) == 10


def test_ttft_of_no_token() -> None:
    assert metrics.ttft_ns(record(sent_ns=100)) is None


def test_ttft_from_due_time_counts_our_own_lateness() -> None:
    """Due at 90, sent at 100, first token at 110: the user waited 20 ns."""
    assert metrics.due_ttft_ns(record(due_ns=90, sent_ns=100, chunk_ns=[110])) == 20


def test_lateness() -> None:
    """Due at 90, sent at 100: 10 ns late."""
    assert metrics.lateness_ns(record(due_ns=90, sent_ns=100)) == 10


def test_e2e() -> None:
    """Start 100 ns, last token 150 ns: E2E 50 ns."""
    assert metrics.e2e_ns(record(sent_ns=100, chunk_ns=[110, 150], end_ns=155)) == 50


def test_tpot_divides_by_tokens_not_chunks() -> None:
    """First token 110 ns, last 150 ns, 5 tokens in 2 chunks: 40 ns for the 4 after the first."""
    assert metrics.tpot_ns(record(chunk_ns=[110, 150], num_output_tokens=5)) == 10


@pytest.mark.parametrize("num", [-1, 0, 1])
def test_tpot_needs_two_tokens(num: int) -> None:
    assert metrics.tpot_ns(record(chunk_ns=[110], num_output_tokens=num)) is None


def test_itl_and_longest_stall() -> None:
    """Arrivals at 110, 120, 150: gaps of 10 and 30, the longest stall is 30."""
    r = record(chunk_ns=[110, 120, 150])
    assert metrics.itl_ns(r) == [10, 30]
    assert metrics.longest_stall_ns(r) == 30


def test_percentile_interpolates() -> None:
    """Of 10, 20, 30, 40: the median is 25, the 0th 10, the 100th 40, the 90th 37."""
    values = [40, 10, 30, 20]
    assert [metrics.percentile(values, q) for q in (0, 50, 90, 100)] == [10, 25, 37, 40]
    assert metrics.percentile([], 50) is None


def two_seconds() -> list[Record]:
    """Three requests within 2 s; the third failed."""
    return [
        record(due_ns=1, sent_ns=1, chunk_ns=[100], end_ns=1_000_000_001, num_output_tokens=30),
        record(due_ns=2, sent_ns=2, chunk_ns=[900], end_ns=2_000_000_001, num_output_tokens=10),
        record(due_ns=3, sent_ns=3, end_ns=4, outcome="error"),
    ]


def test_throughput() -> None:
    """Two good requests with 40 tokens in 2 s: 1 request/s, 20 tokens/s."""
    records = two_seconds()
    assert metrics.duration_s(records) == 2
    assert metrics.request_throughput(records) == 1
    assert metrics.output_throughput(records) == 20


def test_total_throughput_adds_prompts() -> None:
    records = two_seconds()
    for r in records[:2]:
        r.num_prompt_tokens = 100
    assert metrics.total_throughput(records) == (200 + 40) / 2


def test_goodput_and_attainment() -> None:
    """TTFT within 500 ns: one of three requests, in 2 s."""
    slos = {"": Slo(ttft_ns=500)}
    assert metrics.goodput(two_seconds(), slos) == 0.5
    assert metrics.attainment(two_seconds(), slos) == pytest.approx(1 / 3)


def test_goodput_looks_at_the_due_time() -> None:
    """A generator that sends late does not make the server look good."""
    r = record(due_ns=0, sent_ns=1000, chunk_ns=[1010])
    assert metrics.ttft_ns(r) == 10
    assert not metrics.is_good(r, Slo(ttft_ns=100))


def test_attainment_ignores_what_the_plan_cancelled() -> None:
    records = [*two_seconds(), record(outcome="cancelled", chunk_ns=[5])]
    assert metrics.attainment(records, {"": Slo()}) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(ttft_ns=10), True),
        (Slo(ttft_ns=9), False),
        (Slo(e2e_ns=50), True),
        (Slo(e2e_ns=49), False),
        (Slo(tpot_ns=10), True),
        (Slo(tpot_ns=9), False),
        (Slo(stall_ns=40), True),
        (Slo(stall_ns=39), False),
        (Slo(), True),
    ],
)
def test_bounds_are_inclusive(slo: Slo, good: bool) -> None:
    r = record(due_ns=100, sent_ns=100, chunk_ns=[110, 150], num_output_tokens=5)
    assert metrics.is_good(r, slo) is good


def test_acceptance() -> None:
    """10 steps accepted 15 of 20 drafts: 2.5 tokens a step (the bonus token counts), rate 0.75."""
    r = record(num_steps=10, num_drafted=20, num_accepted=15)
    assert metrics.acceptance_length([r]) == 2.5
    assert metrics.acceptance_rate([r]) == 0.75
    assert metrics.acceptance_length([record()]) is None
    assert metrics.acceptance_rate([record()]) is None


def test_acceptance_weighs_by_steps() -> None:
    """1 step with 3 accepted and 9 steps with none: 1 + 3 / 10."""
    records = [record(num_steps=1, num_accepted=3), record(num_steps=9)]
    assert metrics.acceptance_length(records) == 1.3


def test_offered_rate() -> None:
    """Due at 0 s, 1 s, 2 s: one request a second."""
    assert metrics.offered_rate([record(due_ns=i * 1_000_000_000) for i in range(3)]) == 1


def test_handoff_share() -> None:
    """1 ms of hand-off in 4 ms until the first token: a quarter."""
    r = record(sent_ns=0, chunk_ns=[4_000_000], stages_ms={"handoff": 1.0})
    assert metrics.handoff_share(r) == 0.25


def test_concurrency() -> None:
    """Two requests of 1 s each in 2 s: one in flight on average."""
    records = [
        record(sent_ns=1, end_ns=1_000_000_001),
        record(sent_ns=1_000_000_001, end_ns=2_000_000_001),
    ]
    assert metrics.concurrency(records) == 1
