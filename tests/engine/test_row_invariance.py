"""The bits of a row do not depend on the rows around it: whole, chunked, batched, speculated.

Every comparison here is of bits, on models that select entries (trunk-topk), that simulate the
quantisation (trunk-quant) and that do not.
"""

from __future__ import annotations

import numpy as np
import pytest

from decant.engine.cpu_engine import CpuEngine
from decant.engine.interface import F32, I32, PrefillChunk, SlotRows, StepPlan

MODELS = [("trunk-topk", False), ("trunk-quant", True), ("trunk-quant", False)]
TOTAL = 300
PAGES = 3  # of 128 tokens: up to 384 positions


@pytest.fixture(scope="module", params=MODELS, ids=lambda p: f"{p[0]}-{'on' if p[1] else 'off'}")
def engine(request: pytest.FixtureRequest, make_engine) -> CpuEngine:  # type: ignore[no-untyped-def]
    name, quantise = request.param
    made: CpuEngine = make_engine(name, quantise)
    return made


def table(slot: int) -> tuple[int, ...]:
    return tuple(range(slot * PAGES, slot * PAGES + PAGES))


def tokens(engine: CpuEngine, seed: int, count: int = TOTAL) -> I32:
    return np.random.default_rng(seed).integers(0, engine.vocab_size, count).astype(np.int32)


def prefill(engine: CpuEngine, slot: int, ids: I32, chunk: int) -> None:
    engine.clear_slot(slot)
    for at in range(0, len(ids), chunk):
        part = PrefillChunk(slot, at, ids[at : at + chunk], table(slot))
        engine.step(StepPlan(0, (), part))


def decode(engine: CpuEngine, slot: int, start: int, ids: I32 | list[int]) -> F32:
    rows = SlotRows(slot, start, tuple(int(t) for t in ids), table(slot))
    return engine.step(StepPlan(0, (rows,))).logits


def state(engine: CpuEngine, slot: int, total: int) -> list[int]:
    """Checksums of everything that a sequence of ``total`` tokens owns."""
    pages = [
        engine.page_checksum(p, max(0, min(128, total - i * 128)))
        for i, p in enumerate(table(slot))
    ]
    return [engine.slot_checksum(slot, total), *pages]


def same_bits(a: F32, b: F32) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("chunk", [1, 7, 64, 256])
def test_chunking(engine: CpuEngine, chunk: int) -> None:
    ids = tokens(engine, 1, TOTAL if chunk > 1 else 150)
    prefill(engine, 0, ids, 1024)
    whole, logits = state(engine, 0, len(ids)), engine.head([0])
    prefill(engine, 1, ids, chunk)
    assert state(engine, 1, len(ids)) == whole
    assert same_bits(engine.head([1]), logits)


def test_prefill_equals_decode(engine: CpuEngine) -> None:
    """The last 140 tokens fed one by one: the same state, and the logits that head() gives."""
    ids = tokens(engine, 2)
    prefill(engine, 0, ids, 256)
    prefill(engine, 1, ids[:160], 64)
    for i in range(160, TOTAL):
        logits = decode(engine, 1, i, [int(ids[i])])
    assert same_bits(logits, engine.head([0]))
    live = engine.pool.layout.live_in_slot(TOTAL)
    for rows in live:
        if rows.part.name == "mtp_window":  # decode leaves these to the draft
            continue
        at = np.arange(rows.first, rows.first + rows.count) % rows.part.rows
        a, b = (engine.pool.slot_rows(rows.part.name, rows.part.layer, s)[at] for s in (0, 1))
        assert same_bits(a, b), rows.part
    assert state(engine, 0, TOTAL)[1:] == state(engine, 1, TOTAL)[1:]


def test_batches(engine: CpuEngine) -> None:
    """1 to 17 sequences of ragged lengths, in both orders: every row as it is alone."""
    lengths = [3, 130, 257, 64, 200, 5, 127, 128, 255, 90, 1, 16, 31, 290, 77, 150, 299]
    plans, alone = [], []
    for slot, length in enumerate(lengths):
        ids = tokens(engine, 100 + slot, length + 4)
        prefill(engine, slot, ids[:length], 256)
        fed = ids[length : length + 1 + slot % 4]
        alone.append(decode(engine, slot, length, fed))
        plans.append(SlotRows(slot, length, tuple(int(t) for t in fed), table(slot)))
    before = [state(engine, p.slot, p.start + len(p.token_ids)) for p in plans]
    for size in range(1, 18):
        together = engine.step(StepPlan(0, tuple(plans[:size]))).logits
        assert same_bits(together, np.concatenate(alone[:size])), size
        backwards = engine.step(StepPlan(0, tuple(plans[:size][::-1]))).logits
        assert same_bits(backwards, np.concatenate(alone[:size][::-1])), size
    # The rows were computed again and again over themselves: the state is what it was alone.
    assert [state(engine, p.slot, p.start + len(p.token_ids)) for p in plans] == before


@pytest.mark.parametrize("k", [1, 2, 3])
def test_rollback(engine: CpuEngine, k: int) -> None:
    """Verify steps of 1 + k rows whose drafts are right for a while, then wrong: forgetting the
    wrong ones is only a smaller length."""
    ids = tokens(engine, 3)
    begin = 110  # across the ends of CSA windows and of the first HCA window
    prefill(engine, 0, ids[:begin], 256)
    wanted = [decode(engine, 0, i, [int(ids[i])])[0] for i in range(begin, 150)]
    prefill(engine, 1, ids[:begin], 256)
    at, right = begin, 0
    while at < 150:
        right = (right + 1) % (k + 1)
        rows = ids[at : at + 1 + k].copy()
        rows[1 + right :] = (rows[1 + right :] + 1) % engine.vocab_size
        logits = decode(engine, 1, at, rows)
        for i in range(min(1 + right, 150 - at)):
            assert same_bits(logits[i], wanted[at + i - begin]), (at, i)
        at += 1 + right
    decode(engine, 1, at, [int(ids[at])])  # what lies behind the end was a rejected draft's
    prefill(engine, 0, ids[: at + 1], 256)
    assert state(engine, 1, at + 1)[1:] == state(engine, 0, at + 1)[1:]
    assert same_bits(engine.last_streams([1]), engine.last_streams([0]))


def test_mixed_step(engine: CpuEngine) -> None:
    """Decode slots and a prefill chunk in one step equal the two done apart."""
    ids = [tokens(engine, 20 + i) for i in range(4)]
    for slot in range(3):
        prefill(engine, slot, ids[slot][: 80 + slot], 256)
    prefill(engine, 3, ids[3][:100], 64)
    apart = [decode(engine, s, 80 + s, ids[s][80 + s : 82 + s]) for s in range(3)]
    chunk = PrefillChunk(3, 100, ids[3][100:230], table(3))
    engine.step(StepPlan(0, (), chunk))
    wanted = [state(engine, s, 82 + s) for s in range(3)], state(engine, 3, 230)
    head = engine.head([3])
    for slot in range(3):
        prefill(engine, slot, ids[slot][: 80 + slot], 256)
    prefill(engine, 3, ids[3][:100], 64)
    rows = tuple(
        SlotRows(s, 80 + s, tuple(int(t) for t in ids[s][80 + s : 82 + s]), table(s))
        for s in range(3)
    )
    logits = engine.step(StepPlan(0, rows, chunk)).logits
    assert same_bits(logits, np.concatenate(apart))
    assert ([state(engine, s, 82 + s) for s in range(3)], state(engine, 3, 230)) == wanted
    assert same_bits(engine.head([3]), head)
