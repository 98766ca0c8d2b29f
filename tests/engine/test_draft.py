"""The draft engine: independent of company, holes in the window, bounds."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest

from decant.engine.cpu_engine import CpuEngine
from decant.engine.draft import CpuDraftEngine
from decant.engine.interface import F32, DraftSlot, PrefillChunk, SlotRows, StepPlan
from decant.engine.load import load_draft
from decant.protocol.config import Config, KVConfig, ModelConfig
from decant.protocol.errors import HandoffError, KVPageError

GOLDEN = Path(__file__).parents[1] / "golden"
LENGTHS = (40, 130, 64, 7)


@pytest.fixture(scope="module")
def decode(make_engine) -> CpuEngine:  # type: ignore[no-untyped-def]
    engine: CpuEngine = make_engine("trunk-fp32", slots=5, pages=10)
    return engine


@pytest.fixture(scope="module")
def draft(decode: CpuEngine) -> CpuDraftEngine:
    config = Config(
        model=ModelConfig(path=str(GOLDEN / "trunk-fp32")), kv=KVConfig(page_tokens=128)
    )
    made = cast(CpuDraftEngine, load_draft(config))
    made.attach("decode", decode.pools())
    return made


def start(engine: CpuEngine, slot: int) -> tuple[F32, list[int]]:
    """Prefill a slot; its last streams and two verified tokens with theirs."""
    ids = np.random.default_rng(slot).integers(0, 152, LENGTHS[slot] + 3).astype(np.int32)
    engine.clear_slot(slot)
    table = (2 * slot, 2 * slot + 1)
    engine.step(StepPlan(0, (), PrefillChunk(slot, 0, ids[:-3], table)))
    first = engine.last_streams([slot])
    fed = [int(t) for t in ids[-3:]]
    rows = SlotRows(slot, LENGTHS[slot], tuple(fed[:2]), table)
    streams = engine.step(StepPlan(0, (rows,))).streams
    return np.concatenate([first, streams]), fed


def ask(slot: int, streams: F32, fed: list[int], num: int = 3, first: int = 0) -> DraftSlot:
    at = LENGTHS[slot] - 1
    return DraftSlot(slot, at, tuple(fed), streams, num, first, seed=slot, temperature=0.7)


def test_a_proposal_does_not_depend_on_company(decode: CpuEngine, draft: CpuDraftEngine) -> None:
    asked, alone = [], []
    for slot in range(4):
        streams, fed = start(decode, slot)
        asked.append(ask(slot, streams, fed, num=3 - slot % 3))
        alone.append(draft.propose("decode", [asked[-1]])[0])
    assert [len(d) for d in alone] == [3, 2, 1, 3]
    assert draft.propose("decode", asked) == alone
    assert draft.propose("decode", asked[::-1]) == alone[::-1]
    # Row by row instead of three verified positions at once: the same keys, the same drafts.
    streams, fed = start(decode, 1)
    for i in range(2):
        one = DraftSlot(1, LENGTHS[1] - 1 + i, (fed[i],), streams[i : i + 1], 0)
        assert draft.propose("decode", [one]) == [[]]
    last = DraftSlot(1, LENGTHS[1] + 1, (fed[2],), streams[2:], 2, seed=1, temperature=0.7)
    assert draft.propose("decode", [last])[0] == alone[1]


def test_chained_keys_are_written_over(decode: CpuEngine, draft: CpuDraftEngine) -> None:
    """Keys of rejected drafts do not reach a later proposal."""
    streams, fed = start(decode, 0)
    at = LENGTHS[0] - 1
    for i in range(3):
        draft.propose("decode", [DraftSlot(0, at + i, (fed[i],), streams[i : i + 1], 3, seed=i)])
    ring = decode.pool.slot_rows("mtp_window", -1, 0)
    chained = ring[[p % len(ring) for p in range(at + 3)][-16:]].copy()
    start(decode, 0)
    draft.propose("decode", [ask(0, streams, fed, num=0)])
    plain = ring[[p % len(ring) for p in range(at + 3)][-16:]]
    assert np.array_equal(chained, plain)


def test_holes_are_masked(decode: CpuEngine, draft: CpuDraftEngine) -> None:
    """With mtp_valid_from the keys before it count for nothing, whatever they are."""
    streams, fed = start(decode, 2)
    hole = ask(2, streams, fed, first=LENGTHS[2] - 4)
    wanted = draft.propose("decode", [hole])
    ring = decode.pool.slot_rows("mtp_window", -1, 2)
    ring[[p % len(ring) for p in range(LENGTHS[2] - 4)][-20:]] = 3.0
    assert draft.propose("decode", [hole]) == wanted
    assert draft.propose("decode", [ask(2, streams, fed)]) != [[]]


def test_greedy_and_seeded(decode: CpuEngine, draft: CpuDraftEngine) -> None:
    streams, fed = start(decode, 0)
    at = LENGTHS[0] - 1

    def propose(seed: int, temperature: float) -> list[int]:
        slot = DraftSlot(0, at, tuple(fed), streams, 3, seed=seed, temperature=temperature)
        return draft.propose("decode", [slot])[0]

    assert propose(1, 0.0) == propose(2, 0.0)
    assert propose(1, 5.0) == propose(1, 5.0)
    assert len({tuple(propose(seed, 5.0)) for seed in range(8)}) > 4


def test_bounds(decode: CpuEngine, draft: CpuDraftEngine) -> None:
    streams, fed = start(decode, 0)
    assert draft.propose("decode", []) == []
    good = ask(0, streams, fed)
    for wrong in (
        DraftSlot(7, 10, tuple(fed), streams, 1),
        DraftSlot(0, 10, tuple(fed), streams[:2], 1),
        DraftSlot(0, 10, tuple(fed), streams, 9),
        DraftSlot(0, 10, (), streams[:0], 1),
        DraftSlot(0, -1, tuple(fed), streams, 1),
        DraftSlot(0, 10, (1, 2, 500), streams, 1),
    ):
        with pytest.raises(KVPageError):
            draft.propose("decode", [wrong])
    with pytest.raises(KVPageError, match="twice"):
        draft.propose("decode", [good, good])
    with pytest.raises(HandoffError, match="not attached"):
        draft.propose("other", [good])
