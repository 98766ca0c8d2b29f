"""How long the ranks' sums take: one process a rank, graphs of many sums, several row counts.

``python -P -m decant.engine.gpu.sum_time --world 4 --way ipc`` prints one JSON object. All ranks on
one GPU (under MPS, else they take turns of milliseconds), or with ``--spread`` a GPU each. On a CPU
the twin runs and times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decant.engine.gpu.communicator import choose

WIDTH = 4096  # of a row
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CALLS = 40  # in a graph
REPLAYS = 30
COLUMNS = 4096  # of a rank's share of a gather
WAIT_S = 240.0


@torch.inference_mode()
def measure(file: str, rank: int, world: int, way: str, spread: bool) -> dict[str, Any]:
    """One rank: microseconds a sum, and a gather, by rows; median, 10th and 90th percentile."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank if spread else 0) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    comm = choose(file, rank, world, device, (ROWS[-1], WIDTH), COLUMNS, way)
    comm.patience(60.0)
    calls, replays = (CALLS, REPLAYS) if cuda else (2, 2)
    result: dict[str, Any] = {"way": comm.kind, "world": world, "sum_us": {}, "gather_us": {}}
    for name, width in (("sum_us", WIDTH), ("gather_us", COLUMNS)):
        for count in ROWS if cuda else ROWS[:2]:
            x = torch.randn(count, width, device=device)

            def step(name: str = name, x: torch.Tensor = x) -> None:
                for _ in range(calls):
                    if name == "sum_us":
                        comm.all_reduce(x)
                    else:
                        comm.all_reduce(x[:1])  # as in a step: sums stand between gathers
                        comm.all_gather(x)

            run: Callable[[], None] = step
            step()
            if cuda and comm.can_capture:
                torch.cuda.synchronize(device)
                comm.host_gather([0])
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    step()
                run = graph.replay
            took = []
            for _ in range(replays + 3):
                if cuda:
                    torch.cuda.synchronize(device)
                comm.host_gather([0])  # all begin together
                began = time.perf_counter()
                run()
                if cuda:
                    torch.cuda.synchronize(device)
                took.append((time.perf_counter() - began) * 1e6 / calls)
            comm.check()
            cut = np.percentile(took[3:], [50, 10, 90])
            result[name][str(count)] = [round(float(v), 2) for v in cut]
    comm.close()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description="time the sums of a group's ranks")
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--way", default="ipc", choices=("auto", "ipc", "nccl", "gloo"))
    parser.add_argument("--spread", action="store_true", help="a GPU for each rank")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--file", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    file = args.file or str(Path(tempfile.mkdtemp()) / "rendezvous")
    others = []
    if not args.file:
        command = [sys.executable, "-P", "-m", "decant.engine.gpu.sum_time", "--file", file]
        command += ["--world", str(args.world), "--way", args.way]
        command += ["--spread"] if args.spread else []
        others = [
            subprocess.Popen([*command, "--rank", str(r)], stdout=subprocess.DEVNULL)
            for r in range(1, args.world)
        ]
    try:
        result = measure(file, args.rank, args.world, args.way, args.spread)
    finally:
        for other in others:
            try:
                other.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                other.kill()
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
