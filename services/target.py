"""Which running set or server a command means: ``--run-dir`` or ``--url`` and ``--key``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from decant.protocol.config import Config
from decant.services import rundir
from decant.services.client import Api


def add_run_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run-dir", metavar="DIR", default="", help="default: as decant up")


def add_server(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)
    parser.add_argument("--url", default="", help="a server; default: the set in the run directory")
    parser.add_argument("--key", default="", help="API key; default: $DECANT_API_KEY, keys_file")
    parser.add_argument("--model", metavar="NAME", default="", help="default: the first served")


def run_dir_of(args: argparse.Namespace) -> Path:
    return Path(args.run_dir).absolute() if args.run_dir else rundir.default_run_dir()


def url_of(config: Config) -> str:
    """Where the gateway of a config answers, seen from this host."""
    host = config.gateway.host
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{config.gateway.port}"


def key_of(config: Config) -> str:
    """A key for our own requests, where the gateway asks for one."""
    if not config.gateway.keys_file:
        return ""
    words = Path(config.gateway.keys_file).read_text().split()
    return words[0] if words else ""


def api_of(args: argparse.Namespace, timeout_s: float = 600.0) -> Api:
    """The server that the options name. Raises: ConfigError if there is neither URL nor set."""
    key = args.key or os.environ.get("DECANT_API_KEY", "")
    if args.url:
        return Api(args.url, key, timeout_s)
    config = rundir.read_config(run_dir_of(args))
    return Api(url_of(config), key or key_of(config), timeout_s)


def model_of(args: argparse.Namespace, api: Api) -> str:
    return args.model or api.model()
