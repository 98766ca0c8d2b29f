"""One-shot all-reduce of the ranks of a group over memory that all of them map: push, flag, sum.

Data sheet
  operation  out = x_0 + x_1 + ... + x_(n-1), in that order, in fp32, on every rank: all ranks hold
             the same bits, whatever the arrival order
  wire       x in its own type (fp32, bf16 or fp16) into every rank's memory: push only, no reads
             of a peer's memory
  channels   at most 8 programs, each with its own share of the values, its own epoch and flags; a
             channel waits for the same channel of the other ranks only
  epochs     counted on the device, so that a captured graph can be replayed; two buffers by the
             epoch's parity: a rank that is at epoch e + 2 has seen every flag of e + 1, so every
             peer has left e
  waits      bounded in time, and ended by an abort word; a rank that gives up says so in its
             status word, poisons its result with NaN and does so from then on
  floor      (world - 1) * bytes(x) over the link's rate, plus one flag's way
  beside     ranks that share a GPU (MPS) wait on it, at most 8 programs each: with 96 registers a
             thread, 256 threads leave room for a block of any other kernel beside them; 512 did
             not, and a cluster of 16 blocks, which needs nearly all multiprocessors of one GPC,
             never started while the others waited for its rank: clusters have at most 8
  CPU        the same protocol in numpy over shared memory (x86 order of stores)

Captured and eager calls may be mixed, but every rank must make the same calls in the same order.
"""

from __future__ import annotations

import contextlib
import time

import numpy as np
import torch

from decant.kernels.config import architecture
from decant.kernels.shared_memory import Exchange, SharedMemory
from decant.protocol.errors import ConfigError, KernelError

