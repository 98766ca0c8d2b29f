"""Launch of the CUDA C++ experts (``csrc/fp4_moe.cu``): decode, few tokens an expert.

Data sheet
  as fp4_moe.py; weights and work list are the same
  streams   codes, scales and activations through a ring of buffers in shared memory, copies of 16
            bytes that no thread waits for until their stage is due
  launches  2: gate/up with SwiGLU; down, whose block that brings a token's last expert also adds
            its partial results in list order and the shared expert's. The second begins to fetch
            its weights while the first still runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from decant.kernels import cuda
from decant.kernels.config import SHARED_MEMORY_LIMIT

if TYPE_CHECKING:
    from decant.kernels.fp4_moe import PackedExperts, TileList

TYPES = {torch.float32: 0, torch.bfloat16: 1}
LIMIT = 10.0
_counters: dict[torch.device, torch.Tensor] = {}


def constants(options: Mapping[str, int], part: str, group: int) -> dict[str, int]:
    """Build constants of one kernel ("up" or "down") from a tuned line. KB counts 64 channels for
    both formats."""
    pairs = options[f"{part}_kb"] * (32 // group)
    return {
        "GROUP": group, "RG": options[f"{part}_rg"], "KG": options[f"{part}_kg"], "KB": pairs,
        "STAGES": options[f"{part}_stages"], "TOKENS": options["tokens"],
        "SLICES": options.get("slices", 1) if part == "down" else 1,
    }  # fmt: skip


def shared_bytes(c: Mapping[str, int]) -> int:
    """Shared memory of a block, as the source lays it out."""
    rows, channels = c["RG"] * 16, c["KB"] * 2 * c["GROUP"]
    stage = c["KB"] * rows * c["GROUP"] + c["KB"] * 2 * rows
    stage += c["TOKENS"] * (channels * 2 + c["GROUP"] * 2)
    sums = -(-(c["KG"] * rows * (c["TOKENS"] + 1) * 4) // 16) * 16
    return c["STAGES"] * stage + sums + 3 * c["TOKENS"] * 4


def problem(options: Mapping[str, int], arch: str, n13: int, k: int, inner: int, group: int) -> str:
    """Why these options do not take experts of [n13, k] and [k, inner]; empty if they do."""
    for part, rows, channels in (("up", n13, k), ("down", k, inner)):
        c = constants(options, part, group)
        if channels % (c["KB"] * 2 * group) or c["KB"] % c["KG"]:
            return f"{part}: {channels} channels in stages of {c['KB'] * 2 * group}"
        if rows % (c["RG"] * 16 * c["SLICES"]) or (part == "up" and c["RG"] % 2):
            return f"{part}: {rows} rows in blocks of {c['RG'] * 16 * c['SLICES']}"
        if shared_bytes(c) > SHARED_MEMORY_LIMIT[arch]:
            return f"{part}: {shared_bytes(c)} bytes of shared memory"
        if c["RG"] * c["KG"] > 32:
            return f"{part}: {c['RG'] * c['KG']} warps"
    return ""


def builds(
    options: Mapping[str, int], n13: int, k: int, inner: int, group: int, top_k: int
) -> dict[str, dict[str, int]]:
    """Constants of both kernels for a shape (without the types of down's result)."""
    return {
        "up": constants(options, "up", group) | {"K": k, "N": n13, "TOP_K": top_k},
        "down": constants(options, "down", group) | {"K": inner, "N": k, "TOP_K": top_k},
    }


def counters(device: torch.device, size: int) -> torch.Tensor:
    """Zeros that every launch leaves as zeros. Grown outside of captures (warm up first)."""
    kept = _counters.get(device)
    if kept is None or kept.numel() < size:
        kept = _counters[device] = torch.zeros(max(size, 1 << 16), dtype=torch.int32, device=device)
    return kept


def run(
    options: Mapping[str, int],
    arch: str,
    x: torch.Tensor,
    w13: PackedExperts,
    w2: PackedExperts,
    weights: torch.Tensor,
    tiles: TileList,
    hidden: torch.Tensor,
    partial: torch.Tensor,
    out: torch.Tensor,
    shared: torch.Tensor | None,
) -> torch.Tensor:
    """As ``fp4_moe.fp4_moe``, which checks the shapes."""
    tokens, top_k = weights.shape
    _, n13, width = w13.shape
    inner = n13 // 2
    built = builds(options, n13, width, inner, w13.group, top_k)
    types = {"OUT": 0, "SHARED": -1}
    listed = (tiles.pairs, tiles.expert, tiles.start, tiles.count, tiles.num_tiles)
    count = tiles.expert.numel()
    up = built["up"] | types
    threads = up["RG"] * up["KG"] * 32
    cuda.launch(
        cuda.function("fp4_moe", "gate_up_kernel", arch, **up),
        (n13 // (up["RG"] * 16), count, 1), (threads, 1, 1), shared_bytes(up),
        x, w13.codes, w13.scales, w13.rows, hidden, *listed, LIMIT,
        overlap=tokens <= cuda.EARLY_ROWS,
    )  # fmt: skip
    types = {"OUT": TYPES[out.dtype], "SHARED": -1 if shared is None else TYPES[shared.dtype]}
    down = built["down"] | types
    blocks = width // (down["RG"] * 16 * down["SLICES"])
    cuda.launch(
        cuda.function("fp4_moe", "down_kernel", arch, **down),
        (blocks, count, 1), (down["RG"] * down["KG"] * 32, 1, 1), shared_bytes(down),
        hidden, w2.codes, w2.scales, w2.rows, weights, partial, *listed,
        counters(x.device, tokens * blocks), shared, out,
        overlap=True,
    )  # fmt: skip
    return out
