"""Gate and work list against float64 and sorting."""

import cuda_on_host
import pytest
import torch

from decant.kernels import gate, tuned


@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize("hashed", [False, True])
def test_choice_and_weights(tokens: int, hashed: bool, device: str) -> None:
    experts_total, width, top_k, vocab = 32, 256, 6, 50
    x = torch.randn(tokens, width).bfloat16()
    weight = (torch.randn(experts_total, width) * 0.1).bfloat16()
    weight[1] *= 40  # large logits of both signs
    bias = torch.randn(experts_total)
    table = torch.stack([torch.randperm(experts_total)[:top_k] for _ in range(vocab)]).int()
    ids = torch.randint(0, vocab, (tokens,), dtype=torch.int32)
    experts = torch.full((tokens, top_k), -1, dtype=torch.int32, device=device)
    weights = torch.full((tokens, top_k), float("nan"), device=device)
    partial = torch.full((gate.SPLIT_K, tokens, experts_total), float("nan"), device=device)
    reference = gate.gate_ref(
        x,
        weight,
        None if hashed else bias,
        table if hashed else None,
        ids if hashed else None,
        top_k,
    )
    gate.route(
        x.to(device),
        weight.to(device),
        partial,
        experts,
        weights,
        None,
        None if hashed else bias.to(device),
        table.to(device) if hashed else None,
        ids.to(device) if hashed else None,
    )
    assert experts.cpu().tolist() == reference[0].tolist()
    torch.testing.assert_close(weights.cpu().double(), reference[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("tokens", "room", "hashed", "listed", "few"),
    [
        (1, 8, False, True, 0), (13, 16, True, True, 0), (40, 64, False, True, 0),
        (5, 8, False, False, 0), (1, 8, False, True, 1), (8, 8, True, True, 1),
        (5, 8, False, False, 1), (29, 32, False, True, 1), (13, 16, True, True, 1),
    ],
)  # fmt: skip
def test_cuda_route(
    tokens: int,
    room: int,
    hashed: bool,
    listed: bool,
    few: int,
    device: str,
    arch: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device == "cpu":
        cuda_on_host.use(monkeypatch)
    total, width, top_k, vocab, block_t = 128, 512, 6, 50, 4
    x = torch.randn(tokens, width).bfloat16()
    weight = (torch.randn(total, width) * 0.1).bfloat16()
    weight[1] *= 40  # large logits of both signs
    weight[7] = weight[5]  # a tie: the lower expert wins
    bias = torch.randn(total)
    bias[7] = bias[5] = 4.0
    table = torch.stack([torch.randperm(total)[:top_k] for _ in range(vocab)])
    ids = torch.randint(0, vocab, (tokens,), dtype=torch.int32)
    given = (None, table, ids) if hashed else (bias, None, None)
    wanted, values = gate.gate_ref(x, weight, given[0], given[1], given[2], top_k)
    experts = torch.full((tokens, top_k), -1, dtype=torch.int32, device=device)
    weights = torch.full((tokens, top_k), float("nan"), device=device)
    partial = torch.full((gate.SPLIT_K, tokens, total), float("nan"), device=device)
    tiles = gate.new_tile_list(tokens * top_k, total, block_t, device) if listed else None
    moved = [None if v is None else v.to(device) for v in given]
    with tuned.overridden(arch, "gate", "cuda", {"tokens": room, "few": few}):
        for _ in range(2):  # the counter is zero again
            gate.route(x.to(device), weight.to(device), partial, experts, weights, tiles, *moved)
    assert experts.cpu().tolist() == wanted.tolist()
    torch.testing.assert_close(weights.cpu().double(), values, rtol=1e-5, atol=1e-6)
    if tiles is None:
        return
    expected = gate.tile_list_ref(experts.cpu(), total, block_t)
    n = len(expected["expert"])
    assert int(tiles.num_tiles) == n
    assert tiles.pairs.tolist() == expected["pairs"]
    for name in ("expert", "start", "count"):
        assert getattr(tiles, name)[:n].tolist() == expected[name]


def test_cuda_options_that_do_not_fit_are_named() -> None:
    assert gate.cuda_problem({"tokens": 64}, "sm_90", 64, 4096, 256) == ""
    assert "room" in gate.cuda_problem({"tokens": 8}, "sm_90", 9, 4096, 256)
    assert "experts" in gate.cuda_problem({"tokens": 8}, "sm_90", 8, 4096, 32)
    assert "shared" in gate.cuda_problem({"tokens": 64}, "sm_120", 8, 4096, 256)
    few = {"tokens": 8, "few": 1}
    assert gate.cuda_problem(few, "sm_90", 8, 4096, 256) == ""
    assert "cluster" in gate.cuda_problem(few, "sm_120", 8, 4096, 256)
    assert "experts" in gate.cuda_problem(few, "sm_90", 8, 256, 256)
    assert "room" in gate.cuda_problem(few | {"tokens": 64}, "sm_90", 8, 4096, 256)


def test_ties_take_the_lower_expert(device: str) -> None:
    x = torch.zeros(2, 256).bfloat16().to(device)
    weight = torch.randn(16, 256).bfloat16().to(device)
    experts = torch.full((2, 6), -1, dtype=torch.int32, device=device)
    weights = torch.empty(2, 6, device=device)
    partial = torch.empty(gate.SPLIT_K, 2, 16, device=device)
    gate.route(x, weight, partial, experts, weights, None, torch.zeros(16, device=device))
    assert experts.cpu().tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    torch.testing.assert_close(weights.cpu(), torch.full((2, 6), 0.25))


@pytest.mark.parametrize("tokens,block_t", [(1, 16), (9, 4), (70, 16)])
@pytest.mark.parametrize("one_expert", [False, True])
def test_work_list(tokens: int, block_t: int, one_expert: bool, device: str) -> None:
    experts = torch.randint(0, 1 if one_expert else 16, (tokens, 6), dtype=torch.int32)
    tiles = gate.new_tile_list(experts.numel(), 16, block_t, device)
    for tensor in (tiles.pairs, tiles.expert, tiles.start, tiles.count):
        tensor.fill_(-77)
    gate.tile_list(experts.to(device), tiles, 16)
    expected = gate.tile_list_ref(experts, 16, block_t)
    n = len(expected["expert"])
    assert int(tiles.num_tiles) == n
    assert tiles.pairs.tolist() == expected["pairs"]
    for name in ("expert", "start", "count"):
        assert getattr(tiles, name)[:n].tolist() == expected[name]


def test_refuses_bias_with_table(device: str) -> None:
    x = torch.zeros(1, 256, device=device).bfloat16()
    with pytest.raises(ValueError, match="either a bias"):
        gate.route(x, x, x, x, x, None)
