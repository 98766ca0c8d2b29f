"""Draw one token a row: penalties, temperature, top-k, top-p, min-p, noise by (seed, choice,
position).

Data sheet
  noise    Philox4x32-10, key = seed, counter = (token / 4, choice, position, 0); Gumbel noise of
           24-bit
           uniforms: depends on nothing else, so speculation, batch and resume do not change a draw
  draw     argmax(processed / temperature + noise) within the truncated set; ties: the lower token
  sets     top-k: fewer than k values above; top-p: the mass above is under p of the top-k set's
           mass;
           min-p: at least min_p of the greatest; ties at a border stay in
  how      the greatest perturbed value is asked for membership (count and mass above it); if it is
           no
           member the next one is: few passes, no sort
  verify   a draft is accepted exactly if it equals the drawn token (``accept``)
  launches 2 (process, draw) + 1 (accept)
  floor    the logits' bytes over the read rate
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from decant.kernels import cuda, tuned
from decant.kernels.config import SHARED_MEMORY_LIMIT, architecture

GREEDY_BELOW = 1e-5
TRIES = 4  # perturbed maxima asked for membership before the set's border is searched
PARTS = 16  # shares of the vocabulary in the first pass


def philox_ref(seed: int, choice: int, position: int, blocks: int) -> torch.Tensor:
    """[blocks, 4] int64 holding uint32 values."""
    low = 0xFFFFFFFF
    c = [
        torch.arange(blocks, dtype=torch.int64),
        torch.full((blocks,), choice & low, dtype=torch.int64),
        torch.full((blocks,), position & low, dtype=torch.int64),
        torch.zeros(blocks, dtype=torch.int64),
    ]
    k0, k1 = seed & low, (seed >> 32) & low

    def product(a: torch.Tensor, m: int) -> tuple[torch.Tensor, torch.Tensor]:
        lo = a * (m & 0xFFFF)  # < 2^48
        hi = a * (m >> 16)
        total = lo + ((hi & 0xFFFF) << 16)
        return (hi >> 16) + (total >> 32), total & low

    for _ in range(10):
        h0, l0 = product(c[0], 0xD2511F53)
        h1, l1 = product(c[2], 0xCD9E8D57)
        c = [h1 ^ c[1] ^ k0, l1, h0 ^ c[3] ^ k1, l0]
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return torch.stack(c, dim=1)


def gumbel_ref(seed: int, choice: int, position: int, n: int) -> torch.Tensor:
    """[n] float64 standard Gumbel noise."""
    bits = philox_ref(seed, choice, position, -(-n // 4)).flatten()[:n]
    uniform = ((bits >> 8).double() + 0.5) * 2.0**-24
    return -torch.log(-torch.log(uniform))


def draw_ref(
    logits: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    noise: torch.Tensor,
) -> tuple[int, float]:
    """(token, margin) of one row of processed logits [V] in float64.

    margin: how far the drawn value is above the best other member, for tests of near ties.
    """
    x = logits.double()
    if temperature < GREEDY_BELOW:
        best = x.topk(2).values
        return int(x.argmax()), float(best[0] - best[1])
    x = x / temperature
    weight = (x - x.max()).exp()
    order = torch.sort(x, descending=True, stable=True).indices
    ranked = x[order]
    first = torch.searchsorted(-ranked, -ranked, right=False)  # values strictly above
    member = torch.ones_like(x, dtype=torch.bool)
    if top_k > 0:
        member = first < top_k
    total = weight[order][member].sum()
    if top_p < 1:
        before = torch.cat((torch.zeros(1).double(), weight[order].cumsum(0)))[first]
        member = member & (before < top_p * total)
    member = member & (weight[order] >= min_p)
    allowed = order[member]
    value = (x + noise)[allowed]
    best = value.topk(min(2, len(value))).values
    margin = float(best[0] - best[1]) if len(best) > 1 else float("inf")
    return int(allowed[value.argmax()]), margin


@triton.jit
def _philox(seed_low, seed_high, choice, position, block):
    """Four uint32 tensors for counter (block, choice, position, 0)."""
    c0 = block.to(tl.uint32)
    c1 = tl.zeros_like(c0) + choice.to(tl.uint32)
    c2 = tl.zeros_like(c0) + position.to(tl.uint32)
    c3 = tl.zeros_like(c0)
    k0 = seed_low.to(tl.uint32)
    k1 = seed_high.to(tl.uint32)
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = p1.to(tl.uint32)
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = p0.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _gumbel(bits):
    """Gumbel noise of uint32 bits: -log(-log(u)), u = (bits >> 8 + 1 / 2) / 2^24.

    Near u = 1 the inner logarithm is taken as log1p(-(1 - u)) with 1 - u exact.
    """
    top = (bits >> 8).to(tl.int32)
    u = (top.to(tl.float32) + 0.5) * 5.9604644775390625e-08
    rest = ((16777215 - top).to(tl.float32) + 0.5) * 5.9604644775390625e-08
    near = rest * (1.0 + rest * (0.5 + rest * (0.3333333333 + rest * 0.25)))
    inner = tl.where(rest < 0.01, near, -tl.log(u))
    return -tl.log(inner)


@triton.jit
def _process_kernel(
    logits, allowed, counts, seen, slot_of_row, temperature, repetition, presence, frequency,
    seeds, choices, positions, processed, perturbed, best_value, best_token, greatest, finite,
    V, logits_stride, counts_stride,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, HAS_MASK: tl.constexpr, HAS_PENALTY: tl.constexpr,
    GREEDY: tl.constexpr,
):  # fmt: skip
    """One share of one row: processed / temperature, perturbed values, the share's best."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    quads = tl.cdiv(V, 4)
    share = tl.cdiv(quads, PARTS)
    t = tl.load(temperature + row)
    greedy = t < GREEDY
    inverse = 1.0 / tl.where(greedy, 1.0, t)
    seed = tl.load(seeds + row)
    seed_low = seed & 0xFFFFFFFF
    seed_high = (seed >> 32) & 0xFFFFFFFF
    choice = tl.load(choices + row)
    position = tl.load(positions + row)
    top = float("-inf")
    token = 2147483647
    peak = float("-inf")
    bad = 0
    for start in range(0, share, BLOCK):
        inside_share = start + tl.arange(0, BLOCK)
        block = part * share + inside_share
        b0, b1, b2, b3 = _philox(seed_low, seed_high, choice, position, block)
        for lane in tl.static_range(4):
            i = block * 4 + lane
            mask = (inside_share < share) & (i < V)
            x = tl.load(logits + row * logits_stride + i, mask=mask, other=float("-inf")).to(
                tl.float32
            )
            bad += tl.sum((mask & ((x != x) | (x == float("inf")))).to(tl.int32), axis=0)
            if HAS_MASK:
                word = tl.load(allowed + row * tl.cdiv(V, 32) + i // 32, mask=mask, other=0)
                x = tl.where(((word >> (i % 32)) & 1) != 0, x, float("-inf"))
            if HAS_PENALTY:
                slot = tl.load(slot_of_row + row).to(tl.int64)
                count = tl.load(counts + slot * counts_stride + i, mask=mask, other=0).to(
                    tl.float32
                )
                was = tl.load(seen + slot * counts_stride + i, mask=mask, other=0) != 0
                r = tl.load(repetition + row)
                x = tl.where(was, tl.where(x > 0, x / r, x * r), x)
                extra = tl.load(presence + row) + tl.load(frequency + row) * count
                x = tl.where(count > 0, x - extra, x)
            x = x * inverse
            bits = b0
            if lane == 1:
                bits = b1
            if lane == 2:
                bits = b2
            if lane == 3:
                bits = b3
            y = tl.where(greedy, x, x + _gumbel(bits))
            y = tl.where(mask, y, float("-inf"))
            tl.store(processed + row * V + i, x, mask=mask)
            tl.store(perturbed + row * V + i, y, mask=mask)
            peak = tl.maximum(peak, tl.max(tl.where(mask, x, float("-inf")), axis=0))
            here = tl.max(y, axis=0)
            first = tl.min(tl.where((y == here) & mask, i, 2147483647), axis=0)
            token = tl.where(
                here > top, first, tl.where(here == top, tl.minimum(token, first), token)
            )
            top = tl.maximum(top, here)
    tl.store(best_value + row * PARTS + part, top)
    tl.store(best_token + row * PARTS + part, token)
    tl.store(greatest + row * PARTS + part, peak)
    tl.store(finite + row * PARTS + part, bad)


@triton.jit
def _ordered_value(x):
    """fp32 bits as uint32 in the order of the values."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _draw_kernel(
    processed, perturbed, best_value, best_token, greatest, finite, temperature,
    top_k, top_p, min_p,
    tokens, V,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, GREEDY: tl.constexpr, TRIES: tl.constexpr,
):  # fmt: skip
    """One row: the best member of the truncated set. -1 if the logits are not usable."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    values = tl.load(best_value + row * PARTS + part)
    ids = tl.load(best_token + row * PARTS + part)
    bad = tl.sum(tl.load(finite + row * PARTS + part), axis=0)
    peak = tl.max(tl.load(greatest + row * PARTS + part), axis=0)
    value = tl.max(values, axis=0)
    token = tl.min(tl.where(values == value, ids, 2147483647), axis=0)
    usable = (bad == 0) & (peak > float("-inf"))
    k = tl.load(top_k + row)
    k = tl.where(k > 0, k, V)
    p = tl.load(top_p + row)
    least = tl.load(min_p + row)
    truncated = ((k < V) | (p < 1.0) | (least > 0.0)) & (tl.load(temperature + row) >= GREEDY)
    i = tl.arange(0, BLOCK)
    x_row = processed + row * V
    y_row = perturbed + row * V
    if usable & truncated:
        border = float("-inf")
        if (k < V) & (p < 1.0):
            # value of the k-th greatest: radix select over the ordered bits
            prefix = tl.sum(tl.zeros([1], dtype=tl.uint32), axis=0).to(tl.uint32)
            want = k
            bins = tl.arange(0, 256)
            for digit_index in tl.static_range(4):
                shift = 24 - 8 * digit_index
                histogram = tl.zeros([256], dtype=tl.int32)
                for start in range(0, V, BLOCK):
                    mask = start + i < V
                    key = _ordered_value(tl.load(x_row + start + i, mask=mask, other=0.0))
                    if digit_index > 0:
                        mask = mask & ((key >> (32 - 8 * digit_index)) == prefix)
                    histogram += tl.histogram(((key >> shift) & 0xFF).to(tl.int32), 256, mask=mask)
                at_least = tl.sum(histogram, axis=0) - tl.cumsum(histogram, 0) + histogram
                chosen = tl.maximum(tl.sum((at_least >= want).to(tl.int32), axis=0) - 1, 0)
                want -= tl.sum(tl.where(bins > chosen, histogram, 0), axis=0)
                prefix = (prefix << 8) | chosen.to(tl.uint32)
            negative = (prefix >> 31) == 0
            bits = tl.where(negative, prefix ^ 0xFFFFFFFF, prefix & 0x7FFFFFFF)
            border = bits.to(tl.float32, bitcast=True)
        total = 0.0
        if p < 1.0:
            sums = tl.zeros([BLOCK], dtype=tl.float32)
            for start in range(0, V, BLOCK):
                x = tl.load(x_row + start + i, mask=start + i < V, other=float("-inf"))
                sums += tl.where(x >= border, tl.exp(x - peak), 0.0)
            total = tl.sum(sums, axis=0)
        tries = 0
        while (tries < TRIES) & (tries >= 0):
            mine = tl.load(x_row + token)
            above = tl.zeros([BLOCK], dtype=tl.int32)
            mass = tl.zeros([BLOCK], dtype=tl.float32)
            next_value = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
            next_token = tl.full([BLOCK], 2147483647, dtype=tl.int32)
            for start in range(0, V, BLOCK):
                mask = start + i < V
                x = tl.load(x_row + start + i, mask=mask, other=float("-inf"))
                y = tl.load(y_row + start + i, mask=mask, other=float("-inf"))
                higher = x > mine
                above += higher.to(tl.int32)
                mass += tl.where(higher, tl.exp(x - peak), 0.0)
                # the best of what comes after (value, token) in the order of draws
                after = mask & ((y < value) | ((y == value) & (start + i > token)))
                better = after & ((y > next_value) | (next_token == 2147483647))
                next_token = tl.where(better, start + i, next_token)
                next_value = tl.where(better, y, next_value)
            member = (tl.sum(above, axis=0) < k) & (tl.exp(mine - peak) >= least)
            member = member & ((p >= 1.0) | (tl.sum(mass, axis=0) < p * total))
            if member:
                tries = -1
            else:
                value = tl.max(next_value, axis=0)
                token = tl.min(tl.where(next_value == value, next_token, 2147483647), axis=0)
                tries += 1
        if tries >= 0:
            # bisect the ordered bits for the greatest value that is no member
            outside = tl.sum(tl.zeros([1], dtype=tl.uint32), axis=0).to(tl.uint32)
            one = (outside + 1).to(tl.uint32)
            for bit in range(32):
                test = outside | (one << (31 - bit))
                above = tl.zeros([BLOCK], dtype=tl.int32)
                mass = tl.zeros([BLOCK], dtype=tl.float32)
                for start in range(0, V, BLOCK):
                    mask = start + i < V
                    x = tl.load(x_row + start + i, mask=mask, other=float("-inf"))
                    higher = mask & (_ordered_value(x) > test)
                    above += higher.to(tl.int32)
                    mass += tl.where(higher, tl.exp(x - peak), 0.0)
                member = tl.sum(above, axis=0) < k
                member = member & ((p >= 1.0) | (tl.sum(mass, axis=0) < p * total))
                outside = tl.where(member, outside, test)
            best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
            best_at = tl.full([BLOCK], 2147483647, dtype=tl.int32)
            for start in range(0, V, BLOCK):
                mask = start + i < V
                x = tl.load(x_row + start + i, mask=mask, other=float("-inf"))
                y = tl.load(y_row + start + i, mask=mask, other=float("-inf"))
                inside = mask & (_ordered_value(x) > outside) & (tl.exp(x - peak) >= least)
                better = inside & ((y > best) | (best_at == 2147483647))
                best_at = tl.where(better, start + i, best_at)
                best = tl.where(better, y, best)
            value = tl.max(best, axis=0)
            token = tl.min(tl.where(best == value, best_at, 2147483647), axis=0)
    tl.store(tokens + row, tl.where(usable, token, -1))


@triton.jit
def _accept_kernel(drawn, drafts, valid_drafts, accepted, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """One slot: number of leading drafts that equal the drawn tokens."""
    slot = tl.program_id(0)
    i = tl.arange(0, PADDED)
    valid = i < tl.load(valid_drafts + slot)
    inside = i < ROWS - 1
    mine = tl.load(drawn + slot * ROWS + i, mask=inside, other=-1)
    draft = tl.load(drafts + slot * (ROWS - 1) + i, mask=inside, other=-2)
    wrong = (mine != draft) | (valid == 0) | (inside == 0) | (mine < 0)
    first_wrong = tl.min(tl.where(wrong, i, PADDED), axis=0)
    tl.store(accepted + slot, tl.minimum(first_wrong, ROWS - 1))


class Workspace:
    """Scratch of the sampler for up to ``rows`` rows of ``vocab`` logits."""

    def __init__(self, rows: int, vocab: int, device: torch.device | str) -> None:
        def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        self.processed, self.perturbed = make(rows, vocab), make(rows, vocab)
        self.best_value, self.greatest = make(rows, PARTS), make(rows, PARTS)
        self.best_token = make(rows, PARTS, dtype=torch.int32)
        self.finite = make(rows, PARTS, dtype=torch.int32)


CUDA_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def cuda_shared_bytes(options: Mapping[str, int], vocab: int) -> int:
    """Shared memory of a block of ``csrc/sampling.cu``."""
    quads = -(-vocab // 4)
    share = -(-quads // options["cluster"])
    return 1024 * 12 + 64 + options["threads"] + 128 + share * 16


def cuda_problem(options: Mapping[str, int], arch: str, vocab: int) -> str:
    """Why the CUDA kernel does not take this vocabulary; empty if it does."""
    if options["cluster"] > (cuda.PORTABLE_CLUSTER if arch == "sm_120" else 16):
        return f"{options['cluster']} blocks are no cluster of {arch}"
    if cuda_shared_bytes(options, vocab) > SHARED_MEMORY_LIMIT[arch]:
        return f"{cuda_shared_bytes(options, vocab)} bytes of shared memory"
    return ""


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    choices: torch.Tensor,
    positions: torch.Tensor,
    scratch: Workspace,
    tokens: torch.Tensor,
    allowed: torch.Tensor | None = None,
    penalties: tuple[torch.Tensor, ...] | None = None,
) -> torch.Tensor:
    """Draw tokens int32 [R] from logits [R, V] (fp32 or bf16); -1 where they are not finite.

    temperature, top_p, min_p fp32 [R]; top_k, choices, positions int32 [R] (position of the token
    that is drawn); seeds int64 [R]. allowed: int32 bit masks [R, ceil(V / 32)]. penalties:
    (slot_of_row int32 [R], counts int16 [slots, V] of output tokens, seen int8 [slots, V] of
    prompt or output, repetition, presence, frequency fp32 [R]). Two launches, or one of the tuned
    CUDA kernel; no host branch on any value.
    """
    rows, vocab = logits.shape
    if logits.stride(1) != 1 or scratch.processed.shape[1] != vocab:
        raise ValueError(
            f"logits {tuple(logits.shape)} do not fit the scratch or are not contiguous"
        )
    if scratch.processed.shape[0] < rows:
        raise ValueError(f"scratch has room for {scratch.processed.shape[0]} rows, not {rows}")
    slot_of_row, counts, seen, repetition, presence, frequency = penalties or (None,) * 6
    arch = architecture(logits.device) if logits.is_cuda else "sm_90"
    chosen = tuned.choice(arch, "sample", rows)
    if chosen.is_cuda and not cuda_problem(chosen.options, arch, vocab):
        cluster, threads = chosen.options["cluster"], chosen.options["threads"]
        kernel = cuda.function(
            "sampling", "sample_kernel", arch, CLUSTER=cluster, THREADS=threads,
            LOGITS=CUDA_TYPES[logits.dtype], HAS_MASK=allowed is not None,
            HAS_PENALTY=penalties is not None,
        )  # fmt: skip
        cuda.launch(
            kernel, (cluster, rows, 1), (threads, 1, 1), cuda_shared_bytes(chosen.options, vocab),
            logits, allowed, counts, seen, slot_of_row, temperature, repetition, presence,
            frequency, seeds, choices, positions, top_k, top_p, min_p, tokens, vocab,
            cuda.Int64(logits.stride(0)), cuda.Int64(0 if counts is None else counts.stride(0)),
            cluster=cluster, overlap=rows <= cuda.EARLY_ROWS,
        )  # fmt: skip
        return tokens
    _process_kernel[(rows, PARTS)](
        logits,
        allowed,
        counts,
        seen,
        slot_of_row,
        temperature,
        repetition,
        presence,
        frequency,
        seeds,
        choices,
        positions,
        scratch.processed,
        scratch.perturbed,
        scratch.best_value,
        scratch.best_token,
        scratch.greatest,
        scratch.finite,
        vocab,
        logits.stride(0),
        0 if counts is None else counts.stride(0),
        PARTS=PARTS,
        BLOCK=min(512, triton.next_power_of_2(triton.cdiv(vocab, 4 * PARTS))),
        HAS_MASK=allowed is not None,
        HAS_PENALTY=penalties is not None,
        GREEDY=GREEDY_BELOW,
        num_warps=4,
    )
    _draw_kernel[(rows,)](
        scratch.processed,
        scratch.perturbed,
        scratch.best_value,
        scratch.best_token,
        scratch.greatest,
        scratch.finite,
        temperature,
        top_k,
        top_p,
        min_p,
        tokens,
        vocab,
        PARTS=PARTS,
        BLOCK=4096,
        GREEDY=GREEDY_BELOW,
        TRIES=TRIES,
        num_warps=16,
    )
    return tokens


def accept(
    drawn: torch.Tensor, drafts: torch.Tensor, valid_drafts: torch.Tensor, accepted: torch.Tensor
) -> torch.Tensor:
    """Accepted drafts int32 [S]: drawn int32 [S, 1 + k], drafts int32 [S, k], valid_drafts int32
    [S].
    """
    slots, rows = drawn.shape
    if drafts.shape != (slots, rows - 1):
        raise ValueError(f"drafts {tuple(drafts.shape)} do not fit drawn {tuple(drawn.shape)}")
    _accept_kernel[(slots,)](
        drawn,
        drafts,
        valid_drafts,
        accepted,
        ROWS=rows,
        PADDED=triton.next_power_of_2(rows),
        num_warps=1,
    )
    return accepted
