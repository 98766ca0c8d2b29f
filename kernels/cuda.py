"""CUDA C++ kernels of ``csrc/``: compiled for one architecture when first used, kept, loaded, and
launched on the current stream.

Compiled by nvcc if there is one, else by NVRTC, which comes with a CUDA build of torch; the sources
include nothing but each other. Machine code is kept in a folder of the user's own
(``DECANT_CACHE``) under a hash of sources, options and compiler. Loading and launching go to the
driver directly, so a launch can be captured, form a cluster, and overlap its predecessor.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from decant.protocol.errors import KernelError

FOLDER = Path(__file__).parent / "csrc"
TARGETS = {"sm_90": "90a", "sm_120": "120a"}
STATIC_SHARED = 48 * 1024  # more needs the function's leave
PORTABLE_CLUSTER = 8
_SHARED_ATTRIBUTE, _CLUSTER_ATTRIBUTE = 8, 14  # CU_FUNC_ATTRIBUTE_*
_CLUSTER_DIMENSION, _PROGRAMMATIC = 4, 6  # CU_LAUNCH_ATTRIBUTE_*


# "0": no kernel begins before its predecessor ends (to measure what that brings)
EARLY_ROWS = 16  # with more, an early launch takes room from its predecessor: slower on an H200
OVERLAPS = os.environ.get("DECANT_OVERLAP", "1") != "0"


class Int64(int):
    """An integer argument of 64 bits (plain integers are passed as 32)."""


# ---- compiling -----------------------------------------------------------------------------------


def nvcc() -> str | None:
    """Path of nvcc, or None."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which(os.path.join(home, "bin", "nvcc"))


@functools.cache
def nvcc_version(tool: str) -> str:
    """The line that names nvcc's build."""
    done = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=60)
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "unknown"


@functools.cache
def _nvrtc() -> ctypes.CDLL | None:
    places = [f"libnvrtc.so.{v}" for v in (13, 12)]
    for root in sys.path:
        places += sorted(glob.glob(os.path.join(root, "nvidia", "*", "lib", "libnvrtc.so.1?")))
    for place in places:
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(place)
            # it opens its builtins by name alone, which finds them only if they are loaded already
            beside = os.path.join(os.path.dirname(place), "libnvrtc-builtins.so*")
            for builtins in glob.glob(beside):
                ctypes.CDLL(builtins, mode=ctypes.RTLD_GLOBAL)
            return library
    return None


def _options(arch: str, defines: dict[str, int]) -> list[str]:
    return ["-std=c++17", *(f"-D{k}={int(v)}" for k, v in sorted(defines.items()))]


def _with_nvcc(tool: str, source: Path, arch: str, defines: dict[str, int]) -> tuple[bytes, str]:
    target = TARGETS[arch]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kernel.cubin"
        done = subprocess.run(
            [tool, "-cubin", f"-gencode=arch=compute_{target},code=sm_{target}", "-O3",
             "-Xptxas=-v", *_options(arch, defines), "-o", str(out), str(source)],
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        if done.returncode:
            raise KernelError(f"nvcc refused {source.name}: {done.stderr[-2000:]}")
        return out.read_bytes(), done.stderr


def _with_nvrtc(
    library: ctypes.CDLL, source: Path, arch: str, defines: dict[str, int]
) -> tuple[bytes, str]:
    program = ctypes.c_void_p()
    text = source.read_bytes()
    code = library.nvrtcCreateProgram(
        ctypes.byref(program), text, source.name.encode(), 0, None, None
    )
    if code:
        raise KernelError(f"NVRTC: error {code}")
    words = [f"--gpu-architecture=sm_{TARGETS[arch]}", f"-I{source.parent}", "--ptxas-options=-v"]
    options = [w.encode() for w in words + _options(arch, defines)]
    failed = library.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(max(1, size.value))
    library.nvrtcGetProgramLog(program, log)
    said = log.value.decode("utf-8", "replace")
    try:
        if failed:
            raise KernelError(f"NVRTC refused {source.name}: {said[-2000:]}")
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code_bytes = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, code_bytes)
        return code_bytes.raw, said
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def cache_folder() -> Path:
    """Where machine code is kept."""
    default = Path.home() / ".cache" / "decant"
    return Path(os.environ.get("DECANT_CACHE", default)) / "cuda"


@functools.cache
def _sources() -> bytes:
    digest = hashlib.sha256()
    for path in sorted(FOLDER.glob("*.cuh")):
        digest.update(path.read_bytes())
    return digest.digest()


def cache_key(name: str, arch: str, defines: dict[str, int]) -> str:
    """Of ``csrc/<name>.cu`` built with these constants by this machine's compiler."""
    tool = nvcc()
    which = nvcc_version(tool) if tool else "nvrtc"
    words = " ".join([name, arch, which, *_options(arch, defines)])
    text = (FOLDER / f"{name}.cu").read_bytes()
    return hashlib.sha256(_sources() + text + words.encode()).hexdigest()[:32]


