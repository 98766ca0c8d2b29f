"""What a step begins with and what it keeps, against plain torch and a loop over the rows."""

import pytest
import torch

from decant.kernels import step_ends as op
from decant.kernels.layout import Part


@pytest.mark.parametrize("width", [256, 1536])
def test_begin(width: int, device: str) -> None:
    tokens = torch.tensor([3, 0, 7, 7], dtype=torch.int32)
    positions = torch.tensor([0, 130, 1_000_003, -1], dtype=torch.int32)
    embedding = torch.randn(8, width).bfloat16()
    plain = 10000.0 ** (-torch.arange(32) / 32)
    compressed = 160000.0 ** (-torch.arange(32) / 32)
    streams = torch.zeros(4, 4, width, dtype=torch.bfloat16, device=device)
    ropes = torch.full((4, 4, 64), float("nan"), device=device)
    moved = [t.to(device) for t in (tokens, positions, embedding, plain, compressed)]
    given = (moved[0], moved[1], moved[2], moved[3], moved[4])
    op.begin(*given, streams, ropes)
    wanted_streams, wanted = op.begin_ref(tokens, positions, embedding, plain, compressed)
    assert torch.equal(streams.cpu(), wanted_streams)
    torch.testing.assert_close(ropes.cpu(), wanted, atol=2e-6, rtol=0)
    with pytest.raises(ValueError, match="ropes"):
        op.begin(*given, streams, ropes[:3])


@pytest.mark.parametrize("per_sequence", [1, 3])
def test_keep(per_sequence: int, device: str) -> None:
    size, stride, ring = 4 * 96, 16384, 8
    last, recent = Part(1024, 1, 2 * size, 0), Part(4096, ring, 2 * size, 0)
    slot_of_row = torch.tensor([1, 1, 1, 0, 0, 0, 2, 2, 2], dtype=torch.int32)
    positions = torch.tensor([9, 10, -1, 5, 6, 7, -1, -1, -1], dtype=torch.int32)
    if per_sequence == 1:
        slot_of_row, positions = slot_of_row[[0, 3, 6]], torch.tensor([9, 5, -1], dtype=torch.int32)
    streams = torch.randn(len(positions), 4, 96).bfloat16()
    slots = torch.zeros(4, stride, dtype=torch.uint8)
    wanted = slots.clone()
    for row, position in enumerate(positions.tolist()):
        if position < 0:
            continue
        data = streams[row].flatten().view(torch.uint8)
        at = recent.offset + position % ring * 2 * size
        wanted[slot_of_row[row], at : at + 2 * size] = data
        wanted[slot_of_row[row], 1024 : 1024 + 2 * size] = data  # the last one stays
    moved = slots.to(device)
    op.keep(
        streams.to(device), slot_of_row.to(device), positions.to(device), moved, last, recent,
        per_sequence,
    )  # fmt: skip
    assert torch.equal(moved.cpu(), wanted)
    with pytest.raises(ValueError, match="do not fit"):
        op.keep(streams, slot_of_row, positions, slots, last, Part(0, 8, 64, 0), per_sequence)
