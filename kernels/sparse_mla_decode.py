"""Sparse attention of decode rows: window keys plus selected (CSA) or all (HCA) compressed keys,
one softmax, sink.

Data sheet
  q        fp16 or bf16 [R, H, 512], any H; a verify step passes several rows of one sequence
  keys     584-byte rows (448 e4m3, 64 bf16, 7 E8M0 scales), key = value; dequantised to fp16:
           exact for every scale
           between 2^-14 and 2^6
  work     program = (row, 16 heads, split); the splits of a row share its tiles of keys evenly by
           its live length
  combine  the last program of a row merges the partial results in split order and clears its own
           counter
  launches 1; grid (rows, head blocks, splits) depends on the bucket only
  floor    584 bytes per key and row over the read rate
"""

import math
from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from decant.kernels import cuda, tuned
from decant.kernels.config import SHARED_MEMORY_LIMIT, Config, lookup
from decant.kernels.layout import DATA_BYTES, SCALE_BYTES, WINDOW, Part
from decant.kernels.tiles import cast_like, mma, scale_keep

SCALE = 1.0 / math.sqrt(512.0)
WINDOW_ONLY, SELECTED, ALL = 0, 1, 2

# (architecture, kind) -> ((largest number of rows, configuration), ...); block_n keys a tile,
# splits per row
CONFIGS: dict[tuple[str, int], tuple[tuple[int, Config], ...]] = {
    ("sm_90", WINDOW_ONLY): (
        (512, Config(block_n=32, splits=2, num_warps=4, num_stages=1)),
        (1 << 30, Config(block_n=32, splits=1, num_warps=4, num_stages=1)),
    ),
    ("sm_90", SELECTED): (
        (4, Config(block_n=32, splits=10, num_warps=4, num_stages=1)),
        (16, Config(block_n=32, splits=10, num_warps=8, num_stages=1)),
        (32, Config(block_n=32, splits=7, num_warps=4, num_stages=1)),
        (64, Config(block_n=32, splits=4, num_warps=4, num_stages=1)),
        (128, Config(block_n=32, splits=2, num_warps=4, num_stages=1)),
        (512, Config(block_n=32, splits=2, num_warps=4, num_stages=1)),
        (1 << 30, Config(block_n=32, splits=1, num_warps=4, num_stages=1)),
    ),
    ("sm_90", ALL): (
        (4, Config(block_n=32, splits=64, num_warps=4, num_stages=1)),
        (16, Config(block_n=32, splits=32, num_warps=4, num_stages=1)),
        (64, Config(block_n=32, splits=4, num_warps=4, num_stages=1)),
        (512, Config(block_n=32, splits=2, num_warps=4, num_stages=1)),
        (1 << 30, Config(block_n=32, splits=1, num_warps=4, num_stages=1)),
    ),
    ("sm_120", WINDOW_ONLY): (
        (512, Config(block_n=32, splits=2, num_warps=4, num_stages=1)),
        (1 << 30, Config(block_n=32, splits=1, num_warps=8, num_stages=1)),
    ),
    ("sm_120", SELECTED): (
        (16, Config(block_n=32, splits=10, num_warps=4, num_stages=1)),
        (64, Config(block_n=32, splits=5, num_warps=4, num_stages=1)),
        (512, Config(block_n=32, splits=2, num_warps=4, num_stages=1)),
        (1 << 30, Config(block_n=32, splits=1, num_warps=8, num_stages=1)),
    ),
    ("sm_120", ALL): (
        (16, Config(block_n=32, splits=16, num_warps=4, num_stages=1)),
        (64, Config(block_n=32, splits=8, num_warps=4, num_stages=1)),
        (512, Config(block_n=32, splits=2, num_warps=4, num_stages=1)),
        (1 << 30, Config(block_n=32, splits=1, num_warps=8, num_stages=1)),
    ),
}


def sparse_mla_decode_ref(
    q: torch.Tensor, keys: list[torch.Tensor], sink: torch.Tensor
) -> torch.Tensor:
    """Plain torch: q [R, H, 512], keys[r] [n_r, 512] dequantised and visible, sink [H] -> float64
    [R, H, 512].
    """
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for row, visible in enumerate(keys):
        k = visible.double()
        scores = q[row].double() @ k.T * SCALE
        with_sink = torch.cat((scores, sink.double()[:, None]), dim=-1)
        out[row] = with_sink.softmax(-1)[:, :-1] @ k
    return out


