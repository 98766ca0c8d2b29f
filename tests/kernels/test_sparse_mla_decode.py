"""Sparse decode attention against float64: lengths 0, 1, a page exactly; NaN in unused rows; odd
head counts.
"""

import cuda_on_host
import pytest
import torch

from decant.kernels import sparse_mla_decode as op
from decant.kernels import tuned
from decant.kernels.layout import CSA_RATIO, HCA_RATIO, page_layout, slot_layout
from decant.kernels.rows import (
    dequantise_keys_ref,
    poison,
    quantise_keys_ref,
    random_keys,
    write_rows,
)

TOLERANCE = 2e-3  # fp16 probabilities and outputs


class Pool:
    """Slots and pages of a two-layer model (CSA, HCA), filled for given sequence lengths; the rest
    is NaN.
    """

    def __init__(self, lengths: list[int], page_tokens: int, drafts: int = 3) -> None:
        self.pages_layout = page_layout((CSA_RATIO, HCA_RATIO), page_tokens)
        self.slots_layout = slot_layout((CSA_RATIO, HCA_RATIO), drafts)
        width = max(1, max(-(-n // page_tokens) for n in lengths) + 1)
        count = len(lengths) * width
        self.pages = torch.empty(count, self.pages_layout.stride, dtype=torch.uint8)
        self.slots = torch.empty(len(lengths), self.slots_layout.stride, dtype=torch.uint8)
        poison(self.pages)
        poison(self.slots)
        self.table = torch.randperm(count, dtype=torch.int32).view(len(lengths), width)
        self.window: list[list[torch.Tensor]] = []
        self.entries: list[list[torch.Tensor]] = []
        for slot, n in enumerate(lengths):
            self.window.append([torch.empty(0)] * 2)
            self.entries.append([torch.empty(0)] * 2)
            for layer, ratio in enumerate((CSA_RATIO, HCA_RATIO)):
                first = max(0, n - 128 - drafts)
                self.window[slot][layer] = torch.full((n, 512), float("nan"))
                if n:
                    data, scale = quantise_keys_ref(random_keys(n - first))
                    self.window[slot][layer][first:] = dequantise_keys_ref(data, scale)
                    part = self.slots_layout.window[layer]
                    for i in range(n - first):
                        write_rows(
                            self.slots[slot], part, (first + i) % part.rows, data[i], scale[i]
                        )
                data, scale = quantise_keys_ref(random_keys(max(1, n // ratio)))
                self.entries[slot][layer] = dequantise_keys_ref(data, scale)
                part = self.pages_layout.keys[layer]
                for e in range(n // ratio):
                    page = int(self.table[slot, e // part.rows])
                    write_rows(self.pages[page], part, e % part.rows, data[e], scale[e])


@pytest.mark.parametrize("kind", [op.WINDOW_ONLY, op.SELECTED, op.ALL])
@pytest.mark.parametrize(
    "heads,page_tokens",
    [(4, 1024), (18, 256)]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in ((16, 256), (4, 256), (16, 1024))],
)
def test_attention_matches_float64(
    heads: int, kind: int, page_tokens: int, device: str, arch: str
) -> None:
    check(heads, kind, page_tokens, device, arch)


@pytest.mark.parametrize(
    ("heads", "kind", "page_tokens", "splits", "ring"),
    [
        (4, op.WINDOW_ONLY, 1024, 1, 2),
        (18, op.SELECTED, 256, 4, 3),
        (16, op.ALL, 1024, 2, 2),
        pytest.param(16, op.SELECTED, 1024, 8, 2, marks=pytest.mark.slow),
    ],
)
def test_cuda_attention_matches_float64(
    heads: int,
    kind: int,
    page_tokens: int,
    splits: int,
    ring: int,
    device: str,
    arch: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device == "cpu":
        cuda_on_host.use(monkeypatch)
    options = {"splits": splits, "ring": ring}
    with tuned.overridden(arch, op.OPERATIONS[kind], "cuda", options):
        check(heads, kind, page_tokens, device, arch)


def test_cuda_options_that_do_not_fit_are_named() -> None:
    for arch in ("sm_90", "sm_120"):
        assert op.cuda_problem({"splits": 8, "ring": 3}, arch) == ""
        assert "cluster" in op.cuda_problem({"splits": 3, "ring": 3}, arch)
    assert "cluster" in op.cuda_problem({"splits": 16, "ring": 3}, "sm_120")
    assert "ring" in op.cuda_problem({"splits": 8, "ring": 4}, "sm_120")


def check(heads: int, kind: int, page_tokens: int, device: str, arch: str) -> None:
    lengths = [1, 3, 130, 256, 700]
    pool = Pool(lengths, page_tokens)
    layer = 1 if kind == op.ALL else 0
    # three verify rows of the last sequence, one padded row
    slot_of_row = [0, 1, 2, 3, 4, 4, 4, 0]
    positions = [0, 2, 129, 255, 697, 698, 699, -1]
    top_k = 64
    selected = torch.full((len(positions), top_k), -1, dtype=torch.int32)
    count = torch.zeros(len(positions), dtype=torch.int32)
    keys = []
    for row, (slot, t) in enumerate(zip(slot_of_row, positions, strict=True)):
        visible = (
            pool.window[slot][layer][max(0, t - 127) : t + 1] if t >= 0 else torch.empty(0, 512)
        )
        if kind == op.SELECTED and t >= 0:
            n = (t + 1) // CSA_RATIO
            chosen = torch.randperm(n)[:top_k].int()
            selected[row, : len(chosen)] = chosen
            count[row] = len(chosen)
            visible = torch.cat((visible, pool.entries[slot][layer][chosen.long()]))
        elif kind == op.ALL and t >= 0:
            visible = torch.cat((visible, pool.entries[slot][layer][: (t + 1) // HCA_RATIO]))
        keys.append(visible)
    q = torch.randn(len(positions), heads, 512).bfloat16()
    sink = torch.randn(heads) * 3
    sink[0] = 60.0  # far above every score
    reference = op.sparse_mla_decode_ref(q, keys, sink)
    out = torch.full((len(positions), heads, 512), float("nan"), device=device)
    scratch = op.workspace(len(positions), heads, kind, arch, device)
    scratch[0].fill_(float("nan"))
    scratch[1].fill_(float("nan"))
    part = None if kind == op.WINDOW_ONLY else pool.pages_layout.keys[layer]
    for _ in range(2):  # the second call finds the counters as the first left them
        op.sparse_mla_decode(
            q.to(device),
            pool.slots.to(device),
            pool.slots_layout.stride,
            pool.slots_layout.window[layer],
            pool.pages.to(device),
            pool.pages_layout.stride,
            part,
            torch.tensor(slot_of_row, dtype=torch.int32, device=device),
            torch.tensor(positions, dtype=torch.int32, device=device),
            pool.table.to(device),
            sink.to(device),
            scratch,
            out,
            arch,
            ratio=HCA_RATIO if kind == op.ALL else 0,
            selected=selected.to(device) if kind == op.SELECTED else None,
            selected_count=count.to(device) if kind == op.SELECTED else None,
        )
        if device == "cpu":
            break
    got = out.cpu().double()
    assert bool((got[-1] == 0).all())
    for row in range(len(positions) - 1):
        scale = keys[row].abs().max()
        assert ((got[row] - reference[row]).abs().max() / scale) < TOLERANCE, row
    assert not scratch[2].any()
