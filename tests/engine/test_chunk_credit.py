"""The credit law of mixed steps: what decode slots lose to chunks, and that chunks get on."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest

from decant.engine.chunk_credit import GRAIN, ChunkCredit
from decant.engine.decode_batch import Limits, StepOutput
from decant.engine.decode_scheduler import DecodeScheduler
from decant.engine.sampler import Draw
from decant.protocol.config import Config, DecodeConfig
from decant.protocol.errors import ConfigError
from decant.protocol.messages import Reserve, Sampling


def simulate(
    seconds: Callable[[int, int], float], budget_s: float, num_steps: int = 4000, accepted: int = 1
) -> tuple[float, float, int]:
    """Steps of 8 sequences beside an endless prompt: (TPOT, longest step after the first 20,
    tokens of prefill a second)."""
    law = ChunkCredit(budget_s, 2048)
    clock = longest = 0.0
    chunks = 0
    for step in range(num_steps):
        chunk = law.grant(8)
        took = seconds(8, chunk)
        law.stepped(8, chunk, 8, 8 * accepted, took)
        clock += took
        chunks += chunk
        longest = max(longest, took if step > 20 else 0.0)
    return clock / num_steps / accepted, longest, int(chunks / clock)


@pytest.mark.parametrize("accepted", [1, 2])
def test_tokens_keep_their_budget_and_prefill_gets_the_rest(accepted: int) -> None:
    tpot, longest, rate = simulate(
        lambda rows, chunk: 0.010 + 100e-6 * chunk, 0.030, accepted=accepted
    )
    assert tpot == pytest.approx(0.030, rel=0.05)
    assert longest <= 0.160 + 1e-9
    # Of each second, the share that the budget leaves beside plain steps goes to chunks.
    assert rate > 0.9 * 10_000 * (1 - 0.010 / 0.030)


def test_a_slow_machine_still_gets_on() -> None:
    """The smallest chunk alone exceeds the longest step: plain steps pay for it."""
    tpot, longest, rate = simulate(lambda rows, chunk: 0.012 + 2e-3 * chunk, 0.050)
    assert longest == pytest.approx(0.012 + 2e-3 * GRAIN)
    assert tpot == pytest.approx(0.050, rel=0.05)
    assert rate > 300


def test_nothing_is_left_for_chunks() -> None:
    """Plain steps alone miss the budget: after the saved credit there is no chunk."""
    law = ChunkCredit(0.020, 512)
    granted = []
    for _ in range(200):
        chunk = law.grant(4)
        granted.append(chunk)
        law.stepped(4, chunk, 4, 4, 0.025 + 1e-4 * chunk)
    assert granted[0] == 512
    assert sum(granted[50:]) == 0
    assert law.grant(0) == 512  # nobody waits for a token


def test_credit_is_not_saved_without_end() -> None:
    law = ChunkCredit(0.050, 512)
    for _ in range(1000):
        law.stepped(1, 0, 1, 1, 0.001)
    assert law.credit_s == ChunkCredit.MAX_CREDIT_S


def test_the_scheduler_asks_the_law() -> None:
    """A sequence decodes; a long prompt beside it gets no chunk while credit is overdrawn."""
    limits = Limits(64, 8, 256, 4096, 50, 1, 8, 0, 0, 512, tpot_budget_s=0.02)
    scheduler = DecodeScheduler(limits)

    def reserve(name: str, num: int) -> None:
        sampling = Sampling(seed=1, max_tokens=50, ignore_eos=True)
        message = Reserve(name, 1, 0, [0], num, sampling, "", "")
        scheduler.reserve(message, array("i", [5] * num))

    def step(seconds: float) -> int:
        """Tokens of the chunk."""
        plan = scheduler.plan()
        assert plan is not None
        firsts = [Draw(7) for _ in plan.firsts]
        draws = [Draw(7) for _ in range(plan.num_rows)]
        scheduler.apply(StepOutput(firsts, draws, elapsed_s=seconds))
        return len(plan.step.chunk.token_ids) if plan.step.chunk else 0

    reserve("short", 10)
    assert [step(0.001), step(0.01)] == [10, 0]  # its prompt, its first token
    reserve("long", 2000)
    assert [step(0.150), step(0.01)] == [512, 0]  # 130 ms beyond the budget, 100 were saved
    later = [step(0.01) for _ in range(20)]
    assert later[0] == 0
    assert sum(later) > 500  # paid back


def test_a_budget_is_positive() -> None:
    with pytest.raises(ConfigError, match="tpot_budget_ms"):
        Config(decode=DecodeConfig(tpot_budget_ms=0))
