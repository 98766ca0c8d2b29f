"""The trainable model against golden vectors, and the way through the quantised format and back."""

import copy
from pathlib import Path

import pytest
import torch

from decant.engine.demo import checkpoint, quantise, shape, verify
from decant.engine.demo.network import Model
from decant.engine.demo.train import Rounding

GOLDEN = Path(__file__).parents[2] / "golden"
TINY = {
    **shape.CONFIG,
    "vocab_size": 128,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 128, 0],
    "moe_intermediate_size": 128,
    "n_routed_experts": 2,
}


@pytest.mark.parametrize("name", ["trunk-fp32", "trunk-topk"])
def test_trainable_model_is_the_specified_one(name: str) -> None:
    worst = verify.differences(GOLDEN / name)
    assert max(worst.values()) < verify.BOUND, worst


def test_fp8_rounds_to_the_nearest_of_the_block_scale() -> None:
    w = torch.randn(200, 130, generator=torch.Generator().manual_seed(0))
    w[0, 0] = 448 * 4.0  # the scale of the first block is exactly 4
    packed, scale = quantise.pack_fp8(w)
    assert packed.dtype == torch.float8_e4m3fn and scale.dtype == torch.float8_e8m0fnu
    assert scale.shape == (2, 2) and scale.view(torch.uint8)[0, 0] == quantise.E8M0_BIAS + 2
    back = quantise.unpack_fp8(packed, scale)
    assert torch.equal(back, quantise.fake_fp8(w))
    inside = w[128:].abs() > 0.1  # far from subnormals: at most half of the last of four bits
    assert ((back[128:] - w[128:]).abs()[inside] <= w[128:].abs()[inside] / 16).all()


def test_fp4_packs_even_in_the_low_nibble() -> None:
    row = torch.tensor([[0.5, -6.0] + [0.0] * 30])
    packed, scale = quantise.pack_fp4(row)
    assert packed.view(torch.uint8)[0, 0] == 1 | (15 << 4)
    assert scale.view(torch.uint8).item() == quantise.E8M0_BIAS
    w = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    back = quantise.unpack_fp4(*quantise.pack_fp4(w))
    assert torch.equal(back, quantise.fake_fp4(w))
    assert torch.equal(back, quantise.fake_fp4(back)), "rounding twice changes nothing"


def test_quantised_folder_holds_what_training_multiplied_with(tmp_path: Path) -> None:
    model = Model(TINY, 3)
    checkpoint.write_quantised(tmp_path, TINY, checkpoint.published(model))
    loaded = checkpoint.load(tmp_path)
    aware = copy.deepcopy(model)
    rounding = Rounding(aware)
    before = {n: p.data.clone() for n, p in aware.named_parameters()}
    rounding.put()
    for name, p in aware.named_parameters():
        got = loaded.get_parameter(name)
        want = p.data if checkpoint.rounded(name, before[name]) is not None else None
        if want is not None:
            assert torch.equal(got, want), name
        else:
            assert torch.allclose(got, before[name], rtol=2**-8, atol=1e-30), name
    rounding.take_back()
    assert all(torch.equal(p.data, before[n]) for n, p in aware.named_parameters())


def test_quantised_refuses_a_missing_or_misshapen_tensor() -> None:
    state = checkpoint.published(Model(TINY, 0))
    short = {k: v for k, v in state.items() if k != "mtp.0.e_proj.weight"}
    with pytest.raises(ValueError, match=r"mtp\.0\.e_proj"):
        checkpoint.quantised(TINY, short)
    with pytest.raises(ValueError, match="head.weight"):
        checkpoint.quantised(TINY, {**state, "head.weight": state["head.weight"][:64]})
