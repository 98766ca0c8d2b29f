"""Perplexity and right answers by setting: the same tokens, another activation or selection."""

import json
from pathlib import Path

import pytest

import decant.engine.demo.shape as demo_shape
from decant.engine.demo import chat, fidelity
from decant.engine.demo.bpe import Encoder

FOLDER = Path(demo_shape.__file__).parent


def test_settings_differ_and_answers_do_not(tmp_path: Path) -> None:
    """A block longer than the selection, so that 64 of its entries are not all of them."""
    file = tmp_path / "fidelity.json"
    words = ["--json", str(file), "--num", "2", "--seed", "3"]
    assert fidelity.main([*words, "--skills", "recall@350"]) == 0
    assert fidelity.main([*words, "--skills", "add", "--settings", "served"]) == 0
    table = json.loads(file.read_text())
    assert set(table["skills"]) == {"recall@350", "add"}
    rows = table["skills"]["recall@350"]
    assert {r["right"] for r in rows.values()} == {rows["served"]["answers"]}
    assert all(1 <= r["perplexity"] < 1.05 for r in rows.values())
    assert len({r["all_nll"] for r in rows.values()}) == 3
    assert rows["simulated"]["perplexity_of_all_tokens"] == pytest.approx(
        rows["served"]["perplexity_of_all_tokens"], rel=0.02
    )


def test_the_spans_are_the_answers() -> None:
    encode = Encoder(FOLDER / "tokenizer.json")
    c = next(fidelity.conversations("recall@2000", 5))
    ids, spans = fidelity.exam(encode, c)
    assert [encode.decode(ids[a:b]) for a, b in spans] == [t.answer + chat.EOS for t in c.turns]
    c = next(fidelity.conversations("tool-result", 5))
    ids, spans = fidelity.exam(encode, c)
    assert [encode.decode(ids[a:b]) for a, b in spans] == [c.turns[-1].answer + chat.EOS]


def test_unknown_setting() -> None:
    with pytest.raises(SystemExit, match="2"):
        fidelity.main(["--settings", "blurred"])
