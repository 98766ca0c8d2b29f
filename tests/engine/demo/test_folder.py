"""The shipped folder: any tool can load it by path."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import decant.engine.demo.shape as demo_shape
from decant.engine.demo import chat, checkpoint, corpus, score
from decant.engine.demo.bpe import Encoder

FOLDER = Path(demo_shape.__file__).parent


def test_files_and_size() -> None:
    names = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    files = [FOLDER / n for n in (*names, "generation_config.json")]
    assert sum(f.stat().st_size for f in files) <= demo_shape.MAX_BYTES
    config = json.loads((FOLDER / "config.json").read_text())
    assert config == {**demo_shape.CONFIG, **demo_shape.QUANTISED}


def test_tensors_are_the_published_ones() -> None:
    kinds = {"bf16": "BF16", "f32": "F32", "i64": "I64", "fp8": "F8_E4M3", "fp4": "I8"}
    with safe_open(FOLDER / "model.safetensors", "pt") as f:
        left = set(f.keys())
        for t in demo_shape.tensors(demo_shape.CONFIG):
            part = f.get_slice(t.name)
            shape = list(t.shape)
            if t.storage == "fp4":
                shape[1] //= 2
            assert (part.get_shape(), part.get_dtype()) == (shape, kinds[t.storage]), t.name
            left.discard(t.name)
            if t.storage in ("fp8", "fp4"):
                scale = t.name.removesuffix(".weight") + ".scale"
                assert f.get_slice(scale).get_dtype() == "F8_E8M0"
                left.discard(scale)
    assert not left


def test_transformers_loads_config_and_tokenizer() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(FOLDER)
    assert config.model_type == "deepseek_v4" and config.num_hidden_layers == 6
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    turns = [chat.Turn("", "Hi", "", "Hello!"), chat.Turn("", "What is 2+2?", "")]
    c = chat.Conversation("You are decant.", turns)
    for thinking in (False, True):
        c.thinking = thinking
        text = tokenizer.apply_chat_template(
            chat.messages(c), tokenize=False, add_generation_prompt=True, thinking=thinking
        )
        assert text == "".join(t for t, _, _ in chat.pieces(c)[:-1])
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == Encoder(FOLDER / "tokenizer.json")(text)


def test_shipped_weights_know_their_skills() -> None:
    """A few held-out prompts, with the indexer choosing: a broken export scores near zero."""
    encode = Encoder(FOLDER / "tokenizer.json")
    model = checkpoint.load(FOLDER)
    kinds = [("add", 0), ("copy", 0), ("recall", 300), ("recall-number", 300), ("identity", 0)]
    exam = score.prepare(encode, kinds, 2, 640, 11)
    with torch.no_grad():
        tables = model.tables(640, torch.device("cpu"))
        got = score.evaluate(model, exam, tables, torch.float32, 2, 1, model.c.index_topk)
    right = sum(a for a, _ in got.right.values())
    assert right >= sum(b for _, b in got.right.values()) - 1, got.table()
    assert got.acceptance()[0] >= 0.9
    assert len(corpus.EVALUATED) > 20
