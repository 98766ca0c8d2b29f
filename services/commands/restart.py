"""``decant restart SERVICE``: drain each process of a service, start it anew, wait."""

from __future__ import annotations

import argparse
import sys
import time

from decant.protocol.errors import ConfigError
from decant.services import rundir
from decant.services.cli import FAILED, NOT_READY, NOT_RUNNING, OK
from decant.services.client import Api, ApiError
from decant.services.supervisor import SupervisorClient, programs
from decant.services.target import add_run_dir, key_of, run_dir_of, url_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)
    parser.add_argument("service", help="gateway, tokenizer, router, prefill, decode, draft, or "
                        "one instance such as tokenizer-1")  # fmt: skip
    parser.add_argument("--timeout", metavar="S", type=float, default=180.0, help="until ready")


def run(args: argparse.Namespace) -> int:
    config = rundir.read_config(run_dir_of(args))
    wanted = [p.name for p in programs(config) if args.service in (p.service, p.name)]
    if not wanted:
        names = ", ".join(sorted({p.service for p in programs(config)}))
        raise ConfigError(f"there is no service {args.service!r} in this set; there are {names}")
    api = Api(url_of(config), key_of(config), timeout_s=5.0)
    for name in wanted:
        print(f"draining {name}", file=sys.stderr, flush=True)
        try:
            # NOTE: supervisord answers only after the drain, and meanwhile serves others.
            client = SupervisorClient(config.run_dir)
            client.stop(name)
            client.start(name)
        except OSError as error:
            print(f"decant restart: {error}", file=sys.stderr)
            return NOT_RUNNING
        if not _wait(client, api, name, args.timeout):
            print(f"decant restart: not ready {args.timeout:.0f} s after the start of {name};"
                  f" see {config.run_dir}/logs/{name}.log", file=sys.stderr)  # fmt: skip
            return NOT_READY
    print(f"restarted {', '.join(wanted)}")
    return OK if wanted else FAILED


def _wait(client: SupervisorClient, api: Api, name: str, timeout_s: float) -> bool:
    """Until the process runs and /ready says yes."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        time.sleep(0.2)
        try:
            states = {i["name"]: i["statename"] for i in client.processes()}
            if states.get(name) in ("STARTING", "RUNNING") and api.call("GET", "/ready")[0] == 200:
                return True
        except (OSError, ApiError):
            continue
    return False
