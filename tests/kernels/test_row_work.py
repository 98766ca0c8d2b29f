"""One launch for all that stands between projections and attention: the same bits as the launches
that it replaces."""

from typing import Any

import pytest
import torch

from decant.kernels import compressor, indexer, kv_store
from decant.kernels import row_work as op
from decant.kernels.kv_store import rope_ref
from decant.kernels.layout import page_layout, slot_layout

FREQUENCIES = 160000.0 ** (-torch.arange(0, 64, 2).float() / 64)
# (slot, position): two sequences that end windows of 4 and of 128, and a padded row
ROWS = [(0, 126), (0, 127), (1, 3), (1, 4), (2, -1)]


class Layer:
    """Inputs of one layer's rows, and the slots and pages that they go to."""

    def __init__(self, ratio: int, device: str) -> None:
        generator = torch.Generator().manual_seed(5)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(device)

        self.ratio, self.heads = ratio, 6
        ratios = (ratio,)
        self.page_layout, self.slot_layout = page_layout(ratios, 256), slot_layout(ratios, 3)
        num = len(ROWS)
        self.slots_of = torch.tensor([s for s, _ in ROWS], dtype=torch.int32, device=device)
        self.positions = torch.tensor([p for _, p in ROWS], dtype=torch.int32, device=device)
        at = self.positions.cpu().clamp_min(0)
        self.rope = rope_ref(at, FREQUENCIES).to(device)
        self.entry_rope = rope_ref((at + 1 - ratio).clamp_min(0), FREQUENCIES).to(device)
        self.table = torch.tensor([[2], [0], [1]], dtype=torch.int32, device=device)
        self.q = normal(num, self.heads, 512).bfloat16()
        self.first = normal(num, 700).bfloat16()  # the key is a part of a longer row
        self.k_norm = (1 + 0.1 * normal(512)).bfloat16()
        self.size = 1024 if ratio == 4 else 512
        self.aux = normal(num, 2 * self.size + 512 + 64)
        self.ape, self.norm = normal(max(ratio, 1), self.size), (1 + 0.1 * normal(512)).bfloat16()
        self.index_ape, self.index_norm = normal(4, 256), (1 + 0.1 * normal(128)).bfloat16()
        self.psi = normal(num, 64, 128).bfloat16()
        self.codes = torch.zeros(num, 64, 128, dtype=torch.float8_e4m3fn, device=device)
        self.weights = torch.zeros(num, 64, device=device)
        self.slots = torch.zeros(4, self.slot_layout.stride, dtype=torch.uint8, device=device)
        self.slots.random_(0, 64, generator=torch.Generator(device).manual_seed(1))
        self.pages = torch.zeros(4, self.page_layout.stride, dtype=torch.uint8, device=device)

    def key(self) -> torch.Tensor:
        return self.first[:, 188:]

    def compressions(self) -> tuple[op.Compression | None, op.Compression | None]:
        if not self.ratio:
            return None, None
        cut = 2 * self.size
        main = op.Compression(
            self.aux[:, :cut], self.ape, self.norm, self.slot_layout.state[0],
            self.page_layout.keys[0],
        )  # fmt: skip
        if self.ratio != 4:
            return main, None
        index = op.Compression(
            self.aux[:, cut : cut + 512], self.index_ape, self.index_norm,
            self.slot_layout.index_state[0], self.page_layout.index[0],
        )  # fmt: skip
        return main, index

    def omega(self) -> torch.Tensor:
        return self.aux[:, -64:]

    def results(self) -> list[torch.Tensor]:
        codes = self.codes.view(torch.uint8)
        return [t.cpu() for t in (self.q, self.slots, self.pages, codes, self.weights)]


