"""Training's own parts: pieces that go on where they stopped, rounding, curves."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from decant.engine.demo import checkpoint, curves, recipe, train
from decant.engine.demo.network import Model
from decant.engine.demo.shape import CONFIG
from decant.engine.demo.train import Rounding

TINY = ["--batch", "1", "--length", "256", "--workers", "1", "--eval-rows", "0", "--far", "0"]


def test_rounding_is_the_files_and_masters_come_back() -> None:
    model = Model(CONFIG, 3)
    masters = {n: p.data.clone() for n, p in model.named_parameters()}
    rounding = Rounding(model)
    rounding.put()
    num_rounded = 0
    for name, p in model.named_parameters():
        wanted = checkpoint.rounded(name, masters[name])
        num_rounded += wanted is not None
        assert torch.equal(p.data, masters[name] if wanted is None else wanted), name
    assert num_rounded > 60
    rounding.take_back()
    assert all(torch.equal(p.data, masters[n]) for n, p in model.named_parameters())


def test_progress_reads_the_last_saved_step_and_the_end(tmp_path: Path) -> None:
    assert recipe.progress(tmp_path) == (0, False)
    log = tmp_path / "log.jsonl"
    rows: list[dict[str, object]] = [{"step": 50, "loss": 1.0}, {"saved": 50}, {"saved": 90}]
    log.write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert recipe.progress(tmp_path) == (90, False)
    log.write_text(log.read_text() + json.dumps({"final": True, "step": 99}) + "\n")
    assert recipe.progress(tmp_path) == (90, True)


@pytest.mark.parametrize("options", recipe.PIECES)
def test_pieces_are_valid_options(options: tuple[str, ...], tmp_path: Path) -> None:
    a = train.parse([*options, "--out", str(tmp_path)])
    assert a.steps > 1000 and a.length % 128 == 0


@pytest.mark.parametrize(
    "options",
    [["--length", "300"], ["--length", "128"], ["--begin", "5"], ["--begin", "5", "--steps", "9"]],
)
def test_options_that_cannot_be_are_refused(options: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        train.parse(["--out", str(tmp_path), *options])


def test_curves_are_drawn(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    rows = [{"step": n, "loss": 2.0 / n, "mtp": [2.1 / n, 2.2 / n]} for n in range(1, 30)]
    log.write_text("".join(json.dumps(r) + "\n" for r in rows))
    root = ET.fromstring(curves.draw([log, log]))
    lines = [e for e in root.iter() if e.tag.endswith("polyline")]
    assert len(lines) == len(curves.LOSSES) + len(curves.SKILLS)
    assert [e.text for e in root.iter() if (e.text or "").startswith("piece 2")] == [
        "piece 2 ends: step 58"
    ]
    with pytest.raises(ValueError, match="no steps"):
        curves.draw([])


@pytest.mark.slow
def test_recipe_goes_on_and_ends_with_a_model_folder(tmp_path: Path) -> None:
    """Two pieces of six steps; the first is cut by the deadline and continued."""
    short = ["--steps", "6", "--save-every", "0", "--log-every", "1", "--reserve", "0", *TINY]
    out = ["--out", str(tmp_path)]
    assert recipe.main([*out, "--", *short, "--deadline", "0"]) == train.UNFINISHED
    saved, is_finished = recipe.progress(tmp_path / "piece-1")
    assert 0 < saved < 6 and not is_finished
    assert recipe.main([*out, "--", *short]) == 0
    assert recipe.progress(tmp_path / "piece-2")[1]
    model = checkpoint.load(tmp_path / "model")
    state = checkpoint.load(tmp_path / "piece-2").state_dict()
    wanted = checkpoint.rounded("layers.1.attn.wq_b.weight", state["layers.1.attn.wq_b.weight"])
    assert wanted is not None
    assert torch.equal(model.state_dict()["layers.1.attn.wq_b.weight"], wanted)
