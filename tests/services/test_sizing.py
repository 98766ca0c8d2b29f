"""docs/sizing.md is current and its formulas give the known totals."""

from __future__ import annotations

from pathlib import Path

import pytest

from decant.engine.kv_layout import KVLayout
from decant.engine.model_shape import parse_shape, read_config
from decant.services import preflight, sizing

PAGE = Path(__file__).parents[2] / "docs" / "sizing.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == sizing.render(), (
        "run: python -P -m decant.services.sizing > docs/sizing.md"
    )


@pytest.mark.parametrize(
    ("num_tokens", "csa", "hca", "indexer"),
    [
        (1_024, 3_139_584, 93_440, 709_632),
        (8_192, 25_116_672, 747_520, 5_677_056),
        (131_072, 401_866_752, 11_960_320, 90_832_896),
        (1_048_576, 3_214_934_016, 95_682_560, 726_663_168),
    ],
)
def test_totals_of_the_published_model(num_tokens: int, csa: int, hca: int, indexer: int) -> None:
    """By hand: floor(T / 4) x 21 x 584 and so on; windows 3,214,336 and 74,752 for MTP."""
    found = sizing.state(num_tokens)
    assert (found.csa, found.hca, found.indexer) == (csa, hca, indexer)
    assert found.windows == 3_214_336 + 74_752
    assert (found.csa_state, found.hca_state) == (860_160, 0)


def test_open_windows_add_their_rows() -> None:
    """At most 20 x 4096 x 127 and 21 x 10240 x 3 bytes."""
    assert sizing.state(1_024 + 127).hca_state == 10_403_840 - 0
    assert sizing.state(1_027).csa_state - sizing.state(1_024).csa_state == 645_120
    assert sizing.state(3).csa_state == 21 * 3 * 10_240  # no window before the first


def test_growth_is_the_slope() -> None:
    """3,850 bytes a token."""
    slope = (sizing.state(1 << 20).total - sizing.state(1 << 19).total) / (1 << 19)
    assert slope == sizing.growth() == pytest.approx(3850.25)


def test_counts_agree_with_the_engine_s_layout() -> None:
    """The demo's pages hold as many rows as the formula says for its layers."""
    shape = parse_shape(read_config(preflight.demo_folder()))
    layout = KVLayout(shape, 256)
    ratios = shape.compress_ratios
    found = sizing.state(256, len(ratios), ratios.count(4), ratios.count(128))
    live = {"csa": 0, "index": 0, "hca": 0}
    for rows in layout.live_in_page(256):
        live[rows.part.name] += rows.count
    assert found.csa == live["csa"] * sizing.ENTRY
    assert found.indexer == live["index"] * sizing.INDEX_KEY
    assert found.hca == live["hca"] * sizing.ENTRY


def test_sequences() -> None:
    """10 pages of 256 tokens: 512 tokens take 2 pages, 513 take 3; slots bound it too."""
    assert sizing.sequences(10, 100, 256, 512) == 5
    assert sizing.sequences(10, 100, 256, 513) == 3
    assert sizing.sequences(10, 2, 256, 1) == 2
