"""``decant make-checkpoint DIR``: random weights in the published format and real shapes."""

from __future__ import annotations

import argparse
from pathlib import Path

from decant.services.cli import OK


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new or empty folder")
    parser.add_argument("--layers", type=int, default=4, help="1 to 43 (default 4)")
    parser.add_argument(
        "--width", choices=("real", "tiny"), default="real", help="real: about 3.6 GB a layer"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same bytes")


def run(args: argparse.Namespace) -> int:
    from decant.engine.synthetic import make_checkpoint

    size = make_checkpoint(args.folder, args.layers, args.width, args.seed)
    print(f"{args.folder}: {args.layers} layers and the MTP layer, {size / 1e9:.2f} GB")
    return OK
