"""Sums and gathers over the TP ranks of a group, in rank order: the same bits on every rank.

Three ways, chosen at start by ``choose`` and said in the log: one-shot over IPC memory (``ipc.py``:
any ranks that can map each other's memory, several on one GPU included), NCCL (one GPU a rank), and
gloo, which is the CPU's way and, through host memory and without graphs, the last resort of a GPU.
"""

from __future__ import annotations

import importlib
import logging
import os
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from decant.engine.group import GATHER_WAIT_S
from decant.protocol.errors import ConfigError, DecantError

log = logging.getLogger("decant.engine.gpu")

NCCL_GATHER_ROWS = 512  # up to so many rows the sum is taken here, in rank order
HOST_WAIT_S = 900.0  # at start one rank compiles for all
WAYS = ("ipc", "nccl", "gloo")


class Communicator(Protocol):
    """Collectives of one rank. Every rank makes the same calls in the same order, from one thread,
    on its current stream.

    Attributes: can_capture: calls may be part of a CUDA graph."""

    kind: str
    rank: int
    size: int
    can_capture: bool

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of the ranks' float32 [rows, width], added in rank order. May reuse ``x``."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """[rows, n] of each rank -> [rows, size * n], rank after rank."""
        ...

    def host_gather(self, values: list[int]) -> list[list[int]]:
        """The whole numbers of every rank (equally many), over the host: at start and for checks,
        never in a step's fast path."""
        ...

    def patience(self, seconds: float) -> None:
        """How long calls from now on wait for a peer; a captured call keeps what it had."""
        ...

    def check(self) -> None:
        """After a step. Raises: KernelError if a peer was waited for in vain."""
        ...

    def abort(self) -> None:
        """End the waits of this group; from any thread."""
        ...

    def close(self) -> None: ...


class _Unbounded:
    """Where the library keeps the time itself (GATHER_WAIT_S)."""

    def patience(self, seconds: float) -> None:
        pass

    def check(self) -> None:
        pass

    def abort(self) -> None:
        pass


class Unasked(_Unbounded):
    """Stands for a group of ``size`` whose other ranks take no part (a dry run): results have the
    right shapes and no meaning."""

    kind, rank, can_capture = "none", 0, False

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.size)

    def host_gather(self, values: list[int]) -> list[list[int]]:
        return [values] * self.size

    def close(self) -> None:
        pass


