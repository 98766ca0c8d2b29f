"""The CUDA C++ linear and output projection against float64: on the GPU where there is one, else
their own source on the CPU."""

import cuda_on_host
import pytest
import torch

from decant.kernels import fp8_linear, tuned, wo_a

WIDE = {"rows": 64, "threads": 256}
TOLERANCE = {torch.bfloat16: 4e-3, torch.float32: 2e-6}


def weights(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = (torch.randn(n, k) * 8).to(torch.float8_e4m3fn)
    return codes, torch.randint(112, 128, (-(-n // 128), k // 128), dtype=torch.uint8)


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double().cpu() - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("tokens", "n", "k", "options", "given", "dtype"),
    [
        (1, 128, 512, {"kb": 2, "tokens": 8}, torch.bfloat16, torch.bfloat16),
        (37, 128, 512, {"kb": 1, "tokens": 32}, torch.float32, torch.float32),
        (5, 64, 256, {"kb": 2, "tokens": 16}, torch.float8_e4m3fn, torch.float32),
        (9, 128, 512, WIDE | {"kb": 4, "tokens": 16}, torch.bfloat16, torch.bfloat16),
        (70, 128, 512, WIDE | {"kb": 2, "tokens": 64, "rows": 128}, torch.float32, torch.float32),
        (3, 64, 512, WIDE | {"kb": 4, "tokens": 8}, torch.float8_e4m3fn, torch.float32),
        (
            33,
            64,
            512,
            WIDE | {"kb": 4, "tokens": 32, "threads": 512},
            torch.bfloat16,
            torch.float32,
        ),
    ],
)
def test_linear_matches_float64(
    tokens: int,
    n: int,
    k: int,
    options: dict[str, int],
    given: torch.dtype,
    dtype: torch.dtype,
    device: str,
    arch: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device == "cpu":
        cuda_on_host.use(monkeypatch)
    weight, scale = weights(n, k)
    x = torch.randn(tokens, k) * torch.exp2(torch.randint(-8, 8, (tokens, 1)).float())
    x[1:2] = 0  # the smallest scale
    factors = None
    if given == torch.float8_e4m3fn:
        x = torch.randint(0, 120, (tokens, k), dtype=torch.uint8).view(given)
        factors = torch.exp2(torch.randint(-3, 4, (k // 128, tokens)).float())
        values = x.double() * factors.t().repeat_interleave(128, 1).double()
        expected = values @ fp8_linear.dequantise_weight_ref(weight, scale).T
    else:
        x = x.to(given)
        expected = fp8_linear.fp8_linear_ref(x, weight, scale)
    wide = torch.zeros(tokens, k + 64, dtype=x.dtype)  # rows need not be contiguous
    wide[:, :k] = x
    out = torch.full((tokens, n), float("nan"), dtype=dtype, device=device)
    with tuned.overridden(arch, f"linear_{k}", "cuda", options):
        fp8_linear.fp8_linear(
            wide.to(device)[:, :k], weight.to(device), scale.to(device), None, out, arch,
            factors=None if factors is None else factors.to(device),
        )  # fmt: skip
    # the matrix unit's own sums of e4m3 products keep about 14 bits
    tolerance = 1e-3 if device != "cpu" and "rows" in options else TOLERANCE[dtype]
    assert relative(out, expected) < max(tolerance, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("tokens", "options"), [(3, {"kb": 8, "tokens": 8}), (33, {"kb": 4, "tokens": 32})]
)
def test_wo_a_matches_float64(
    tokens: int,
    options: dict[str, int],
    device: str,
    arch: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device == "cpu":
        cuda_on_host.use(monkeypatch)
    heads, rank = 16, 128
    weight, scale = weights(2 * rank, 4096)
    o = torch.randn(tokens, heads, 512).bfloat16()
    angle = torch.rand(tokens, 32) * 6
    rope = torch.cat((angle.cos(), angle.sin()), -1)
    expected = wo_a.wo_a_ref(o, rope, weight, scale)
    out = torch.full((tokens, 2 * rank), float("nan"), device=device)
    with tuned.overridden(arch, "wo_a_4096", "cuda", options):
        wo_a.wo_a(
            o.to(device), rope.to(device), weight.to(device), scale.to(device), None, out, arch
        )
    assert relative(out, expected) < 5e-4  # rotated inputs are rounded to fp16


def test_options_that_do_not_fit_are_named() -> None:
    problem = fp8_linear.cuda_problem
    assert problem({"kb": 4, "tokens": 64}, "sm_90", 8192, 1024) == ""
    assert "pieces" in problem({"kb": 3, "tokens": 64}, "sm_90", 8192, 1024)
    assert "cluster" in problem({"kb": 2, "tokens": 8}, "sm_120", 1536, 4096)
    assert "shared" in problem({"kb": 4, "tokens": 64}, "sm_120", 8192, 1024)
    assert "tokens" in problem({"kb": 4, "tokens": 24}, "sm_90", 8192, 1024)
    wide = WIDE | {"kb": 8, "tokens": 64}
    assert problem(wide, "sm_90", 8192, 1024) == ""
    assert "four warps" in problem(wide, "sm_120", 8192, 1024)
    assert "groups" in problem(wide | {"kb": 2, "threads": 512}, "sm_90", 8192, 1024)
    assert "threads" in problem(wide | {"kb": 2, "tokens": 8}, "sm_90", 8192, 1024)


def test_codes_and_factors_belong_together(arch: str) -> None:
    weight, scale = weights(64, 128)
    x, out = torch.zeros(2, 128), torch.zeros(2, 64)
    with pytest.raises(ValueError, match="codes come with"):
        fp8_linear.fp8_linear(x, weight, scale, None, out, arch, factors=torch.ones(1, 2))
    with pytest.raises(ValueError, match="factors must be"):
        codes = x.to(torch.float8_e4m3fn)
        fp8_linear.fp8_linear(codes, weight, scale, None, out, arch, factors=torch.ones(2, 2))