def apart(layer: Layer) -> None:
    kv_store.norm_rope_store(
        layer.q, layer.key(), layer.k_norm, layer.rope, layer.slots_of, layer.positions,
        layer.slots, layer.slots.stride(0), layer.slot_layout.window[0],
    )  # fmt: skip
    for c in layer.compressions():
        if c is not None:
            compressor.compress(
                c.projected, c.ape, c.norm, layer.entry_rope, layer.slots, layer.slots.stride(0),
                c.state, layer.pages, layer.pages.stride(0), c.part, layer.slots_of,
                layer.positions, layer.table, layer.ratio, 2,
            )  # fmt: skip
    if layer.ratio == 4:
        omega = layer.omega()
        indexer.index_queries(layer.psi, omega, layer.codes, layer.weights, layer.rope)


def together(layer: Layer, queries: bool = True) -> None:
    main, index = layer.compressions()
    asked = None
    if index is not None and queries:
        asked = op.IndexQueries(layer.psi, layer.omega(), layer.codes, layer.weights)
    op.row_work(
        layer.q, layer.key(), layer.k_norm, layer.rope, layer.slots_of, layer.positions,
        layer.table, layer.slots, layer.pages, layer.slot_layout.window[0], 2, layer.ratio,
        layer.entry_rope, main, index, asked,
    )  # fmt: skip


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_same_bits_as_apart(ratio: int, device: str) -> None:
    one, two = Layer(ratio, device), Layer(ratio, device)
    before = [t.clone() for t in one.results()]
    apart(one)
    together(two)
    for was, wanted, got in zip(before, one.results(), two.results(), strict=True):
        assert torch.equal(wanted, got)
        assert ratio != 4 or not torch.equal(was, got)  # every result was written
    if ratio == 4:
        three = Layer(ratio, device)
        together(three, queries=False)
        assert torch.equal(three.pages.cpu(), one.pages.cpu()) and not three.weights.any()


def test_queries_that_are_parts_of_longer_rows(device: str) -> None:
    """q and the indexer's come out of one product; q goes where it is whole."""
    one, two = Layer(4, device), Layer(4, device)
    apart(one)
    joined = torch.cat((two.q.flatten(1), two.psi.flatten(1)), 1)
    cut = two.heads * 512
    q, two.psi = joined[:, :cut].view(-1, two.heads, 512), joined[:, cut:].view(-1, 64, 128)
    main, index = two.compressions()
    asked = op.IndexQueries(two.psi, two.omega(), two.codes, two.weights)
    op.row_work(
        q, two.key(), two.k_norm, two.rope, two.slots_of, two.positions, two.table, two.slots,
        two.pages, two.slot_layout.window[0], 2, 4, two.entry_rope, main, index, asked, two.q,
    )  # fmt: skip
    for wanted, got in zip(one.results(), two.results(), strict=True):
        assert torch.equal(wanted, got)
    three = Layer(4, device)
    kv_store.norm_rope_store(
        q, three.key(), three.k_norm, three.rope, three.slots_of, three.positions, three.slots,
        three.slots.stride(0), three.slot_layout.window[0], three.q,
    )  # fmt: skip
    indexer.index_queries(two.psi, three.omega(), three.codes, three.weights, three.rope)
    assert torch.equal(three.q.cpu(), one.q.cpu())
    assert torch.equal(three.codes.view(torch.uint8).cpu(), one.codes.view(torch.uint8).cpu())
    with pytest.raises(ValueError, match="out must be"):
        run(two, 2, main=main, index=index, out=two.q[:, :1])


def run(layer: Layer, most: int, ratio: int = 4, **more: Any) -> None:
    op.row_work(
        layer.q, layer.key(), layer.k_norm, layer.rope, layer.slots_of, layer.positions,
        layer.table, layer.slots, layer.pages, layer.slot_layout.window[0], most, ratio,
        layer.entry_rope, **more,
    )  # fmt: skip


def test_what_does_not_fit(device: str) -> None:
    layer = Layer(4, device)
    main, index = layer.compressions()
    with pytest.raises(ValueError, match="launches of their own"):
        run(layer, 9, main=main, index=index)
    with pytest.raises(ValueError, match="does not fit the compressors"):
        run(layer, 1, 0, main=main)
    with pytest.raises(ValueError, match="come with the indexer"):
        asked = op.IndexQueries(layer.psi, layer.omega(), layer.codes, layer.weights)
        run(layer, 1, main=main, queries=asked)