@triton.jit
def _key_rows(
    tile, end, row, slot, window_base, page_base, window_first, window_keys, entries, page_table,
    selected, page_stride16, table_stride,
    RING: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW_KEYS: tl.constexpr, DATA: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Addresses of a tile's data and scale rows, and which of them hold a visible key; none from
    tile ``end`` on.
    """
    j = tile * BLOCK + tl.arange(0, BLOCK)
    inside = tile < end
    in_window = j < WINDOW_KEYS
    ring_row = (window_first + j) % RING
    valid = in_window & (j < window_keys) & inside
    data = window_base + ring_row.to(tl.int64) * DATA
    scale = window_base + RING * DATA + ring_row.to(tl.int64) * SCALES
    if KIND != 0:
        e = j - WINDOW_KEYS
        live = (e >= 0) & (e < entries) & inside
        if KIND == 1:
            entry = tl.load(selected + row * TOP_K + e, mask=live, other=0)
        else:
            entry = tl.where(live, e, 0)
        page = tl.load(page_table + slot * table_stride + entry // ROWS, mask=live, other=0)
        entry_row = (entry % ROWS).to(tl.int64)
        base = page_base + page.to(tl.int64) * page_stride16 * 16
        data = tl.where(in_window, data, base + entry_row * DATA)
        scale = tl.where(in_window, scale, base + ROWS * DATA + entry_row * SCALES)
        valid = valid | live
    return data, scale, valid


@triton.jit
def _half_keys(codes, exponent, BLOCK: tl.constexpr):
    """fp16 values [BLOCK, 256] of codes [BLOCK, 4, 64] and their scales' exponents [BLOCK, 4]."""
    factor = (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True).to(tl.float16)
    key = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    key = scale_keep(key, tl.broadcast_to(factor[:, :, None], [BLOCK, 4, 64]))
    return tl.reshape(key, [BLOCK, 256])


@triton.jit
def _attend_kernel(
    q, slots, pages, slot_of_row, position_of_row, page_table, selected, selected_count, sink,
    partial, partial_ml, counter, out,
    slot_stride16, window_offset16, page_stride16, part_offset16, table_stride,
    H: tl.constexpr, RING: tl.constexpr, ROWS: tl.constexpr, RATIO: tl.constexpr,
    KIND: tl.constexpr, TOP_K: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    WINDOW_KEYS: tl.constexpr, DATA: tl.constexpr, SCALES: tl.constexpr, QK_SCALE: tl.constexpr,
):  # fmt: skip
    """Strides and offsets are in units of 16 bytes. KIND: 0 window, 1 selected entries, 2 all
    entries (RATIO).
    """
    row = tl.program_id(0)
    head_block = tl.program_id(1)
    split = tl.program_id(2)
    position = tl.load(position_of_row + row)
    slot = tl.load(slot_of_row + row).to(tl.int64)
    channel = tl.arange(0, 512)
    rope = tl.arange(0, 64)
    half = tl.arange(0, 256)
    group = tl.arange(0, 4)
    head = head_block * BLOCK_H + tl.arange(0, BLOCK_H)
    live_head = head < H
    q_base = q + (row * H + head[:, None]) * 512
    # two halves of 256 channels, the last 64 of them zero: rope channels stand apart
    q_low = tl.load(q_base + half[None, :], mask=live_head[:, None], other=0.0).to(tl.float16)
    q_high = tl.load(
        q_base + 256 + half[None, :], mask=live_head[:, None] & (half[None, :] < 192), other=0.0
    ).to(tl.float16)
    q_rope = tl.load(q_base + 448 + rope[None, :], mask=live_head[:, None], other=0.0).to(
        tl.float16
    )

    window_keys = tl.minimum(position + 1, WINDOW_KEYS)
    window_first = position + 1 - window_keys
    WINDOW_TILES: tl.constexpr = WINDOW_KEYS // BLOCK
    entries = 0
    if KIND == 1:
        entries = tl.load(selected_count + row)
    if KIND == 2:
        entries = (position + 1) // RATIO
    tiles = WINDOW_TILES + tl.cdiv(entries, BLOCK)
    share = tl.cdiv(tiles, SPLITS)
    begin = split * share
    end = tl.minimum(begin + share, tiles)
    if position < 0:  # a padded row: no key, no output
        begin = 0
        end = 0

    peak = tl.full([BLOCK_H], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_H], dtype=tl.float32)
    acc_low = tl.zeros([256, BLOCK_H], dtype=tl.float32)
    acc_high = tl.zeros([256, BLOCK_H], dtype=tl.float32)
    acc_rope = tl.zeros([64, BLOCK_H], dtype=tl.float32)
    window_base = slots + (slot * slot_stride16 + window_offset16) * 16
    page_base = pages + part_offset16 * 16
    data, scale, valid = _key_rows(
        begin, end, row, slot, window_base, page_base, window_first, window_keys, entries,
        page_table, selected, page_stride16, table_stride,
        RING, ROWS, KIND, TOP_K, BLOCK, WINDOW_KEYS, DATA, SCALES,
    )  # fmt: skip
    for tile in range(begin, end):
        at = data[:, None, None] + (group * 64)[None, :, None] + rope[None, None, :]
        codes_low = tl.load(at, mask=valid[:, None, None], other=0)
        codes_high = tl.load(
            at + 256, mask=valid[:, None, None] & (group < 3)[None, :, None], other=0
        )
        scale_at = scale[:, None] + group[None, :]
        exponent_low = tl.load(scale_at, mask=valid[:, None], other=0)
        exponent_high = tl.load(scale_at + 4, mask=valid[:, None] & (group < 3)[None, :], other=0)
        # where the next tile's keys are: two dependent loads that run while this tile is computed
        next_data, next_scale, next_valid = _key_rows(
            tile + 1, end, row, slot, window_base, page_base, window_first, window_keys, entries,
            page_table, selected, page_stride16, table_stride,
            RING, ROWS, KIND, TOP_K, BLOCK, WINDOW_KEYS, DATA, SCALES,
        )  # fmt: skip
        key_rope = tl.load(
            (data + 448).to(tl.pointer_type(tl.bfloat16))[:, None] + rope[None, :],
            mask=valid[:, None], other=0.0,
        ).to(tl.float32).to(tl.float16)  # fmt: skip
        key_low = _half_keys(codes_low, exponent_low, BLOCK)
        score = mma(key_low, tl.trans(q_low), tl.zeros([BLOCK, BLOCK_H], dtype=tl.float32))
        key_high = _half_keys(codes_high, exponent_high, BLOCK)
        score = mma(key_high, tl.trans(q_high), score)
        score = mma(key_rope, tl.trans(q_rope), score) * QK_SCALE
        score = tl.where(valid[:, None], score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, axis=0))
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = tl.exp2(score - safe[None, :])
        alpha = tl.exp2(peak - safe)
        total = total * alpha + tl.sum(p, axis=0)
        weight = p.to(tl.float16)
        acc_low = mma(tl.trans(key_low), weight, acc_low * alpha[None, :])
        acc_high = mma(tl.trans(key_high), weight, acc_high * alpha[None, :])
        acc_rope = mma(tl.trans(key_rope), weight, acc_rope * alpha[None, :])
        peak = new_peak
        data, scale, valid = next_data, next_scale, next_valid

    # the sink, in units of log2, belongs to the denominator only
    sink_logit = tl.load(sink + head, mask=live_head, other=0.0) * 1.4426950408889634
    o_base = (row * H + head[None, :]) * 512
    low_mask = live_head[None, :] & (half[:, None] >= 0)
    high_mask = live_head[None, :] & (half[:, None] < 192)
    rope_mask = live_head[None, :] & (rope[:, None] >= 0)
    if SPLITS == 1:
        top = tl.maximum(peak, sink_logit)
        denominator = total * tl.exp2(peak - top) + tl.exp2(sink_logit - top)
        factor = tl.exp2(peak - top) / denominator
        tl.store(
            out + o_base + half[:, None],
            cast_like(acc_low * factor[None, :], out),
            mask=low_mask,
        )
        tl.store(
            out + o_base + 256 + half[:, None],
            cast_like(acc_high * factor[None, :], out),
            mask=high_mask,
        )
        tl.store(
            out + o_base + 448 + rope[:, None],
            cast_like(acc_rope * factor[None, :], out),
            mask=rope_mask,
        )
    else:
        p_base = ((row * SPLITS + split).to(tl.int64) * H + head[None, :]) * 512
        tl.store(partial + p_base + half[:, None], acc_low, mask=low_mask)
        tl.store(partial + p_base + 256 + half[:, None], acc_high, mask=high_mask)
        tl.store(partial + p_base + 448 + rope[:, None], acc_rope, mask=rope_mask)
        ml = partial_ml + ((row * SPLITS + split) * H + head) * 2
        tl.store(ml, peak, mask=live_head)
        tl.store(ml + 1, total, mask=live_head)
        tl.debug_barrier()
        ticket = tl.atomic_add(counter + row * tl.num_programs(1) + head_block, 1, sem="acq_rel")
        if ticket == SPLITS - 1:
            tl.debug_barrier()
            top = sink_logit
            for s in tl.static_range(SPLITS):
                ml = partial_ml + ((row * SPLITS + s) * H + head) * 2
                top = tl.maximum(
                    top, tl.load(ml, mask=live_head, other=float("-inf"), volatile=True)
                )
            denominator = tl.exp2(sink_logit - top)
            o = tl.zeros([BLOCK_H, 512], dtype=tl.float32)
            for s in range(SPLITS):
                ml = partial_ml + ((row * SPLITS + s) * H + head) * 2
                m = tl.load(ml, mask=live_head, other=float("-inf"), volatile=True)
                factor = tl.exp2(m - top)
                denominator += tl.load(ml + 1, mask=live_head, other=0.0, volatile=True) * factor
                from_base = ((row * SPLITS + s).to(tl.int64) * H + head[:, None]) * 512
                piece = tl.load(
                    partial + from_base + channel[None, :],
                    mask=live_head[:, None],
                    other=0.0,
                    cache_modifier=".cg",
                )
                o += piece * factor[:, None]
            tl.store(
                out + (row * H + head[:, None]) * 512 + channel[None, :],
                cast_like(o / denominator[:, None], out),
                mask=live_head[:, None],
            )
            tl.store(counter + row * tl.num_programs(1) + head_block, 0)


