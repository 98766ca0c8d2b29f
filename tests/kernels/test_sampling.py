"""Sampler against float64 sets and noise; noise against the published test vector."""

from collections.abc import Iterator

import cuda_on_host
import pytest
import torch

from decant.kernels import sampling as op
from decant.kernels import tuned

VOCAB = 1003


def test_philox_known_answer() -> None:
    # Random123's known answers for philox4x32-10, zero and all-ones counters and keys
    assert [f"{int(v):08x}" for v in op.philox_ref(0, 0, 0, 1)[0]] == [
        "6627e8d5",
        "e169c58d",
        "bc57ac4c",
        "9b00dbd8",
    ]


@pytest.fixture(params=["triton", "cuda"], autouse=True)
def implementation(
    request: pytest.FixtureRequest, device: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Every test with both implementations."""
    if device == "cpu" and request.param == "cuda":
        cuda_on_host.use(monkeypatch)
    with tuned.overridden(arch, "sample", request.param, {"cluster": 2, "threads": 128}):
        yield


def run(
    rows: list[dict[str, float]], logits: torch.Tensor, device: str, **more: object
) -> list[int]:
    def column(name: str, dtype: torch.dtype, default: float = 0.0) -> torch.Tensor:
        return torch.tensor([r.get(name, default) for r in rows], dtype=dtype, device=device)

    scratch = op.Workspace(len(rows), logits.shape[1], device)
    for tensor in (scratch.processed, scratch.perturbed, scratch.best_value, scratch.greatest):
        tensor.fill_(float("nan"))
    tokens = torch.full((len(rows),), -9, dtype=torch.int32, device=device)
    op.sample(
        logits.to(device),
        column("temperature", torch.float32, 1.0),
        column("top_k", torch.int32),
        column("top_p", torch.float32, 1.0),
        column("min_p", torch.float32),
        column("seed", torch.int64),
        column("choice", torch.int32),
        column("position", torch.int32),
        scratch,
        tokens,
        **more,  # type: ignore[arg-type]
    )
    return [int(t) for t in tokens.cpu()]


def expected(row: dict[str, float], logits: torch.Tensor) -> tuple[int, float]:
    noise = op.gumbel_ref(
        int(row["seed"]), int(row["choice"]), int(row["position"]), logits.shape[0]
    )
    return op.draw_ref(
        logits,
        row.get("temperature", 1.0),
        int(row.get("top_k", 0)),
        row.get("top_p", 1.0),
        row.get("min_p", 0.0),
        noise,
    )


SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.5, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.5},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 2.0, "top_k": 1},
    {"temperature": 1.0, "top_p": 1e-6},
]


@pytest.mark.parametrize("sharp", [1.0, 4.0])
def test_draws_match_float64(sharp: float, device: str) -> None:
    rows, logits = [], []
    for i in range(16):
        settings = dict(SETTINGS[i % len(SETTINGS)])
        seed = int(torch.randint(0, 2**62, (1,)))
        rows.append({**settings, "seed": seed, "choice": i % 3, "position": 1000 * i + 1})
        logits.append(torch.randn(VOCAB) * sharp)
    batch = torch.stack(logits)
    got = run(rows, batch, device)
    checked = 0
    for i, row in enumerate(rows):
        token, margin = expected(row, batch[i])
        if margin > 1e-3:
            assert got[i] == token, row
            checked += 1
    assert checked > len(rows) * 3 // 4


def test_row_does_not_depend_on_its_place(device: str) -> None:
    row = {"temperature": 0.9, "top_p": 0.8, "seed": 77, "choice": 1, "position": 5}
    other = {"temperature": 1.0, "seed": 3, "choice": 0, "position": 9}
    logits = torch.randn(3, VOCAB)
    logits[2] = logits[0]
    got = run([row, other, row], logits, device)
    assert got[0] == got[2] == run([row], logits[:1], device)[0]


def test_ties_and_unusable_rows(device: str) -> None:
    logits = torch.zeros(5, VOCAB)
    logits[1, 7] = float("nan")
    logits[2, :] = float("-inf")
    logits[3, 9] = float("inf")
    logits[4, :-1] = float("-inf")
    rows = [{"temperature": 0.0, "seed": 1, "choice": 0, "position": 1}] * 5
    assert run(rows, logits, device) == [0, -1, -1, -1, VOCAB - 1]


def test_mask_and_penalties(device: str) -> None:
    logits = torch.randn(4, VOCAB)
    allowed = torch.zeros(4, -(-VOCAB // 32), dtype=torch.int32)
    allowed[:, 3] = 0b1010  # tokens 97 and 99
    rows = [{"temperature": 0.0, "seed": 1, "choice": 0, "position": 1}] * 4
    got = run(rows, logits, device, allowed=allowed.to(device))
    assert got == [97 if logits[i, 97] >= logits[i, 99] else 99 for i in range(4)]

    slot_of_row = torch.tensor([1, 0, 1, 0], dtype=torch.int32)
    counts = torch.randint(0, 3, (2, VOCAB)).to(torch.int16)
    seen = ((counts > 0) | (torch.rand(2, VOCAB) < 0.2)).to(torch.int8)
    repetition, presence = torch.tensor([1.0, 1.3, 2.0, 1.0]), torch.tensor([0.0, 0.5, 0.0, 1.0])
    frequency = torch.tensor([0.0, 0.1, 0.7, 0.2])
    x = logits.clone()
    for i in range(4):
        was, n = seen[slot_of_row[i]].bool(), counts[slot_of_row[i]]
        x[i] = torch.where(
            was, torch.where(x[i] > 0, x[i] / repetition[i], x[i] * repetition[i]), x[i]
        )
        x[i] -= torch.where(n > 0, presence[i] + frequency[i] * n, torch.zeros(()))
    tensors = (slot_of_row, counts, seen, repetition, presence, frequency)
    got = run(rows, logits, device, penalties=tuple(t.to(device) for t in tensors))
    assert got == x.argmax(-1).tolist()


def test_accept_stops_at_the_first_difference(device: str) -> None:
    drawn = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8], [-1, 6, 7, 8], [5, 6, 7, 8]])
    drafts = torch.tensor([[5, 6, 7], [5, 9, 7], [5, 6, 7], [-1, 6, 7], [4, 6, 7]])
    valid = torch.tensor([3, 3, 1, 3, 3])
    accepted = torch.full((5,), -9, dtype=torch.int32, device=device)
    op.accept(drawn.int().to(device), drafts.int().to(device), valid.int().to(device), accepted)
    assert accepted.tolist() == [3, 1, 1, 0, 0]
