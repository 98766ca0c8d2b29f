"""``decant admin``: the administrator's calls to a running set, over its Unix socket."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from decant.protocol.errors import ConfigError
from decant.services import rundir
from decant.services.cli import FAILED, NOT_RUNNING, OK
from decant.services.client import ApiError, unix_call
from decant.services.target import add_run_dir, run_dir_of

WITH_NAME = {"drain": "instance", "undrain": "instance", "abort": "request id"}
WITHOUT = ("state", "ledger", "flush_cache")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)
    parser.add_argument(
        "action",
        choices=[*WITHOUT, *WITH_NAME],
        help="state and ledger print JSON; drain: no new work for a process, it ends and is "
        "started anew; flush_cache: forget all prefix caches; abort: end a request",
    )
    parser.add_argument("name", nargs="?", default="", help="instance, or id of a request")


def run(args: argparse.Namespace) -> int:
    wanted = WITH_NAME.get(args.action, "")
    if bool(wanted) != bool(args.name):
        raise ConfigError(
            f"{args.action} needs the {wanted}" if wanted else f"{args.action} takes no name"
        )
    config = rundir.read_config(run_dir_of(args))
    try:
        key = Path(config.admin_key_path).read_text().strip()
    except OSError as error:
        print(f"decant admin: no admin key: {error}", file=sys.stderr)
        return NOT_RUNNING
    path = f"/admin/{args.action}" + (f"/{args.name}" if args.name else "")
    method = "GET" if args.action in ("state", "ledger") else "POST"
    try:
        text = unix_call(config.admin_path, method, path, key)
    except ApiError as error:
        print(f"decant admin: {error.message}", file=sys.stderr)
        return FAILED if error.status else NOT_RUNNING
    print(json.dumps(json.loads(text), indent=1))
    return OK
