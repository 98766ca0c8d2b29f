"""Row-invariant products: the probe, and the fixed tiles that replace them where it fails."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from decant.engine.interface import PrefillChunk, SlotRows, StepPlan
from decant.engine.reference import products


@pytest.fixture
def in_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(products, "is_invariant", lambda: False)
    yield


def test_this_cpu() -> None:
    """Not a requirement, but the engine is slower and its bits others where this fails."""
    torch.set_num_threads(1)
    assert products.is_invariant() in (True, False)
    assert products.is_invariant() is products.is_invariant()


@pytest.mark.parametrize("rows", [1, 4, 15, 16, 17, 100])
def test_tiles_compute_the_product(in_tiles: None, rows: int) -> None:
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(3, rows, 40, generator=g), torch.randn(3, 40, 32, generator=g)
    assert torch.allclose(products.bmm(x, w), torch.bmm(x, w), atol=1e-5)
    assert torch.allclose(products.mm(x[0], w[0]), x[0] @ w[0], atol=1e-5)
    keys = w.transpose(1, 2).contiguous()
    assert torch.allclose(products.scores(x, keys, 16), torch.bmm(x, w), atol=1e-5)


def test_tiles_give_every_row_the_same_bits(in_tiles: None) -> None:
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(1, 50, 40, generator=g), torch.randn(1, 40, 48, generator=g)
    whole = products.bmm(x, w)
    for rows in (1, 2, 3, 17, 33):
        assert products.same_bits(products.bmm(x[:, :rows], w), whole[:, :rows])


def test_engine_in_tiles(in_tiles: None, make_engine) -> None:  # type: ignore[no-untyped-def]
    """The whole engine on fixed tiles: chunking and batching change no bit."""
    engine = make_engine("trunk-topk", slots=4, pages=12)
    ids = np.random.default_rng(0).integers(0, engine.vocab_size, 200).astype(np.int32)
    tables = [(0, 1), (2, 3), (4, 5)]
    engine.step(StepPlan(0, (), PrefillChunk(0, 0, ids, tables[0])))
    for at in range(0, 200, 60):
        engine.step(StepPlan(0, (), PrefillChunk(1, at, ids[at : at + 60], tables[1])))
    assert engine.head([0]).tobytes() == engine.head([1]).tobytes()
    assert engine.slot_checksum(0, 200) == engine.slot_checksum(1, 200)
    rows = [SlotRows(s, 200, (5, 6, 7), tables[s]) for s in range(2)]
    alone = engine.step(StepPlan(0, (rows[0],))).logits
    both = engine.step(StepPlan(0, tuple(rows))).logits
    assert both[:3].tobytes() == both[3:].tobytes() == alone.tobytes()
