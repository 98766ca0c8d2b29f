"""FP8 linear against float64 on the quantised operands; split sums, odd shapes, zero and huge
rows.
"""

import pytest
import torch

from decant.kernels import fp8_linear as op
from decant.kernels.config import Config

TOLERANCE = 1e-5  # fp32 sums of exact products
GPU_TOLERANCE = 2e-3  # Hopper's FP8 accumulator keeps fewer bits


def operands(tokens: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(tokens, k)
    x[0] = 0.0
    if tokens > 1:
        x[1] *= 3e4
    if tokens > 2:
        x[2, :128] *= 1e-6
    weight = torch.randn(n, k).to(torch.float8_e4m3fn)
    scale = torch.randint(110, 130, (-(-n // 128), k // 128), dtype=torch.uint8)
    return x.bfloat16(), weight, scale


@pytest.mark.parametrize(
    "tokens,n,k", [(1, 128, 512), (3, 192, 1024), (20, 128, 512), (70, 256, 256)]
)
def test_matches_float64(tokens: int, n: int, k: int, device: str, arch: str) -> None:
    x, weight, scale = operands(tokens, n, k)
    reference = op.fp8_linear_ref(x, weight, scale)
    scratch = op.workspace(n, 64, device)
    scratch[0].fill_(float("nan"))
    for _ in range(2):
        out = torch.full((tokens, n), float("nan"), device=device)
        op.fp8_linear(x.to(device), weight.to(device), scale.to(device), scratch, out, arch)
        got = out.cpu().double()
        for row in range(tokens):  # every row has its own magnitude
            error = (got[row] - reference[row]).norm() / reference[row].norm().clamp_min(1e-30)
            assert error < (TOLERANCE if device == "cpu" else GPU_TOLERANCE), row
    assert not scratch[1].any()


def test_activation_scale_is_the_smallest_power_of_two(device: str, arch: str) -> None:
    # 448 fits scale 1, the next bf16 above needs 2: an identity weight shows the quantised
    # activations
    x = torch.zeros(2, 128)
    x[0, 0], x[0, 1] = 448.0, 1.0 + 1 / 16
    x[1, 0], x[1, 1] = 450.0, 1.0 + 1 / 16
    weight = torch.eye(128).to(torch.float8_e4m3fn)
    scale = torch.full((1, 1), 127, dtype=torch.uint8)
    out = torch.full((2, 128), float("nan"), device=device)
    op.fp8_linear(x.bfloat16().to(device), weight.to(device), scale.to(device), None, out, arch)
    assert out.cpu()[:, :2].tolist() == [[448.0, 1.0], [448.0, 1.0]]
    assert torch.equal(out.cpu().double(), op.quantise_ref(x.bfloat16()))


def test_rows_do_not_depend_on_their_neighbours(device: str, arch: str) -> None:
    config = Config(block_n=64, block_t=16, splits=4, num_warps=4, num_stages=2)
    x, weight, scale = operands(5, 128, 1024)
    scratch = op.workspace(128, 64, device)
    args = weight.to(device), scale.to(device), scratch
    together = op.fp8_linear(x.to(device), *args, torch.empty(5, 128, device=device), arch, config)
    for row in range(5):
        alone = op.fp8_linear(
            x[row : row + 1].to(device), *args, torch.empty(1, 128, device=device), arch, config
        )
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("tokens,n,k", [(70, 192, 256), (3, 128, 128)])
def test_quantising_apart_changes_nothing(
    tokens: int, n: int, k: int, device: str, arch: str
) -> None:
    x, weight, scale = operands(tokens, n, k)
    config = Config(block_n=64, block_t=64, splits=1, num_warps=4, num_stages=2)
    args = x.to(device), weight.to(device), scale.to(device), None
    nan = torch.full((tokens, n), float("nan"), device=device)
    fused = op.fp8_linear(*args, nan.clone(), arch, config)
    room = (
        torch.full((tokens, k), float("nan"), device=device).to(torch.float8_e4m3fn),
        torch.full((k // 128, tokens), float("nan"), device=device),
    )
    apart = op.fp8_linear(*args, nan, arch, config, room)
    assert torch.equal(fused, apart)
    with pytest.raises(ValueError, match="room for codes"):
        op.fp8_linear(*args, nan, arch, config, (room[0][:1], room[1]))


def test_refuses_wrong_scales(arch: str) -> None:
    x, weight, scale = operands(1, 128, 256)
    with pytest.raises(ValueError, match="scale has shape"):
        op.fp8_linear(x, weight, scale[:, :1], None, torch.empty(1, 128), arch)
