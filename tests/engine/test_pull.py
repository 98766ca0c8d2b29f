"""Hand-off between two engines at every T mod 4 and T mod 128: decode goes on as if undisturbed,
bit for bit, drafts included; forks; and what must fail."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest

from decant.engine.cpu_engine import CpuEngine
from decant.engine.draft import CpuDraftEngine
from decant.engine.interface import F32, I32, DraftSlot, PrefillChunk, SlotRows, StepPlan
from decant.engine.load import load_draft
from decant.protocol.config import Config, KVConfig, ModelConfig
from decant.protocol.errors import HandoffError, KVPageError

GOLDEN = Path(__file__).parents[1] / "golden"
SOURCE_TABLE, TARGET_TABLE = (0, 1, 2), (5, 2, 7)
IDS = np.random.default_rng(11).integers(0, 128, 400).astype(np.int32)


@pytest.fixture(scope="module")
def pair(make_engine) -> tuple[CpuEngine, CpuEngine]:  # type: ignore[no-untyped-def]
    prefill, decode = (make_engine("trunk-topk", slots=4, pages=10) for _ in range(2))
    decode.attach("prefill", prefill.pools())
    return prefill, decode


@pytest.fixture(scope="module")
def draft(pair: tuple[CpuEngine, CpuEngine]) -> CpuDraftEngine:
    config = Config(
        model=ModelConfig(path=str(GOLDEN / "trunk-topk")), kv=KVConfig(page_tokens=128)
    )
    made = cast(CpuDraftEngine, load_draft(config))
    made.attach("prefill", pair[0].pools())
    made.attach("decode", pair[1].pools())
    return made


def prefill_to(engine: CpuEngine, slot: int, begin: int, end: int, table: tuple[int, ...]) -> None:
    for at in range(begin, end, 64):
        part: I32 = IDS[at : min(at + 64, end)]
        engine.step(StepPlan(0, (), PrefillChunk(slot, at, part, table)))


def pull(source: CpuEngine, target: CpuEngine, slot: int, to: int, total: int) -> None:
    pages = -(-total // 128)
    live = [min(128, total - 128 * i) for i in range(pages)]
    sums = [source.page_checksum(SOURCE_TABLE[i], live[i]) for i in range(pages)]
    target.pull_pages("prefill", SOURCE_TABLE[:pages], TARGET_TABLE[:pages], live, sums)
    target.pull_slot("prefill", slot, to, total, source.slot_checksum(slot, total))


def decode(engine: CpuEngine, slot: int, start: int, table: tuple[int, ...]) -> F32:
    """Three verify steps of 3, 1 and 2 rows."""
    out = []
    for count in (3, 1, 2):
        rows = SlotRows(slot, start, tuple(int(t) for t in IDS[start : start + count]), table)
        out.append(engine.step(StepPlan(0, (rows,))).logits)
        start += count
    return np.concatenate(out)


def drafts(draft: CpuDraftEngine, peer: str, engine: CpuEngine, slot: int, total: int) -> list[int]:
    streams = engine.last_streams([slot])
    asked = DraftSlot(slot, total - 1, (int(IDS[total]),), streams, 3, seed=total, temperature=0.9)
    return draft.propose(peer, [asked])[0]


@pytest.mark.parametrize(("first", "count"), [(1, 9), (120, 128)])
def test_every_length(
    pair: tuple[CpuEngine, CpuEngine], draft: CpuDraftEngine, first: int, count: int
) -> None:
    """The shortest lengths, and 128 in a row: every T mod 4 and T mod 128. The source goes on
    prefilling; garbage of other sequences lies in the target's slots and pages."""
    source, target = pair
    source.clear_slot(0)
    prefill_to(source, 0, 0, first, SOURCE_TABLE)
    target.pool.array[:] = np.float32(0.123)
    for total in range(first, first + count):
        pull(source, target, 0, total % 4, total)
        head = target.head([total % 4])
        assert head.tobytes() == source.head([0]).tobytes()
        wanted = drafts(draft, "prefill", source, 0, total)
        assert drafts(draft, "decode", target, total % 4, total) == wanted
        if total % 4 == 3 or total < 8 or total % 128 in (0, 1, 125):  # all would take too long
            got = decode(target, total % 4, total, TARGET_TABLE)
            source.copy_slot(0, 1, total)
            assert got.tobytes() == decode(source, 1, total, SOURCE_TABLE).tobytes()
        prefill_to(source, 0, total, total + 1, SOURCE_TABLE)


