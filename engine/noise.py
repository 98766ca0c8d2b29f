"""Noise of a drawn token, keyed by (seed, choice, position) and nothing else, so that trunk, draft,
a resumed request and any batch draw with the same numbers.

Philox4x32-10 (Salmon et al., SC 2011): key = the 64-bit seed; counter = (block, choice, position,
0); block i gives the numbers of tokens 4 i .. 4 i + 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
CACHED_BLOCKS = 6144
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox_rows(
    seeds: NDArray[np.uint64], choices: NDArray[np.uint64], positions: NDArray[np.uint64], num: int
) -> NDArray[np.uint64]:
    """[rows, num, 4] 32-bit numbers: blocks 0 .. num - 1 of each row's key and counter.

    seeds, choices, positions: [rows, 1]; seeds use 64 bits, the others 32.
    """
    c0 = np.broadcast_to(np.arange(num, dtype=np.uint64), (len(seeds), num)).copy()
    c1, c2 = np.broadcast_to(choices & _LOW, c0.shape), np.broadcast_to(positions & _LOW, c0.shape)
    c3 = np.zeros_like(c0)
    k0, k1 = seeds & _LOW, seeds >> _SHIFT
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0 = p1 >> _SHIFT
        c0 ^= c1
        c0 ^= k0
        c2 = p0 >> _SHIFT
        c2 ^= c3
        c2 ^= k1
        p1 &= _LOW
        p0 &= _LOW
        c1, c3 = p1, p0
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return np.stack([c0, c1, c2, c3], axis=2)


def philox(seed: int, choice: int, position: int, num: int) -> NDArray[np.uint32]:
    """[num, 4]: one row of ``philox_rows``."""
    key = [np.array([[v & (2**64 - 1)]], np.uint64) for v in (seed, choice, position)]
    row: NDArray[np.uint32] = philox_rows(key[0], key[1], key[2], num)[0].astype(np.uint32)
    return row


def gumbel_rows(keys: Sequence[tuple[int, int, int]], n: int) -> NDArray[np.float32]:
    """[len(keys), n] float32 standard Gumbel noise, -log(-log(u)), u in (0, 1) with 24 bits.

    keys: (seed, choice, position); seed is taken modulo 2^64, choice and position modulo 2^32.
    position: of the token that is drawn (the row at position t draws the token of t + 1).
    A row has the same bits whatever the other rows are."""
    num = -(-n // 4)
    some = max(1, CACHED_BLOCKS // num)  # rows at a time whose arrays stay in the cache
    if len(keys) > some:
        parts = [gumbel_rows(keys[i : i + some], n) for i in range(0, len(keys), some)]
        return np.concatenate(parts)
    seeds = np.array([[key[0] & (2**64 - 1)] for key in keys], np.uint64)
    choices = np.array([[key[1] & 0xFFFFFFFF] for key in keys], np.uint64)
    positions = np.array([[key[2] & 0xFFFFFFFF] for key in keys], np.uint64)
    bits = philox_rows(seeds, choices, positions, num).reshape(len(keys), -1)
    bits >>= np.uint64(8)
    uniform = bits.astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-24
    np.log(uniform, out=uniform)
    np.negative(uniform, out=uniform)
    np.log(uniform, out=uniform)
    np.negative(uniform, out=uniform)
    return uniform[:, :n].astype(np.float32)


def gumbel(seed: int, choice: int, position: int, n: int) -> NDArray[np.float32]:
    """[n]: one row of ``gumbel_rows``."""
    row: NDArray[np.float32] = gumbel_rows([(seed, choice, position)], n)[0]
    return row