OPERATIONS = ("attention_window", "attention_selected", "attention_all")  # in tuned.json, by kind
CUDA_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CUDA_TILE, CUDA_HEADS = 32, 16


def cuda_shared_bytes(ring: int, splits: int) -> int:
    """Shared memory of a block of ``csrc/attention.cu``."""
    keys, raw = CUDA_TILE * (512 * 2 + 16), CUDA_TILE * (DATA_BYTES + SCALE_BYTES)
    scores = 4 * CUDA_HEADS * 36 * 4
    return keys + ring * raw + scores + CUDA_HEADS * 80 + (1 + 2 * splits) * CUDA_HEADS * 4


def cuda_problem(options: Mapping[str, int], arch: str) -> str:
    """Why the CUDA kernel cannot be built with these options; empty if it can."""
    most = cuda.PORTABLE_CLUSTER if arch == "sm_120" else 16
    if options["splits"] not in (1, 2, 4, 8, 16) or options["splits"] > most:
        return f"{options['splits']} blocks are no cluster of {arch}"
    shared = cuda_shared_bytes(options["ring"], options["splits"])
    if options["ring"] < 2 or shared > SHARED_MEMORY_LIMIT[arch]:
        return f"a ring of {options['ring']} buffers"
    return ""


def workspace(
    rows: int, heads: int, kind: int, arch: str, device: torch.device | str
) -> tuple[torch.Tensor, ...]:
    """(partial, partial_ml, counter) for a bucket; counter starts at zero and returns to zero
    after each launch.
    """
    splits = lookup(CONFIGS[arch, kind], rows).splits
    room = rows * splits if splits > 1 else 0
    return (
        torch.empty(room, heads, 512, dtype=torch.float32, device=device),
        torch.empty(room, heads, 2, dtype=torch.float32, device=device),
        torch.zeros(rows, triton.cdiv(heads, 16), dtype=torch.int32, device=device),
    )


