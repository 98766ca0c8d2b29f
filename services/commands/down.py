"""``decant down``: stop the set in order, then prove that nothing is left of it."""

from __future__ import annotations

import argparse
import sys

from decant.protocol.errors import ConfigError
from decant.services import rundir
from decant.services.cli import FAILED, OK
from decant.services.supervisor import STOP_MARGIN_S
from decant.services.target import add_run_dir, run_dir_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)
    parser.add_argument("--now", action="store_true", help="kill at once instead of draining")


def run(args: argparse.Namespace) -> int:
    run_dir = run_dir_of(args)
    try:
        config = rundir.read_config(run_dir)
    except ConfigError:
        print(f"nothing runs in {run_dir}")
        return OK
    before = rundir.leftovers(config)
    if args.now:
        forced = rundir.sweep(config)
    else:
        forced = rundir.stop_set(config, config.router.drain_s + STOP_MARGIN_S + 5.0)
        if forced.pids or forced.segments:
            print(f"removed by force: {forced}", file=sys.stderr)
    left = rundir.leftovers(config)
    if left:
        print(f"decant down: left behind in {run_dir}: {left}", file=sys.stderr)
        return FAILED
    what = f"stopped {len(before.pids)} processes" if before.pids else f"nothing runs in {run_dir}"
    print(f"{what}; no process, socket or shared memory segment is left")
    return OK
