"""Grouped output projection with inverse rotation, against float64."""

import pytest
import torch

from decant.kernels import fp8_linear, wo_a
from decant.kernels.kv_store import rope_ref, rotate_ref

TOLERANCE = 1e-3  # fp16 inputs


@pytest.mark.parametrize("tokens,heads,rank", [(1, 16, 64), (5, 8, 128)])
def test_matches_float64(tokens: int, heads: int, rank: int, device: str, arch: str) -> None:
    groups = heads // 8
    o = torch.randn(tokens, heads, 512)
    positions = torch.randint(0, 100_000, (tokens,))
    rope = rope_ref(positions, 10000.0 ** (-torch.arange(0, 64, 2).float() / 64))
    weight = torch.randn(groups * rank, 4096).to(torch.float8_e4m3fn)
    scale = torch.randint(115, 122, (max(1, groups * rank // 128), 32), dtype=torch.uint8)
    expected = wo_a.wo_a_ref(o, rope, weight, scale)
    scratch = fp8_linear.workspace(groups * rank, 64, device)
    scratch[0].fill_(float("nan"))
    room = torch.full((tokens, heads, 512), float("nan"), dtype=torch.float16, device=device)
    for rotated in (None, room):
        out = torch.full((tokens, groups * rank), float("nan"), device=device)
        wo_a.wo_a(
            o.to(device),
            rope.to(device),
            weight.to(device),
            scale.to(device),
            scratch,
            out,
            arch,
            rotated=rotated,
        )
        error = (out.cpu().double() - expected).norm() / expected.norm()
        assert error < TOLERANCE
    assert not scratch[1].any()


def test_rotation_back_undoes_the_rotation() -> None:
    x = torch.randn(3, 2, 512)
    rope = rope_ref(torch.tensor([1, 7, 99]), torch.rand(32))
    torch.testing.assert_close(
        rotate_ref(rotate_ref(x, rope), rope, -1.0).float(), x, rtol=1e-5, atol=1e-5
    )


def test_refuses_heads_that_are_no_groups(arch: str) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        wo_a.wo_a(
            torch.zeros(1, 12, 512),
            torch.zeros(1, 64),
            torch.zeros(64, 4096),
            torch.zeros(1, 32),
            None,
            torch.zeros(1, 64),
            arch,
        )
