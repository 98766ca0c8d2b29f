"""The GPU engine's steps in plain torch on a CPU: against the reference, chunked, handed off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from decant.engine.cpu_engine import CpuEngine
from decant.engine.gpu.draft import GpuDraftEngine
from decant.engine.gpu.engine import GpuEngine
from decant.engine.gpu.scoring import score_rows, to_host
from decant.engine.gpu.selftest import compare, held_out, teacher_force
from decant.engine.gpu.start import start_draft
from decant.engine.interface import DraftSlot, PrefillChunk, Scores, SlotRows, StepPlan
from decant.engine.load import load_draft
from decant.engine.scoring import score
from decant.protocol.errors import HandoffError, KVPageError

IDS = np.random.default_rng(5).integers(3, 2500, 320).astype(np.int32)


def prefill(engine: Any, slot: int, pages: tuple[int, ...], end: int, chunk: int) -> None:
    engine.clear_slot(slot)
    for at in range(0, end, chunk):
        part = IDS[at : min(end, at + chunk)]
        engine.step(StepPlan(0, (), PrefillChunk(slot, at, part, pages)))


def go_on(
    engine: Any, slot: int, pages: tuple[int, ...], at: int, rows: int, steps: int
) -> NDArray[np.float32]:
    """Logits of the last prompt position and of a few decode steps."""
    out = [engine.head([slot])]
    for i in range(at, at + rows * steps, rows):
        given = tuple(int(t) for t in IDS[i : i + rows])
        out.append(engine.step(StepPlan(0, (SlotRows(slot, i, given, pages),))).logits)
    return np.concatenate(out)


def distance(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.fixture(scope="module")
def twin(make_twin: Any) -> GpuEngine:
    engine: GpuEngine = make_twin()
    return engine


def test_agrees_with_the_reference(twin: GpuEngine, reference: CpuEngine) -> None:
    """Teacher-forced on held-out conversations, one of them long enough for both kinds of entries,
    the indexer's choice and a ring that wraps."""
    chosen = [p for p in held_out(1) if p[0] in ("sort", "recall@300")]
    assert len(chosen) == 2 and len(chosen[1][1]) > 256
    ours, theirs = (
        [teacher_force(engine, ids, begin, 128) for _, ids, begin in chosen]
        for engine in (twin, reference)
    )
    seen = compare(chosen, ours, theirs)
    assert seen["agreement"] >= 0.96 and seen["largest_gap"] <= 0.1
    assert seen["relative_error"] < 0.06
    assert seen["answers_right"]["ours"] == seen["answers_right"]["reference"] == 2


def test_chunks_and_rows_do_not_matter_much(twin: GpuEngine) -> None:
    pages = (0, 1, 2)
    prefill(twin, 0, pages, 133, 256)
    one = go_on(twin, 0, pages, 133, 3, 2)
    prefill(twin, 0, pages, 133, 61)
    two = go_on(twin, 0, pages, 133, 1, 6)
    assert distance(one, two) < 0.1


def test_a_step_with_decode_and_chunk_equals_the_two_apart(twin: GpuEngine) -> None:
    pages, others = (0, 1), (6, 7)
    prefill(twin, 0, pages, 40, 64)
    rows = SlotRows(0, 40, (7, 9), pages)
    apart = twin.step(StepPlan(0, (rows,))).logits
    prefill(twin, 2, others, 30, 64)
    head = twin.head([2])
    prefill(twin, 0, pages, 40, 64)
    twin.clear_slot(2)
    chunk = PrefillChunk(2, 0, IDS[:30], others)
    both = twin.step(StepPlan(0, (rows,), chunk)).logits
    assert np.array_equal(both, apart)
    assert np.array_equal(twin.head([2]), head)


