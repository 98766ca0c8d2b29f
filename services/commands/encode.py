"""``decant encode FILE``: the prompt that a chat request becomes, and its token ids."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from decant.protocol.errors import ConfigError
from decant.services.chat import verify
from decant.services.cli import OK
from decant.services.commands.verify_chat import add_tokenizer, vocabulary_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="a chat request, or a bare list of messages, as JSON")
    add_tokenizer(parser)
    parser.add_argument("--json", action="store_true", help="prompt and token_ids as JSON")


def run(args: argparse.Namespace) -> int:
    if not Path(args.file).is_file():
        raise ConfigError(f"there is no file {args.file}")
    result = verify.encode_file(args.file, vocabulary_of(args.tokenizer))
    if args.json:
        print(json.dumps(result, ensure_ascii=False))
        return OK
    print(result["prompt"])
    if ids := result.get("token_ids"):
        print(f"\n{len(ids)} ids: {' '.join(map(str, ids))}")
    return OK
