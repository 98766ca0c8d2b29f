"""A row's bits under the deterministic table do not depend on how many rows stand beside it: on the
GPU where there is one, else the kernels' own source on the CPU."""

from collections.abc import Callable

import cuda_on_host
import pytest
import torch

from decant.kernels import fp4_moe, fp8_linear, gate, mhc, tuned, tuning
from decant.kernels import sparse_mla_decode as attention


@pytest.fixture(autouse=True)
def _host(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        cuda_on_host.use(monkeypatch)


def lines(op: str, arch: str) -> list[tuned.Choice]:
    return [c for _, c in tuned.parse(tuned.DETERMINISTIC.read_text())[arch, op]]


@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
def test_every_line_exists_and_keeps_the_order_of_sums(arch: str) -> None:
    table = tuned.parse(tuned.DETERMINISTIC.read_text())
    free = {"moe": (), "gate": ("tokens",), "mhc": ()}  # options that change no sum
    for (which, op), found in table.items():
        if which != arch:
            continue
        for bound, choice in found:
            arguments = {"tokens": min(bound, 32 if arch == "sm_120" else 64)}
            if op.startswith("linear"):
                arguments |= {"n": 4096, "k": int(op.removeprefix("linear_"))}
            job = tuning.Job(op, bound, "", arguments, ())
            assert tuning.problem(job, choice.options, arch) == "", (op, bound)
        constant = [
            {k: v for k, v in c.options.items() if k not in free.get(op, ("tokens",))}
            for _, c in found
        ]
        assert all(c == constant[0] for c in constant), op
        if op.startswith(("linear", "wo_a")):  # K is halved inside a block for up to 16 tokens only
            assert all(c.options["tokens"] <= 16 for _, c in found)


def same_alone(run: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> None:
    together = run(rows)
    for i in (0, len(rows) - 1):
        assert torch.equal(run(rows[i : i + 1])[0], together[i])


def test_linear(device: str, arch: str) -> None:
    weight = (torch.randn(64, 512) * 8).to(torch.float8_e4m3fn).to(device)
    scale = torch.randint(118, 124, (1, 4), dtype=torch.uint8, device=device)

    def run(x: torch.Tensor) -> torch.Tensor:
        out = torch.full((len(x), 64), float("nan"), device=device)
        options = {"kb": 2, "tokens": 8 if len(x) <= 8 else 16}
        with tuned.overridden(arch, "linear_512", "cuda", options):
            return fp8_linear.fp8_linear(x, weight, scale, None, out, arch)

    same_alone(run, torch.randn(11, 512, device=device).bfloat16())


def test_boundary(device: str, arch: str) -> None:
    fn = torch.randn(24, 1024, device=device) * 0.02
    base, scale = torch.randn(24, device=device), torch.ones(3, device=device)
    norm = torch.rand(256, device=device).bfloat16()
    post, comb = torch.rand(5, 4, device=device), torch.rand(5, 4, 4, device=device)
    y = torch.randn(5, 256, device=device).bfloat16()
    x = torch.randn(5, 4, 256, device=device).bfloat16()

    def run(first: int, count: int) -> torch.Tensor:
        part = slice(first, first + count)
        out = torch.empty(count, 256, dtype=torch.bfloat16, device=device)
        streams = torch.empty_like(x[part])
        mixing = (post[part].clone(), comb[part].clone())
        options = {"cluster": 2, "tokens": 4, "fn_shared": 0}
        with tuned.overridden(arch, "mhc", "cuda", options):
            mhc.mhc_boundary(
                x[part].contiguous(), y[part].contiguous(), *mixing, fn, base, scale, norm, streams,
                mhc.workspace(count, arch, device), out, arch,
            )  # fmt: skip
        return torch.cat((out.float().flatten(1), mixing[1].flatten(1), mixing[0]), 1)

    together = run(0, 5)
    for i in (0, 4):
        assert torch.equal(run(i, 1)[0], together[i])


def test_experts(device: str, arch: str) -> None:
    options = {
        "tokens": 8, "slices": 1, "up_rg": 2, "up_kg": 2, "up_kb": 2, "up_stages": 3,
        "down_rg": 4, "down_kg": 1, "down_kb": 1, "down_stages": 2,
    }  # fmt: skip
    codes = [
        torch.randint(0, 256, shape, dtype=torch.uint8) for shape in ((8, 256, 128), (8, 256, 64))
    ]
    scales = [torch.randint(118, 125, (8, 256, n), dtype=torch.uint8) for n in (8, 4)]
    packed = []
    for c, s in zip(codes, scales, strict=True):
        w = fp4_moe.pack_experts(c, s)
        places = (w.codes.to(device), w.scales.to(device), w.rows.to(device))
        packed.append(fp4_moe.PackedExperts(*places, w.group))
    chosen = torch.tensor([[0, 1, 2, 3, 4, 5]] * 10, dtype=torch.int32, device=device)
    weights = torch.rand(1, 6, device=device).expand(10, 6).contiguous()

    def run(x: torch.Tensor) -> torch.Tensor:
        n = len(x)
        with tuned.overridden(arch, "moe", "cuda", options):
            tiles = gate.new_tile_list(n * 6, 8, 8, device)
            gate.tile_list(chosen[:n], tiles, 8)
            hidden = torch.empty(n * 6, 128, dtype=torch.float16, device=device)
            partial = torch.empty(n * 6, 256, device=device)
            out = torch.empty(n, 256, device=device)
            return fp4_moe.fp4_moe(
                x, packed[0], packed[1], weights[:n], tiles, hidden, partial, out, arch
            )

    same_alone(run, torch.randn(10, 256, device=device).half())


def test_attention_splits_do_not_follow_the_rows(arch: str) -> None:
    for op in attention.OPERATIONS:
        assert len(lines(op, arch)) == 1
