"""Compile the kernels of a profile's workers into the caches on disk, without a GPU: before a
machine with one is started, when an image is built, or beside other work.

``python -P -m decant.engine.gpu.warm_cache --profile one-gpu-tp4`` takes the model, sizes and tp of
the profile, runs every role's steps dry on the CPU (``precompile.py``) and compiles what they
would launch. Workers then find it where they look (Triton's cache folder, DECANT_CACHE).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from decant.engine.checkpoint import Checkpoint
from decant.engine.gpu.draft import GpuDraftEngine
from decant.engine.gpu.header import BUCKETS, bucket_of
from decant.engine.gpu.layout import GpuLayout
from decant.engine.gpu.model import GpuModel
from decant.engine.gpu.ops import ALL, Ops
from decant.engine.gpu.pool import GpuPool
from decant.engine.gpu.precompile import compile_all, dry_steps, note, without_device
from decant.engine.gpu.probe import PROBED
from decant.engine.gpu.runner import Runner
from decant.engine.gpu.weights import load_weights
from decant.engine.load import max_context, model_folder
from decant.kernels import tuned
from decant.protocol.config import Config
from decant.protocol.errors import DecantError

ROLES = ("decode", "prefill", "draft")


@torch.no_grad()
def wanted_by(config: Config, role: str) -> list[dict[str, str]]:
    """Kernels that rank 0 of a role would launch (see precompile.note); other ranks launch the
    same."""
    cpu = torch.device("cpu")
    room: Any = {"decode": config.decode, "prefill": config.prefill, "draft": config.draft}[role]
    checkpoint = Checkpoint(model_folder(config))
    shape = checkpoint.shape
    layout = GpuLayout(shape, config.kv.page_tokens, config.kv.max_drafts)
    is_draft = role == "draft"
    weights = load_weights(checkpoint, cpu, not is_draft, "full" if is_draft else "keys", room.tp)
    model_hash = checkpoint.model_hash
    checkpoint.close()
    model = GpuModel(shape, weights, Ops.create(shape, cpu, set(ALL), room.tp))
    drafts = config.draft.num_drafts if config.draft.enabled else 0
    most = bucket_of(config.decode.max_batch)
    chunk = max(config.prefill.chunk_tokens, 128)
    slots = most if is_draft else 1
    name = f"decant-warm-{os.getpid()}-{role}"
    pool = GpuPool.create(name, layout, -(-chunk // layout.page_tokens), slots, cpu)
    try:
        if is_draft:
            engine = GpuDraftEngine(model, layout, cpu, config.kv.max_drafts, model_hash)

            def passes() -> None:
                for num in (n for n in BUCKETS if n <= most):
                    for size in range(1, 2 + drafts):
                        inputs = torch.zeros(4 * num * size, dtype=torch.int32)
                        engine._run(pool, inputs, None, num, size, False)

            return note(passes)
        runner = Runner(model, pool, max_context(config, shape), chunk)
        buckets = [
            (num, size)
            for num in BUCKETS
            if num <= (most if role == "decode" else 1)
            for size in (range(1, 2 + drafts) if role == "decode" else (1,))
        ]
        return note(lambda: dry_steps(model, runner, buckets + PROBED))
    finally:
        pool.close()


def warm(config: Config, arch: int, workers: int, budget_s: float) -> tuple[int, int]:
    """Compile for all roles. Returns: kernels compiled, and how many there are."""
    roles = [r for r in ROLES if r != "draft" or config.draft.enabled]
    found: dict[str, dict[str, str]] = {}
    if config.gpu.mps and max(config.prefill.tp, config.decode.tp, config.draft.tp) > 1:
        tuned.use_shared()  # as the workers do
    with without_device(arch):
        for role in roles:
            for kernel in wanted_by(config, role):
                found[kernel["source"] + kernel["data"]] = kernel
    done = compile_all(list(found.values()), arch, workers, budget_s)
    return done, len(found)


def main() -> int:
    """0 if all were compiled."""
    # the command line is a layer above: what ``decant up`` makes of a profile, and nothing else
    from decant.services.preflight import resolve

    parser = argparse.ArgumentParser(description="compile a profile's GPU kernels without a GPU")
    parser.add_argument("--profile", default="one-gpu")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE")
    parser.add_argument("--arch", type=int, default=90, choices=(90, 120))
    parser.add_argument("--workers", type=int, default=0, help="0: all processors but one")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds")
    args = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            config = resolve(args.profile, args.set, Path(folder))
            done, wanted = warm(config, args.arch, args.workers, args.budget)
        except DecantError as error:
            print(error, file=sys.stderr)
            return 2
    took = time.monotonic() - began
    print(f"{done} of {wanted} kernels of {args.profile} compiled for sm_{args.arch}, {took:.1f} s")
    return 0 if done == wanted else 1


if __name__ == "__main__":
    sys.exit(main())
