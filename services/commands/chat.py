"""``decant chat``: one question, or a conversation. Reasoning is shown apart from the answer."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from typing import Any

from decant.services.cli import FAILED, OK
from decant.services.client import Api, ApiError, figures_line
from decant.services.target import add_server, api_of, model_of

DIM, PLAIN, CYAN = "\033[2m", "\033[0m", "\033[36m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server(parser)
    add = parser.add_argument
    add("prompt", nargs="?", default="", help="without it: a conversation; - reads standard input")
    add("--system", default="", help="system message")
    add("--thinking", action="store_true", help="let the model reason first")
    add("--effort", choices=["low", "medium", "high", "max"], default="", help="of reasoning")
    add("--temperature", type=float, default=None, help="0 is greedy; default: the server's")
    add("--top-p", type=float, default=None, help="above 0, to 1")
    add("--seed", type=int, default=None, help="the same seed gives the same answer")
    add("--max-tokens", type=int, default=None, help="of the answer, reasoning included")
    add("--figures", action="store_true", help="show TTFT, TPOT and acceptance after an answer")


class Screen:
    """Writes pieces of an answer; marks the border between reasoning and answer."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._channel = ""

    def show(self, channel: str, text: str) -> None:
        if channel != self._channel:
            self._border(channel)
            self._channel = channel
        # NOTE: control characters of a model's answer must not reach the terminal.
        print("".join(c for c in text if c >= " " or c in "\n\t"), end="", flush=True)

    def _border(self, channel: str) -> None:
        if self._channel:
            print(PLAIN if self._is_terminal else "", end="")
            print("\n")
        if channel == "reasoning":
            print(f"{DIM if self._is_terminal else ''}[reasoning] ", end="")
        elif channel == "tool":
            print(f"{CYAN if self._is_terminal else ''}[tool call] ", end="")
        elif self._channel:
            print("[answer] ", end="")

    def end(self) -> None:
        print(PLAIN if self._is_terminal else "", flush=True)
        self._channel = ""


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Request fields from the options; what was not given is left to the server."""
    fields: dict[str, Any] = {}
    for name in ("temperature", "top_p", "seed", "max_tokens"):
        if (value := getattr(args, name)) is not None:
            fields[name] = value
    if args.thinking or args.effort:
        fields["thinking"] = {"type": "enabled"}
    if args.effort:
        fields["reasoning_effort"] = args.effort
    return fields


def run(args: argparse.Namespace) -> int:
    api = api_of(args)
    fields = {"model": model_of(args, api), **options_of(args)}
    messages: list[dict[str, Any]] = []
    if args.system:
        messages.append({"role": "system", "content": args.system})
    if args.prompt:
        prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
        messages.append({"role": "user", "content": prompt})
        answer(api, messages, fields, args.figures)
        return OK
    return converse(api, messages, fields, args.figures)


def answer(
    api: Api, messages: list[dict[str, Any]], fields: dict[str, Any], wants_figures: bool
) -> None:
    """Ask, show, and append the answer to the messages. Raises: ApiError."""
    screen = Screen()
    try:
        content, reasoning, figures = api.chat(messages, screen.show, **fields)
    finally:
        screen.end()
    if wants_figures:
        print(f"[{figures_line(figures)}]")
    messages.append({"role": "assistant", "content": content, "reasoning_content": reasoning})


def converse(
    api: Api, messages: list[dict[str, Any]], fields: dict[str, Any], wants_figures: bool
) -> int:
    """Prompt after prompt until Ctrl-D; /new forgets, Ctrl-C stops an answer."""
    with suppress(ImportError):
        import readline  # noqa: F401  line editing, where Python has it
    print(f"{fields['model']} at {api.url}. /new starts over, Ctrl-D ends.")
    system, failed = list(messages), False
    while True:
        try:
            prompt = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return FAILED if failed else OK
        if prompt in ("/new", "/reset"):
            messages[:] = system
        elif prompt:
            messages.append({"role": "user", "content": prompt})
            try:
                answer(api, messages, fields, wants_figures)
                failed = False
            except ApiError as error:
                print(error.message, file=sys.stderr)
                messages.pop()
                failed = True
            except KeyboardInterrupt:
                print("[stopped]")
                messages.pop()