def sparse_mla_decode(
    q: torch.Tensor,
    slots: torch.Tensor,
    slot_stride: int,
    window: Part,
    pages: torch.Tensor,
    page_stride: int,
    part: Part | None,
    slot_of_row: torch.Tensor,
    position_of_row: torch.Tensor,
    page_table: torch.Tensor,
    sink: torch.Tensor,
    scratch: tuple[torch.Tensor, ...],
    out: torch.Tensor,
    arch: str,
    ratio: int = 0,
    selected: torch.Tensor | None = None,
    selected_count: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of R query rows.

    q [R, H, 512]; slots and pages uint8 extents with strides in bytes; window and part say where
    this layer's rows are (part None for window-only layers). slot_of_row, position_of_row int32
    [R] (position < 0: padded row, output is zero); page_table int32 [slots, width]. CSA passes
    selected int32 [R, top_k] entry numbers and selected_count int32 [R]; HCA passes ratio 128.
    sink fp32 [H]. out [R, H, 512] fp16, bf16 or fp32.
    """
    rows, heads, width = q.shape
    kind = WINDOW_ONLY if part is None else (ALL if selected is None else SELECTED)
    if width != 512 or not q.is_contiguous() or not out.is_contiguous():
        raise ValueError("q and out must be contiguous [rows, heads, 512]")
    if kind == ALL and ratio < 1:
        raise ValueError("a layer that attends to all entries needs its ratio")
    if slot_stride % 16 or page_stride % 16 or window.offset % 16 or (part and part.offset % 16):
        raise ValueError("strides and offsets must be multiples of 16 bytes")
    top_k = 0 if selected is None else selected.shape[1]
    chosen = tuned.choice(arch, OPERATIONS[kind], rows)
    if chosen.is_cuda:
        if problem := cuda_problem(chosen.options, arch):
            raise ValueError(f"tuned attention: {problem}")
        splits, ring = chosen.options["splits"], chosen.options["ring"]
        kernel = cuda.function(
            "attention", "attend_kernel", arch,
            KIND=kind, SPLITS=splits, RING=ring, Q_TYPE=CUDA_TYPES[q.dtype],
            OUT=CUDA_TYPES[out.dtype],
        )  # fmt: skip
        cuda.launch(
            kernel, (splits, rows, triton.cdiv(heads, CUDA_HEADS)), (256, 1, 1),
            cuda_shared_bytes(ring, splits),
            q, slots, pages, slot_of_row, position_of_row, page_table, selected, selected_count,
            sink, out, cuda.Int64(slot_stride), cuda.Int64(window.offset), cuda.Int64(page_stride),
            cuda.Int64(part.offset if part else 0), cuda.Int64(page_table.stride(0)), heads,
            window.rows, part.rows if part else 1, max(ratio, 1), top_k, SCALE * math.log2(math.e),
            cluster=splits, overlap=rows <= cuda.EARLY_ROWS,
        )  # fmt: skip
        return out
    config = lookup(CONFIGS[arch, kind], rows)
    partial, partial_ml, counter = scratch
    _attend_kernel[(rows, triton.cdiv(heads, 16), config.splits)](
        q,
        slots,
        pages,
        slot_of_row,
        position_of_row,
        page_table,
        selected,
        selected_count,
        sink,
        partial,
        partial_ml,
        counter,
        out,
        slot_stride // 16,
        window.offset // 16,
        page_stride // 16,
        part.offset // 16 if part else 0,
        page_table.stride(0),
        H=heads,
        RING=window.rows,
        ROWS=part.rows if part else 1,
        RATIO=max(ratio, 1),
        KIND=kind,
        TOP_K=top_k,
        SPLITS=config.splits,
        BLOCK=config.block_n,
        BLOCK_H=16,
        WINDOW_KEYS=WINDOW,
        DATA=DATA_BYTES,
        SCALES=SCALE_BYTES,
        QK_SCALE=SCALE * math.log2(math.e),
        **config.launch(),
    )
    return out
