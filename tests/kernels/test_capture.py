"""Captured decode kernels replayed with other lengths; pages beyond 2^32 bytes. On a GPU only."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from decant.kernels import indexer, sparse_mla_decode, tuned
from decant.kernels.layout import CSA_RATIO, HCA_RATIO, Part, page_layout, slot_layout
from decant.kernels.rows import dequantise_keys_ref, quantise_keys_ref, random_keys, read_rows

pytestmark = pytest.mark.gpu

PAGE_TOKENS = 256


def fill(extents: torch.Tensor, part: Part) -> None:
    """Valid random key rows in one part of every extent."""
    data, scale = quantise_keys_ref(random_keys(extents.shape[0] * part.rows).cuda())
    count = extents.shape[0]
    extents[:, part.offset : part.scale_offset] = data.view(count, -1)
    end = part.scale_offset + part.rows * part.scale_bytes
    extents[:, part.scale_offset : end] = scale.view(count, -1)


@pytest.fixture(params=["triton", "cuda"], autouse=True)
def implementation(request: pytest.FixtureRequest, arch: str) -> Iterator[str]:
    """Every test with both implementations of what it launches."""
    options = {op: {"splits": 4, "ring": 2} for op in sparse_mla_decode.OPERATIONS}
    options["select"] = {"cluster": 2, "threads": 512}
    with ExitStack() as stack:
        for op, values in options.items():
            stack.enter_context(tuned.overridden(arch, op, request.param, values))
        yield request.param


def captured(launch: object) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        launch()  # type: ignore[operator]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        launch()  # type: ignore[operator]
    return graph


def visible_keys(
    extent: torch.Tensor, window: Part, pages: torch.Tensor, part: Part, table: list[int], t: int
) -> torch.Tensor:
    """All keys that a row at position t of an HCA layer sees."""
    data, scale = read_rows(extent, window)
    ring = torch.arange(max(0, t - 127), t + 1, device="cuda") % window.rows
    keys = [dequantise_keys_ref(data[ring], scale[ring])]
    for e in range((t + 1) // HCA_RATIO):
        data, scale = read_rows(pages[table[e // part.rows]], part)
        at = e % part.rows
        keys.append(dequantise_keys_ref(data[at : at + 1], scale[at : at + 1]))
    return torch.cat(keys)


def test_attention_replays_with_other_lengths(arch: str) -> None:
    layout, slot = page_layout((HCA_RATIO,), PAGE_TOKENS), slot_layout((HCA_RATIO,), 3)
    part, window = layout.keys[0], slot.window[0]
    rows, heads, width = 4, 16, 64
    pages = torch.zeros(rows * width, layout.stride, dtype=torch.uint8, device="cuda")
    slots = torch.zeros(rows, slot.stride, dtype=torch.uint8, device="cuda")
    fill(pages, part)
    fill(slots, window)
    table = torch.randperm(rows * width, device="cuda").int().view(rows, width)
    q = torch.randn(rows, heads, 512, device="cuda").bfloat16()
    sink = torch.randn(heads, device="cuda")
    positions = torch.zeros(rows, dtype=torch.int32, device="cuda")
    slot_of_row = torch.arange(rows, dtype=torch.int32, device="cuda")
    out = torch.empty(rows, heads, 512, device="cuda")
    scratch = sparse_mla_decode.workspace(rows, heads, sparse_mla_decode.ALL, arch, "cuda")

    def launch() -> None:
        sparse_mla_decode.sparse_mla_decode(
            q, slots, slot.stride, window, pages, layout.stride, part, slot_of_row, positions,
            table, sink, scratch, out, arch, ratio=HCA_RATIO,
        )  # fmt: skip

    graph = captured(launch)
    for lengths in ([0, 1, 127, 128], [16383, 5, 255, 4000], [-1, 300, 9000, 40]):
        positions.copy_(torch.tensor(lengths))
        out.fill_(float("nan"))
        graph.replay()
        for row, t in enumerate(lengths):
            if t < 0:
                assert bool((out[row] == 0).all())
                continue
            keys = visible_keys(slots[row], window, pages, part, table[row].tolist(), t)
            expected = sparse_mla_decode.sparse_mla_decode_ref(q[row : row + 1], [keys], sink)[0]
            error = (out[row].double() - expected).norm() / expected.norm()
            assert error < 4e-3, (lengths, row)


def test_indexer_replays_with_other_lengths(arch: str) -> None:
    layout = page_layout((CSA_RATIO,), PAGE_TOKENS)
    part, rows, width = layout.index[0], 3, 64
    pages = torch.randint(0, 120, (rows * width, layout.stride), dtype=torch.uint8, device="cuda")
    end = part.scale_offset + 4 * part.rows
    ones = torch.ones(rows * width, part.rows, device="cuda").view(torch.uint8)
    pages[:, part.scale_offset : end] = ones
    table = torch.randperm(rows * width, device="cuda").int().view(rows, width)
    codes = torch.randn(rows, 64, 128, device="cuda").to(torch.float8_e4m3fn)
    weights = torch.randn(rows, 64, device="cuda")
    slot_of_row = torch.arange(rows, dtype=torch.int32, device="cuda")
    positions = torch.full((rows,), width * PAGE_TOKENS - 1, dtype=torch.int32, device="cuda")
    plan = indexer.new_plan(rows, arch, "cuda")
    most = [width * PAGE_TOKENS // CSA_RATIO] * rows
    logits = torch.empty(indexer.logits_capacity(most, plan.tile), device="cuda")
    slots = max(1, indexer.chunk_slots(most, plan.chunk))
    value = torch.empty(slots, 512, device="cuda")
    entry = torch.empty(slots, 512, dtype=torch.int32, device="cuda")
    selected = torch.empty(rows, 512, dtype=torch.int32, device="cuda")
    count = torch.empty(rows, dtype=torch.int32, device="cuda")

    def launch() -> None:
        indexer.fill_plan(positions, plan)
        indexer.index_logits(
            codes, weights, pages, layout.stride, part, table, slot_of_row, plan, logits, arch
        )
        indexer.index_select(logits, plan, value, entry, selected, count, arch)

    graph = captured(launch)
    for lengths in ([2050, 16383, -1], [16383, 2047, 8000], [3, 2500, 16380]):
        positions.copy_(torch.tensor(lengths))
        for tensor in (logits, value):
            tensor.fill_(float("nan"))
        selected.fill_(-7)
        graph.replay()
        for row, t in enumerate(lengths):
            n = (t + 1) // CSA_RATIO
            assert int(count[row]) == min(n, 512)
            if n <= 512:
                assert selected[row, :n].tolist() == list(range(n))
                continue
            start = int(plan.row_start[row])
            scores = logits[start : start + n]
            assert bool(scores.isfinite().all())
            assert selected[row].tolist() == indexer.top_k_ref(scores, 512).tolist(), (lengths, row)


def test_attention_reads_pages_above_four_gigabytes(arch: str) -> None:
    layout, slot = page_layout((HCA_RATIO,) * 30, 1024), slot_layout((HCA_RATIO,), 3)
    part, window = layout.keys[29], slot.window[0]
    count = (5 << 30) // layout.stride
    pages = torch.zeros(count, layout.stride, dtype=torch.uint8, device="cuda")
    fill(pages[-2:], part)
    slots = torch.zeros(1, slot.stride, dtype=torch.uint8, device="cuda")
    fill(slots, window)
    table = torch.tensor([[count - 1, count - 2]], dtype=torch.int32, device="cuda")
    q = torch.randn(1, 16, 512, device="cuda").bfloat16()
    sink = torch.randn(16, device="cuda")
    out = torch.full((1, 16, 512), float("nan"), device="cuda")
    t = 2047
    sparse_mla_decode.sparse_mla_decode(
        q, slots, slot.stride, window, pages, layout.stride, part,
        torch.zeros(1, dtype=torch.int32, device="cuda"),
        torch.tensor([t], dtype=torch.int32, device="cuda"), table, sink,
        sparse_mla_decode.workspace(1, 16, sparse_mla_decode.ALL, arch, "cuda"), out, arch,
        ratio=HCA_RATIO,
    )  # fmt: skip
    keys = visible_keys(slots[0], window, pages, part, table[0].tolist(), t)
    expected = sparse_mla_decode.sparse_mla_decode_ref(q, [keys], sink)
    assert (out.double() - expected).norm() / expected.norm() < 4e-3
