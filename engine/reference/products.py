"""Matrix products whose rows do not know how many they are.

A BLAS may take another kernel, and so other last bits, for another number of rows or columns. On
the CPUs that we know, products of at least 4 rows and 16 columns give a row the same bits in any
company (oneMKL's AVX2 kernels; measured on an AMD EPYC of family 25 with torch 2.13, December
2026). ``is_invariant`` probes that once per process; where it does not hold, every product runs in
tiles of exactly TILE rows, and scores in tiles of a fixed number of columns, which is slower but
invariant by construction.
"""

from __future__ import annotations

from functools import cache

import structlog
import torch
from torch import Tensor
from torch.nn.functional import pad

TILE = 16
_PROBE_INNER = (16, 24, 64, 96, 128, 144, 256, 512, 1024)
_PROBE_COLUMNS = (16, 24, 64, 144, 512)
_PROBE_ROWS = (4, 8, 12, 16, 20, 28, 48, 64, 100, 256, 260)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.contiguous().view(torch.int32).equal(b.contiguous().view(torch.int32))


@cache
def is_invariant() -> bool:
    """Whether this CPU's products and exponentials treat rows alike. Takes about 0.1 s."""
    generator = torch.Generator().manual_seed(1)
    largest = max(_PROBE_ROWS)
    for inner in _PROBE_INNER:
        x = torch.randn(largest, inner, generator=generator)
        w = torch.randn(inner, max(_PROBE_COLUMNS), generator=generator)
        whole = torch.mm(x, w)
        for columns in _PROBE_COLUMNS:
            part = w[:, :columns].contiguous()
            for rows in _PROBE_ROWS:
                first, last = torch.mm(x[:rows], part), torch.mm(x[-rows:], part)
                batch = torch.bmm(x[None, :rows].expand(2, -1, -1), part.expand(2, -1, -1))
                good = same_bits(first, whole[:rows, :columns])
                good &= same_bits(last, whole[-rows:, :columns])
                good &= same_bits(batch[1], first)
                if not good:
                    structlog.get_logger().warning(
                        "products are not row-invariant here; using fixed tiles",
                        rows=rows, inner=inner, columns=columns,
                    )  # fmt: skip
                    return False
    x = torch.randn(1024, generator=generator)
    whole = x.exp()
    return all(same_bits(x[:n].exp(), whole[:n]) for n in (1, 3, 8, 12, 17, 33, 1000))


def mm(x: Tensor, w: Tensor) -> Tensor:
    """[rows, inner] x [inner, columns]; rows is a multiple of 4, columns at least 16."""
    if is_invariant():
        return torch.mm(x, w)
    return _tiled(x[None], w[None])[0]


def bmm(x: Tensor, w: Tensor) -> Tensor:
    """[batch, rows, inner] x [batch, inner, columns]."""
    if is_invariant():
        return torch.bmm(x, w)
    return _tiled(x, w)


def scores(q: Tensor, keys: Tensor, tile: int) -> Tensor:
    """[batch, rows, dim] x [batch, columns, dim] -> [batch, rows, columns]; the number of columns
    may differ from call to call in whole tiles."""
    if is_invariant():
        return torch.bmm(q, keys.transpose(1, 2))
    blocks = [keys[:, i : i + tile] for i in range(0, keys.shape[1], tile)]
    return torch.cat([_tiled(q, block.transpose(1, 2)) for block in blocks], 2)


def _tiled(x: Tensor, w: Tensor) -> Tensor:
    rows = x.shape[1]
    x = pad(x, (0, 0, 0, -rows % TILE))
    tiles = [torch.bmm(x[:, i : i + TILE], w) for i in range(0, x.shape[1], TILE)]
    return torch.cat(tiles, 1)[:, :rows].contiguous()
