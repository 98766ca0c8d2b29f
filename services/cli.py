"""The ``decant`` command: finds the subcommand, prints errors as one sentence, sets the exit code.

Each subcommand is a module of ``decant.services.commands`` with ``add_arguments(parser)`` and
``run(args) -> int``; only the one that is called is imported, so ``decant status`` needs no torch.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence

from decant.protocol.errors import ConfigError, DecantError

OK = 0
FAILED = 1  # it ran, and what it did or checked went wrong
USAGE = 2  # wrong arguments, settings or surroundings; nothing was done
NOT_RUNNING = 3
NOT_READY = 4
INTERRUPTED = 130

COMMANDS = {  # name -> module, one line
    "up": ("up", "start the set of processes and wait until it is ready"),
    "down": ("down", "stop the set and prove that nothing is left of it"),
    "status": ("status", "show the processes, readiness and pages"),
    "restart": ("restart", "drain and restart one service"),
    "admin": ("admin", "drain, undrain, abort, flush the caches; state and ledger as JSON"),
    "top": ("top", "watch the set: rates, latencies, pages, processes"),
    "trace": ("trace", "what happened to a request, from the logs of all processes"),
    "doctor": ("doctor", "is this machine fit? every finding with its fix"),
    "chat": ("chat", "ask the running set; without a prompt: a conversation"),
    "bench": ("bench", "load generator: latency, throughput, goodput, acceptance"),
    "bench-kernels": ("bench_kernels", "measure the GPU kernels at the model's shapes"),
    "verify": ("verify", "run fixtures through the engine and compare with expected values"),
    "eval": ("eval", "ask held-out prompts of the demo's skills and count right answers"),
    "verify-chat": ("verify_chat", "compare the chat encoding with a file of examples"),
    "encode": ("encode", "print the prompt, and its ids, of a chat request in a file"),
    "make-checkpoint": ("make_checkpoint", "write random weights in the published format"),
    "wire": ("wire", "print captured frames between processes, without our schemas"),
}

EXIT_CODES = """\
exit codes:
  0    done
  1    failed: a process died, a request failed, a check found a difference
  2    wrong arguments, settings or surroundings (port or run directory in use, model folder
       missing or of another kind, too little memory or /dev/shm); nothing was started
  3    no set runs in the run directory
  4    the set runs but is not ready (in time)
  130  interrupted
"""


def version() -> str:
    """The installed version; "source" in a work tree that was not installed."""
    try:
        return importlib.metadata.version("decant")
    except importlib.metadata.PackageNotFoundError:
        return "source"


def overview() -> str:
    """What ``decant --help`` prints."""
    width = max(map(len, COMMANDS)) + 2
    rows = "\n".join(f"  {name:<{width}}{line}" for name, (_, line) in COMMANDS.items())
    return (
        "usage: decant COMMAND [options]     (decant COMMAND --help explains one)\n\n"
        "Serves DeepSeek-V4-Flash: prefill and decode in different processes, MTP drafts, an\n"
        f"OpenAI-compatible API.\n\ncommands:\n{rows}\n\n"
        "environment:\n"
        "  DECANT_RUN_DIR  the run directory, if --run-dir is not given\n"
        "  DECANT_SET      settings like --set, separated by spaces\n"
        "  DECANT_CAPTURE  file into which every process copies its frames (see decant wire)\n\n"
        f"{EXIT_CODES}"
    )


def parser_for(name: str) -> argparse.ArgumentParser:
    """The argument parser of one command."""
    module, line = COMMANDS[name]
    parser = argparse.ArgumentParser(
        prog=f"decant {name}",
        description=line[0].upper() + line[1:] + ".",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    importlib.import_module(f"decant.services.commands.{module}").add_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. A reader that leaves (``| head``) is no error."""
    try:
        code = dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def dispatch(words: list[str]) -> int:
    """Run the command that ``words`` name; every expected failure becomes a line and a code."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview(), end="")
        return OK if words else USAGE
    if words[0] in ("-V", "--version"):
        print(f"decant {version()}")
        return OK
    if words[0] not in COMMANDS:
        print(f"decant: there is no command {words[0]!r}; see decant --help", file=sys.stderr)
        return USAGE
    try:
        arguments = parser_for(words[0]).parse_args(words[1:])
        module = importlib.import_module(f"decant.services.commands.{COMMANDS[words[0]][0]}")
        code: int = module.run(arguments)
        return code
    except SystemExit as end:  # argparse: 0 after --help, 2 after a usage error
        return end.code if isinstance(end.code, int) else FAILED
    except ConfigError as error:
        print(f"decant {words[0]}: {error.message}", file=sys.stderr)
        return USAGE
    except DecantError as error:
        print(f"decant {words[0]}: {error.message}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