def test_neighbours_do_not_change_a_row(twin: GpuEngine) -> None:
    tables = [(0, 1), (2, 3), (4, 5)]
    for slot, table in enumerate(tables):
        prefill(twin, slot, table, 20 + slot, 64)
    rows = tuple(SlotRows(i, 20 + i, (11 + i,), t) for i, t in enumerate(tables))
    together = twin.step(StepPlan(0, rows))
    alone = twin.step(StepPlan(0, rows[1:2]))
    assert distance(alone.logits, together.logits[1:2]) < 1e-2
    assert together.streams.shape == (3, 4, 256)


@pytest.mark.parametrize("total", [130, 259])
def test_handed_off_sequences_go_on_with_the_same_bits(
    twin: GpuEngine, make_twin: Any, total: int
) -> None:
    pages = (2, 9, 4)
    prefill(twin, 3, pages, total, 256)
    lengths = [min(128, max(0, total - 128 * i)) for i in range(3)]
    sums = [twin.page_checksum(p, n) for p, n in zip(pages, lengths, strict=True)]
    slot_sum = twin.slot_checksum(3, total)
    other: GpuEngine = make_twin()
    other.attach("prefill", twin.pools())
    other.pull_pages("prefill", pages, (7, 0, 1), lengths, sums)
    other.pull_slot("prefill", 3, 2, total, slot_sum)
    got = go_on(other, 2, (7, 0, 1), total, 2, 2)
    assert np.array_equal(got, go_on(twin, 3, pages, total, 2, 2))
    with pytest.raises(HandoffError, match="checksum"):
        other.pull_pages("prefill", pages[:1], (7,), lengths[:1], [sums[0] ^ 1])
    other.detach("prefill")
    with pytest.raises(HandoffError, match="not attached"):
        other.pull_slot("prefill", 3, 2, total, slot_sum)


def test_static_buffers_give_what_an_uncaptured_step_gives(twin: GpuEngine) -> None:
    tables = [(0, 1), (2, 3), (4, 5)]
    for slot, table in enumerate(tables):
        prefill(twin, slot, table, 131, 256)
    rows = tuple(SlotRows(i, 131, (5, 6), t) for i, t in enumerate(tables))
    wanted = twin.step(StepPlan(0, rows)).logits
    twin.runner.capture(4, 2)
    try:
        assert distance(twin.step(StepPlan(0, rows)).logits, wanted) < 1e-5
        # the next step on the same buffers, one sequence fewer: the last is padding now
        fewer = twin.step(StepPlan(0, rows[:2])).logits
        assert fewer.shape[0] == 4
    finally:
        twin.runner.drop_graphs()
    twin.runner.capture(4, 2)
    twin.runner.drop_graphs()
    assert distance(fewer, wanted[:4]) < 1e-2


def test_scores_on_the_device_are_those_of_the_host() -> None:
    """Ties go to the smaller id; the numbers differ by a rounding at most."""
    random = np.random.default_rng(2)
    logits = random.integers(-20, 20, (70, 300)).astype(np.float32)  # many ties
    targets = random.integers(0, 300, 70).astype(np.int32)
    for num_top in (0, 4, 300, 400):
        on_device = torch.from_numpy(logits)
        found = to_host(score_rows(on_device, targets, num_top, lambda rows: rows), num_top)
        wanted = score(logits, targets, num_top)
        for name in ("ranks", "top_ids"):
            assert np.array_equal(getattr(found, name), getattr(wanted, name))
        for name in ("logprobs", "top_logprobs"):
            assert np.allclose(getattr(found, name), getattr(wanted, name), atol=1e-6)


