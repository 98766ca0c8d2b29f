"""Launch configurations: small frozen records, looked up by architecture and bucket, never by the
device.

A device under MPS reports a share of its multiprocessors; a configuration that followed that
figure would change results and captured graphs. So tables are keyed by architecture name and by
the batch bucket.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ARCHS = ("sm_90", "sm_120")
SHARED_MEMORY_LIMIT = {"sm_90": 232_448, "sm_120": 101_376}


@dataclass(frozen=True)
class Config:
    """Tile sizes and launch options of one kernel; a field that a kernel does not use stays 0."""

    block_n: int = 0
    block_t: int = 0
    block_k: int = 0
    splits: int = 0
    num_warps: int = 4
    num_stages: int = 2

    def launch(self) -> dict[str, int]:
        """Options for the Triton launcher."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def lookup(table: Sequence[tuple[int, Config]], size: int) -> Config:
    """First configuration whose bound is at least ``size``. Raises ValueError if none is."""
    for bound, config in table:
        if size <= bound:
            return config
    raise ValueError(f"no configuration for size {size} (largest is {table[-1][0]})")


def architecture(device: torch.device | None = None) -> str:
    """Name of the device's architecture: "sm_90" or "sm_120". Raises ValueError for any other."""
    major, minor = torch.cuda.get_device_capability(device)
    name = f"sm_{major}{minor}"
    if name == "sm_121":  # same instruction set as sm_120
        name = "sm_120"
    if name not in ARCHS:
        raise ValueError(f"no kernels for {name}; supported: {', '.join(ARCHS)}")
    return name
