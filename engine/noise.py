"""Noise of a drawn token, keyed by (seed, choice, position) and nothing else, so that trunk, draft,
a resumed request and any batch draw with the same numbers.

Philox4x32-10 (Salmon et al., SC 2011): key = the 64-bit seed; counter = (block, choice, position,
0); block i gives the numbers of tokens 4 i .. 4 i + 3.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox(seed: int, choice: int, position: int, num_blocks: int) -> NDArray[np.uint32]:
    """[num_blocks, 4] uint32. seed is taken modulo 2^64, choice and position modulo 2^32."""
    c0 = np.arange(num_blocks, dtype=np.uint64)
    c1 = np.full(num_blocks, choice & 0xFFFFFFFF, np.uint64)
    c2 = np.full(num_blocks, position & 0xFFFFFFFF, np.uint64)
    c3 = np.zeros(num_blocks, np.uint64)
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0 = (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0)
        c2 = (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1)
        c1, c3 = p1 & _LOW, p0 & _LOW
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def gumbel(seed: int, choice: int, position: int, n: int) -> NDArray[np.float32]:
    """[n] float32 standard Gumbel noise, -log(-log(u)), u in (0, 1) with 24 bits.

    position: of the token that is drawn (the row at position t draws the token of t + 1)."""
    bits = philox(seed, choice, position, -(-n // 4)).reshape(-1)[:n]
    uniform = ((bits >> np.uint32(8)).astype(np.float64) + 0.5) * 2.0**-24
    noise: NDArray[np.float32] = (-np.log(-np.log(uniform))).astype(np.float32)
    return noise