def test_prompts_are_scored_as_the_reference_does(twin: GpuEngine, reference: CpuEngine) -> None:
    """Whatever the chunks; and as the same engine's decode rows say it."""
    _, given, _ = next(p for p in held_out(1) if p[0] == "recall@300")
    ids, pages = np.array(given[:300], np.int32), (0, 1, 2)

    def scored(engine: Any, size: int) -> Scores:
        engine.clear_slot(0)
        parts = []
        for at in range(0, len(ids), size):
            following = int(ids[at + size]) if at + size < len(ids) else -1
            chunk = PrefillChunk(0, at, ids[at : at + size], pages, following, 3)
            scores = engine.step(StepPlan(0, (), chunk)).scores
            assert scores is not None
            parts.append(scores)
        names = Scores.__annotations__
        return Scores(*(np.concatenate([getattr(p, n) for p in parts]) for n in names))

    wanted = scored(reference, 300)
    for size in (300, 97):  # 300: two passes of the engine's own pieces of 256
        found = scored(twin, size)
        assert found.logprobs.shape == (len(ids) - 1,) and found.top_ids.shape == (len(ids) - 1, 3)
        assert np.median(np.abs(found.logprobs - wanted.logprobs)) < 0.02
        assert abs(found.logprobs.mean() - wanted.logprobs.mean()) < 0.05
        assert ((found.ranks == 1) == (wanted.ranks == 1)).mean() > 0.95
    prefill(twin, 1, (3, 4), 40, 64)
    row = SlotRows(1, 40, tuple(int(t) for t in IDS[40:43]), (3, 4))
    rows = twin.step(StepPlan(0, (row,))).logits
    twin.clear_slot(1)
    chunk = PrefillChunk(1, 0, IDS[:43], (3, 4), int(IDS[43]), 1)
    last = twin.step(StepPlan(0, (), chunk)).scores
    assert last is not None and last.logprobs.shape == (43,)
    decoded = score(rows, IDS[41:44], 1)
    assert np.allclose(last.logprobs[-3:], decoded.logprobs, atol=0.1)
    assert twin.step(StepPlan(0, (SlotRows(1, 43, (5,), (3, 4)),))).scores is None


def test_drafts_agree_with_the_reference(
    twin: GpuEngine, reference: CpuEngine, configuration: Any
) -> None:
    found = []
    pages = (0, 1)
    drafts: list[Any] = [start_draft(configuration, set()), load_draft(configuration)]
    engines: list[Any] = [twin, reference]
    for engine, draft in zip(engines, drafts, strict=True):
        prefill(engine, 0, pages, 100, 256)
        draft.attach("decode", engine.pools())
        streams = engine.last_streams([0])
        proposed = []
        for hole in (0, 90):  # keys before position 90 masked: a draft that came late
            slot = DraftSlot(
                0, 99, (int(IDS[100]),), streams, 3, mtp_valid_from=hole, temperature=0.0
            )
            proposed += draft.propose("decode", [slot])[0]
        found.append(proposed)
        assert isinstance(draft, GpuDraftEngine) or engine is reference
        with pytest.raises(KVPageError):
            draft.propose("decode", [DraftSlot(99, 0, (1,), streams, 1)])
        draft.close()
    same = sum(a == b for a, b in zip(*found, strict=True))
    assert len(found[0]) == 6 and same >= 4  # of random tokens; a near tie may differ


def test_plans_outside_the_pool_are_refused(twin: GpuEngine) -> None:
    with pytest.raises(KVPageError, match="slot 9"):
        twin.step(StepPlan(0, (SlotRows(9, 0, (1,), (0,)),)))
    with pytest.raises(KVPageError, match="no page"):
        twin.step(StepPlan(0, (SlotRows(0, 128, (1,), (0,)),)))
    with pytest.raises(KVPageError, match="rows in one step"):
        twin.step(StepPlan(0, (SlotRows(0, 0, (1, 2, 3, 4, 5), (0,)),)))


def test_tiny_checkpoint_runs(make_twin: Any, tiny: Path) -> None:
    engine: GpuEngine = make_twin(tiny)
    chunk = PrefillChunk(0, 0, IDS[:40] % 512, (0,))
    engine.clear_slot(0)
    engine.step(StepPlan(0, (), chunk))
    logits = engine.head([0])
    assert logits.shape == (1, 512) and np.isfinite(logits).all() and logits.std() > 0.01
