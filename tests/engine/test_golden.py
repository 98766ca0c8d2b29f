"""The engine against the shared fixtures (``decant verify``)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from decant.engine.verify import verify_folder

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = sorted(p.parent.name for p in GOLDEN.glob("*/expected.safetensors"))


def test_all_fixtures_are_here() -> None:
    assert FOLDERS == ["kv-state", "trunk-fp32", "trunk-nvfp4", "trunk-quant", "trunk-topk"]


@pytest.mark.parametrize("name", FOLDERS)
def test_within_the_fixture_tolerances(name: str) -> None:
    checks = verify_folder(GOLDEN / name)
    assert [c for c in checks if not c.is_ok] == []
    assert len(checks) >= 12


def test_a_wrong_weight_is_seen(tmp_path: Path) -> None:
    """The comparison can fail: enlarge one weight of the last layer a little."""
    folder = tmp_path / "trunk-fp32"
    shutil.copytree(GOLDEN / "trunk-fp32", folder)
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["layers.4.attn.wo_b.weight"] *= 1.01
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors")
    wrong = {c.name for c in verify_folder(folder) if not c.is_ok}
    assert {"prefill logits", "decode logits"} <= wrong