CHANNELS = 8
MAX_RANKS = 8
MIN_SHARE = 1024  # values a channel takes before another one is opened
HEADER_BYTES = 4096
ABORT, STATUS, EPOCHS, FLAGS = 0, 1, 8, 32  # places of int32 words in the header
THREADS = 256  # at most, of a program; see the data sheet
GRAIN = 8  # values: 16 bytes of the narrowest type
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def capacity(max_values: int) -> int:
    """Values a channel has room for."""
    return max(MIN_SHARE, -(-max_values // (CHANNELS * GRAIN)) * GRAIN)


def workspace_bytes(world: int, max_values: int) -> int:
    """Size of one rank's memory: header, then [channel, parity, source rank, capacity] fp32."""
    return HEADER_BYTES + CHANNELS * 2 * world * capacity(max_values) * 4


def shares(num_values: int) -> tuple[int, int]:
    """(channels, values a channel) for a tensor of that many values; the last share is shorter."""
    channels = min(CHANNELS, -(-num_values // MIN_SHARE))
    share = -(-num_values // (channels * GRAIN)) * GRAIN
    return -(-num_values // share), share


class AllReduce:
    """All-reduce for one group of ranks.

    One stream a group: calls must not overlap. Wants a GPU (sm_90, sm_120) or CPU tensors.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        max_values: int,
        device: torch.device,
        exchange: Exchange,
        timeout_s: float = 10.0,
    ) -> None:
        """Make and map the memory of all ranks; every rank calls this at the same time.

        max_values: of the largest tensor that will be reduced (rows * hidden). exchange: own bytes
        -> the bytes of all ranks in rank order; called twice, only here. timeout_s: how long a
        call waits for a peer.
        Raises: ConfigError for a group that cannot be served or too little memory, HandoffError if
        a peer's memory cannot be mapped (no peer access, other container).
        """
        if not 1 <= world <= MAX_RANKS or not 0 <= rank < world:
            raise ConfigError(f"no all-reduce for rank {rank} of {world} (at most {MAX_RANKS})")
        if max_values < 1 or timeout_s <= 0:
            raise ConfigError("max_values and timeout_s must be positive")
        self.rank, self.world, self.device = rank, world, device
        self.max_values, self.timeout_s = max_values, timeout_s
        self._capacity = capacity(max_values)
        size = workspace_bytes(world, max_values)
        self._memory = SharedMemory(size, rank, device, exchange)
        header = self._memory.own[:HEADER_BYTES].view(torch.int32)
        self._status: torch.Tensor = header[STATUS : STATUS + 1]
        if device.type == "cuda":
            self.arch = architecture(device)
            pointers = [m.data_ptr() for m in self._memory.ranks]
            self._pointers = torch.tensor(pointers, dtype=torch.int64, device=device)
            self._aborts = [m[:4].view(torch.int32) for m in self._memory.ranks]
            self._side = torch.cuda.Stream(device)
            self._one = torch.ones(1, dtype=torch.int32).pin_memory()
        else:
            self._host = [m.numpy() for m in self._memory.ranks]

    def fits(self, x: torch.Tensor) -> bool:
        """Whether ``reduce`` takes this tensor (type, size, contiguous); depends on its shape only,
        so all ranks answer alike."""
        return (
            x.dtype in TYPES
            and x.is_contiguous()
            and 0 < x.numel() <= self.max_values
            and x.numel() % GRAIN == 0
        )

    def reduce(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Sum of x over all ranks, in rank order, in fp32. Capture-safe: one launch on the current
        stream, no host wait (on the CPU it returns when the sum is there).

        x: as in ``fits``, any shape. out: same shape, fp32, bf16 or fp16; x's type by default; may
        be x itself. After a failure of any rank the result is NaN: call ``check`` once a step.
        Raises: ValueError for a tensor that does not fit.
        """
        if not self.fits(x):
            raise ValueError(f"{x.dtype} {tuple(x.shape)} does not fit {self.max_values} values")
        out = torch.empty_like(x) if out is None else out
        if out.shape != x.shape or out.dtype not in TYPES or not out.is_contiguous():
            raise ValueError(f"out must be contiguous {tuple(x.shape)}, fp32, bf16 or fp16")
        if self.device.type == "cuda":
            self._launch(x, out)
        else:
            self._reduce_on_host(x, out)
        return out

    def status(self) -> torch.Tensor:
        """int32 [1] on the device: 0, or what ended the group (copy it with a step's results)."""
        return self._status

    def words(self) -> dict[str, list[int]]:
        """For looking at a group that does not go on: abort and status, this rank's epoch by
        channel, and the latest epoch that each rank has flagged in each channel. Beside what runs.
        """
        with contextlib.ExitStack() as stack:
            if self.device.type == "cuda":
                stack.enter_context(torch.cuda.stream(self._side))
            header = self._memory.own[:HEADER_BYTES].view(torch.int32).to("cpu").tolist()
        out = {"abort and status": header[ABORT : STATUS + 1],
               "epochs": header[EPOCHS : EPOCHS + CHANNELS]}  # fmt: skip
        for rank in range(self.world):
            places = range(FLAGS + rank, FLAGS + CHANNELS * MAX_RANKS, MAX_RANKS)
            out[f"flags of {rank}"] = [header[at] for at in places]
        return out

    def check(self) -> None:
        """Raises: KernelError if a call gave up; waits for the device. The group is then of no use
        any more: all ranks close it and make a new one."""
        raise_for(int(self._status.item()), self.rank)

    def abort(self) -> None:
        """End the waits of every rank, now and later; from any thread (a peer is known to be
        dead)."""
        if self.device.type == "cuda":
            with torch.cuda.stream(self._side):
                for word in self._aborts:
                    word.copy_(self._one, non_blocking=True)
        else:
            for memory in self._host:
                memory[:4].view(np.int32)[0] = 1

    def close(self) -> None:
        """Unmap and free. NOTE: only after every rank has stopped calling ``reduce``."""
        if self.device.type == "cpu":
            self._host = []
        else:
            self._aborts = []
        self._status = torch.zeros(1, dtype=torch.int32)
        self._memory.close()

    def _launch(self, x: torch.Tensor, out: torch.Tensor) -> None:
        from decant.kernels import cuda

        channels, share = shares(x.numel())
        vectors = share * x.element_size() // 16
        threads = max(128, min(THREADS, -(-vectors // 32) * 32))
        function = cuda.function(
            "all_reduce", "all_reduce_kernel", self.arch, IN=TYPES[x.dtype], OUT=TYPES[out.dtype]
        )
        cuda.launch(
            function, (channels, 1, 1), (threads, 1, 1), 16,
            x, out, self._pointers, x.numel(), share, self._capacity, self.rank, self.world,
            cuda.Int64(int(self.timeout_s * 1e9)),
        )  # fmt: skip

    # -- the twin on the CPU -----------------------------------------------------------------------

    def _reduce_on_host(self, x: torch.Tensor, out: torch.Tensor) -> None:
        raw = x.reshape(-1).view(torch.uint8).numpy()
        target = out.reshape(-1)
        channels, share = shares(x.numel())
        for channel in range(channels):
            begin, end = channel * share, min((channel + 1) * share, x.numel())
            size = x.element_size()
            piece = raw[begin * size : end * size]
            target[begin:end] = self._channel(channel, piece, x.dtype)

    def _region(self, channel: int, parity: int, source: int) -> int:
        index = (channel * 2 + parity) * self.world + source
        return HEADER_BYTES + index * self._capacity * 4

    def _channel(self, channel: int, piece: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        """One program of the kernel: push, flag, wait, sum."""
        own = self._host[self.rank]
        header = own[:HEADER_BYTES].view(np.int32)
        epoch = int(header[EPOCHS + channel]) + 1
        mine = self._region(channel, epoch & 1, self.rank)
        if not header[STATUS]:
            for memory in self._host:
                memory[mine : mine + piece.size] = piece
            for memory in self._host:
                flags = memory[:HEADER_BYTES].view(np.int32)
                flags[FLAGS + channel * MAX_RANKS + self.rank] = epoch
            self._await(header, channel, epoch)
        header[EPOCHS + channel] = epoch
        total = torch.zeros(piece.size * 8 // (torch.finfo(dtype).bits), dtype=torch.float32)
        if header[STATUS]:
            return total.fill_(float("nan"))
        for source in range(self.world):
            at = self._region(channel, epoch & 1, source)
            arrived = torch.from_numpy(own[at : at + piece.size].copy()).view(dtype)
            total += arrived.float()
        return total

    def _await(self, header: np.ndarray, channel: int, epoch: int) -> None:
        deadline = time.monotonic() + self.timeout_s
        for source in range(self.world):
            while header[FLAGS + channel * MAX_RANKS + source] - epoch < 0:
                if header[ABORT]:
                    header[STATUS] = status_word(2, source)
                    return
                if time.monotonic() > deadline:
                    header[STATUS] = status_word(1, source)
                    return
                time.sleep(0)


def status_word(reason: int, peer: int) -> int:
    """reason 1: a peer was late; 2: aborted. peer: whose flag was missing."""
    return reason | peer << 8


def raise_for(word: int, rank: int) -> None:
    """Raises: KernelError unless the status word is 0."""
    if word:
        reason = "waited in vain for" if word & 0xFF == 1 else "was told to stop waiting for"
        raise KernelError(f"all-reduce: rank {rank} {reason} rank {word >> 8}")


def all_reduce_ref(parts: list[torch.Tensor]) -> torch.Tensor:
    """Plain torch: fp32 sum in rank order."""
    total = torch.zeros(parts[0].shape, dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total
