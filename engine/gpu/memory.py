"""One plain allocation that other processes can map: cudaMalloc with an IPC handle, or its twin on
the CPU, a POSIX shared memory object. Knows bytes only; ``pool.py`` says what is in them.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import secrets
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from decant.protocol.errors import ConfigError, HandoffError

log = logging.getLogger("decant.engine.gpu")

SHM = Path("/dev/shm")
HANDLE_BYTES = 64  # cudaIpcMemHandle_t


def first_line(error: BaseException) -> str:
    """What a CUDA error says, without the advice that follows."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


class Memory(Protocol):
    """kind, name and device of a PoolHandle; data: uint8 [size] on the device."""

    kind: str
    name: str
    data: Tensor

    def close(self) -> None:
        """Unmap; the owner frees. ``data`` must not be used afterwards."""
        ...


class HostMemory:
    """Shared memory of the host, mode 0600."""

    kind = "shm"

    def __init__(self, name: str, mapping: mmap.mmap, is_owner: bool) -> None:
        self.name, self._mapping, self.is_owner = name, mapping, is_owner
        self.data = torch.frombuffer(mapping, dtype=torch.uint8)

    @classmethod
    def create(cls, prefix: str, size: int) -> HostMemory:
        """Zeroed. Objects named ``prefix`` of a dead predecessor are unlinked. Raises:
        ConfigError."""
        for old in SHM.glob(prefix + ".*"):
            with contextlib.suppress(FileNotFoundError):
                old.unlink()
        name = f"{prefix}.{secrets.token_hex(8)}"
        space = os.statvfs(SHM)
        if size > space.f_bavail * space.f_frsize:
            raise ConfigError(f"the KV pool needs {size >> 20} MB of shared memory in {SHM}")
        descriptor = os.open(SHM / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
            mapping = mmap.mmap(descriptor, size)
        except OSError as error:
            os.unlink(SHM / name)
            raise ConfigError(f"the KV pool of {size >> 20} MB was refused: {error}") from error
        finally:
            os.close(descriptor)
        return cls(name, mapping, True)

    @classmethod
    def open(cls, name: str, size: int) -> HostMemory:
        """Raises: HandoffError."""
        if os.path.basename(name) != name or name.startswith("."):
            raise HandoffError(f"{name!r} is not the name of a pool")
        try:
            descriptor = os.open(SHM / name, os.O_RDWR)
        except OSError as error:
            raise HandoffError(f"pool {name} cannot be opened: {error}") from error
        try:
            if os.fstat(descriptor).st_size != size:
                raise HandoffError(f"pool {name} has another size than its handle says")
            return cls(name, mmap.mmap(descriptor, size), False)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        if self.is_owner:
            with contextlib.suppress(FileNotFoundError):
                (SHM / self.name).unlink()
        self.data = torch.empty(0, dtype=torch.uint8)
        with contextlib.suppress(BufferError):  # views that are still held keep the memory mapped
            self._mapping.close()


# Pools of this process by handle: a process cannot open its own IPC handle, it has the pointer.
_own: dict[str, int] = {}


def _cuda(result: tuple[Any, ...], what: str, error: type[Exception]) -> Any:
    """The value of a cuda.bindings call. Raises: ``error`` unless it succeeded."""
    code, *values = result
    if int(code) != 0:
        raise error(f"{what}: {code!s}")
    return values[0] if values else None


class _Span:
    """A device pointer as torch understands it."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 3,
        }  # fmt: skip


class DeviceMemory:
    """cudaMalloc, never the framework's allocator: only such memory has a handle for all of it."""

    kind = "cuda_ipc"

    def __init__(self, name: str, pointer: int, size: int, device: torch.device, how: str) -> None:
        self.name, self._pointer, self._how = name, pointer, how
        self.data = torch.as_tensor(_Span(pointer, size), device=device)
        if self.data.data_ptr() != pointer:
            # NOTE: memory of another GPU: torch would copy it to ours, and we would read the copy
            self.data = torch.as_tensor(_Span(pointer, size))

    @classmethod
    def create(cls, size: int, device: torch.device) -> DeviceMemory:
        """Zeroed. Raises: ConfigError if the device has too little memory."""
        from cuda.bindings import runtime

        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # the context that cudaMalloc shall use
        what = f"the KV pool of {size >> 20} MB"
        pointer = int(_cuda(runtime.cudaMalloc(size), what, ConfigError))
        handle = _cuda(runtime.cudaIpcGetMemHandle(pointer), "cudaIpcGetMemHandle", ConfigError)
        name = ctypes.string_at(int(handle.getPtr()), HANDLE_BYTES).hex()
        _own[name] = pointer
        memory = cls(name, pointer, size, device, "owner")
        memory.data.zero_()
        torch.cuda.synchronize(device)
        return memory

    @classmethod
    def open(cls, name: str, size: int, device: torch.device) -> DeviceMemory:
        """Raises: HandoffError."""
        if name in _own:
            return cls(name, _own[name], size, device, "borrowed")
        from cuda.bindings import runtime

        try:
            raw = bytes.fromhex(name)
        except ValueError as error:
            raise HandoffError(f"{name[:80]!r} is not an IPC handle") from error
        handle = runtime.cudaIpcMemHandle_t()
        if len(raw) != HANDLE_BYTES:
            raise HandoffError(f"an IPC handle of {len(raw)} bytes")
        ctypes.memmove(int(handle.getPtr()), raw, HANDLE_BYTES)
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        flag = runtime.cudaIpcMemLazyEnablePeerAccess
        opened = runtime.cudaIpcOpenMemHandle(handle, flag)
        pointer = int(_cuda(opened, "cudaIpcOpenMemHandle", HandoffError))
        return cls(name, pointer, size, device, "mapped")

    def close(self) -> None:
        from cuda.bindings import runtime

        self.data = torch.empty(0, dtype=torch.uint8)
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:  # its context is lost, and all memory with it
            _own.pop(self.name, None)
            self._how = "closed"
            log.warning("device memory is gone already: %s", first_line(error))
            return
        if self._how == "mapped":
            runtime.cudaIpcCloseMemHandle(self._pointer)
        elif self._how == "owner":
            _own.pop(self.name, None)
            runtime.cudaFree(self._pointer)
        self._how = "closed"


def pin(memory: mmap.mmap | bytearray) -> bool:
    """Pin host memory in place, so that copies from it do not wait. False: it stays pageable."""
    from cuda.bindings import runtime

    view = torch.frombuffer(memory, dtype=torch.uint8)
    (code,) = runtime.cudaHostRegister(view.data_ptr(), view.numel(), 0)
    return int(code) == 0


def create_memory(prefix: str, size: int, device: torch.device) -> Memory:
    """Raises: ConfigError."""
    if device.type == "cuda":
        return DeviceMemory.create(size, device)
    return HostMemory.create(prefix, size)


def open_memory(kind: str, name: str, size: int, device: torch.device) -> Memory:
    """Raises: HandoffError."""
    if kind == "cuda_ipc" and device.type == "cuda":
        return DeviceMemory.open(name, size, device)
    if kind == "shm" and device.type == "cpu":
        return HostMemory.open(name, size)
    raise HandoffError(f"a {kind} pool cannot be mapped on a {device.type} device")
