"""``decant verify DIR...``: the engine against fixtures of expected values."""

from __future__ import annotations

import argparse
from pathlib import Path

from decant.protocol.errors import ConfigError
from decant.services.cli import FAILED, OK


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folders",
        nargs="+",
        metavar="DIR",
        help="a folder with config.json, model*.safetensors and expected.safetensors",
    )


def run(args: argparse.Namespace) -> int:
    folders = [Path(f) for f in args.folders if not Path(f).is_file()]  # a glob finds READMEs too
    if not folders:
        raise ConfigError("none of these is a folder")
    for folder in folders:
        if not (folder / "expected.safetensors").is_file():
            raise ConfigError(f"there is no expected.safetensors in {folder}")
    from decant.engine.verify import report, verify_folder

    wrong = 0
    for folder in folders:
        checks = verify_folder(folder)
        print(report(folder, checks), flush=True)
        wrong += sum(not c.is_ok for c in checks)
    print("all within bounds" if not wrong else f"{wrong} quantities out of bounds")
    return FAILED if wrong else OK
