"""What a worker's start found out, for the next start of the same worker: which kernels are right.

Probing and noting what is to be compiled cost seconds, and their results depend on nothing but the
code, the model, the sizes, the libraries and the device. The record lies in Triton's cache folder,
beside the compiled kernels that it speaks of, so who clears one clears the other.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs

from decant.engine.gpu.ops import ALL

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("engine/gpu", "kernels", "kernels/csrc")
SUFFIXES = (".py", ".cu", ".cuh", ".json")


@functools.cache
def sources() -> str:
    """Hash of the code and the tables that kernels are chosen by."""
    digest = hashlib.sha256()
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).iterdir()):
            if path.suffix in SUFFIXES:
                digest.update(path.name.encode() + path.read_bytes())
    other = os.environ.get("DECANT_TUNED", "")
    if other and Path(other).exists():
        digest.update(Path(other).read_bytes())
    return digest.hexdigest()


def path_of(device: torch.device, facts: dict[str, Any]) -> Path:
    """Where a worker's record lies. facts: its model and sizes."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    words = {
        "sources": sources(), "torch": torch.__version__, "triton": triton.__version__,
        "device": name, **facts,
    }  # fmt: skip
    text = json.dumps(words, sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    return Path(knobs.cache.dir) / f"decant-start-{key}.json"


def read(path: Path) -> set[str] | None:
    """Kernels that were found right; None: nothing is known."""
    try:
        names = json.loads(path.read_text())["kernels"]
        return set(names) if set(names) <= set(ALL) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write(path: Path, kernels: set[str]) -> None:
    """Keep what was found. A cache that cannot be written is none."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(json.dumps({"kernels": sorted(kernels)}))
        partial.replace(path)
