"""Tensor values from a checkpoint, one at a time: published formats to float32, and the share of a
TP rank. Knows nothing of layers; ``reference/layers.py`` asks for names.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from decant.engine.checkpoint import Checkpoint
from decant.protocol.errors import CheckpointError

# How a tensor is split over TP ranks. First match wins; what has no
# entry is replicated. rows = output rows, columns = input columns (summed over ranks in order).
SHARDING: tuple[tuple[str, str], ...] = (
    ("indexer.wq_b.weight", "replicated"),
    ("attn.wq_b.weight", "rows"),
    ("attn.attn_sink", "rows"),
    ("attn.wo_a.weight", "rows"),
    ("attn.wo_b.weight", "columns"),
    (".w1.weight", "rows"),
    (".w3.weight", "rows"),
    (".w2.weight", "columns"),
    ("head.weight", "rows"),
)

_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "I8": torch.uint8,  # two FP4 codes a byte: unsigned, so that shifts bring in zeros
    "U8": torch.uint8,
    "I64": torch.int64,
}
# 2 ** (byte - 127); byte 0 is 2 ** -127, byte 255 is NaN
E8M0 = torch.from_numpy(
    np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.nan).astype(np.float32)
)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def sharding(name: str) -> str:
    """rows, columns or replicated."""
    return next((how for end, how in SHARDING if name.endswith(end)), "replicated")


def unpack_fp4(packed: Tensor) -> Tensor:
    """[rows, K / 2] uint8 -> [rows, K] float32 values of the codes: the low nibble comes first."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    return E2M1[codes.int()]


class WeightReader:
    """Reads tensors of one TP rank as float32.

    checkpoint: its headers are already checked. tp, rank: the share to return."""

    def __init__(self, checkpoint: Checkpoint, tp: int = 1, rank: int = 0) -> None:
        self.checkpoint, self.tp, self.rank = checkpoint, tp, rank

    def raw(self, name: str) -> Tensor:
        """A tensor as stored (a view of the mapped file)."""
        entry = self.checkpoint.entries[name]
        data = self.checkpoint.read(name)
        if not len(data):
            return torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
        return torch.frombuffer(data, dtype=_DTYPES[entry.dtype]).view(entry.shape)

    def __contains__(self, name: str) -> bool:
        return name in self.checkpoint.entries

    def full(self, name: str) -> Tensor:
        """The whole tensor: float32 values, or int64 for an index table."""
        entry = self.checkpoint.entries[name]
        weight = self.raw(name)
        if entry.dtype == "I64":
            return weight.clone()
        stem = name.removesuffix(".weight")
        if entry.dtype == "F8_E4M3":
            scale = self._scale(stem + ".scale")
            rows, columns = weight.shape
            scale = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
            value = weight.float().mul_(scale)
        elif entry.dtype == "I8":
            scale = self._scale(stem + ".scale")
            value = unpack_fp4(weight)
            value.view(*scale.shape, 32).mul_(scale[..., None])
        elif entry.dtype == "U8":
            scale = self.raw(stem + ".weight_scale").float()
            scale = scale * self.raw(stem + ".weight_scale_2").reshape(())
            value = unpack_fp4(weight)
            value.view(*scale.shape, 16).mul_(scale[..., None])
        else:
            return weight.float().clone() if entry.dtype == "F32" else weight.float()
        if not torch.isfinite(value).all():
            raise CheckpointError(f"tensor {name} has values that are not finite")
        return value

    def _scale(self, name: str) -> Tensor:
        scale = self.raw(name)
        return E8M0[scale.int()] if scale.dtype == torch.uint8 else scale

    def get(self, name: str) -> Tensor:
        """This rank's share of a tensor, float32 (see SHARDING)."""
        value, how = self.full(name), sharding(name)
        if self.tp == 1 or how == "replicated":
            return value
        axis = 0 if how == "rows" else 1
        return value.chunk(self.tp, axis)[self.rank].contiguous()
