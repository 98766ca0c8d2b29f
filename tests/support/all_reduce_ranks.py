"""What a rank of the all-reduce tests does, in a module that other processes can import."""

import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import cuda_on_host
import torch

from decant.kernels import cuda
from decant.kernels.all_reduce import AllReduce
from decant.protocol.errors import KernelError

CPU = torch.device("cpu")
MAX_VALUES = 20_000


def exchange_over(pipe: Connection) -> Callable[[bytes], Sequence[bytes]]:
    def exchange(own: bytes) -> Sequence[bytes]:
        pipe.send_bytes(own)
        return [bytes(b) for b in pipe.recv()]

    return exchange


def input_of(rank: int, call: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Values whose fp32 sum depends on the order of the ranks."""
    generator = torch.Generator().manual_seed(1000 * rank + call)
    scale = torch.exp2(torch.randint(-12, 13, (numel,), generator=generator).float())
    return (torch.randn(numel, generator=generator) * scale).to(dtype)


CALLS = [(24_000 // 3, torch.float32), (8, torch.bfloat16), (MAX_VALUES, torch.float16)]
CALLS += [(4096, torch.bfloat16), (1024, torch.float32), (1032, torch.float32)]


def use_kernel(group: AllReduce) -> None:
    """Let the CUDA kernel's own source do what the twin does."""
    cuda.function, cuda.launch = cuda_on_host.function, cuda_on_host.launch  # type: ignore[assignment]
    group.arch = "sm_90"
    group._pointers = torch.tensor([memory.data_ptr() for memory in group._memory.ranks])
    group._reduce_on_host = group._launch  # type: ignore[method-assign]


def rank_main(
    rank: int, world: int, pipe: Connection, job: str, timeout_s: float, how: str
) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if how == "gpu" else CPU  # all ranks on one GPU
    group = AllReduce(rank, world, MAX_VALUES, device, exchange_over(pipe), timeout_s)
    if how == "kernel":
        use_kernel(group)
    result: list[Any] = []
    if job == "sums":
        for call in range(4 * len(CALLS)):
            if (call + rank) % world == 0:
                time.sleep(0.002)  # another rank is the last one each time
            numel, dtype = CALLS[call % len(CALLS)]
            out = torch.full((numel,), 7.0, device=device)
            x = input_of(rank, call, numel, dtype).to(device)
            result.append(group.reduce(x, out).cpu().numpy().tobytes())
        group.check()
    elif job == "silent" and rank == world - 1:
        time.sleep(1.5)  # never calls
    elif job == "silent":
        out = group.reduce(torch.ones(64, device=device))
        group.status().cpu()
        again = time.monotonic()
        group.reduce(torch.ones(64, device=device))
        group.status().cpu()
        result = [bool(out.isnan().all()), time.monotonic() - again]
        try:
            group.check()
        except KernelError as error:
            result.append(str(error))
    elif job == "abort":
        if rank == 0:
            group.reduce(torch.ones(64, device=device))
            try:
                group.check()
            except KernelError as error:
                result.append(str(error))
        else:
            time.sleep(0.3)
            group.abort()
    elif job == "killed":
        group.reduce(torch.ones(64, device=device)).cpu()
        pipe.send("ready")
        if rank == 1:
            time.sleep(60)
        group.reduce(torch.ones(64, device=device))
        result.append(int(group.status().cpu()[0]))
    pipe.send(result)
    pipe.recv()
    group.close()
