"""Collectives over memory that the ranks map: the one-shot all-reduce of ``kernels/all_reduce.py``,
and a gather that reads the peers' memory after a barrier. Ranks may share a GPU; on a CPU the same
protocol runs over shared memory (the twin for tests).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decant.engine.gpu.communicator import GlooCommunicator, check
from decant.kernels.all_reduce import AllReduce
from decant.kernels.shared_memory import SharedMemory
from decant.protocol.errors import ConfigError

MAX_ROWS = 512  # of one all-reduce; more rows (prefill) go in pieces
BARRIER_VALUES = 8


class IpcCommunicator:
    """See communicator.Communicator. columns: of the widest gather."""

    kind = "ipc"
    can_capture = True

    def __init__(
        self,
        host: GlooCommunicator,
        device: torch.device,
        max_rows: int,
        width: int,
        columns: int,
    ) -> None:
        """Every rank at the same time. Raises: ConfigError, HandoffError if memory cannot be
        mapped or the sums are wrong."""
        self._host, self.rank, self.size = host, host.rank, host.size
        self._rows = min(max_rows, MAX_ROWS)
        values = max(self._rows * width, 256 * 64)
        self._sum = AllReduce(self.rank, self.size, values, device, self._exchange, 30.0)
        # Two halves in turn: who has passed the barrier of one gather may still read the other's.
        self._half = max(max_rows * columns, 256 * 64) * 4
        self._memory = SharedMemory(2 * self._half, self.rank, device, self._exchange)
        self._turn = 0
        self._barrier = torch.zeros(BARRIER_VALUES, device=device)
        check(self, device)
        self.check()

    def _exchange(self, own: bytes) -> Sequence[bytes]:
        """Own bytes, at most 64 of them, to all ranks."""
        if len(own) > 64:
            raise ConfigError(f"{len(own)} bytes to exchange")
        numbers = [len(own), *own.ljust(64, b"\0")]
        return [bytes(row[1 : 1 + row[0]]) for row in self._host.host_gather(numbers)]

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if len(x) <= self._rows:
            return self._sum.reduce(x)
        for at in range(0, len(x), self._rows):
            part = x[at : at + self._rows]
            self._sum.reduce(part, part)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        size = x.numel() * x.element_size()
        if size > self._half:
            most = self._half // (size // len(x))
            if not most:
                raise ConfigError(f"a gather of {size} bytes is larger than the ranks' memory")
            parts = [self.all_gather(x[at : at + most]) for at in range(0, len(x), most)]
            return torch.cat(parts)
        at = self._turn * self._half
        self._turn ^= 1

        def part(memory: Tensor) -> Tensor:
            return memory[at : at + size].view(x.dtype).view(x.shape)

        part(self._memory.own).copy_(x)
        # NOTE: a captured graph always uses the same half. It has sums before its gather, and
        # whoever has passed one of those knows that all ranks have left the gather before.
        self._sum.reduce(self._barrier, self._barrier)
        return torch.cat([part(memory) for memory in self._memory.ranks], 1)

    def host_gather(self, values: list[int]) -> list[list[int]]:
        return self._host.host_gather(values)

    def patience(self, seconds: float) -> None:
        """How long calls from now on wait for a peer; a captured call keeps what it had."""
        self._sum.timeout_s = seconds

    def check(self) -> None:
        """Raises: KernelError if a sum gave up since the start; waits for the device."""
        self._sum.check()

    def words(self) -> dict[str, list[int]]:
        """Where the sums stand, for looking at a group that does not go on."""
        return self._sum.words()

    def abort(self) -> None:
        self._sum.abort()

    def close(self) -> None:
        self._sum.close()
        self._memory.close()
        self._host.close()
