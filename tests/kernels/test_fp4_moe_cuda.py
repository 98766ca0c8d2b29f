"""The CUDA C++ experts against float64: on the GPU where there is one, else their own source on
the CPU."""

import cuda_on_host
import pytest
import torch

from decant.kernels import fp4_moe, fp4_moe_cuda, gate, tuned

TOLERANCE = 2e-3  # fp16 hidden values: 2^-11 relative, summed over I

SMALL = {
    "tokens": 8, "slices": 1,
    "up_rg": 2, "up_kg": 2, "up_kb": 2, "up_stages": 3,
    "down_rg": 4, "down_kg": 1, "down_kb": 1, "down_stages": 2,
}  # fmt: skip
WIDE = SMALL | {"tokens": 16, "slices": 2, "up_kg": 1, "up_stages": 2, "down_kb": 2}


def random_experts(kind: str, experts: int, n: int, k: int) -> fp4_moe.PackedExperts:
    codes = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8)
    if kind == "mxfp4":
        scales = torch.randint(118, 125, (experts, n, k // 32), dtype=torch.uint8)
        return fp4_moe.pack_experts(codes, scales)
    small = (torch.rand(experts, n, k // 16) * 4 + 0.01).to(torch.float8_e4m3fn)
    return fp4_moe.pack_experts(codes, small, torch.rand(experts) * 0.01 + 0.002)


@pytest.mark.parametrize(
    ("kind", "routing", "tokens", "options", "dtype"),
    [
        ("mxfp4", "random", 5, SMALL, torch.float32),
        ("nvfp4", "one_expert", 3, SMALL, torch.bfloat16),
        ("mxfp4", "one_expert", 4, WIDE, torch.bfloat16),
        ("nvfp4", "random", 1, WIDE, torch.float32),
    ],
)
def test_moe_matches_float64(
    kind: str,
    routing: str,
    tokens: int,
    options: dict[str, int],
    dtype: torch.dtype,
    device: str,
    arch: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device == "cpu":
        cuda_on_host.use(monkeypatch)
    total, width, inner, top_k = 8, 256, 128, 6
    w13 = random_experts(kind, total, 2 * inner, width)
    w2 = random_experts(kind, total, width, inner)
    x = torch.randn(tokens, width).half()
    if routing == "one_expert":
        experts = torch.full((tokens, top_k), 3, dtype=torch.int32)
    else:
        experts = torch.stack([torch.randperm(total)[:top_k] for _ in range(tokens)]).int()
    weights = torch.rand(tokens, top_k)
    shared = torch.randn(tokens, width).to(dtype)
    expected = fp4_moe.fp4_moe_ref(x, w13, w2, experts, weights) + shared.double()
    pairs = tokens * top_k

    def move(w: fp4_moe.PackedExperts) -> fp4_moe.PackedExperts:
        places = (w.codes.to(device), w.scales.to(device), w.rows.to(device))
        return fp4_moe.PackedExperts(*places, w.group)

    def nan(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)

    with tuned.overridden(arch, "moe", "cuda", options):
        assert fp4_moe.chosen_for(arch, pairs, w13).is_cuda
        tiles = gate.new_tile_list(pairs, total, fp4_moe.block_tokens(pairs, arch, w13), device)
        gate.tile_list(experts.to(device), tiles, total)
        for _ in range(2):  # the counters are zero again
            out = fp4_moe.fp4_moe(
                x.to(device), move(w13), move(w2), weights.to(device), tiles,
                hidden=nan(pairs, inner, dtype=torch.float16), partial=nan(pairs, width),
                out=nan(tokens, width, dtype=dtype), arch=arch, shared=shared.to(device),
            )  # fmt: skip
    error = (out.cpu().double() - expected).norm() / expected.norm()
    assert error < (TOLERANCE if dtype == torch.float32 else 4e-3)
    assert not fp4_moe_cuda.counters(out.device, 1).any()


def test_options_that_do_not_fit_are_named() -> None:
    assert fp4_moe_cuda.problem(SMALL, "sm_90", 256, 256, 128, 32) == ""
    assert "channels" in fp4_moe_cuda.problem(SMALL, "sm_90", 256, 192, 128, 32)
    assert "rows" in fp4_moe_cuda.problem(SMALL, "sm_90", 256 + 16, 256, 128, 32)
    big = SMALL | {"up_rg": 8, "up_kb": 8, "up_stages": 8}
    assert "shared memory" in fp4_moe_cuda.problem(big, "sm_120", 1024, 4096, 512, 32)


def test_tables_are_read_back() -> None:
    table = {
        ("sm_90", "moe"): ((6, tuned.Choice("cuda", SMALL)), (1 << 20, tuned.Choice("triton", {})))
    }
    assert tuned.parse(tuned.dump(table)) == table
    with pytest.raises(ValueError, match="no line"):
        tuned.parse('{"sm_90": {"moe": [[6, "cuda", {}], [6, "cuda", {}]]}}')
    tuned.parse(tuned.PATH.read_text())
