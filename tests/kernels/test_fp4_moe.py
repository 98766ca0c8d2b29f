"""FP4 MoE against float64: both formats, empty and crowded experts, poisoned scratch."""

import pytest
import torch

from decant.kernels import fp4_moe, gate, tuned

TOLERANCE = 2e-3  # fp16 hidden values: 2^-11 relative, summed over I


def nan(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def random_experts(kind: str, experts: int, n: int, k: int) -> fp4_moe.PackedExperts:
    codes = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8)
    if kind == "mxfp4":
        return fp4_moe.pack_experts(
            codes, torch.randint(118, 125, (experts, n, k // 32), dtype=torch.uint8)
        )
    scales = (torch.rand(experts, n, k // 16) * 4 + 0.01).to(torch.float8_e4m3fn)
    return fp4_moe.pack_experts(codes, scales, torch.rand(experts) * 0.01 + 0.002)


def checkpoint_values(codes: torch.Tensor, scale: torch.Tensor, group: int) -> torch.Tensor:
    """The published rule, written independently of the shuffle: low nibble first."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    values = torch.empty(*codes.shape[:-1], codes.shape[-1] * 2)
    values[..., 0::2] = table[(codes & 15).long()]
    values[..., 1::2] = table[(codes >> 4).long()]
    return values * scale.repeat_interleave(group, -1)


def test_shuffle_keeps_every_value() -> None:
    codes = torch.randint(0, 256, (3, 8, 64), dtype=torch.uint8)
    mx = torch.randint(100, 140, (3, 8, 4), dtype=torch.uint8)
    mx[0] = torch.randint(118, 125, (8, 4))
    packed = fp4_moe.pack_experts(codes, mx)
    expected = checkpoint_values(codes, torch.exp2(mx.float() - 127), 32)
    got = fp4_moe.unpack_experts_ref(packed)
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=0)
    # scales more than 28 binary orders under the row's largest are dropped, nothing else is
    limit = 6 * torch.exp2(mx.amax(-1, keepdim=True).float() - 127 - 28)
    assert bool(((got - expected).abs() <= limit).all())

    nv = (torch.rand(3, 8, 8) * 400 + 0.002).to(torch.float8_e4m3fn)
    tensor_scale = torch.tensor([0.5, 0.01, 3.0])
    packed = fp4_moe.pack_experts(codes, nv, tensor_scale)
    expected = checkpoint_values(codes, nv.float(), 16) * tensor_scale[:, None, None]
    torch.testing.assert_close(fp4_moe.unpack_experts_ref(packed), expected, rtol=1e-6, atol=0)


def test_pack_refuses_what_has_no_form() -> None:
    codes = torch.zeros(1, 4, 32, dtype=torch.uint8)
    with pytest.raises(ValueError, match="do not fit"):
        fp4_moe.pack_experts(codes, torch.zeros(1, 4, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="NaN"):
        fp4_moe.pack_experts(codes, torch.full((1, 4, 2), 255, dtype=torch.uint8))
    with pytest.raises(ValueError, match="tensor scale"):
        fp4_moe.pack_experts(codes, torch.zeros(1, 4, 4, dtype=torch.float8_e4m3fn))


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("routing", ["random", "one_expert", "spread"])
@pytest.mark.parametrize("tokens", [1, 5, 20])
def test_moe_matches_float64(kind: str, routing: str, tokens: int, device: str, arch: str) -> None:
    experts_total, width, inner, top_k = 16, 128, 64, 6
    w13 = random_experts(kind, experts_total, 2 * inner, width)
    w2 = random_experts(kind, experts_total, width, inner)
    x = torch.randn(tokens, width).to(torch.float16)
    if routing == "one_expert":
        experts = torch.full((tokens, top_k), 3, dtype=torch.int32)
    elif routing == "spread":
        experts = (torch.arange(tokens * top_k, dtype=torch.int32) % experts_total).view(
            tokens, top_k
        )
    else:
        experts = torch.stack([torch.randperm(experts_total)[:top_k] for _ in range(tokens)]).int()
    weights = torch.rand(tokens, top_k)
    reference = fp4_moe.fp4_moe_ref(x, w13, w2, experts, weights)
    shared = torch.randn(tokens, width)

    def move(w: fp4_moe.PackedExperts) -> fp4_moe.PackedExperts:
        return fp4_moe.PackedExperts(
            w.codes.to(device), w.scales.to(device), w.rows.to(device), w.group
        )

    tiles = gate.new_tile_list(
        tokens * top_k, experts_total, fp4_moe.block_tokens(tokens * top_k, arch, w13), device
    )
    gate.tile_list(experts.to(device), tiles, experts_total)
    out = fp4_moe.fp4_moe(
        x.to(device),
        move(w13),
        move(w2),
        weights.to(device),
        tiles,
        hidden=nan(tokens * top_k, inner, dtype=torch.float16, device=device),
        partial=nan(tokens * top_k, width, dtype=torch.float32, device=device),
        out=nan(tokens, width, dtype=torch.float32, device=device),
        arch=arch,
        shared=shared.to(device),
    )
    expected = reference + shared.double()
    error = (out.cpu().double() - expected).norm() / expected.norm()
    assert error < TOLERANCE


def test_a_tuned_kernel_that_does_not_fit_the_experts_is_passed_over() -> None:
    """The table is tuned at real width; smaller models run beside it."""
    options = {"up_rg": 4, "up_kg": 2, "up_kb": 8, "up_stages": 4, "down_rg": 4, "down_kg": 2,
               "down_kb": 8, "down_stages": 4, "slices": 2, "tokens": 8}  # fmt: skip
    empty = torch.empty(0)

    def experts(n13: int, width: int) -> fp4_moe.PackedExperts:
        codes = torch.empty(1, width // 64, n13, 32, dtype=torch.uint8)
        return fp4_moe.PackedExperts(codes, empty, empty, 32)

    with tuned.overridden("sm_90", "moe", "cuda", options):
        assert fp4_moe.chosen_for("sm_90", 6, experts(1024, 4096)).is_cuda
        assert not fp4_moe.chosen_for("sm_90", 6, experts(512, 256)).is_cuda
        assert fp4_moe.block_tokens(6, "sm_90", experts(512, 256)) == 16
