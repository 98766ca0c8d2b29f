"""Router gate: sqrt(softplus) scores, top-6 with bias or the hash table, and the experts' work
list on the device.

Data sheet
  logits    bf16 operands, fp32 accumulation, split along K and summed in split order
  choice    score + bias, or table[token id] (hash layers); ties: the lower expert number
  weights   score / sum of the chosen scores * 1.5
  work list (token, choice) pairs sorted by expert, then by pair number; tiles of at most block_t
  pairs
  launches  3 (logits, choice, list); grids depend on the number of tokens only
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from decant.kernels import cuda, tuned
from decant.kernels.config import SHARED_MEMORY_LIMIT, architecture
from decant.kernels.fp4_moe import TileList, max_tiles
from decant.kernels.tiles import mma

ROUTED_SCALE = 1.5
LIST_PAIRS = 16  # pairs a program of the work list places
SPLIT_K = 8  # shares of the hidden width; fixed, so a row's logits do not depend on the batch


def gate_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    table: torch.Tensor | None,
    token_ids: torch.Tensor | None,
    top_k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch in float64: experts int64 [T, k] and weights [T, k]. Give bias, or table and
    token_ids.
    """
    logits = x.double() @ weight.double().T
    scores = torch.nn.functional.softplus(logits).sqrt()
    if table is not None and token_ids is not None:
        experts = table[token_ids.long()].long()
    else:
        assert bias is not None
        order = torch.sort(scores + bias.double(), dim=-1, descending=True, stable=True).indices
        experts = order[:, :top_k]
    chosen = scores.gather(1, experts)
    return experts, chosen / chosen.sum(-1, keepdim=True) * ROUTED_SCALE


