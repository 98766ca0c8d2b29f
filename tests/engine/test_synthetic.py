"""Random checkpoints: the published format, real shapes, the same bytes for a seed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from decant.engine.checkpoint import Checkpoint, expected_tensors
from decant.engine.model_shape import parse_shape
from decant.engine.synthetic import config_table, make_checkpoint
from decant.engine.weights import WeightReader
from decant.protocol.errors import ConfigError


def test_tiny_checkpoint_passes_every_check(tmp_path: Path) -> None:
    size = make_checkpoint(tmp_path / "a", 3, "tiny", 4)
    checkpoint = Checkpoint(tmp_path / "a")
    assert checkpoint.shape.has_mtp and checkpoint.shape.compress_ratios == (0, 0, 4)
    assert size == sum(e.end - e.begin for e in checkpoint.entries.values())
    reader = WeightReader(checkpoint)
    for name in ("layers.2.attn.wq_b.weight", "layers.1.ffn.experts.3.w2.weight"):
        value = reader.get(name)
        assert torch.isfinite(value).all()
        assert 0.3 < float(value.std()) * value.shape[1] ** 0.5 < 3
    table = reader.full("layers.0.ffn.gate.tid2eid")
    assert table.shape == (512, 2) and int(table.min()) >= 0 and int(table.max()) < 16
    assert (table[:, 0] != table[:, 1]).all()
    make_checkpoint(tmp_path / "b", 3, "tiny", 4)
    again = Checkpoint(tmp_path / "b")
    assert again.model_hash == checkpoint.model_hash
    make_checkpoint(tmp_path / "c", 3, "tiny", 5)
    assert Checkpoint(tmp_path / "c").model_hash != checkpoint.model_hash


def test_real_width_has_the_published_size() -> None:
    shape = parse_shape(config_table(43, "real"))
    experts = 0
    for want in expected_tensors(shape):
        if want.kind == "expert" and want.name.startswith("layers."):
            experts += want.shape[0] * want.shape[1]
    assert experts == 43 * 256 * 25_165_824
    assert shape.compress_ratios[2:5] == (4, 128, 4)
    assert shape.compress_ratios.count(4) == 21 and shape.compress_ratios.count(128) == 20


def test_refusals(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="not empty"):
        make_checkpoint(tmp_path, 1, "tiny", 0)
    with pytest.raises(ConfigError, match="layers 44"):
        config_table(44, "real")
    with pytest.raises(ConfigError, match="width 'wide'"):
        config_table(1, "wide")
