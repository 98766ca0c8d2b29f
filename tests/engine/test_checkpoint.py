"""What the loader refuses, by the tensor's name and before any tensor is read; the formats."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from decant.engine.checkpoint import Checkpoint
from decant.engine.load import model_info
from decant.engine.model_shape import parse_shape
from decant.engine.weights import E8M0, SHARDING, WeightReader, sharding, unpack_fp4
from decant.protocol.config import Config, ModelConfig
from decant.protocol.errors import CheckpointError

GOLDEN = Path(__file__).parents[1] / "golden"

Edit = Callable[[dict[str, Tensor]], None]


def edited(folder: Path, name: str, edit: Edit, config: dict[str, Any] | None = None) -> Path:
    """A copy of a fixture's model with its tensors and config.json changed."""
    source = GOLDEN / name
    tensors = load_file(source / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    table = json.loads((source / "config.json").read_text())
    table.update(config or {})
    (folder / "config.json").write_text(json.dumps(table))
    return folder


def drop(name: str) -> Edit:
    def edit(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return edit


def put(name: str, value: Tensor) -> Edit:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name] = value

    return edit


WRONG = {
    "missing": (drop("layers.2.attn.indexer.weights_proj.weight"), "weights_proj.* is missing"),
    "missing mtp": (drop("mtp.0.e_proj.weight"), "mtp.0.e_proj.weight is missing"),
    "shape": (
        put("layers.1.ffn.gate.weight", torch.zeros(8, 63, dtype=torch.bfloat16)),
        r"layers.1.ffn.gate.weight has shape \[8, 63\], expected \[8, 64\]",
    ),
    "dtype of hc": (
        put("layers.0.hc_attn_fn", torch.zeros(24, 256, dtype=torch.bfloat16)),
        "layers.0.hc_attn_fn has dtype BF16, expected F32",
    ),
    "dtype of norm": (
        put("norm.weight", torch.zeros(64, dtype=torch.float16)),
        "norm.weight has dtype F16, expected BF16 or F32",
    ),
    "dtype of linear": (
        put("layers.0.attn.wkv.weight", torch.zeros(80, 64, dtype=torch.int8)),
        "layers.0.attn.wkv.weight has dtype I8",
    ),
    "fp8 without scale": (
        put("layers.0.attn.wkv.weight", torch.zeros(80, 64).to(torch.float8_e4m3fn)),
        "layers.0.attn.wkv.scale is missing",
    ),
    "unknown mtp": (
        put("mtp.0.markov.weight", torch.zeros(4)),
        "mtp.0.markov.weight is not part of the MTP layer",
    ),
    "second mtp": (put("mtp.1.norm.weight", torch.zeros(64)), "mtp.1.norm.weight is not part"),
    "unknown": (put("layers.5.attn_norm.weight", torch.zeros(64)), "layers.5.attn_norm.weight"),
    "hash table": (
        put("layers.0.ffn.gate.tid2eid", torch.zeros(152, 3, dtype=torch.int32)),
        "tid2eid has dtype I32, expected I64",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_tensors(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    edit, message = WRONG[case]
    folder = edited(tmp_path, "trunk-fp32", edit)
    monkeypatch.setattr(WeightReader, "raw", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dspark_block_size": 4}, "0731 with the DSpark drafter"),
        ({"compress_ratios": [0, 0, 4, 128, 4, 0, 0, 0]}, "8 compress_ratios for 5 layers"),
        ({"compress_ratios": [0, 0, 4, 128, 2, 0]}, r"compress_ratios\[4\] is 2"),
        ({"model_type": "deepseek_v41"}, "V4.1"),
        ({"model_type": "deepseek_v3"}, "deepseek_v4 only"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' is not yarn"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"index_head_dim": 48}, "index_head_dim is not a power of two"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
    ],
)
def test_wrong_config(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(edited(tmp_path, "trunk-fp32", lambda _: None, fields))


def test_wrong_folders(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        Checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="no config.json"):
        Checkpoint(tmp_path)
    shutil.copy(GOLDEN / "trunk-fp32" / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"no model\*.safetensors"):
        Checkpoint(tmp_path)
    data = (GOLDEN / "trunk-fp32" / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match=r"tensor \S+ lies outside the file"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(data[:100])
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        Checkpoint(tmp_path)


def test_missing_shard(tmp_path: Path) -> None:
    for path in (GOLDEN / "trunk-nvfp4").glob("*"):
        if not path.name.endswith("00002-of-00002.safetensors"):
            shutil.copy(path, tmp_path)
    with pytest.raises(CheckpointError, match="shard model-00002-of-00002.safetensors is missing"):
        Checkpoint(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"]["norm.weight"] = "../elsewhere.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside the model folder"):
        Checkpoint(tmp_path)


def test_wrong_scales(tmp_path: Path) -> None:
    def shrink(tensors: dict[str, Tensor]) -> None:
        name = "layers.1.ffn.experts.2.w2.scale"
        tensors[name] = tensors[name][:, :2].contiguous()

    with pytest.raises(CheckpointError, match=r"experts.2.w2.scale has shape \[128, 2\]"):
        Checkpoint(edited(tmp_path, "trunk-quant", shrink))


def test_a_checkpoint_without_mtp_is_served_without_drafts(tmp_path: Path) -> None:
    def strip(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.startswith("mtp.")]:
            del tensors[name]

    folder = edited(tmp_path, "trunk-fp32", strip)
    info = model_info(Config(model=ModelConfig(path=str(folder), served_name="tiny")))
    assert (info.has_mtp, info.served_name, info.vocab_size) == (False, "tiny", 152)


def test_nan_scales_are_refused(tmp_path: Path) -> None:
    def poison(tensors: dict[str, Tensor]) -> None:
        scale = tensors["layers.0.attn.wkv.scale"].view(torch.uint8)
        scale[0, 0] = 255
        tensors["layers.0.attn.wkv.scale"] = scale.view(torch.float8_e8m0fnu)

    reader = WeightReader(Checkpoint(edited(tmp_path, "trunk-quant", poison)))
    with pytest.raises(CheckpointError, match=r"layers.0.attn.wkv.weight has values"):
        reader.get("layers.0.attn.wkv.weight")


def test_model_hash(tmp_path: Path) -> None:
    """Of config.json, headers and samples of the data: two trainings of one shape differ."""
    first = Checkpoint(GOLDEN / "trunk-fp32").model_hash

    def train(tensors: dict[str, Tensor]) -> None:
        for name, x in tensors.items():
            if x.is_floating_point():
                tensors[name] = x * 1.25

    assert Checkpoint(edited(tmp_path, "trunk-fp32", train)).model_hash != first
    assert Checkpoint(GOLDEN / "kv-state").model_hash == first  # the same model, copied
    assert Checkpoint(GOLDEN / "trunk-topk").model_hash != first


def test_codes() -> None:
    packed = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert unpack_fp4(packed)[0].tolist() == values + [-v for v in values]
    assert E8M0[[0, 127, 128, 254]].tolist() == [2.0**-127, 1.0, 2.0, 2.0**127]
    assert bool(E8M0[255].isnan())


def test_nvfp4_and_fp4_decode_to_the_same_values() -> None:
    a, b = (WeightReader(Checkpoint(GOLDEN / n)) for n in ("trunk-quant", "trunk-nvfp4"))
    for name in ("layers.0.ffn.experts.3.w1.weight", "layers.2.ffn.experts.5.w2.weight"):
        assert a.checkpoint.entries[name].dtype == "I8"
        assert b.checkpoint.entries[name].dtype == "U8"
        assert a.full(name).equal(b.full(name))


def test_shares_of_two_ranks_make_the_whole() -> None:
    checkpoint = Checkpoint(GOLDEN / "trunk-quant")
    one, two = (WeightReader(checkpoint, 2, rank) for rank in (0, 1))
    kinds = set()
    for name in checkpoint.entries:
        if name.endswith(("scale", "tid2eid")) and ".hc" not in name:
            continue
        how, whole = sharding(name), one.full(name)
        kinds.add(how)
        if how == "replicated":
            assert one.get(name).equal(whole)
        else:
            axis = 0 if how == "rows" else 1
            assert torch.cat([one.get(name), two.get(name)], axis).equal(whole), name
    assert kinds == {"rows", "columns", "replicated"}
    assert {how for _, how in SHARDING} == kinds


def test_the_real_shape_parses() -> None:
    """The published config's shape: 43 layers, 44 ratios."""
    table = json.loads((GOLDEN / "trunk-fp32" / "config.json").read_text())
    ratios = [0, 0, *[4, 128] * 20, 4, 0]
    table |= {"num_hidden_layers": 43, "compress_ratios": ratios, "head_dim": 512}
    shape = parse_shape(table)
    assert len(shape.layers_with(4)) == 21
    assert len(shape.layers_with(128)) == 20
    assert shape.compress_ratios[42] == 4