def test_fork(pair: tuple[CpuEngine, CpuEngine]) -> None:
    """A second choice shares full pages and copies the open page and the slot's rows."""
    engine = pair[1]
    engine.clear_slot(0)
    prefill_to(engine, 0, 0, 150, (0, 1))
    engine.copy_page(1, 4)
    engine.copy_slot(0, 2, 150)
    forked = decode(engine, 2, 150, (0, 4))
    assert forked.tobytes() == decode(engine, 0, 150, (0, 1)).tobytes()


def test_early_pages(pair: tuple[CpuEngine, CpuEngine]) -> None:
    """A finished page may be pulled while its sequence goes on."""
    source, target = pair
    source.clear_slot(0)
    prefill_to(source, 0, 0, 128, SOURCE_TABLE)
    checksum = source.page_checksum(0, 128)
    prefill_to(source, 0, 128, 200, SOURCE_TABLE)
    target.pull_pages("prefill", [0], [3], [128], [checksum])
    assert target.page_checksum(3, 128) == checksum


def test_what_must_fail(pair: tuple[CpuEngine, CpuEngine], make_engine) -> None:  # type: ignore[no-untyped-def]
    source, target = pair
    source.clear_slot(0)
    prefill_to(source, 0, 0, 100, SOURCE_TABLE)
    with pytest.raises(HandoffError, match="page 0 of prefill does not match"):
        target.pull_pages("prefill", [0], [0], [100], [1])
    with pytest.raises(HandoffError, match="slot 0 of prefill does not match"):
        target.pull_slot("prefill", 0, 0, 100, source.slot_checksum(0, 99))
    with pytest.raises(KVPageError, match="page 77"):
        target.pull_pages("prefill", [77], [0], [100], [1])
    target.detach("nobody")
    gone = make_engine("trunk-topk", slots=1, pages=1)
    target.attach("gone", gone.pools())
    gone.close()
    with pytest.raises(HandoffError, match="closed by its owner"):
        target.pull_pages("gone", [0], [0], [1], [0])
    target.detach("gone")
    with pytest.raises(HandoffError, match="not attached"):
        target.pull_slot("gone", 0, 0, 1, 0)
    other = make_engine("trunk-quant", slots=1, pages=1)
    with pytest.raises(HandoffError, match="KV layout"):
        target.attach("other", other.pools())


WRONG_PLANS = {
    "no page": SlotRows(0, 127, (1, 2), (0,)),
    "outside": SlotRows(0, 1023, (1, 2), tuple(range(8)) * 2),
    "page 99": SlotRows(0, 0, (1,), (99,)),
    "vocabulary": SlotRows(0, 0, (152,), (0,)),
    "rows in one step": SlotRows(0, 0, (1, 2, 3, 4, 5), (0,)),
    "slot 4": SlotRows(4, 0, (1,), (0,)),
    "are outside": SlotRows(0, -1, (1,), (0,)),
}


@pytest.mark.parametrize("message", WRONG_PLANS)
def test_wrong_plans(pair: tuple[CpuEngine, CpuEngine], message: str) -> None:
    with pytest.raises(KVPageError, match=message):
        pair[1].step(StepPlan(0, (WRONG_PLANS[message],)))


def test_a_slot_is_once_in_a_step(pair: tuple[CpuEngine, CpuEngine]) -> None:
    rows, chunk = SlotRows(0, 0, (1,), (0,)), PrefillChunk(0, 0, IDS[:3], (1,))
    with pytest.raises(KVPageError, match="twice"):
        pair[1].step(StepPlan(0, (rows,), chunk))
    with pytest.raises(KVPageError, match="twice"):
        pair[1].step(StepPlan(0, (rows, rows)))
    empty = pair[1].step(StepPlan(0))
    assert empty.logits.shape == (0, 152)
