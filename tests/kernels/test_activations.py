"""RMSNorm and SwiGLU into e4m3 codes, against float64 and against the linears' own rounding."""

import pytest
import torch

from decant.kernels import activations as op
from decant.kernels.fp8_linear import quantise, quantise_ref


def room(tokens: int, width: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.zeros(tokens, width, dtype=torch.float8_e4m3fn, device=device)
    return codes, torch.full((width // 128, tokens), float("nan"), device=device)


def values(codes: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return codes.cpu().double() * factors.cpu().double().T.repeat_interleave(128, 1)


def close(got: torch.Tensor, exact: torch.Tensor) -> bool:
    """Equal but for values within rounding of a tie, which may take the neighbouring code."""
    wanted = quantise_ref(exact.bfloat16())
    off = (got - wanted).abs() > 1e-9
    return float(off.double().mean()) < 2e-3 and bool(
        ((got - wanted).abs() <= wanted.abs() / 8 + 1e-6).all()
    )


@pytest.mark.parametrize("width", [128, 384, 1024])
def test_norm_codes(width: int, device: str) -> None:
    x = (torch.randn(3, width + 512) * torch.tensor([1e-3, 1.0, 40.0])[:, None]).bfloat16()
    weight = (1 + 0.1 * torch.randn(width)).bfloat16()
    codes, factors = room(3, width, device)
    op.norm_codes(x.to(device)[:, :width], weight.to(device), codes, factors)
    assert close(values(codes, factors), op.norm_codes_ref(x[:, :width], weight))


@pytest.mark.parametrize("width", [128, 512])
def test_swiglu_codes(width: int, device: str) -> None:
    x = (torch.randn(5, 2 * width) * 6).bfloat16()
    codes, factors = room(5, width, device)
    op.swiglu_codes(x.to(device), codes, factors)
    assert close(values(codes, factors), op.swiglu_codes_ref(x))


def test_codes_are_those_of_the_linears(device: str) -> None:
    """With a mean square of 1 and weight 1 the norm changes nothing: only codes are made."""
    x = torch.where(torch.rand(4, 256) < 0.5, -1.0, 1.0).bfloat16().to(device)
    made, own = room(4, 256, device), room(4, 256, device)
    op.norm_codes(x, torch.ones(256, dtype=torch.bfloat16, device=device), *made)
    quantise(x, *own)
    assert torch.equal(made[0].view(torch.uint8), own[0].view(torch.uint8))
    assert torch.equal(made[1], own[1])


def test_shapes_that_do_not_fit(device: str) -> None:
    codes, factors = room(2, 128, device)
    x = torch.zeros(2, 130, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="groups of 128"):
        op.norm_codes(x, x[0], codes, factors)
    with pytest.raises(ValueError, match="are not"):
        op.swiglu_codes(torch.zeros(3, 256, device=device), codes, factors)
