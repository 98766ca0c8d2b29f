"""One allocation a rank that all ranks of a group map: cudaMalloc and an IPC handle on a GPU, a
POSIX shared memory object on the CPU. Knows bytes only.

Never the framework's allocator: a handle names a whole allocation, and memory that is given back
while a peer maps it must not be handed out again.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from decant.protocol.errors import ConfigError, HandoffError

SHM = Path("/dev/shm")
HANDLE_BYTES = 64  # cudaIpcMemHandle_t

Exchange = Callable[[bytes], Sequence[bytes]]  # own bytes -> those of all ranks, in rank order


class _Span:
    """A device pointer as torch understands it."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 3,
        }  # fmt: skip


def _cuda(result: tuple[Any, ...], what: str, error: type[Exception]) -> Any:
    code, *values = result
    if int(code) != 0:
        raise error(f"{what}: {code!s}")
    return values[0] if values else None


class SharedMemory:
    """Attributes: ranks: uint8 [size] of every rank, mapped here; own: this rank's."""

    def __init__(self, size: int, rank: int, device: torch.device, exchange: Exchange) -> None:
        """Allocate (zeroed), tell the others, map theirs. Every rank calls this at the same time.

        Raises: ConfigError if there is too little memory, HandoffError if a peer's memory cannot
        be mapped."""
        self._device, self._rank = device, rank
        self._close: list[Callable[[], None]] = []
        make, attach = self._host_pair() if device.type == "cpu" else self._cuda_pair()
        try:
            name, own = make(size)
            names = exchange(name)
            if len(names) <= rank or bytes(names[rank]) != name:
                raise HandoffError("the exchange of handles does not return them in rank order")
            self.ranks = [
                own if peer == rank else attach(bytes(other), size)
                for peer, other in enumerate(names)
            ]
            exchange(b"mapped")  # until then nobody may unlink or free
        except BaseException:
            self.close()
            raise
        self.own = own
        self._unlink(name)

    def _host_pair(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        def mapped(descriptor: int, size: int) -> torch.Tensor:
            try:
                mapping = mmap.mmap(descriptor, size)
            finally:
                os.close(descriptor)
            return torch.frombuffer(mapping, dtype=torch.uint8)

        def make(size: int) -> tuple[bytes, torch.Tensor]:
            name = f"decant-group.{secrets.token_hex(8)}"
            descriptor = os.open(SHM / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            self._close.append(lambda: self._unlink(name.encode()))
            try:
                os.posix_fallocate(descriptor, 0, size)
            except OSError as error:
                os.close(descriptor)
                raise ConfigError(f"{size >> 20} MB of shared memory: {error}") from error
            return name.encode(), mapped(descriptor, size)

        def attach(name: bytes, size: int) -> torch.Tensor:
            text = name.decode("ascii", "replace")
            if os.path.basename(text) != text or not text.startswith("decant-group."):
                raise HandoffError(f"{text[:80]!r} is not the name of a rank's memory")
            try:
                descriptor = os.open(SHM / text, os.O_RDWR)
            except OSError as error:
                raise HandoffError(f"a rank's memory cannot be opened: {error}") from error
            if os.fstat(descriptor).st_size != size:
                os.close(descriptor)
                raise HandoffError("a rank's memory has another size than ours")
            return mapped(descriptor, size)

        return make, attach

    def _unlink(self, name: bytes) -> None:
        if self._device.type == "cpu":
            with contextlib.suppress(FileNotFoundError):
                (SHM / name.decode()).unlink()

    def _cuda_pair(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        from cuda.bindings import runtime

        torch.cuda.set_device(self._device)
        torch.zeros(1, device=self._device)  # the context that cudaMalloc shall use

        def tensor(pointer: int, size: int) -> torch.Tensor:
            return torch.as_tensor(_Span(pointer, size), device=self._device)

        def make(size: int) -> tuple[bytes, torch.Tensor]:
            pointer = int(_cuda(runtime.cudaMalloc(size), f"{size >> 20} MB", ConfigError))
            self._close.append(lambda: runtime.cudaFree(pointer))
            handle = _cuda(runtime.cudaIpcGetMemHandle(pointer), "cudaIpcGetMemHandle", ConfigError)
            own = tensor(pointer, size)
            own.zero_()
            torch.cuda.synchronize(self._device)
            return ctypes.string_at(int(handle.getPtr()), HANDLE_BYTES), own

        def attach(name: bytes, size: int) -> torch.Tensor:
            if len(name) != HANDLE_BYTES:
                raise HandoffError(f"an IPC handle of {len(name)} bytes")
            handle = runtime.cudaIpcMemHandle_t()
            ctypes.memmove(int(handle.getPtr()), name, HANDLE_BYTES)
            flag = runtime.cudaIpcMemLazyEnablePeerAccess
            opened = runtime.cudaIpcOpenMemHandle(handle, flag)
            pointer = int(_cuda(opened, "cudaIpcOpenMemHandle", HandoffError))
            self._close.insert(0, lambda: runtime.cudaIpcCloseMemHandle(pointer))
            return tensor(pointer, size)

        return make, attach

    def close(self) -> None:
        """Unmap the peers' memory, then free ours. NOTE: all ranks must have stopped using it."""
        self.ranks, self.own = [], torch.empty(0, dtype=torch.uint8)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for end in self._close:
            end()
        self._close = []
