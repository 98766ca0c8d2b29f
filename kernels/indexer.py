"""Lightning indexer: Hadamard and FP8 of the queries, paged logits, top-512, all bounded by live
lengths.

Data sheet
  queries  64 heads x 128 a row: rope (done before) -> Hadamard / sqrt(128) -> e4m3 with one
           power-of-two scale, which is
           folded into the head weights
  keys     132-byte rows of the pages (128 e4m3, one fp32 scale)
  score    sum_h w_h relu(q_h . k) * key scale, fp32
  plan     one launch a step: entries, tiles and chunks of every row as prefix sums on the device
  logits   a fixed number of programs walks the plan's (row, tile) list; the buffer holds live
           entries only, row after row
  top-512  per chunk of entries a search for the threshold in registers, two bits a step, then a
           tournament over a row's chunks; order of the result: ascending entry number; ties: the
           lower entry wins
  a row with at most 512 entries takes all of them and is not scored
  floor    132 bytes per entry and row over the read rate
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from decant.kernels import cuda, tuned
from decant.kernels.config import Config, lookup
from decant.kernels.kv_store import rotate_last_64
from decant.kernels.layout import CSA_RATIO, INDEX_CHANNELS, INDEX_SCALE_BYTES, Part
from decant.kernels.tiles import mma, power_of_two_scale, to_bf16, to_e4m3

TOP_K = 512
HEADS = 64
HEAD_WEIGHT = (128.0 * 64.0) ** -0.5

# architecture -> ((largest number of rows, configuration), ...)
# block_n entries a tile, splits = programs of the persistent grid (a constant of the full chip,
# not of the device)
LOGITS: dict[str, tuple[tuple[int, Config], ...]] = {
    "sm_90": ((1 << 30, Config(block_n=64, splits=528, num_warps=4, num_stages=3)),),
    "sm_120": ((1 << 30, Config(block_n=128, splits=376, num_warps=4, num_stages=3)),),
}
# block_n entries a chunk
SELECT: dict[str, tuple[tuple[int, Config], ...]] = {
    "sm_90": ((1 << 30, Config(block_n=8192, splits=132, num_warps=16, num_stages=1)),),
    "sm_120": ((1 << 30, Config(block_n=8192, splits=188, num_warps=32, num_stages=1)),),
}


def hadamard_ref(x: torch.Tensor) -> torch.Tensor:
    """128-point Walsh-Hadamard transform in natural order times 128^(-1/2), over the last axis,
    float64.
    """
    n = x.shape[-1]
    y = x.double()
    h = 1
    while h < n:
        pairs = y.unflatten(-1, (-1, 2, h))
        y = torch.stack(
            (pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), -2
        )
        y = y.flatten(-3)
        h *= 2
    return torch.mul(y, float(n) ** -0.5)


def quantise_vector_ref(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., 128] -> e4m3 codes and one fp32 power-of-two scale per vector [...]."""
    amax = x.float().abs().amax(-1).clamp_min(1e-4)
    mantissa, exponent = torch.frexp(amax * (1.0 / 448.0))
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    codes = torch.ldexp(x.float(), -exponent[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, torch.ldexp(torch.ones_like(amax), exponent)


def logits_ref(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """q [64, 128], weights [64], keys [n, 128], all dequantised -> float64 [n]."""
    return torch.relu(keys.double() @ q.double().T) @ weights.double()


def top_k_ref(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Entry numbers of the k largest, ascending; ties: the lower entry wins."""
    order = torch.sort(logits, descending=True, stable=True).indices[:k]
    return order.sort().values


@triton.jit
def _hadamard_kernel(
    q,
    head_weights,
    rope,
    codes,
    weights,
    q_stride,
    weights_stride,
    ROTATE: tl.constexpr,
    FACTOR: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """See ``index_query``."""
    index_query(
        tl.program_id(0).to(tl.int64), tl.program_id(1), q, head_weights, rope, codes, weights,
        q_stride, weights_stride, ROTATE, FACTOR, HEADS, BLOCK_H,
    )  # fmt: skip


@triton.jit
def index_query(
    row, part, q, head_weights, rope, codes, weights, q_stride, weights_stride,
    ROTATE: tl.constexpr, FACTOR: tl.constexpr, HEADS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Some heads of one row, 128 channels each."""
    head = part * BLOCK_H + tl.arange(0, BLOCK_H)
    i = tl.arange(0, 128)
    x = tl.load(q + row * q_stride + head[:, None] * 128 + i[None, :]).to(tl.float32)
    if ROTATE:
        x = to_bf16(rotate_last_64(x, rope + row * 64, 1.0)).to(tl.float32)
    bits = i[:, None] & i[None, :]
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits ^= bits >> 1
    matrix = (1 - 2 * (bits & 1)).to(tl.float32)
    y = tl.dot(x, matrix, input_precision="tf32x3") * 0.08838834764831845
    scale, inverse, _ = power_of_two_scale(tl.max(tl.abs(y), axis=1))
    tl.store(
        codes + row * HEADS * 128 + head[:, None] * 128 + i[None, :], to_e4m3(y * inverse[:, None])
    )
    w = tl.load(head_weights + row * weights_stride + head).to(tl.float32)
    tl.store(weights + row * HEADS + head, w * FACTOR * scale)


@triton.jit(do_not_specialize=["rows"])
def _plan_kernel(
    positions, entries, row_start, tile_start, chunk_start, rows,
    R: tl.constexpr, RATIO: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Prefix sums over the rows; a row with at most K entries gets no tile and no chunk."""
    row = tl.arange(0, R)
    position = tl.load(positions + row, mask=row < rows, other=-1)
    n = (position + 1) // RATIO
    scored = tl.where(n > K, n, 0)
    tiles = (scored + TILE - 1) // TILE
    chunks = (scored + CHUNK - 1) // CHUNK
    tile_end = tl.cumsum(tiles, 0)
    chunk_end = tl.cumsum(chunks, 0)
    tl.store(entries + row, n, mask=row < rows)
    tl.store(row_start + row, (tile_end - tiles).to(tl.int64) * TILE, mask=row < rows)
    tl.store(tile_start + row, tile_end - tiles, mask=row < rows)
    tl.store(chunk_start + row, chunk_end - chunks, mask=row < rows)
    tl.store(tile_start + rows, tl.sum(tiles, axis=0))
    tl.store(chunk_start + rows, tl.sum(chunks, axis=0))


@triton.jit
def _find_row(starts, unit, rows, R: tl.constexpr):
    """Row whose half-open range of units holds ``unit``: rows whose start is at most unit, minus
    one.
    """
    row = tl.arange(0, R)
    start = tl.load(starts + row, mask=row < rows, other=2147483647)
    return tl.sum((start <= unit).to(tl.int32), axis=0) - 1


@triton.jit
def _page_of(page_table, slot, table_stride, e, n, ROWS: tl.constexpr):
    """Page of every entry; 0 past the row's entries."""
    return tl.load(page_table + slot * table_stride + e // ROWS, mask=e < n, other=0).to(tl.int64)


@triton.jit
def _keys_of(
    pages, page, page_stride16, part_offset16, e, n, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Codes [BLOCK, 128] and scales [BLOCK] of entries; zeros from entry n on."""
    live = e < n
    base = pages + (page * page_stride16 + part_offset16) * 16
    row = (e % ROWS).to(tl.int64)
    channel = tl.arange(0, 128)
    key = tl.load((base + row * 128)[:, None] + channel[None, :], mask=live[:, None], other=0)
    at = (base + ROWS * 128 + row * 4).to(tl.pointer_type(tl.float32))
    return key, tl.load(at, mask=live, other=0.0)


@triton.jit(do_not_specialize=["rows"])
def _logits_kernel(
    q, weights, pages, page_table, slot_of_row, entries, row_start, tile_start, logits,
    rows, page_stride16, part_offset16, table_stride,
    R: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """A program has a contiguous share of the (row, tile of entries) list, so it reads a row's
    query once for many tiles.
    """
    total = tl.load(tile_start + rows)
    head = tl.arange(0, HEADS)
    channel = tl.arange(0, 128)
    program, programs = tl.program_id(0), tl.num_programs(0)
    begin = (total.to(tl.int64) * program // programs).to(tl.int32)
    end = (total.to(tl.int64) * (program + 1) // programs).to(tl.int32)
    unit = begin
    while unit < end:
        row = _find_row(tile_start, unit, rows, R)
        row_first = tl.load(tile_start + row)
        row_end = tl.minimum(end, tl.load(tile_start + row + 1))
        n = tl.load(entries + row)
        slot = tl.load(slot_of_row + row).to(tl.int64)
        query = tl.load(q + row.to(tl.int64) * HEADS * 128 + head[None, :] * 128 + channel[:, None])
        w = tl.load(weights + row * HEADS + head)
        out = logits + tl.load(row_start + row)
        tile, last = unit - row_first, row_end - row_first
        # a tile's keys are fetched while the tile before is multiplied, its page one tile earlier
        e = tile * BLOCK + tl.arange(0, BLOCK)
        page = _page_of(page_table, slot, table_stride, e, n, ROWS)
        key, scale = _keys_of(pages, page, page_stride16, part_offset16, e, n, ROWS, BLOCK)
        page = _page_of(page_table, slot, table_stride, e + BLOCK, n, ROWS)
        while tile < last:
            live = e < n
            limit = tl.where(tile + 1 < last, n, 0)
            next_key, next_scale = _keys_of(
                pages, page, page_stride16, part_offset16, e + BLOCK, limit, ROWS, BLOCK
            )
            page = _page_of(page_table, slot, table_stride, e + 2 * BLOCK, n, ROWS)
            dots = mma(
                key.to(tl.float8e4nv, bitcast=True),
                query,
                tl.zeros([BLOCK, HEADS], dtype=tl.float32),
            )
            score = tl.sum(tl.maximum(dots, 0.0) * w[None, :], axis=1) * scale
            tl.store(out + e, score + 0.0, mask=live)
            key, scale = next_key, next_scale
            e += BLOCK
            tile += 1
        unit = row_end


@triton.jit
def _ordered(x):
    """fp32 bits as uint32 whose order is the order of the values (no NaN; -0 counts as 0)."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    negative = (bits >> 31) != 0
    return tl.where(negative, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _select(key, valid, K: tl.constexpr):
    """Mask of the K largest valid keys (all, if fewer), lower index first among equals. key uint32
    [N].

    The threshold is found from the top, two bits by three counts a step; the search ends as soon
    as exactly K keys reach it.
    """
    reached = tl.sum(valid.to(tl.int32), axis=0)
    want = tl.minimum(reached, K)
    key = tl.where(valid, key, 0)
    one = (want * 0 + 1).to(tl.uint32)
    threshold = (want * 0).to(tl.uint32)
    bit = want * 0 + 30
    while (bit >= 0) & (reached != want):
        step = one << bit.to(tl.uint32)
        t1, t2, t3 = threshold | step, threshold | (step << 1), threshold | (step << 1) | step
        reach = (key >= t1).to(tl.int64) + ((key >= t2).to(tl.int64) << 20)
        counts = tl.sum(reach + ((key >= t3).to(tl.int64) << 40), axis=0)
        c1 = (counts & 0xFFFFF).to(tl.int32)
        c2 = ((counts >> 20) & 0xFFFFF).to(tl.int32)
        c3 = (counts >> 40).to(tl.int32)
        threshold = tl.where(
            c3 >= want, t3, tl.where(c2 >= want, t2, tl.where(c1 >= want, t1, threshold))
        )
        reached = tl.where(
            c3 >= want, c3, tl.where(c2 >= want, c2, tl.where(c1 >= want, c1, reached))
        )
        bit -= 2
    chosen = valid & (key >= threshold)
    if reached != want:  # more keys equal to the threshold than places: the first ones win
        equal = valid & (key == threshold)
        above = valid & (key > threshold)
        places = want - tl.sum(above.to(tl.int32), axis=0)
        chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= places))
    return chosen


@triton.jit(do_not_specialize=["rows"])
def _chunk_kernel(
    logits, entries, row_start, chunk_start, best_value, best_entry, selected, rows,
    R: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Persistent programs over (row, chunk): the chunk's K best into its slot, or the row's result
    if it is the only one.
    """
    total = tl.load(chunk_start + rows)
    i = tl.arange(0, CHUNK)
    k = tl.arange(0, K)
    for unit in range(tl.program_id(0), total, tl.num_programs(0)):
        row = _find_row(chunk_start, unit, rows, R)
        first_unit = tl.load(chunk_start + row)
        n = tl.load(entries + row)
        e = (unit - first_unit) * CHUNK + i
        valid = e < n
        value = tl.load(logits + tl.load(row_start + row) + e, mask=valid, other=float("-inf"))
        chosen = _select(_ordered(value), valid, K)
        place = tl.cumsum(chosen.to(tl.int32), 0) - 1
        if n <= CHUNK:
            tl.store(selected + row * K + place, e, mask=chosen)
        else:
            slot = (first_unit.to(tl.int64) + (unit - first_unit)) * K
            count = tl.sum(chosen.to(tl.int32), axis=0)
            tl.store(best_entry + slot + place, e, mask=chosen)
            tl.store(best_value + slot + place, value, mask=chosen)
            tl.store(best_entry + slot + k, -1, mask=k >= count)


@triton.jit
def _merge_kernel(
    entries, chunk_start, best_value, best_entry, selected, selected_count,
    K: tl.constexpr, CHUNK: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """One row: all entries if there are at most K, else a tournament of WAYS chunk results at a
    time.
    """
    row = tl.program_id(0)
    n = tl.load(entries + row)
    tl.store(selected_count + row, tl.minimum(n, K))
    k = tl.arange(0, K)
    if n <= K:
        tl.store(selected + row * K + k, tl.where(k < n, k, -1))
    elif n > CHUNK:
        first = tl.load(chunk_start + row)
        end = first + (n + CHUNK - 1) // CHUNK
        i = tl.arange(0, WAYS * K)
        current = first
        while current < end - 1:
            offset = current.to(tl.int64) * K + i
            inside = current + i // K < end
            e = tl.load(best_entry + offset, mask=inside, other=-1, cache_modifier=".cg")
            valid = e >= 0
            value = tl.load(
                best_value + offset, mask=valid, other=float("-inf"), cache_modifier=".cg"
            )
            chosen = _select(_ordered(value), valid, K)
            place = tl.cumsum(chosen.to(tl.int32), 0) - 1
            following = tl.minimum(current + WAYS - 1, end - 1)
            tl.debug_barrier()  # everything is read before the last slot is overwritten
            slot = following.to(tl.int64) * K
            tl.store(best_entry + slot + place, e, mask=chosen)
            tl.store(best_value + slot + place, value, mask=chosen)
            tl.store(selected + row * K + place, e, mask=chosen)
            tl.debug_barrier()
            current = following


@dataclass(frozen=True)
class IndexPlan:
    """Device tensors of one step: how many entries each row sees and where its tiles and chunks
    begin.

    entries int32 [R]; row_start int64 [R] first element in the logits buffer; tile_start,
    chunk_start int32 [R + 1].
    """

    entries: torch.Tensor
    row_start: torch.Tensor
    tile_start: torch.Tensor
    chunk_start: torch.Tensor
    tile: int
    chunk: int


def logits_config(rows: int, arch: str) -> Config:
    """Configuration of the logits for a bucket of rows."""
    return tuned.choice(arch, "logits", rows).config() or lookup(LOGITS[arch], rows)


def new_plan(rows: int, arch: str, device: torch.device | str) -> IndexPlan:
    """Buffers of a plan for a bucket of rows."""
    return IndexPlan(
        torch.zeros(rows, dtype=torch.int32, device=device),
        torch.zeros(rows, dtype=torch.int64, device=device),
        torch.zeros(rows + 1, dtype=torch.int32, device=device),
        torch.zeros(rows + 1, dtype=torch.int32, device=device),
        logits_config(rows, arch).block_n,
        lookup(SELECT[arch], rows).block_n,
    )


def fill_plan(positions: torch.Tensor, plan: IndexPlan) -> None:
    """Fill the plan from positions int32 [R] (-1: padded row). One launch a step, shared by all
    CSA layers.
    """
    rows = positions.numel()
    _plan_kernel[(1,)](
        positions,
        plan.entries,
        plan.row_start,
        plan.tile_start,
        plan.chunk_start,
        rows,
        R=triton.next_power_of_2(rows),
        RATIO=CSA_RATIO,
        K=TOP_K,
        TILE=plan.tile,
        CHUNK=plan.chunk,
        num_warps=4,
    )


def logits_capacity(entries: list[int], tile: int) -> int:
    """Elements of the logits buffer that rows with these numbers of entries need: live entries
    only.
    """
    return sum(-(-n // tile) * tile for n in entries if n > TOP_K)


def chunk_slots(entries: list[int], chunk: int) -> int:
    """Slots of 512 candidates that rows with these numbers of entries need."""
    return sum(-(-n // chunk) for n in entries if n > TOP_K)


def index_queries(
    q: torch.Tensor,
    head_weights: torch.Tensor,
    codes: torch.Tensor,
    weights: torch.Tensor,
    rope: torch.Tensor | None = None,
) -> None:
    """Hadamard and FP8 of q [R, 64, 128] into codes e4m3; weights fp32 [R, 64] = w / sqrt(128 * 64)
    * scale. rope fp32 [R, 64]: q is rotated first (and rounded to bf16); None: it is already.
    """
    rows, heads, width = q.shape
    if head_weights.stride(1) != 1:
        raise ValueError("a row's head weights must be contiguous")
    if width != INDEX_CHANNELS or q.stride(1) != width or q.stride(2) != 1:
        raise ValueError(f"q must be [rows, heads, 128], rows contiguous, not {tuple(q.shape)}")
    block = min(16, heads)
    _hadamard_kernel[(rows, heads // block)](
        q, head_weights, rope, codes, weights, q.stride(0), head_weights.stride(0),
        ROTATE=rope is not None, FACTOR=HEAD_WEIGHT, HEADS=heads, BLOCK_H=block, num_warps=8,
    )  # fmt: skip


def index_logits(
    codes: torch.Tensor,
    weights: torch.Tensor,
    pages: torch.Tensor,
    page_stride: int,
    part: Part,
    page_table: torch.Tensor,
    slot_of_row: torch.Tensor,
    plan: IndexPlan,
    logits: torch.Tensor,
    arch: str,
) -> None:
    """Scores of every live entry into logits fp32 (packed; row r begins at plan.row_start[r]).

    The caller's plan of live lengths must fit logits (``logits_capacity``); the kernel cannot
    check it.
    """
    rows, heads, _ = codes.shape
    if page_stride % 16 or part.offset % 16 or part.scale_bytes != INDEX_SCALE_BYTES:
        raise ValueError("page stride and index part must be multiples of 16 bytes")
    config = logits_config(rows, arch)
    _logits_kernel[(config.splits,)](
        codes,
        weights,
        pages,
        page_table,
        slot_of_row,
        plan.entries,
        plan.row_start,
        plan.tile_start,
        logits,
        rows,
        page_stride // 16,
        part.offset // 16,
        page_table.stride(0),
        R=triton.next_power_of_2(rows),
        ROWS=part.rows,
        BLOCK=plan.tile,
        HEADS=heads,
        **config.launch(),
    )


def cuda_select_bytes(threads: int) -> int:
    """Shared memory of a block of ``csrc/select.cu``: two histograms, a list, sums by warp."""
    return 2 * 2048 * 4 + 2 * 1024 * 4 + 4 * (threads // 32) * 4 + 16 * 4


def index_select(
    logits: torch.Tensor,
    plan: IndexPlan,
    best_value: torch.Tensor,
    best_entry: torch.Tensor,
    selected: torch.Tensor,
    selected_count: torch.Tensor,
    arch: str,
) -> None:
    """The 512 best entries of every row into selected int32 [R, 512] (ascending; -1 past the
    count) and their number.

    best_value fp32 and best_entry int32 [slots, 512] are scratch (``chunk_slots``). Two launches.
    """
    rows = selected.shape[0]
    chosen = tuned.choice(arch, "select", rows)
    if chosen.is_cuda:
        cluster, threads = chosen.options["cluster"], chosen.options["threads"]
        kernel = cuda.function(
            "select", "select_kernel", arch, TOP=TOP_K, CLUSTER=cluster, THREADS=threads
        )
        cuda.launch(
            kernel, (cluster, rows, 1), (threads, 1, 1), cuda_select_bytes(threads),
            logits, plan.entries, plan.row_start, selected, selected_count, cluster=cluster,
            overlap=rows <= cuda.EARLY_ROWS,
        )  # fmt: skip
        return
    config = lookup(SELECT[arch], rows)
    _chunk_kernel[(config.splits,)](
        logits,
        plan.entries,
        plan.row_start,
        plan.chunk_start,
        best_value,
        best_entry,
        selected,
        rows,
        R=triton.next_power_of_2(rows),
        K=TOP_K,
        CHUNK=plan.chunk,
        **config.launch(),
    )
    _merge_kernel[(rows,)](
        plan.entries,
        plan.chunk_start,
        best_value,
        best_entry,
        selected,
        selected_count,
        K=TOP_K,
        CHUNK=plan.chunk,
        WAYS=8,
        num_warps=16,
    )
