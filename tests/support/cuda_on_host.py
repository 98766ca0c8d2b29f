"""CUDA C++ kernels on the CPU: the sources of ``kernels/csrc`` compiled by the machine's C++
compiler against ``cuda_on_host.h``, behind the interface of ``decant.kernels.cuda``.

``use(monkeypatch)`` puts them there, so a test calls the public functions with CPU tensors.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from decant.kernels import cuda

HERE = Path(__file__).parent


@dataclass(frozen=True)
class HostFunction:
    """A kernel in a shared library of the host."""

    name: str
    call: Any


@functools.cache
def build(name: str, defines: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    """Compile ``csrc/<name>.cu`` for the host; kept by content."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler, "the CUDA kernels' tests need a C++ compiler (g++ or clang++)"
    sources = [cuda.FOLDER / f"{name}.cu", HERE / "cuda_on_host.h", *cuda.FOLDER.glob("*.cuh")]
    text = b"".join(p.read_bytes() for p in sorted(sources))
    key = hashlib.sha256(text + repr((compiler, defines)).encode()).hexdigest()[:24]
    library = cuda.cache_folder() / f"host-{name}-{key}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        partial = library.with_suffix(f".{os.getpid()}")
        words = [
            compiler, "-x", "c++", "-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-DDECANT_HOST",
            "-U_FORTIFY_SOURCE", "-fno-stack-protector", "-ffp-contract=off", f"-I{HERE}",
            f"-I{cuda.FOLDER}", *(f"-D{k}={v}" for k, v in defines),
            str(cuda.FOLDER / f"{name}.cu"), "-o", str(partial),
        ]  # fmt: skip
        done = subprocess.run(words, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
        partial.replace(library)
    return ctypes.CDLL(str(library))


def function(name: str, kernel: str, arch: str, **defines: int) -> HostFunction:
    """As cuda.function."""
    library = build(name, tuple(sorted((k, int(v)) for k, v in defines.items())))
    return HostFunction(kernel, getattr(library, f"{kernel}_on_host"))


def launch(
    target: HostFunction,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared: int,
    *arguments: Any,
    cluster: int = 1,
    overlap: bool = False,
) -> None:
    """As cuda.launch; returns when the kernel has run."""
    assert grid[0] % cluster == 0, "the grid is no multiple of the cluster"
    assert shared <= 227 * 1024
    values = [cuda._argument(a) for a in arguments]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
    dims = (ctypes.c_uint * 6)(*grid, block[0], shared, cluster)
    target.call(dims, pointers)


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run CUDA C++ kernels on CPU tensors for the length of a test."""
    monkeypatch.setattr(cuda, "function", function)
    monkeypatch.setattr(cuda, "launch", launch)