@triton.jit(do_not_specialize=["tokens"])
def _logits_kernel(
    x, weight, partial, tokens, D: tl.constexpr, E: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """partial[split, t, e] = sum over the split's share of D."""
    split = tl.program_id(2)
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    valid = token < tokens
    SHARE: tl.constexpr = D // SPLITS
    acc = tl.zeros([BLOCK_E, BLOCK_T], dtype=tl.float32)
    k = split * SHARE + tl.arange(0, BLOCK_K)
    for _ in range(SHARE // BLOCK_K):
        w = tl.load(weight + expert[:, None] * D + k[None, :])
        v = tl.load(
            x + token[None, :].to(tl.int64) * D + k[:, None], mask=valid[None, :], other=0.0
        )
        acc = mma(w, v, acc)
        k += BLOCK_K
    offset = (split * tokens + token[None, :]) * E + expert[:, None]
    tl.store(partial + offset, acc, mask=valid[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _choose_kernel(
    partial, bias, table, token_ids, experts, weights, tokens, SCALE: tl.constexpr,
    E: tl.constexpr, TOP_K: tl.constexpr, SPLITS: tl.constexpr, HASHED: tl.constexpr,
):  # fmt: skip
    """One program a token: scores, the k best (or the table's), their normalised weights."""
    token = tl.program_id(0)
    expert = tl.arange(0, E)
    logit = tl.zeros([E], dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        logit += tl.load(partial + (split * tokens + token) * E + expert)
    # softplus(x) = max(x, 0) + log1p(exp(-|x|)); log1p(u) by log and the rounding correction of
    # Goldberg
    u = tl.exp(-tl.abs(logit))
    one_plus = 1.0 + u
    log1p = tl.where(
        one_plus == 1.0, u, tl.log(one_plus) * (u / tl.where(one_plus == 1.0, 1.0, one_plus - 1.0))
    )
    score = tl.sqrt(tl.maximum(logit, 0.0) + log1p)
    key = score
    if not HASHED:
        key += tl.load(bias + expert)
    PADDED: tl.constexpr = triton.next_power_of_2(TOP_K)
    lane = tl.arange(0, PADDED)
    chosen = tl.zeros([PADDED], dtype=tl.float32)
    ids = tl.zeros([PADDED], dtype=tl.int32)
    for choice in tl.static_range(TOP_K):
        if HASHED:
            best = tl.load(table + tl.load(token_ids + token).to(tl.int64) * TOP_K + choice).to(
                tl.int32
            )
        else:
            best = tl.argmax(key, axis=0, tie_break_left=True).to(tl.int32)
            key = tl.where(expert == best, float("-inf"), key)
        value = tl.sum(tl.where(expert == best, score, 0.0), axis=0)
        chosen = tl.where(lane == choice, value, chosen)
        ids = tl.where(lane == choice, best, ids)
    weight = chosen / tl.sum(chosen, axis=0) * SCALE
    tl.store(experts + token * TOP_K + lane, ids, mask=lane < TOP_K)
    tl.store(weights + token * TOP_K + lane, weight, mask=lane < TOP_K)


@triton.jit(do_not_specialize=["num_pairs"])
def _list_kernel(
    experts, pairs, tile_expert, tile_start, tile_count, num_tiles, num_pairs,
    E: tl.constexpr, BLOCK_P: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The last program makes the tiles from a histogram; every other one finds the places of
    BLOCK_P pairs by counting the pairs that come before each.
    """
    block = tl.program_id(0)
    chunk = tl.arange(0, CHUNK)
    if block == tl.num_programs(0) - 1:
        e = tl.arange(0, E)
        counts = tl.zeros([E], dtype=tl.int32)
        for first in range(0, num_pairs, CHUNK):
            q = first + chunk
            other = tl.load(experts + q, mask=q < num_pairs, other=0)
            counts += tl.histogram(other, E, mask=q < num_pairs)
        starts = tl.cumsum(counts, 0) - counts
        tiles = (counts + TILE - 1) // TILE
        first_tile = tl.cumsum(tiles, 0) - tiles
        tl.store(num_tiles, tl.sum(tiles, axis=0))
        most = tl.max(tiles, axis=0)
        for i in range(most):
            here = i < tiles
            tl.store(tile_expert + first_tile + i, e, mask=here)
            tl.store(tile_start + first_tile + i, starts + i * TILE, mask=here)
            tl.store(tile_count + first_tile + i, tl.minimum(counts - i * TILE, TILE), mask=here)
    else:
        p = block * BLOCK_P + tl.arange(0, BLOCK_P)
        valid = p < num_pairs
        mine = (tl.load(experts + p, mask=valid, other=0) << 22) | p  # expert first, then pair
        position = tl.zeros([BLOCK_P], dtype=tl.int32)
        for first in range(0, num_pairs, CHUNK):
            q = first + chunk
            other = tl.load(experts + q, mask=q < num_pairs, other=E)
            before = ((other << 22) | q)[None, :] < mine[:, None]
            position += tl.sum(before.to(tl.int32), axis=1)
        tl.store(pairs + position, p, mask=valid)


def new_tile_list(
    num_pairs: int, num_experts: int, block_t: int, device: torch.device | str
) -> TileList:
    """Buffers of a work list for a bucket of num_pairs (token, choice) pairs."""
    tiles = max_tiles(num_pairs, num_experts, block_t)

    def ints(n: int) -> torch.Tensor:
        return torch.zeros(n, dtype=torch.int32, device=device)

    return TileList(ints(num_pairs), ints(tiles), ints(tiles), ints(tiles), ints(1), block_t)


def tile_list(experts: torch.Tensor, tiles: TileList, num_experts: int) -> None:
    """Fill ``tiles`` from experts int32 [T, k]. One launch; num_experts a power of two and
    at most 256, at most 2^22 pairs.
    """
    num_pairs = experts.numel()
    if num_experts > 256 or num_pairs > 1 << 22:
        raise ValueError(f"no work list for {num_experts} experts and {num_pairs} pairs")
    if tiles.pairs.numel() != num_pairs or tiles.expert.numel() < max_tiles(
        num_pairs, num_experts, tiles.block_t
    ):
        raise ValueError(f"tile list has room for {tiles.pairs.numel()} pairs, not {num_pairs}")
    _list_kernel[(triton.cdiv(num_pairs, LIST_PAIRS) + 1,)](
        experts,
        tiles.pairs,
        tiles.expert,
        tiles.start,
        tiles.count,
        tiles.num_tiles,
        num_pairs,
        E=num_experts,
        BLOCK_P=LIST_PAIRS,
        CHUNK=512,
        TILE=tiles.block_t,
        num_warps=4,
    )


def tile_list_ref(experts: torch.Tensor, num_experts: int, block_t: int) -> dict[str, list[int]]:
    """The same list by sorting, for tests and for prefill, where nothing is captured."""
    flat = experts.flatten().tolist()
    pairs = sorted(range(len(flat)), key=lambda p: (flat[p], p))
    counts = [flat.count(e) for e in range(num_experts)]
    expert, start, count, position = [], [], [], 0
    for e, n in enumerate(counts):
        for i in range(0, n, block_t):
            expert.append(e)
            start.append(position + i)
            count.append(min(block_t, n - i))
        position += n
    return {"pairs": pairs, "expert": expert, "start": start, "count": count}


CUDA_CLUSTER = 8
_counter: dict[torch.device, torch.Tensor] = {}


def cuda_shared_bytes(options: Mapping[str, int], width: int, e: int) -> int:
    """Shared memory of a block of ``csrc/gate.cu``, or of ``csrc/gate_few.cu`` (option "few")."""
    room = options["tokens"]
    if options.get("few"):
        return 16 * room * 17 * 4 + room * e * 4 + e * 4 + -(-room * 6 // 32) * 128 + 64
    return (16 + room) * (width // CUDA_CLUSTER * 2 + 16) + 5 * room * 17 * 4 + 64


def cuda_problem(options: Mapping[str, int], arch: str, tokens: int, width: int, e: int) -> str:
    """Why the CUDA kernel does not take this gate; empty if it does."""
    room, few = options["tokens"], options.get("few", 0)
    if room not in ((8, 16, 32) if few else (8, 16, 32, 64)) or tokens > room:
        return f"{tokens} tokens in room for {room}"
    if few and (width % 512 or e % 32 or e > 256):
        return f"{e} experts of {width} channels"
    if few and e // 16 > (cuda.PORTABLE_CLUSTER if arch == "sm_120" else 16):
        return f"{e // 16} blocks are no cluster of {arch}"
    if not few and (width % (CUDA_CLUSTER * 64) or e % 128):
        return f"{e} experts of {width} channels"
    if cuda_shared_bytes(options, width, e) > SHARED_MEMORY_LIMIT[arch]:
        return f"{cuda_shared_bytes(options, width, e)} bytes of shared memory"
    return ""


def _cuda_route(
    options: Mapping[str, int],
    arch: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    logits: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    tiles: TileList | None,
    bias: torch.Tensor | None,
    table: torch.Tensor | None,
    token_ids: torch.Tensor | None,
) -> None:
    tokens, width = x.shape
    num_experts, top_k = weight.shape[0], experts.shape[1]
    listed: tuple[torch.Tensor | None, ...] = (None,) * 5
    if tiles is not None:
        listed = (tiles.pairs, tiles.expert, tiles.start, tiles.count, tiles.num_tiles)
    few = bool(options.get("few"))
    source, name = ("gate_few", "route_few_kernel") if few else ("gate", "route_kernel")
    kernel = cuda.function(
        source, name, arch, D=width, E=num_experts, TOP_K=top_k,
        TOKENS=options["tokens"], HASHED=table is not None,
        IDS64=token_ids is not None and token_ids.dtype == torch.int64,
        TABLE64=table is not None and table.dtype == torch.int64, LIST=tiles is not None,
    )  # fmt: skip
    shared = cuda_shared_bytes(options, width, num_experts)
    given = (x, weight, bias, table, token_ids)
    rest = (experts, weights, *listed, tokens, 1 if tiles is None else tiles.block_t, ROUTED_SCALE)
    if few:
        cluster = num_experts // 16
        cuda.launch(
            kernel, (cluster, 1, 1), (512, 1, 1), shared, *given, *rest,
            cluster=cluster, overlap=True,
        )  # fmt: skip
        return
    if x.device not in _counter:  # outside of captures: warm up first
        _counter[x.device] = torch.zeros(1, dtype=torch.int32, device=x.device)
    cuda.launch(
        kernel, (CUDA_CLUSTER, num_experts // 16, 1), (128, 1, 1), shared,
        *given, logits, _counter[x.device], *rest, cluster=CUDA_CLUSTER, overlap=True,
    )  # fmt: skip


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    partial: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    tiles: TileList | None,
    bias: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
) -> None:
    """Choose experts for T tokens.

    x bf16 [T, D]; weight bf16 [E, D]; partial fp32 scratch [8, T, E]; results experts int32 [T,
    k], weights fp32 [T, k] and, if given, the work list. Learned layers pass bias fp32 [E]; hash
    layers table [vocab, k] and token_ids [T].
    """
    hashed = table is not None
    if hashed == (bias is not None) or hashed != (token_ids is not None):
        raise ValueError("give either a bias, or a table with token ids")
    tokens, width = x.shape
    num_experts = weight.shape[0]
    if partial.shape != (SPLIT_K, tokens, num_experts):
        raise ValueError(f"partial must be [{SPLIT_K}, {tokens}, {num_experts}]")
    arch = architecture(x.device) if x.is_cuda else "sm_90"
    chosen = tuned.choice(arch, "gate", tokens)
    if chosen.is_cuda and not cuda_problem(chosen.options, arch, tokens, width, num_experts):
        if not x.is_contiguous() or x.dtype != torch.bfloat16:
            raise ValueError("x must be contiguous bf16")
        given = (bias, table, token_ids)
        _cuda_route(chosen.options, arch, x, weight, partial, experts, weights, tiles, *given)
        return
    block_e = min(16, num_experts)
    block_k = min(128, width // SPLIT_K)
    block_t = 16 if tokens <= 64 else 64
    _logits_kernel[(triton.cdiv(tokens, block_t), num_experts // block_e, SPLIT_K)](
        x,
        weight,
        partial,
        tokens,
        D=width,
        E=num_experts,
        SPLITS=SPLIT_K,
        BLOCK_T=block_t,
        BLOCK_E=block_e,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=3,
    )
    _choose_kernel[(tokens,)](
        partial,
        bias,
        table,
        token_ids,
        experts,
        weights,
        tokens,
        SCALE=ROUTED_SCALE,
        E=num_experts,
        TOP_K=experts.shape[1],
        SPLITS=SPLIT_K,
        HASHED=hashed,
        num_warps=1,
    )
    if tiles is not None:
        tile_list(experts, tiles, num_experts)
