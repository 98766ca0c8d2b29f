"""``decant wire``: print captured frames with the msgpack package alone, without our schemas.

So a capture can be read by a build with other messages, and a schema's mistake cannot hide itself.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from decant.protocol.errors import ConfigError
from decant.services.cli import FAILED, OK

MAX_RECORD = 16 << 20
MAX_IDS = 16  # ids shown of a blob
MAX_TEXT = 400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print a capture. To make one, start the set with DECANT_CAPTURE=FILE in the environment;"
        " the file holds prompts and answers."
    )
    parser.add_argument("file", help="the capture")
    parser.add_argument("--type", default="", help="only messages of this type (generate, tokens)")
    parser.add_argument("--request", default="", help="only messages that name this request id")
    parser.add_argument("--direction", choices=["in", "out"], default="", help="as the process saw")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, nothing cut")
    parser.add_argument("--limit", metavar="N", type=int, default=0, help="stop after N messages")


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a capture; what follows a broken record is given up with ValueError."""
    import msgpack

    with open(path, "rb") as file:
        unpacker = msgpack.Unpacker(file, max_buffer_size=MAX_RECORD, raw=False)
        for record in unpacker:
            if not isinstance(record, dict) or "frames" not in record:
                raise ValueError("not a capture of decant")
            yield record


def decode(record: dict[str, Any]) -> dict[str, Any]:
    """Header and body as plain maps, blobs as sizes and leading int32 values."""
    import msgpack

    parts: list[Any] = []
    for frame in record["frames"][:2]:
        try:
            parts.append(msgpack.unpackb(frame, raw=False, strict_map_key=False))
        except (ValueError, msgpack.UnpackException) as error:
            parts.append({"unreadable": str(error), "hex": frame[:64].hex()})
    header, body = [*parts, {}, {}][:2]
    blobs = [
        {"bytes": size, "int32": list(struct.unpack(f"<{len(b) // 4}i", b[: len(b) // 4 * 4]))}
        for b, size in zip(record["frames"][2:], record["sizes"][2:], strict=True)
    ]
    return {
        "at_ns": record["at_ns"],
        "pid": record["pid"],
        "direction": record["direction"],
        "endpoint": record["endpoint"],
        "header": header,
        "body": body,
        "blobs": blobs,
    }


def _names(value: Any, request: str) -> bool:
    """Whether a request id occurs anywhere in a body."""
    if isinstance(value, dict):
        return any(_names(v, request) for v in value.values())
    if isinstance(value, list):
        return any(_names(v, request) for v in value)
    return bool(value == request)


def line_of(message: dict[str, Any]) -> str:
    """One line for people."""
    header, body = message["header"], message["body"]
    second, ns = divmod(message["at_ns"], 10**9)
    clock = time.strftime("%H:%M:%S", time.gmtime(second)) + f".{ns // 1000:06d}"
    body = dict(body) if isinstance(body, dict) else {"type": "?", "value": body}
    kind = body.pop("type", "?")
    text = json.dumps(body, ensure_ascii=True, default=_plain)
    text = text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "..."
    arrow = "->" if message["direction"] == "out" else "<-"
    source = header.get("source", "?") if isinstance(header, dict) else "?"
    blobs = " ".join(
        f"[{b['bytes']} B: {' '.join(map(str, b['int32'][:MAX_IDS]))}"
        f"{' ...' if b['bytes'] > 4 * MAX_IDS else ''}]"
        for b in message["blobs"]
    )
    endpoint = message["endpoint"].rpartition("/")[2]
    return f"{clock} {arrow} {endpoint:<18} {source:<12} {kind:<14} {text} {blobs}".rstrip()


def _plain(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def run(args: argparse.Namespace) -> int:
    path = Path(args.file)
    if not path.is_file():
        raise ConfigError(f"there is no capture {path}")
    num = 0
    try:
        for record in read(path):
            message = decode(record)
            body = message["body"] if isinstance(message["body"], dict) else {}
            if (
                (args.type and body.get("type") != args.type)
                or (args.request and not _names(body, args.request))
                or (args.direction and message["direction"] != args.direction)
            ):
                continue
            print(json.dumps(message, default=_plain) if args.json else line_of(message))
            num += 1
            if num == args.limit:
                break
    except (ValueError, KeyError, TypeError) as error:
        print(f"decant wire: {path} breaks off after {num} messages: {error}", file=sys.stderr)
        return FAILED
    return OK
