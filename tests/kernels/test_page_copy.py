"""Page copy: scattered pages, both index types, untouched neighbours, a peer that dies midway."""

import pytest
import torch

from decant.kernels import page_copy as op
from decant.kernels.layout import ALIGNMENT


def pools(device: str, stride: int, pages: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.randint(0, 256, (pages, stride), dtype=torch.uint8, device=device)
    return source, torch.full((pages + 2, stride), 0xFF, dtype=torch.uint8, device=device)


@pytest.mark.parametrize("stride", [ALIGNMENT, 9 * ALIGNMENT])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_copies_these_pages_and_no_others(stride: int, dtype: torch.dtype, device: str) -> None:
    source, target = pools(device, stride)
    expected = target.clone()
    a, b = [6, 0, 3], [1, 8, 5]
    op.copy_pages_ref(source, expected, a, b)
    op.copy_pages(
        source, target, torch.tensor(a, dtype=dtype).to(device), torch.tensor(b).to(device)
    )
    assert torch.equal(target, expected)


def test_part_of_a_page_and_nothing(device: str) -> None:
    source, target = pools(device, ALIGNMENT)
    index = torch.tensor([2], device=device)
    op.copy_pages(source, target, index, index, num_bytes=592)
    assert torch.equal(target[2, :592], source[2, :592])
    assert bool((target[2, 592:] == 0xFF).all())
    before = target.clone()
    op.copy_pages(source, target, index[:0], index[:0])
    assert torch.equal(target, before)
    with pytest.raises(ValueError, match="multiple of 16"):
        op.copy_pages(source, target, index, index, num_bytes=600)
    with pytest.raises(ValueError, match="lack"):
        op.copy_pages(source, target, index, index, num_bytes=ALIGNMENT + 16)
    with pytest.raises(ValueError, match="do not go into"):
        op.copy_pages(source, target, index, index[:0])


class Peer:
    """Answers is_alive and wait from a list of moments at which they turn False."""

    def __init__(self, dies_at: int = 99, late_at: int = 99) -> None:
        self.asked = self.waited = 0
        self.dies_at, self.late_at = dies_at, late_at

    def is_alive(self) -> bool:
        self.asked += 1
        return self.asked <= self.dies_at

    def wait(self) -> bool:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.waited += 1
        return self.waited <= self.late_at


def test_chunks_ask_for_the_peer_before_each_launch(device: str) -> None:
    source, target = pools(device, ALIGNMENT)
    index = torch.arange(7, device=device)
    peer = Peer()
    assert op.copy_in_chunks(source, target, index, index, 2, peer.is_alive, peer.wait) == 7
    assert torch.equal(target[:7], source)
    assert peer.asked == 5, "four launches and the end"


@pytest.mark.parametrize(
    "peer,reason,done",
    [
        (Peer(dies_at=0), "gone", 0),
        (Peer(dies_at=3), "gone", 4),
        (Peer(dies_at=4), "gone", 0),
        (Peer(late_at=1), "late", 4),
    ],
)
def test_ends_with_the_peer(peer: Peer, reason: str, done: int, device: str) -> None:
    source, target = pools(device, ALIGNMENT)
    index = torch.arange(7, device=device)
    with pytest.raises(op.CopyEnded, match=reason) as caught:
        op.copy_in_chunks(source, target, index, index, 2, peer.is_alive, peer.wait)
    assert caught.value.pages_done == done
    launched = min(2 * peer.asked, 7) if reason == "late" else 2 * peer.dies_at
    assert bool((target[launched:] == 0xFF).all()), "nothing is launched after the answer"


@pytest.mark.gpu
def test_pages_above_four_gigabytes() -> None:
    stride = 9 * ALIGNMENT
    pages = (1 << 32) // stride + 3
    source = torch.empty(pages, stride, dtype=torch.uint8, device="cuda")
    target = torch.zeros(pages, stride, dtype=torch.uint8, device="cuda")
    last = torch.tensor([pages - 1], device="cuda")
    source[-1] = torch.randint(0, 256, (stride,), dtype=torch.uint8, device="cuda")
    op.copy_pages(source, target, last, last)
    assert torch.equal(target[-1], source[-1])
