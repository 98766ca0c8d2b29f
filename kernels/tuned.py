"""Which implementation of an operation runs, with which sizes: data, by architecture and bucket.

``tuned.json`` holds, per architecture and operation, lines of (largest size, implementation,
options), ascending; what it does not name runs as Triton with the table beside the kernel. The file
is written by ``decant.kernels.autotune`` on a GPU, from results that were right there.

``shared.json`` is the same for GPUs that also hold blocks which wait for other ranks
(``use_shared``): no cluster in it has more than SHARED_BLOCKS blocks, since a larger one may never
find room beside them, and the ranks would wait for each other for ever.

``deterministic.json`` is a table whose results do not depend on the bucket: every sum of a row has
the same parts in the same order for any number of rows up to the last line.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decant.kernels.config import Config

PATH = Path(__file__).parent / "tuned.json"
DETERMINISTIC = Path(__file__).parent / "deterministic.json"
SHARED = Path(__file__).parent / "shared.json"
SHARED_BLOCKS = 8
ENVIRONMENT = "DECANT_TUNED"  # path of a file to use instead, or a key of NAMED
NAMED = {"deterministic": DETERMINISTIC, "shared": SHARED}
IMPLEMENTATIONS = ("triton", "cuda")


@dataclass(frozen=True)
class Choice:
    """implementation: one of IMPLEMENTATIONS; options: constants that it is built with (of Triton:
    the fields of a Config)."""

    implementation: str
    options: Mapping[str, int]

    @property
    def is_cuda(self) -> bool:
        return self.implementation == "cuda"

    def config(self) -> Config | None:
        """Launch configuration of a tuned Triton kernel; None: the table beside the kernel."""
        return None if self.is_cuda or not self.options else Config(**self.options)


TRITON = Choice("triton", {})
Lines = tuple[tuple[int, Choice], ...]
_overridden: dict[tuple[str, str], Lines] = {}


def parse(text: str) -> dict[tuple[str, str], Lines]:
    """The file's content. Raises ValueError for anything that is no table."""
    out: dict[tuple[str, str], Lines] = {}
    for arch, operations in json.loads(text).items():
        for op, lines in operations.items():
            last = -1
            found = []
            for bound, implementation, options in lines:
                if implementation not in IMPLEMENTATIONS or not last < bound:
                    raise ValueError(f"{arch} {op}: {bound}, {implementation} is no line")
                if not all(isinstance(v, int) for v in options.values()):
                    raise ValueError(f"{arch} {op}: options are integers")
                found.append((int(bound), Choice(implementation, dict(options))))
                last = bound
            out[arch, op] = tuple(found)
    return out


@functools.cache
def _table() -> dict[tuple[str, str], Lines]:
    wanted = os.environ.get(ENVIRONMENT, "")
    return parse((NAMED.get(wanted) or Path(wanted or PATH)).read_text())


def use_shared() -> None:
    """From now on shared.json decides, unless the environment names a table."""
    os.environ.setdefault(ENVIRONMENT, "shared")
    _table.cache_clear()


def cluster_blocks(op: str, options: Mapping[str, int]) -> int:
    """Blocks that a CUDA C++ kernel with these options needs at the same time."""
    if "kb" in options:  # linear_K and wo_a_K: the blocks of a cluster divide K
        return int(op.rpartition("_")[2]) // (128 * options["kb"])
    if options.get("few"):
        return 16
    return max(options.get("cluster", 1), options.get("splits", 1))


def choice(arch: str, op: str, size: int) -> Choice:
    """What runs ``op`` for this size on this architecture."""
    lines = _overridden.get((arch, op))
    if lines is None:
        lines = _table().get((arch, op), ())
    for bound, found in lines:
        if size <= bound:
            return found
    return TRITON


@contextlib.contextmanager
def overridden(
    arch: str, op: str, implementation: str, options: Mapping[str, int] | None = None
) -> Iterator[None]:
    """One implementation for every size, for the length of a test or a measurement."""
    before = _overridden.get((arch, op))
    _overridden[arch, op] = ((1 << 62, Choice(implementation, dict(options or {}))),)
    try:
        yield
    finally:
        if before is None:
            del _overridden[arch, op]
        else:
            _overridden[arch, op] = before


def dump(table: Mapping[tuple[str, str], Sequence[tuple[int, Choice]]]) -> str:
    """Text of a file that ``parse`` reads back."""
    data: dict[str, dict[str, Any]] = {}
    for (arch, op), lines in sorted(table.items()):
        data.setdefault(arch, {})[op] = [
            [bound, c.implementation, dict(c.options)] for bound, c in lines
        ]
    rows = []
    for arch, operations in data.items():
        body = []
        for op, lines in operations.items():
            inner = ",\n".join(f"   {json.dumps(line)}" for line in lines)
            body.append(f'  "{op}": [\n{inner}\n  ]')
        rows.append(f' "{arch}": {{\n' + ",\n".join(body) + "\n }")
    return "{\n" + ",\n".join(rows) + "\n}\n"
