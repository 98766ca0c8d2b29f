"""Hyper-connection boundary against float64."""

import cuda_on_host
import pytest
import torch

from decant.kernels import fp8_linear, tuned
from decant.kernels import mhc as op

MIX_TOLERANCE = 2e-5  # fp32 with three-term tf32 products
OUT_TOLERANCE = 8e-3  # one bf16 rounding each of the collapsed input and of the result


def parameters(width: int, dots: int) -> tuple[torch.Tensor, ...]:
    fn = torch.randn(dots, 4 * width) * 0.02
    return (
        fn,
        torch.randn(dots),
        torch.rand(3 if dots == op.MIX else 1) + 0.5,
        torch.rand(width).bfloat16() + 0.5,
    )


@pytest.mark.parametrize("tokens", [1, 5, 19])
@pytest.mark.parametrize("inplace", [False, True])
def test_boundary_matches_float64(tokens: int, inplace: bool, device: str, arch: str) -> None:
    check_boundary(tokens, inplace, device, arch, None)


@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        (1, {"cluster": 2, "tokens": 1, "fn_shared": 1}),
        (7, {"cluster": 2, "tokens": 4, "fn_shared": 0}),
        (3, {"cluster": 1, "tokens": 2, "fn_shared": 1}),
    ],
)
def test_cuda_boundary_matches_float64(
    tokens: int,
    options: dict[str, int],
    device: str,
    arch: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device == "cpu":
        cuda_on_host.use(monkeypatch)
    with tuned.overridden(arch, "mhc", "cuda", options):
        check_boundary(tokens, tokens == 7, device, arch, options)
        if tokens == 3:
            for dots in (op.MIX, op.STREAMS):
                check_first_site_and_head(dots, device, arch)


def test_cuda_options_that_do_not_fit_are_named() -> None:
    good = {"cluster": 8, "tokens": 4, "fn_shared": 0}
    assert op.cuda_problem(good, "sm_120", 4096) == ""
    assert "cluster of 16" in op.cuda_problem(good | {"cluster": 16}, "sm_120", 4096)
    assert "shared memory" in op.cuda_problem(good | {"fn_shared": 1}, "sm_120", 4096)
    assert "tokens" in op.cuda_problem(good | {"tokens": 32}, "sm_90", 4096)


def check_boundary(
    tokens: int, inplace: bool, device: str, arch: str, options: dict[str, int] | None
) -> None:
    width = 256
    fn, base, scale, norm = parameters(width, op.MIX)
    x = (
        torch.randn(tokens, 4, width) * torch.tensor([1.0, 30.0, 0.1, 5.0])[None, :, None]
    ).bfloat16()
    y = torch.randn(tokens, width).bfloat16()
    post, comb = torch.rand(tokens, 4) * 2, torch.rand(tokens, 4, 4)
    streams_ref = op.combine_ref(x, y, post, comb)
    x_device = x.to(device)
    streams = x_device if inplace else torch.full_like(x_device, float("nan"))
    post_device, comb_device = post.to(device), comb.to(device)
    out = torch.full((tokens, width), float("nan"), dtype=torch.bfloat16, device=device)
    out16 = torch.full((tokens, width), float("nan"), dtype=torch.float16, device=device)
    codes = torch.zeros(tokens, width, device=device).to(torch.float8_e4m3fn)
    pair = None
    if options is not None:
        assert op.cuda_problem(options, arch, width) == ""
        pair = (codes, torch.full((width // 128, tokens), float("nan"), device=device))
    op.mhc_boundary(
        x_device,
        y.to(device),
        post_device,
        comb_device,
        fn.to(device),
        base.to(device),
        scale.to(device),
        norm.to(device),
        streams,
        op.workspace(tokens, arch, device).fill_(float("nan")),
        out,
        arch,
        out16,
        codes=pair,
    )
    got = streams.cpu().double()
    assert ((got - streams_ref).abs() <= streams_ref.abs() * 2**-8 + 1e-6).all()
    pre, post_ref, comb_ref = op.mix_ref(streams.cpu(), fn, base, scale)
    torch.testing.assert_close(
        post_device.cpu().double(), post_ref, rtol=MIX_TOLERANCE, atol=MIX_TOLERANCE
    )
    torch.testing.assert_close(
        comb_device.cpu().double(), comb_ref, rtol=MIX_TOLERANCE, atol=MIX_TOLERANCE
    )
    torch.testing.assert_close(
        comb_device.cpu().sum(-2), torch.ones(tokens, 4), rtol=1e-4, atol=1e-4
    )
    expected = op.collapse_ref(streams.cpu(), pre, norm)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=OUT_TOLERANCE, atol=1e-3)
    assert torch.equal(out16.cpu(), out.cpu().to(torch.float16))
    if pair is not None:
        values = codes.cpu().double() * pair[1].cpu().t().repeat_interleave(128, 1).double()
        assert torch.equal(values, fp8_linear.quantise_ref(out.cpu()))


@pytest.mark.parametrize("dots", [op.MIX, op.STREAMS])
def test_first_site_and_head(dots: int, device: str, arch: str) -> None:
    check_first_site_and_head(dots, device, arch)


def check_first_site_and_head(dots: int, device: str, arch: str) -> None:
    tokens, width = 3, 256
    fn, base, scale, norm = parameters(width, dots)
    x = torch.randn(tokens, 4, width).bfloat16()
    post = torch.full((tokens, 4), float("nan"), device=device)
    comb = torch.full((tokens, 4, 4), float("nan"), device=device)
    out = torch.full((tokens, width), float("nan"), dtype=torch.bfloat16, device=device)
    x_device = x.to(device)
    op.mhc_boundary(
        x_device,
        None,
        post,
        comb,
        fn.to(device),
        base.to(device),
        scale.to(device),
        norm.to(device),
        x_device,
        op.workspace(tokens, arch, device),
        out,
        arch,
    )
    assert torch.equal(x_device.cpu(), x)
    if dots == op.MIX:
        pre, post_ref, _ = op.mix_ref(x, fn, base, scale)
        torch.testing.assert_close(
            post.cpu().double(), post_ref, rtol=MIX_TOLERANCE, atol=MIX_TOLERANCE
        )
    else:
        flat = x.double().flatten(1)
        rho = (flat.square().mean(-1, keepdim=True) + op.EPS).rsqrt()
        pre = torch.sigmoid(rho * (flat @ fn.double().T) * scale.double() + base.double()) + op.EPS
        assert bool(post.isnan().all()), "the head writes no mixing values"
    torch.testing.assert_close(
        out.cpu().double(), op.collapse_ref(x, pre, norm), rtol=OUT_TOLERANCE, atol=1e-3
    )


def test_refuses_a_wrong_width(device: str, arch: str) -> None:
    x = torch.zeros(1, 4, 128).bfloat16()
    with pytest.raises(ValueError, match="do not fit"):
        op.mhc_boundary(x, None, x, x, torch.zeros(24, 128), x, x, x, x, x, x, arch)
