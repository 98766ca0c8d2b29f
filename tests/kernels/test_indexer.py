"""Indexer: Hadamard, paged logits, top-512, against float64 and stable sorting."""

from dataclasses import replace

import cuda_on_host
import pytest
import torch

from decant.kernels import indexer as op
from decant.kernels import tuned
from decant.kernels.kv_store import rope_ref, rotate_ref
from decant.kernels.layout import CSA_RATIO, page_layout
from decant.kernels.rows import poison, write_rows


def make_plan(positions: list[int], arch: str, device: str, chunk: int = 1024) -> op.IndexPlan:
    plan = replace(op.new_plan(len(positions), arch, device), chunk=chunk)
    op.fill_plan(torch.tensor(positions, dtype=torch.int32, device=device), plan)
    return plan


def test_hadamard_and_quantise(device: str) -> None:
    q = (torch.randn(3, 64, 128) * 4).bfloat16()
    head_weights = torch.randn(3, 64).bfloat16()
    codes = torch.zeros(3, 64, 128, dtype=torch.float8_e4m3fn, device=device)
    weights = torch.full((3, 64), float("nan"), device=device)
    op.index_queries(q.to(device), head_weights.to(device), codes, weights)
    transformed = op.hadamard_ref(q)
    expected, scale = op.quantise_vector_ref(transformed)
    got = codes.cpu().float() * (weights.cpu() / (head_weights.float() * op.HEAD_WEIGHT))[..., None]
    # a value that the transform puts within fp32 rounding of a tie may take the neighbouring code:
    # 1/8 of it
    close = (got - expected.float() * scale[..., None]).abs()
    assert (close > 1e-6).float().mean() < 1e-3
    assert (
        (got - transformed).abs() <= transformed.abs() / 16 + scale[..., None] * 2**-10 + 1e-6
    ).all()


def test_hadamard_turns_queries_itself(device: str) -> None:
    """As if they had been rotated and rounded before; head weights lie in longer rows."""
    q = (torch.randn(3, 64, 128) * 4).bfloat16()
    positions = torch.tensor([0, 77, 4001])
    rope = rope_ref(positions, 10000.0 ** (-torch.arange(32) / 32))
    turned = rotate_ref(q, rope).bfloat16()
    wide = torch.randn(3, 100)
    made = []
    for given, angles in ((q, rope.to(device)), (turned, None)):
        codes = torch.zeros(3, 64, 128, dtype=torch.float8_e4m3fn, device=device)
        weights = torch.full((3, 64), float("nan"), device=device)
        op.index_queries(given.to(device), wide.to(device)[:, 30:94], codes, weights, angles)
        made.append((codes.cpu().float(), weights.cpu()))
    assert torch.allclose(made[0][1], made[1][1])
    assert (made[0][0] != made[1][0]).float().mean() < 2e-3  # near ties of the rounding to bf16


