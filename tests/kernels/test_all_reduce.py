"""The all-reduce's protocol between real processes over shared memory."""

import multiprocessing
import os
import signal
import time
from typing import Any

import cuda_on_host
import pytest
import torch
from all_reduce_ranks import CALLS, CPU, input_of, rank_main

from decant.kernels.all_reduce import (
    CHANNELS,
    FLAGS,
    GRAIN,
    MAX_RANKS,
    MIN_SHARE,
    TYPES,
    AllReduce,
    all_reduce_ref,
    capacity,
    shares,
    workspace_bytes,
)
from decant.protocol.errors import ConfigError, HandoffError

GPU = pytest.param("gpu", marks=pytest.mark.gpu)
HOW = pytest.mark.parametrize("how", ["twin", "kernel", GPU])


def run_ranks(
    job: str, world: int, how: str, timeout_s: float = 20.0, kill: int | None = None
) -> list[Any]:
    if how == "kernel":  # once, not by every rank
        for _, dtype in CALLS:
            cuda_on_host.function(
                "all_reduce", "all_reduce_kernel", "sm_90", IN=TYPES[dtype], OUT=0
            )
    # forkserver: a fork, but of a process without threads and without a CUDA context
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    pipes, processes = [], []
    for rank in range(world):
        mine, theirs = context.Pipe()
        process = context.Process(target=rank_main, args=(rank, world, theirs, job, timeout_s, how))
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    try:
        for _ in range(2):  # handles, then "mapped"
            own = [pipe.recv_bytes() for pipe in pipes]
            for pipe in pipes:
                pipe.send(own)
        if kill is not None:
            for pipe in pipes:
                assert pipe.recv() == "ready"
            os.kill(processes[kill].pid or 0, signal.SIGKILL)
        results = []
        for rank, pipe in enumerate(pipes):
            if rank != kill:
                assert pipe.poll(60), f"rank {rank} did not answer"
                results.append(pipe.recv())
        for rank, pipe in enumerate(pipes):
            if rank != kill:
                pipe.send("end")
        return results
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def test_shares_cover_every_value_and_fit() -> None:
    for numel in range(GRAIN, 40_000, GRAIN):
        channels, share = shares(numel)
        assert channels <= CHANNELS
        assert share % GRAIN == 0
        assert (channels - 1) * share < numel <= channels * share
        assert share <= capacity(numel)
    assert FLAGS + CHANNELS * MAX_RANKS <= 1024  # the header's words
    assert workspace_bytes(4, 4096) == 4096 + 8 * 2 * 4 * MIN_SHARE * 4


@HOW
@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_holds_the_bits_of_the_sum_in_rank_order(world: int, how: str) -> None:
    results = run_ranks("sums", world, how)
    differs_by_order = 0
    for call in range(4 * len(CALLS)):
        numel, dtype = CALLS[call % len(CALLS)]
        parts = [input_of(rank, call, numel, dtype) for rank in range(world)]
        expected = all_reduce_ref(parts).numpy().tobytes()
        for result in results:
            assert result[call] == expected
        differs_by_order += all_reduce_ref(parts[::-1]).numpy().tobytes() != expected
    assert world == 2 or differs_by_order  # two values are summed alike in either order


@HOW
def test_a_silent_rank_ends_the_wait_and_poisons(how: str) -> None:
    is_nan, second, message = run_ranks("silent", 3, how, timeout_s=0.4)[0]
    assert is_nan
    assert second < 0.3  # a failed group does not wait again
    assert "rank 0 waited in vain for rank 2" in message


@HOW
def test_abort_ends_the_wait(how: str) -> None:
    began = time.monotonic()
    results = run_ranks("abort", 2, how, timeout_s=60.0)
    assert "was told to stop waiting for rank 1" in results[0][0]
    assert time.monotonic() - began < 50


@HOW
def test_a_killed_rank_ends_the_wait(how: str) -> None:
    assert run_ranks("killed", 2, how, timeout_s=0.5, kill=1) == [[1 | 1 << 8]]


def test_what_does_not_fit_is_refused() -> None:
    group = AllReduce(0, 1, 4096, CPU, lambda own: [own])
    assert not group.fits(torch.ones(4104))
    assert not group.fits(torch.ones(4))
    assert not group.fits(torch.ones(64, 2).t())
    assert not group.fits(torch.ones(64, dtype=torch.float64))
    with pytest.raises(ValueError, match="does not fit"):
        group.reduce(torch.ones(8192))
    with pytest.raises(ValueError, match="out must be"):
        group.reduce(torch.ones(64), torch.ones(32))
    x = torch.randn(64)
    assert group.reduce(x, x) is x
    group.check()
    group.close()
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        AllReduce(2, 2, 64, CPU, lambda own: [own])
    with pytest.raises(HandoffError, match="rank order"):
        AllReduce(0, 2, 64, CPU, lambda own: [b"other", own])
    with pytest.raises(HandoffError, match="not the name"):
        AllReduce(0, 2, 64, CPU, lambda own: [own, b"../etc/passwd"])
