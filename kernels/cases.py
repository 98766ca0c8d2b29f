"""The one list of cases: shapes of DeepSeek-V4-Flash per operation, as problems for benchmark,
check and warm-up.

Sizes are those of one rank of four (16 heads, expert slice 512). Each builder makes rotating input
sets, the operation's call, its byte and operation counts, and an error against float64.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from decant.kernels import (
    compressor,
    fp4_moe,
    fp8_linear,
    gate,
    indexer,
    kv_store,
    mhc,
    page_copy,
    sampling,
    sparse_mla_decode,
    wo_a,
)
from decant.kernels.bench import Problem, sets_for
from decant.kernels.layout import CSA_RATIO, HCA_RATIO, ROW_BYTES, page_layout, slot_layout
from decant.kernels.rows import dequantise_keys_ref, read_rows

HIDDEN = 4096
EXPERTS = 256
TOP_K = 6
EXPERT_SLICE = 512
HEADS = 16
PAGE_TOKENS = 1024


@dataclass(frozen=True)
class Case:
    """One line of the benchmark: operation and builder (which takes the architecture)."""

    op: str
    build: partial[Problem]

    @property
    def rows(self) -> int:
        """Tokens or rows of the case."""
        given = self.build.keywords
        return int(max(given.get("tokens", 0), given.get("rows", 0)))

    def answers(self, name: str) -> bool:
        """Whether the case is meant by an operation, or operation:value of one of its arguments."""
        op, _, value = name.partition(":")
        return op == self.op and value in ("", *map(str, self.build.keywords.values()))


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of the expected tensor; NaN counts as infinite."""
    value = float((got.double() - expected.double()).norm() / expected.double().norm())
    return value if value == value else float("inf")


