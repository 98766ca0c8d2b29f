"""``decant bench``: the load generator, aimed at the set in the run directory unless --url says
otherwise.
"""

from __future__ import annotations

import argparse

from decant.loadgen import cli as loadgen
from decant.services import rundir
from decant.services.cli import EXIT_CODES
from decant.services.target import add_run_dir, key_of, run_dir_of, url_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    loadgen.add_arguments(parser)
    add_run_dir(parser)
    parser.set_defaults(url="")
    parser.epilog = (
        f"{parser.epilog or ''}\n{EXIT_CODES}"
        "  of bench: 1 no request ended well, 2 no server, 3 answers under load differ or pages"
        " leaked\n"
    )


def run(args: argparse.Namespace) -> int:
    if not args.url:
        config = rundir.read_config(run_dir_of(args))
        args.url, args.key = url_of(config), args.key or key_of(config)
    return loadgen.main(args)