def in_rank_order(parts: list[Tensor]) -> Tensor:
    """((r0 + r1) + r2) + r3: the order that every way keeps."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class GlooCommunicator(_Unbounded):
    """Over the host. ``file``: the group's rendezvous. With tensors on a GPU every call waits for
    the stream, so nothing can be captured."""

    kind = "gloo"

    def __init__(self, file: str, rank: int, size: int, device: torch.device) -> None:
        # imported late: its stubs lack what we use, and a group of one never needs it
        dist: Any = importlib.import_module("torch.distributed")

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.rank, self.size, self.can_capture = rank, size, device.type == "cpu"
        self.store = dist.FileStore(file, size)
        timeout = timedelta(seconds=HOST_WAIT_S)
        self._ranks = dist.ProcessGroupGloo(dist.PrefixStore("gloo", self.store), rank, size,
                                            timeout)  # fmt: skip

    def _parts(self, x: Tensor) -> list[Tensor]:
        here = x.detach().cpu().contiguous()
        parts = [torch.empty_like(here) for _ in range(self.size)]
        self._ranks.allgather([parts], [here]).wait()
        return parts

    def all_reduce(self, x: Tensor) -> Tensor:
        return in_rank_order(self._parts(x)).to(x.device)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._parts(x), 1).to(x.device)

    def host_gather(self, values: list[int]) -> list[list[int]]:
        parts = self._parts(torch.tensor(values, dtype=torch.int64))
        return [[int(v) for v in part] for part in parts]

    def close(self) -> None:
        self._ranks = None


class NcclCommunicator(_Unbounded):
    """Ranks on GPUs of their own. Few rows are gathered and added here, in rank order; many rows
    (prefill) are added by NCCL, in an order of its own that is the same on every rank."""

    kind = "nccl"
    can_capture = True

    def __init__(self, host: GlooCommunicator, device: torch.device) -> None:
        """Raises: ConfigError if NCCL is not there or does not work among these ranks."""
        dist: Any = importlib.import_module("torch.distributed")

        self._host, self.rank, self.size = host, host.rank, host.size
        if not dist.is_nccl_available():
            raise ConfigError("this PyTorch has no NCCL")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=GATHER_WAIT_S)
        store = dist.PrefixStore("nccl", host.store)
        self._sum = dist.AllreduceOptions()
        try:
            self._ranks = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
            check(self, device)
        except RuntimeError as error:
            raise ConfigError(f"NCCL does not run here: {error}") from error

    def _gathered(self, x: Tensor) -> Tensor:
        out = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        self._ranks._allgather_base(out, x.contiguous()).wait()
        return out

    def all_reduce(self, x: Tensor) -> Tensor:
        if len(x) <= NCCL_GATHER_ROWS:
            return in_rank_order(list(self._gathered(x)))
        self._ranks.allreduce([x], self._sum).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return self._gathered(x).transpose(0, 1).reshape(len(x), -1)

    def host_gather(self, values: list[int]) -> list[list[int]]:
        return self._host.host_gather(values)

    def close(self) -> None:
        self._ranks = None
        self._host.close()


def check(comm: Communicator, device: torch.device) -> None:
    """Sum and gather numbers whose results are known, with several row counts and twice each.

    Raises: ConfigError on a wrong result."""
    place = torch.arange(256, device=device, dtype=torch.float32)
    for rows in (1, 3, 64, 1, 3, 64):
        mine = place[None] + torch.arange(rows, device=device)[:, None] + 0.25 * comm.rank
        wanted = in_rank_order([mine + 0.25 * (r - comm.rank) for r in range(comm.size)])
        if not torch.equal(comm.all_reduce(mine.clone()), wanted):
            raise ConfigError(f"a sum over the ranks by {comm.kind} is wrong")
        joined = comm.all_gather(mine).view(rows, comm.size, 256)
        offset = 0.25 * (torch.arange(comm.size, device=device) - comm.rank)
        if not torch.equal(joined, mine[:, None] + offset[:, None]):
            raise ConfigError(f"a gather over the ranks by {comm.kind} is wrong")


def choose(
    file: str,
    rank: int,
    size: int,
    device: torch.device,
    rows: tuple[int, int],
    columns: int,
    wanted: str = "auto",
) -> Communicator:
    """The fastest way that works on *all* ranks. rows: (number, width) of the largest step's sums;
    columns: a rank's share of the vocabulary. wanted: "auto" or the only way that may be taken.
    On a CPU "auto" is gloo, and "ipc" its twin over shared memory.

    Raises: ConfigError if the way that is wanted does not work."""
    host = GlooCommunicator(file, rank, size, device)
    ways = WAYS if wanted == "auto" else (wanted,)
    if device.type == "cpu" and wanted == "auto":
        ways = ("gloo",)
    failures: list[str] = []
    for way in ways:
        made: Communicator | None = None
        failure = ""
        if way == "gloo":
            made = host
        else:
            # Whether ranks have GPUs of their own must be known before NCCL is asked: it would
            # wait for ranks that it refused.
            places = host.host_gather([device.index or 0])
            apart = len({place[0] for place in places}) == size
            try:
                made = _make(way, host, device, apart, rows, columns)
            except (DecantError, RuntimeError, ImportError) as error:
                failure = f"{type(error).__name__}: {error}"[:300]
        # all or none: ranks that took different ways would wait for each other for ever
        if all(done[0] for done in host.host_gather([int(made is not None)])):
            assert made is not None
            log.info("rank %d of %d sums by %s %s", rank, size, way, "; ".join(failures))
            return made
        failures.append(f"{way}: {failure or 'another rank failed'}")
    raise ConfigError(f"the ranks cannot talk to each other: {'; '.join(failures)}")


def _make(
    way: str,
    host: GlooCommunicator,
    device: torch.device,
    apart: bool,
    rows: tuple[int, int],
    columns: int,
) -> Communicator:
    if way == "nccl":
        if not apart:
            raise ConfigError("NCCL needs a GPU for every rank")
        return NcclCommunicator(host, device)
    from decant.engine.gpu.ipc import IpcCommunicator

    return IpcCommunicator(host, device, *rows, columns)