def compile_source(name: str, arch: str, defines: dict[str, int]) -> tuple[bytes, str]:
    """(cubin, what the assembler said about registers) of ``csrc/<name>.cu``; kept between runs.

    Raises: KernelError without a compiler, or with what it said."""
    source = FOLDER / f"{name}.cu"
    tool = nvcc()
    library = None if tool else _nvrtc()
    if not tool and library is None:
        raise KernelError(
            "CUDA kernels need nvcc on PATH (or CUDA_HOME), or libnvrtc as torch's CUDA wheels "
            "bring it (nvidia-cuda-nvrtc)"
        )
    key = cache_key(name, arch, defines)
    kept = cache_folder() / f"{name}-{arch}-{key}.cubin"
    log = kept.with_suffix(".log")
    if kept.exists() and log.exists():
        return kept.read_bytes(), log.read_text()
    if tool:
        code, said = _with_nvcc(tool, source, arch, defines)
    else:
        assert library is not None
        code, said = _with_nvrtc(library, source, arch, defines)
    kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path, data in ((log, said.encode()), (kept, code)):
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_bytes(data)
        partial.replace(path)
    return code, said


@dataclass(frozen=True)
class Usage:
    """What one kernel takes: registers a thread, bytes of stack and of spills."""

    registers: int
    stack: int
    spills: int


def usage(log: str, kernel: str) -> Usage:
    """Read the assembler's report. Raises: KernelError if it does not speak of the kernel."""
    at = log.find(f"Compiling entry function '{kernel}'")
    found = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r"[\s\S]*?Used (\d+) registers",
        log[at:] if at >= 0 else "",
    )
    if found is None:
        raise KernelError(f"nothing is known of {kernel}: {log[-300:]}")
    stack, stores, loads, registers = (int(g) for g in found.groups())
    return Usage(registers, stack, stores + loads)


# ---- loading and launching -----------------------------------------------------------------------


class _Value(ctypes.Union):
    _fields_ = [("pad", ctypes.c_char * 64), ("words", ctypes.c_uint * 3), ("flag", ctypes.c_int)]


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", _Value)]


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]  # fmt: skip


@functools.cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    library.cuModuleLoadData.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_char_p]
    library.cuModuleGetFunction.argtypes = [
        ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.c_char_p,
    ]  # fmt: skip
    library.cuFuncSetAttribute.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    library.cuLaunchKernelEx.argtypes = [
        ctypes.POINTER(_LaunchConfig), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_void_p,
    ]  # fmt: skip
    return library


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise KernelError(f"{what}: {(text.value or b'?').decode()} ({code})")


@dataclass(frozen=True)
class Function:
    """A kernel that is loaded into a device's context."""

    name: str
    handle: int


@functools.cache
def _load(name: str, kernel: str, arch: str, device: int, defines: tuple[Any, ...]) -> Function:
    code, _ = compile_source(name, arch, dict(defines))
    torch.zeros(1, device=f"cuda:{device}")  # the context that the module goes into is current
    module, handle = ctypes.c_void_p(), ctypes.c_void_p()
    _check(_driver().cuModuleLoadData(ctypes.byref(module), code), f"loading {name}")
    _check(
        _driver().cuModuleGetFunction(ctypes.byref(handle), module, kernel.encode()),
        f"kernel {kernel}",
    )
    assert handle.value
    # every kernel may take what the architecture has; the launch says how much it needs
    most = 227 * 1024 if arch == "sm_90" else 99 * 1024
    _check(_driver().cuFuncSetAttribute(handle, _SHARED_ATTRIBUTE, most), "shared memory")
    if arch == "sm_90":
        _check(_driver().cuFuncSetAttribute(handle, _CLUSTER_ATTRIBUTE, 1), "cluster size")
    return Function(kernel, handle.value)


def function(name: str, kernel: str, arch: str, **defines: int) -> Function:
    """Kernel ``kernel`` of ``csrc/<name>.cu``, built with these constants, on the current device.

    The first call compiles: warm up before a capture. Raises: KernelError."""
    return _load(name, kernel, arch, torch.cuda.current_device(), tuple(sorted(defines.items())))


def _argument(value: Any) -> Any:
    if value is None:
        return ctypes.c_void_p(0)
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, Int64):
        return ctypes.c_int64(value)
    if isinstance(value, int):
        return ctypes.c_int32(value)
    if isinstance(value, float):
        return ctypes.c_float(value)
    raise TypeError(f"a kernel takes no {type(value).__name__}")


def launch(
    target: Function,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared: int,
    *arguments: Any,
    cluster: int = 1,
    overlap: bool = False,
) -> None:
    """Launch on torch's current stream. Tensors go as pointers, int as 32 bits, float as fp32.

    cluster: blocks along x that form a cluster. overlap: the kernel may begin while its
    predecessor on the stream still runs; it must say itself where it needs the results.
    Raises: KernelError if the driver refuses."""
    values = [_argument(a) for a in arguments]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
    attributes = (_Attribute * 2)()
    count = 0
    if cluster > 1:
        attributes[count].id = _CLUSTER_DIMENSION
        attributes[count].value.words[:] = [cluster, 1, 1]
        count += 1
    if overlap and OVERLAPS:
        attributes[count].id = _PROGRAMMATIC
        attributes[count].value.flag = 1
        count += 1
    config = _LaunchConfig(
        (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block), shared,
        torch.cuda.current_stream().cuda_stream, attributes, count,
    )  # fmt: skip
    code = _driver().cuLaunchKernelEx(
        ctypes.byref(config), target.handle, ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p)),
        None,
    )  # fmt: skip
    _check(code, target.name)
