"""``decant bench-kernels``: the GPU kernels at the model's shapes, and what memory allows."""

from __future__ import annotations

import argparse

from decant.protocol.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "op",
        nargs="*",
        help="operation, such as moe or linear (an unknown one lists them); default: all",
    )
    parser.add_argument("--json", metavar="FILE", default="", help="write the records as JSON")


def run(args: argparse.Namespace) -> int:
    """The exit code is 1 if a kernel's result was wrong. Raises: ConfigError without a GPU."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("there is no GPU here; decant doctor says what is missing")
    try:
        from decant.kernels import bench
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install decant[gpu]") from error
    return bench.main([*args.op, *(["--json", args.json] if args.json else [])])