def _experts(kind: str, n: int, k: int, experts: int = EXPERTS) -> fp4_moe.PackedExperts:
    group = 32 if kind == "mxfp4" else 16
    codes = torch.randint(
        0, 256, (experts, k // (2 * group), n, group), dtype=torch.uint8, device="cuda"
    )
    if kind == "mxfp4":
        scales = torch.randint(24, 30, (experts, k // 32, n), dtype=torch.uint8, device="cuda")
    else:
        scales = torch.randint(40, 64, (experts, k // 16, n), dtype=torch.uint8, device="cuda")
    rows = torch.full((experts, n), 2.0**-7, device="cuda")
    return fp4_moe.PackedExperts(codes, scales, rows, group)


def moe(arch: str, tokens: int, kind: str, num_experts: int = EXPERTS) -> Problem:
    """Routed experts of one layer, uniform routing."""
    w13 = _experts(kind, 2 * EXPERT_SLICE, HIDDEN, num_experts)
    w2 = _experts(kind, HIDDEN, EXPERT_SLICE, num_experts)
    pairs = tokens * TOP_K
    sets = 8
    chosen = [
        torch.rand(tokens, num_experts, device="cuda").topk(TOP_K, -1).indices.int()
        for _ in range(sets)
    ]
    weights = [torch.rand(tokens, TOP_K, device="cuda") for _ in range(sets)]
    xs = [torch.randn(tokens, HIDDEN, device="cuda").half() for _ in range(sets)]
    lists = []
    touched = 0
    for experts in chosen:
        block = fp4_moe.block_tokens(pairs, arch, w13)
        tiles = gate.new_tile_list(pairs, num_experts, block, "cuda")
        gate.tile_list(experts, tiles, num_experts)
        lists.append(tiles)
        touched += experts.unique().numel()
    hidden = torch.empty(pairs, EXPERT_SLICE, dtype=torch.float16, device="cuda")
    products = torch.empty(pairs, HIDDEN, device="cuda")
    out = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")

    def run(i: int) -> None:
        fp4_moe.fp4_moe(xs[i], w13, w2, weights[i], lists[i], hidden, products, out, arch)

    def error() -> float:
        for scratch in (hidden, products, out):
            scratch.fill_(float("nan"))
        run(0)
        some = min(tokens, 4)
        experts = chosen[0][:some]
        used, slots = experts.unique(return_inverse=True)

        def pick(w: fp4_moe.PackedExperts) -> fp4_moe.PackedExperts:
            index = used.long()
            return fp4_moe.PackedExperts(w.codes[index], w.scales[index], w.rows[index], w.group)

        expected = fp4_moe.fp4_moe_ref(xs[0][:some], pick(w13), pick(w2), slots, weights[0][:some])
        if not bool(out.isfinite().all()):
            return float("inf")
        return relative(out[:some], expected)

    per_expert = 3 * HIDDEN * EXPERT_SLICE
    size = int(touched / sets * per_expert * (0.5 + 1 / w13.group)) + tokens * HIDDEN * 4
    return Problem(
        "moe", f"{kind} tokens={tokens}", sets, run, size, 2 * pairs * per_expert, error, 6e-3
    )


def linear(arch: str, tokens: int, n: int, k: int) -> Problem:
    """FP8 linear; peer: torch._scaled_mm with one scale for everything, activations quantised
    beforehand.
    """
    size = n * k + n * k // 16384 + tokens * (k + n) * 2
    sets = sets_for(size)
    weights = [torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn) for _ in range(sets)]
    scale = torch.randint(115, 124, (n // 128, k // 128), dtype=torch.uint8, device="cuda")
    x = torch.randn(tokens, k, device="cuda").bfloat16()
    x8 = torch.zeros(-(-tokens // 16) * 16, k, device="cuda").to(torch.float8_e4m3fn)
    x8[:tokens] = x.to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    out = torch.empty(tokens, n, dtype=torch.bfloat16, device="cuda")
    scratch = fp8_linear.workspace(n, 64, "cuda")
    room = None
    if tokens > 16:
        room = (torch.empty_like(x, dtype=torch.float8_e4m3fn), torch.empty(k // 128, tokens))
        room = (room[0], room[1].cuda())

    def run(i: int) -> None:
        fp8_linear.fp8_linear(x, weights[i], scale, scratch, out, arch, quantised=room)

    def error() -> float:
        out.fill_(float("nan"))
        run(0)
        return relative(out, fp8_linear.fp8_linear_ref(x, weights[0], scale))

    def peer(i: int) -> None:
        torch._scaled_mm(x8, weights[i].t(), one, one, out_dtype=torch.bfloat16)

    return Problem(
        "linear",
        f"M={tokens} N={n} K={k}",
        sets,
        run,
        size,
        2 * tokens * n * k,
        error,
        5e-3,
        "_scaled_mm",
        peer,
    )


def _random_rows(extents: torch.Tensor) -> None:
    """Fill uint8 extents [n, stride] with valid key rows everywhere: random codes and scales near
    1.
    """
    flat = extents.view(-1)
    step = 1 << 28
    for start in range(0, flat.numel(), step):
        piece = flat[start : start + step]
        piece.copy_(torch.randint(0, 120, piece.shape, dtype=torch.uint8, device=piece.device))


def attention(arch: str, rows: int, kind: int, context: int) -> Problem:
    """Sparse decode: rows sequences of ``context`` tokens, CSA with 512 selected entries or HCA
    with all.
    """
    ratio = HCA_RATIO if kind == sparse_mla_decode.ALL else CSA_RATIO
    pages_layout = page_layout((ratio,), PAGE_TOKENS)
    slots_layout = slot_layout((ratio,), 3)
    width = -(-context // PAGE_TOKENS)
    copies = max(1, min(8, -(-(300 << 20) // (rows * width * pages_layout.stride))))
    pages = torch.empty(
        copies * rows * width, pages_layout.stride, dtype=torch.uint8, device="cuda"
    )
    slots = torch.empty(copies * rows, slots_layout.stride, dtype=torch.uint8, device="cuda")
    _random_rows(pages)
    _random_rows(slots)
    part, window = pages_layout.keys[0], slots_layout.window[0]
    for extents, where in ((pages, part), (slots, window)):
        rows_of = extents[:, where.offset : where.scale_offset].unflatten(1, (where.rows, -1))
        rope = torch.randn(extents.shape[0], where.rows, 64, device="cuda").bfloat16()
        rows_of[:, :, 448:] = rope.view(torch.uint8)  # scales below: between 2^-7 and 1
        begin, end = where.scale_offset, where.scale_offset + 8 * where.rows
        extents[:, begin:end] = torch.randint(
            120, 128, (extents.shape[0], end - begin), dtype=torch.uint8, device="cuda"
        )
    table = torch.randperm(copies * rows * width, device="cuda").int().view(copies * rows, width)
    positions = torch.full((rows,), context - 1, dtype=torch.int32, device="cuda")
    slot_of_row = [torch.arange(rows, device="cuda").int() + c * rows for c in range(copies)]
    q = torch.randn(rows, HEADS, 512, device="cuda").bfloat16()
    sink = torch.randn(HEADS, device="cuda")
    out = torch.empty(rows, HEADS, 512, dtype=torch.bfloat16, device="cuda")
    scratch = sparse_mla_decode.workspace(rows, HEADS, kind, arch, "cuda")
    entries = context // ratio
    take = min(512, entries)
    selected = [
        torch.rand(rows, entries, device="cuda").topk(take, -1).indices.sort(-1).values.int()
        if kind == sparse_mla_decode.SELECTED
        else None
        for _ in range(copies)
    ]
    count = torch.full((rows,), take, dtype=torch.int32, device="cuda")

    def run(i: int) -> None:
        sparse_mla_decode.sparse_mla_decode(
            q,
            slots,
            slots_layout.stride,
            window,
            pages,
            pages_layout.stride,
            None if kind == sparse_mla_decode.WINDOW_ONLY else part,
            slot_of_row[i],
            positions,
            table,
            sink,
            scratch,
            out,
            arch,
            ratio=ratio,
            selected=selected[i],
            selected_count=count if selected[i] is not None else None,
        )

    def error() -> float:
        out.fill_(float("nan"))
        run(copies - 1)
        worst = 0.0
        for row in {0, rows - 1}:
            slot = int(slot_of_row[copies - 1][row])
            data, scale = read_rows(slots[slot], window)
            ring = (torch.arange(context - min(context, 128), context, device="cuda")) % window.rows
            keys = [dequantise_keys_ref(data[ring], scale[ring])]
            chosen = selected[copies - 1]
            wanted = (
                chosen[row].long() if chosen is not None else torch.arange(entries, device="cuda")
            )
            if kind != sparse_mla_decode.WINDOW_ONLY:
                for page in (wanted // part.rows).unique().tolist():
                    data, scale = read_rows(pages[int(table[slot, page])], part)
                    inside = wanted[wanted // part.rows == page] % part.rows
                    keys.append(dequantise_keys_ref(data[inside], scale[inside]))
            expected = sparse_mla_decode.sparse_mla_decode_ref(
                q[row : row + 1], [torch.cat(keys)], sink
            )
            worst = max(worst, relative(out[row : row + 1], expected))
        return worst

    keys = min(128, context) + (0 if kind == 0 else take if kind == 1 else entries)
    name = {0: "window", 1: "CSA", 2: "HCA"}[kind]
    return Problem(
        "attention",
        f"{name} rows={rows} context={context}",
        copies,
        run,
        rows * keys * ROW_BYTES + 2 * rows * HEADS * 512 * 2,
        4 * rows * HEADS * 512 * keys,
        error,
        6e-3,
    )


def prefill_attention(arch: str, tokens: int, kind: int) -> Problem:
    """The last ``tokens`` queries of one sequence twice as long; their window keys stand in one
    buffer, each query has its own 512 selected entries (CSA) or sees all (HCA).
    """
    ratio = HCA_RATIO if kind == sparse_mla_decode.ALL else CSA_RATIO
    layout, context = page_layout((ratio,), PAGE_TOKENS), 2 * tokens
    slots_layout = slot_layout((ratio,), tokens)
    part, window = layout.keys[0], slots_layout.window[0]
    pages = torch.empty(context // PAGE_TOKENS, layout.stride, dtype=torch.uint8, device="cuda")
    slots = torch.empty(1, slots_layout.stride, dtype=torch.uint8, device="cuda")
    for extents, where in ((pages, part), (slots, window)):
        _random_rows(extents)
        rows_of = extents[:, where.offset : where.scale_offset].unflatten(1, (where.rows, -1))
        rope = torch.randn(extents.shape[0], where.rows, 64, device="cuda").bfloat16()
        rows_of[:, :, 448:] = rope.view(torch.uint8)
        begin, end = where.scale_offset, where.scale_offset + 8 * where.rows
        extents[:, begin:end] = torch.randint(
            120, 128, (extents.shape[0], end - begin), dtype=torch.uint8, device="cuda"
        )
    table = torch.randperm(context // PAGE_TOKENS, device="cuda").int()[None]
    positions = torch.arange(tokens, context, device="cuda").int()
    visible = (positions + 1) // ratio
    q = torch.randn(tokens, HEADS, 512, device="cuda").bfloat16()
    sink = torch.randn(HEADS, device="cuda")
    out = torch.empty(tokens, HEADS, 512, dtype=torch.bfloat16, device="cuda")
    scratch = sparse_mla_decode.workspace(tokens, HEADS, kind, arch, "cuda")
    selected, count = None, None
    if kind == sparse_mla_decode.SELECTED:
        order = torch.rand(tokens, context // ratio, device="cuda")
        order[torch.arange(context // ratio, device="cuda")[None] >= visible[:, None]] = -1.0
        selected = order.topk(512, -1).indices.sort(-1).values.int()
        count = torch.full((tokens,), 512, dtype=torch.int32, device="cuda")
    slot_of_row = torch.zeros(tokens, dtype=torch.int32, device="cuda")

    def run(i: int) -> None:
        sparse_mla_decode.sparse_mla_decode(
            q, slots, slots_layout.stride, window, pages, layout.stride, part, slot_of_row,
            positions, table, sink, scratch, out, arch, ratio=ratio, selected=selected,
            selected_count=count,
        )  # fmt: skip

    def error() -> float:
        out.fill_(float("nan"))
        run(0)
        worst = 0.0
        near, near_scale = read_rows(slots[0], window)
        read = [read_rows(pages[int(page)], part) for page in table[0]]
        far = dequantise_keys_ref(torch.cat([d for d, _ in read]), torch.cat([s for _, s in read]))
        for row in (0, tokens // 3, tokens - 1):
            last = int(positions[row])
            ring = torch.arange(last - 127, last + 1, device="cuda") % window.rows
            wanted = selected[row].long() if selected is not None else slice(int(visible[row]))
            keys = torch.cat((dequantise_keys_ref(near[ring], near_scale[ring]), far[wanted]))
            expected = sparse_mla_decode.sparse_mla_decode_ref(q[row : row + 1], [keys], sink)
            worst = max(worst, relative(out[row : row + 1], expected))
        return worst if bool(out.isfinite().all()) else float("inf")

    pairs = tokens * 128 + (tokens * 512 if selected is not None else int(visible.sum()))
    size = 2 * tokens * HEADS * 1024 + context // ratio * ROW_BYTES + tokens * ROW_BYTES
    name = f"{'CSA' if selected is not None else 'HCA'} prefill rows={tokens}"
    return Problem("attention", name, 2, run, size, 4 * HEADS * 512 * pairs, error, 6e-3)


def boundary(arch: str, tokens: int) -> Problem:
    """mHC boundary."""
    size = 24 * 4 * HIDDEN * 4 + tokens * HIDDEN * 2 * (4 + 1 + 4 + 1)
    sets = sets_for(size)
    fns = [torch.randn(24, 4 * HIDDEN, device="cuda") * 0.01 for _ in range(sets)]
    copies = min(sets, max(1, (1 << 30) // (tokens * HIDDEN * 8)))
    xs = [torch.randn(tokens, 4, HIDDEN, device="cuda").bfloat16() for _ in range(copies)]
    base, scale = torch.randn(24, device="cuda"), torch.rand(3, device="cuda")
    norm = torch.rand(HIDDEN, device="cuda").bfloat16()
    y = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    post = torch.rand(tokens, 4, device="cuda")
    comb = torch.rand(tokens, 4, 4, device="cuda")
    streams = torch.empty(tokens, 4, HIDDEN, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
    shares = mhc.workspace(tokens, arch, "cuda")

    def run(i: int) -> None:
        mhc.mhc_boundary(
            xs[i % copies], y, post, comb, fns[i], base, scale, norm, streams, shares, out, arch
        )

    def error() -> float:
        out.fill_(float("nan"))
        streams.fill_(float("nan"))
        shares.fill_(float("nan"))
        before = mhc.combine_ref(xs[0][:16], y[:16], post[:16], comb[:16])
        run(0)
        pre, _, _ = mhc.mix_ref(streams[:16], fns[0], base, scale)
        expected = mhc.collapse_ref(streams[:16], pre, norm)
        return max(relative(streams[:16], before), relative(out[:16], expected))

    return Problem("mhc", f"tokens={tokens}", sets, run, size, 0, error, 5e-3)


def index(arch: str, rows: int, context: int, what: str, table_tokens: int = 0) -> Problem:
    """Indexer logits or top-512 over ``context`` tokens; table_tokens widens the page table beyond
    the context.
    """
    layout = page_layout((CSA_RATIO,), PAGE_TOKENS)
    part = layout.index[0]
    width = -(-context // PAGE_TOKENS)
    copies = max(1, min(8, -(-(300 << 20) // (rows * context // 4 * 132))))
    pages = torch.empty(copies * rows * width, layout.stride, dtype=torch.uint8, device="cuda")
    _random_rows(pages)
    begin, end = part.scale_offset, part.scale_offset + 4 * part.rows
    ones = torch.ones(pages.shape[0], part.rows, device="cuda").view(torch.uint8)
    pages[:, begin:end] = ones
    table = torch.zeros(
        copies * rows, max(width, table_tokens // PAGE_TOKENS), dtype=torch.int32, device="cuda"
    )
    table[:, :width] = (
        torch.randperm(copies * rows * width, device="cuda").int().view(copies * rows, width)
    )
    positions = torch.full((rows,), context - 1, dtype=torch.int32, device="cuda")
    slot_of_row = [torch.arange(rows, device="cuda").int() + c * rows for c in range(copies)]
    plan = indexer.new_plan(rows, arch, "cuda")
    indexer.fill_plan(positions, plan)
    entries = [context // 4] * rows
    logits = torch.randn(indexer.logits_capacity(entries, plan.tile), device="cuda")
    slots = max(1, indexer.chunk_slots(entries, plan.chunk))
    best_value = torch.empty(slots, 512, device="cuda")
    best_entry = torch.empty(slots, 512, dtype=torch.int32, device="cuda")
    selected = torch.empty(rows, 512, dtype=torch.int32, device="cuda")
    count = torch.empty(rows, dtype=torch.int32, device="cuda")
    codes = torch.randn(rows, 64, 128, device="cuda").to(torch.float8_e4m3fn)
    weights = torch.randn(rows, 64, device="cuda")

    def score(i: int) -> None:
        indexer.index_logits(
            codes, weights, pages, layout.stride, part, table, slot_of_row[i], plan, logits, arch
        )

    def select(i: int) -> None:
        indexer.index_select(logits, plan, best_value, best_entry, selected, count, arch)

    def score_error() -> float:
        logits.fill_(float("nan"))
        score(copies - 1)
        row, n = rows - 1, context // 4
        slot = int(slot_of_row[copies - 1][row])
        keys = torch.cat([read_rows(pages[int(p)], part)[0] for p in table[slot, :width].tolist()])
        values = keys[:n].contiguous().view(torch.float8_e4m3fn).float()
        expected = indexer.logits_ref(codes[row].float(), weights[row], values)
        start = int(plan.row_start[row])
        return relative(logits[start : start + n], expected)

    def select_error() -> float:
        selected.fill_(-7)
        logits.copy_(torch.randn_like(logits))
        select(0)
        row, n = rows - 1, context // 4
        start = int(plan.row_start[row])
        expected = indexer.top_k_ref(logits[start : start + n], 512)
        return float((selected[row].long() != expected).sum())

    size = rows * context // 4 * (132 if what == "logits" else 4)
    flops = rows * context // 4 * 64 * 128 * 2 if what == "logits" else 0
    suffix = f" table={table_tokens}" if table_tokens else ""
    run, error = (score, score_error) if what == "logits" else (select, select_error)
    peer, peer_run = "", None
    if what == "top":
        view = logits[: rows * (context // 4)].view(rows, context // 4)
        peer = "torch.topk"

        def peer_run(i: int) -> None:
            torch.topk(view, 512)

    return Problem(
        "index",
        f"{what} rows={rows} context={context}{suffix}",
        copies,
        run,
        size,
        flops // 2,
        error,
        1e-3,
        peer,
        peer_run,
    )


def router(arch: str, tokens: int) -> Problem:
    """Gate, choice and work list."""
    sets = 24
    weights = [torch.randn(EXPERTS, HIDDEN, device="cuda").bfloat16() * 0.05 for _ in range(sets)]
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    bias = torch.randn(EXPERTS, device="cuda") * 0.1
    logits = torch.empty(gate.SPLIT_K, tokens, EXPERTS, device="cuda")
    experts = torch.empty(tokens, TOP_K, dtype=torch.int32, device="cuda")
    chosen = torch.empty(tokens, TOP_K, device="cuda")
    pairs = tokens * TOP_K
    w13 = _experts("mxfp4", 2 * EXPERT_SLICE, HIDDEN, 1)
    tiles = gate.new_tile_list(pairs, EXPERTS, fp4_moe.block_tokens(pairs, arch, w13), "cuda")

    def run(i: int) -> None:
        gate.route(x, weights[i], logits, experts, chosen, tiles, bias)

    def error() -> float:
        logits.fill_(float("nan"))
        run(0)
        wanted, values = gate.gate_ref(x, weights[0], bias, None, None, TOP_K)
        if not torch.equal(experts.long(), wanted):
            return float((experts.long() != wanted).float().mean()) * 1e-2
        return relative(chosen, values)

    return Problem("gate", f"tokens={tokens}", sets, run, EXPERTS * HIDDEN * 2, 0, error, 1e-4)


def store(arch: str, tokens: int) -> Problem:
    """Query and key norm, rotation and store."""
    layout = slot_layout((CSA_RATIO,), 3)
    window = layout.window[0]
    slots = torch.zeros(tokens, layout.stride, dtype=torch.uint8, device="cuda")
    sets = sets_for(tokens * HEADS * 512 * 2)
    qs = [torch.randn(tokens, HEADS, 512, device="cuda").bfloat16() for _ in range(sets)]
    k = torch.randn(tokens, 512, device="cuda").bfloat16()
    norm = torch.rand(512, device="cuda").bfloat16()
    positions = torch.arange(tokens, device="cuda").int() + 70_000
    frequencies = 10000.0 ** (-torch.arange(0, 64, 2, device="cuda").float() / 64)
    rope = kv_store.rope_rows(positions, frequencies, torch.empty(tokens, 64, device="cuda"))
    slot_of_row = torch.arange(tokens, device="cuda").int()

    def run(i: int) -> None:
        kv_store.norm_rope_store(
            qs[i], k, norm, rope, slot_of_row, positions, slots, layout.stride, window
        )

    def error() -> float:
        before = qs[0].clone()
        run(0)
        expected = kv_store.rotate_ref(kv_store.norm_ref(before), rope)
        key = kv_store.rotate_ref(kv_store.norm_ref(k, norm), rope)
        stored = []
        for row in range(min(tokens, 8)):
            data, scale = read_rows(slots[row], window)
            at = int(positions[row]) % window.rows
            stored.append(dequantise_keys_ref(data[at : at + 1], scale[at : at + 1]))
        # e4m3 keeps three bits: 2^-4 of each value at most
        return max(relative(qs[0], expected), relative(torch.cat(stored), key[:8]) / 10)

    size = tokens * (2 * HEADS * 1024 + 1024 + ROW_BYTES)
    return Problem("store", f"tokens={tokens}", sets, run, size, 0, error, 5e-3)


def projection(arch: str, tokens: int) -> Problem:
    """wo_a with inverse rotation: two groups of 1,024 x 4,096."""
    n, k = 2048, 4096
    sets = sets_for(n * k)
    weights = [torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn) for _ in range(sets)]
    scale = torch.randint(115, 124, (n // 128, k // 128), dtype=torch.uint8, device="cuda")
    o = torch.randn(tokens, HEADS, 512, device="cuda").bfloat16()
    angle = torch.rand(tokens, 32, device="cuda") * 6
    rope = torch.cat((angle.cos(), angle.sin()), -1)
    out = torch.empty(tokens, n, dtype=torch.bfloat16, device="cuda")
    scratch = fp8_linear.workspace(n, 64, "cuda")
    room = torch.empty_like(o, dtype=torch.float16) if tokens > 16 else None

    def run(i: int) -> None:
        wo_a.wo_a(o, rope, weights[i], scale, scratch, out, arch, rotated=room)

    def error() -> float:
        out.fill_(float("nan"))
        run(0)
        return relative(out, wo_a.wo_a_ref(o, rope, weights[0], scale))

    size = n * k + tokens * (HEADS * 1024 + n * 2)
    return Problem("wo_a", f"tokens={tokens}", sets, run, size, 2 * tokens * n * k, error, 5e-3)


def compression(arch: str, rows: int, ratio: int, closing: bool) -> Problem:
    """Compressor step of ``rows`` sequences; closing: every row completes a window."""
    layout, slot = page_layout((ratio,), PAGE_TOKENS), slot_layout((ratio,), 3)
    state, part = slot.state[0], layout.keys[0]
    size = 1024 if ratio == CSA_RATIO else 512
    slots = torch.randn(rows, slot.stride // 4, device="cuda").view(torch.uint8)
    pages = torch.zeros(rows, layout.stride, dtype=torch.uint8, device="cuda")
    table = torch.arange(rows, device="cuda").int().view(rows, 1)
    slot_of_row = torch.arange(rows, device="cuda").int()
    position = ratio * 3 - 1 if closing else ratio * 3 - 2
    positions = torch.full((rows,), position, dtype=torch.int32, device="cuda")
    projected = torch.randn(rows, 2 * size, device="cuda")
    ape = torch.randn(ratio, size, device="cuda")
    norm = torch.rand(512, device="cuda").bfloat16()
    angle = torch.rand(rows, 32, device="cuda")
    rope = torch.cat((angle.cos(), angle.sin()), -1)

    def run(i: int) -> None:
        compressor.compress(
            projected, ape, norm, rope, slots, slot.stride, state, pages, layout.stride, part,
            slot_of_row, positions, table, ratio, 1,
        )  # fmt: skip

    def error() -> float:
        run(0)
        if not closing:
            return 0.0
        first = position + 1 - ratio - (ratio if ratio == CSA_RATIO else 0)
        ring = slots.view(torch.float32)[0, state.offset // 4 :][: state.rows * 2 * size]
        ring = ring.view(state.rows, 2 * size)[torch.arange(first, position + 1) % state.rows]
        e = compressor.entry_ref(ring[:, :size], ring[:, size:], norm, False)
        e = kv_store.rotate_ref(e[None], rope[:1])
        data, scale = read_rows(pages[0], part)
        at = position // ratio
        got = dequantise_keys_ref(data[at : at + 1], scale[at : at + 1])
        return relative(got, e) / 10

    read = (8 if ratio == CSA_RATIO else 128) * 4096 if closing else 0
    name = f"ratio={ratio} rows={rows} closing={closing}"
    return Problem("compress", name, 1, run, rows * (4 * 2 * size * 2 + read), 0, error, 5e-3)


def draw(arch: str, rows: int, setting: str) -> Problem:
    """Sampling over the whole vocabulary."""
    vocab = 129_280
    scratch = sampling.Workspace(rows, vocab, "cuda")
    sets = sets_for(rows * vocab * 4)
    logits = [torch.randn(rows, vocab, device="cuda") * 2 for _ in range(sets)]

    def full(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device="cuda")

    temperature = full(0.0 if setting == "greedy" else 0.8)
    top_p = full(0.95 if setting == "top_p" else 1.0)
    top_k = full(0, torch.int32)
    min_p = full(0.0)
    seeds = torch.randint(0, 2**62, (rows,), device="cuda")
    choices, positions = full(0, torch.int32), torch.arange(rows, device="cuda").int()
    tokens = torch.empty(rows, dtype=torch.int32, device="cuda")

    def run(i: int) -> None:
        sampling.sample(
            logits[i], temperature, top_k, top_p, min_p, seeds, choices, positions, scratch, tokens
        )

    def error() -> float:
        tokens.fill_(-9)
        run(0)
        wrong = 0
        for row in range(min(rows, 4)):
            noise = sampling.gumbel_ref(int(seeds[row]), 0, int(positions[row]), vocab)
            token, margin = sampling.draw_ref(
                logits[0][row].cpu(), float(temperature[row]), 0, float(top_p[row]), 0.0, noise
            )
            wrong += int(margin > 1e-3 and token != int(tokens[row]))
        return float(wrong)

    return Problem("sample", f"{setting} rows={rows}", sets, run, rows * vocab * 4, 0, error, 0.5)


def copy(arch: str, tokens: int) -> Problem:
    """Pages of one request of 43 layers into another pool on the same GPU."""
    ratios = (0, 0) + (CSA_RATIO, HCA_RATIO) * 20 + (CSA_RATIO,)
    layout = page_layout(ratios, PAGE_TOKENS)
    count = tokens // PAGE_TOKENS
    source = torch.randint(0, 256, (2 * count, layout.stride), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randperm(2 * count, device="cuda")[:count].int() for _ in range(2))

    def run(i: int) -> None:
        page_copy.copy_pages(source, target, a, b)

    def error() -> float:
        target.fill_(0xFF)
        run(0)
        return float((target[b.long()] != source[a.long()]).sum())

    def peer(i: int) -> None:
        target[:count].copy_(source[:count])

    size = 2 * count * layout.stride
    return Problem("copy", f"tokens={tokens}", 1, run, size, 0, error, 0.5, "copy_", peer)


def cases() -> Iterator[Case]:
    """Every case of the benchmark, in the order of their weight in a decode step."""
    for kind in ("mxfp4", "nvfp4"):
        for tokens in (1, 8, 16, 32, 64) if kind == "mxfp4" else (1, 64):
            yield Case("moe", partial(moe, tokens=tokens, kind=kind))
    yield Case("moe", partial(moe, tokens=4096, kind="mxfp4"))
    for rows in (1, 8, 64, 128):
        yield Case("attention", partial(attention, rows=rows, kind=1, context=8192))
    yield Case("attention", partial(attention, rows=8, kind=2, context=1 << 20))
    yield Case("attention", partial(attention, rows=64, kind=2, context=1 << 16))
    yield Case("attention", partial(attention, rows=64, kind=0, context=8192))
    for keys in (sparse_mla_decode.SELECTED, sparse_mla_decode.ALL):
        yield Case("attention", partial(prefill_attention, tokens=4096, kind=keys))
    for tokens in (1, 16, 64, 4096):
        yield Case("linear", partial(linear, tokens=tokens, n=8192, k=1024))
    yield Case("linear", partial(linear, tokens=64, n=1536, k=4096))
    yield Case("linear", partial(linear, tokens=64, n=4096, k=2048))
    for rows, context in ((1, 1 << 16), (8, 1 << 16), (64, 1 << 16), (8, 1 << 13)):
        yield Case("index", partial(index, rows=rows, context=context, what="logits"))
        yield Case("index", partial(index, rows=rows, context=context, what="top"))
    for limit in (1 << 14, 1 << 20):
        wide = partial(index, rows=8, context=4096, what="logits", table_tokens=limit)
        yield Case("index", wide)
    for tokens in (1, 8, 64, 4096):
        yield Case("mhc", partial(boundary, tokens=tokens))
    for tokens in (1, 64):
        yield Case("gate", partial(router, tokens=tokens))
    for tokens in (1, 64, 4096):
        yield Case("store", partial(store, tokens=tokens))
    for tokens in (1, 64, 4096):
        yield Case("wo_a", partial(projection, tokens=tokens))
    for ratio in (CSA_RATIO, HCA_RATIO):
        for closing in (False, True):
            yield Case("compress", partial(compression, rows=64, ratio=ratio, closing=closing))
    for setting in ("greedy", "plain", "top_p"):
        yield Case("sample", partial(draw, rows=64, setting=setting))
    yield Case("copy", partial(copy, tokens=1 << 16))
