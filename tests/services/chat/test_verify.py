"""The golden-file checks themselves: equal passes, a changed file is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from decant.protocol.errors import InvalidRequest
from decant.services.chat.verify import encode_file, v4_vocabulary, verify_file

EXAMPLES = Path(__file__).parent / "chat-examples.json"


def test_examples_pass_with_and_without_the_tokenizer() -> None:
    vocabulary = v4_vocabulary()
    assert vocabulary is not None
    checks = verify_file(EXAMPLES, vocabulary)
    assert len(checks) == 21 and not [c for c in checks if c.problem]
    assert not [c for c in verify_file(EXAMPLES, None) if c.problem]


def test_a_wrong_example_is_found(tmp_path: Path) -> None:
    data = json.loads(EXAMPLES.read_text())
    data["encode"][0]["prompt"] += "x"
    data["decode"][1]["message"]["content"] = "5"
    data["encode"][1]["token_ids"][3] += 1
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(data))
    problems = [c.name for c in verify_file(file, v4_vocabulary()) if c.problem]
    assert problems == ["encode chat_basic", "encode thinking_basic", "decode thinking_answer"]


def test_encode_file(tmp_path: Path) -> None:
    file = tmp_path / "request.json"
    file.write_text(json.dumps([{"role": "user", "content": "hi"}]))
    assert encode_file(file, None) == {
        "prompt": "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜></think>"
    }
    file.write_text("{")
    with pytest.raises(InvalidRequest, match="cannot read"):
        encode_file(file, None)