def test_plan_counts_live_entries_only(device: str, arch: str) -> None:
    positions = [-1, 0, 3, 2047, 2051, 5 * 4096]
    plan = make_plan(positions, arch, device)
    entries = [(p + 1) // CSA_RATIO for p in positions]
    assert plan.entries.tolist() == entries
    tiles = [-(-n // plan.tile) if n > op.TOP_K else 0 for n in entries]
    assert plan.tile_start.tolist() == [sum(tiles[:i]) for i in range(len(tiles) + 1)]
    assert plan.row_start.tolist() == [sum(tiles[:i]) * plan.tile for i in range(len(tiles))]
    assert int(plan.tile_start[-1]) * plan.tile == op.logits_capacity(entries, plan.tile)
    assert int(plan.chunk_start[-1]) == op.chunk_slots(entries, plan.chunk)


@pytest.mark.parametrize("page_tokens", [256, 1024])
def test_logits(page_tokens: int, device: str, arch: str) -> None:
    positions, slots = [2600, 100, 3001], [0, 0, 1]
    layout = page_layout((CSA_RATIO, CSA_RATIO), page_tokens)
    part = layout.index[1]
    entries = [(p + 1) // CSA_RATIO for p in positions]
    width = max(entries) // part.rows + 1
    pages = torch.empty(2 * width, layout.stride, dtype=torch.uint8)
    poison(pages)
    table = torch.randperm(2 * width, dtype=torch.int32).view(2, width)
    keys = {}
    for slot, n in ((0, entries[0]), (1, entries[2])):
        codes, scale = op.quantise_vector_ref(torch.randn(n, 128) * torch.rand(n, 1) * 8)
        keys[slot] = codes.double() * scale.double()[:, None]
        for e in range(n):
            octets = scale[e : e + 1].contiguous().view(torch.uint8)
            write_rows(
                pages[table[slot, e // part.rows]],
                part,
                e % part.rows,
                codes[e].view(torch.uint8),
                octets,
            )
    q = torch.randn(3, 64, 128).to(torch.float8_e4m3fn)
    weights = torch.randn(3, 64)
    plan = make_plan(positions, arch, device)
    capacity = op.logits_capacity(entries, plan.tile)
    logits = torch.full((capacity,), float("nan"), device=device)
    op.index_logits(
        q.to(device),
        weights.to(device),
        pages.to(device),
        layout.stride,
        part,
        table.to(device),
        torch.tensor(slots, dtype=torch.int32, device=device),
        plan,
        logits,
        arch,
    )
    for row, (slot, n) in enumerate(zip(slots, entries, strict=True)):
        if n <= op.TOP_K:
            continue
        start = int(plan.row_start[row])
        expected = op.logits_ref(q[row].float(), weights[row], keys[slot][:n])
        got = logits[start : start + n].cpu().double()
        assert (got - expected).abs().max() < 1e-3 * expected.abs().max()
        assert bool(logits[start + n : start + -(-n // plan.tile) * plan.tile].isnan().all())


@pytest.mark.parametrize("case", ["random", "ties", "all_equal", "infinite"])
def test_top_512(case: str, device: str, arch: str) -> None:
    with tuned.overridden(arch, "select", "triton"):
        check_top_512(case, device, arch)


@pytest.mark.parametrize(
    ("case", "cluster"),
    [("random", 1), ("ties", 4), ("all_equal", 2), ("infinite", 1), ("wide", 2)],
)
def test_cuda_top_512(
    case: str, cluster: int, device: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        cuda_on_host.use(monkeypatch)
    with tuned.overridden(arch, "select", "cuda", {"cluster": cluster, "threads": 128}):
        check_top_512(case, device, arch)


def check_top_512(case: str, device: str, arch: str) -> None:
    positions = [3, 2047, 2051, 4095, 4 * 1025 + 3, 4 * 9 * 1024 - 1, -1]
    entries = [(p + 1) // CSA_RATIO for p in positions]
    plan = make_plan(positions, arch, device)
    logits = torch.full((op.logits_capacity(entries, plan.tile),), float("nan"), device=device)
    rows = []
    for row, n in enumerate(entries):
        values = torch.randn(n) * 10
        if case == "ties":
            values = values.round()
            values[::3] = -0.0
        elif case == "all_equal":
            values.fill_(-1.5)
        elif case == "wide":  # a few values far above make one bin of all the others
            values[::97] += 1e7
        elif case == "infinite":
            values[::2] = float("-inf")
        rows.append(values)
        if n > op.TOP_K:
            start = int(plan.row_start[row])
            logits[start : start + n] = values.to(device)
    slots = max(1, op.chunk_slots(entries, plan.chunk))
    selected = torch.full((len(positions), op.TOP_K), -7, dtype=torch.int32, device=device)
    count = torch.full((len(positions),), -7, dtype=torch.int32, device=device)
    op.index_select(
        logits,
        plan,
        torch.full((slots, op.TOP_K), float("nan"), device=device),
        torch.full((slots, op.TOP_K), 12345678, dtype=torch.int32, device=device),
        selected,
        count,
        arch,
    )
    for row, n in enumerate(entries):
        assert int(count[row]) == min(n, op.TOP_K)
        got = selected[row].cpu()
        if n <= op.TOP_K:
            assert got[:n].tolist() == list(range(n)) and bool((got[n:] == -1).all())
        else:
            assert got.tolist() == op.top_k_ref(rows[row], op.TOP_K).tolist(), (row, n)
