"""Time the all-reduce between processes on the GPUs of this machine: ``time_all_reduce.py WORLD
OUT.json``. Ranks share a GPU where there are fewer than ranks: start MPS first, without it every
wait costs a time slice.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from all_reduce_ranks import exchange_over

from decant.kernels.all_reduce import AllReduce

HIDDEN = 4096
CALLS, REPLAYS = 20, 30


def rank_main(rank: int, world: int, pipe: Connection) -> None:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    group = AllReduce(rank, world, 64 * HIDDEN, device, exchange_over(pipe), timeout_s=5.0)
    lines: list[dict[str, Any]] = []
    for rows in (1, 8, 64):
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(rows, HIDDEN, device=device).to(dtype)
            out = torch.empty_like(x)
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                group.reduce(x, out)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(CALLS):
                    group.reduce(x, out)
            times = []
            for _ in range(REPLAYS):
                begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) * 1e3 / CALLS)
            group.check()
            lines.append({
                "op": "all_reduce", "case": f"world={world} rows={rows} {dtype}",
                "us": statistics.median(times), "us_p10": sorted(times)[len(times) // 10],
                "us_p90": sorted(times)[-1 - len(times) // 10],
                "gpus": torch.cuda.device_count(), "hardware": torch.cuda.get_device_name(),
            })  # fmt: skip
    pipe.send(lines)
    pipe.recv()
    group.close()


def main(world: int, path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(world):
        mine, theirs = context.Pipe()
        process = context.Process(target=rank_main, args=(rank, world, theirs), daemon=True)
        process.start()
        pipes.append(mine)
        processes.append(process)
    for _ in range(2):
        own = [pipe.recv_bytes() for pipe in pipes]
        for pipe in pipes:
            pipe.send(own)
    results = []
    for rank, pipe in enumerate(pipes):
        if not pipe.poll(120):
            raise SystemExit(f"rank {rank} did not answer")
        results.append(pipe.recv())
    for pipe in pipes:
        pipe.send("end")
    path.write_text(json.dumps(results[0], indent=1) + "\n")
    for line in results[0]:
        print(f"{line['case']:<40} {line['us']:8.2f} us")
    for process in processes:
        process.join(10)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
