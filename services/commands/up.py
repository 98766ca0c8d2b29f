"""``decant up``: check everything, write the config, start supervisord, wait for /ready, stay.

The order matters: nothing is started before every check has passed, and what was started is stopped
again if the set does not become ready.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decant.protocol.config import Config, dump
from decant.protocol.errors import ConfigError
from decant.services import preflight, rundir, supervisor
from decant.services.cli import FAILED, INTERRUPTED, NOT_READY, OK, USAGE
from decant.services.client import Api, ApiError, figures_line, unix_get
from decant.services.exits import Exit, read_exits
from decant.services.target import key_of, run_dir_of, url_of

POLL_S = 0.2
DRAFT_WAIT_S = 20.0
MAX_DEATHS = 3  # of one program before the set is ready
LOAD_BYTES_PER_S = 200 << 20  # slow disk, for the deadline
HELLO = "What is 12 + 30?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--profile", default="demo", help=f"{', '.join(preflight.profiles())}, or a TOML file")
    add("--model", metavar="DIR", default="", help="model folder; default: the one that ships")
    add("--served-model-name", metavar="NAME", default="", help="default: the folder's name")
    add("--max-context", metavar="N", type=int, default=0, help="tokens of a prompt and its answer")
    add("--host", default="", help="address to listen on (default 127.0.0.1)")
    add("--port", metavar="N", type=int, default=None, help="default 8000; 0: any free one")
    add("--run-dir", metavar="DIR", default="", help="sockets, logs, generated configuration")
    add("--metrics-compat", choices=("vllm", "sglang"), default="",
        help="/metrics has the names of that server's dashboards too")  # fmt: skip
    add("--set", metavar="KEY=VALUE", action="append", default=[], dest="pairs",
        help="one setting, such as draft.enabled=false; may be repeated")  # fmt: skip
    add("--detach", action="store_true", help="return when ready, leave the set running")
    add("--ready-timeout", metavar="S", type=float, default=0.0, help="default: by model size")
    add("--hello", nargs="?", const=HELLO, default="", metavar="PROMPT",
        help="when ready, ask this and show the streamed answer with its figures")  # fmt: skip


@dataclass
class Progress:
    """One line that says what is missing: rewritten on a terminal, else printed when it changes."""

    is_terminal: bool = field(default_factory=sys.stderr.isatty)
    started: float = field(default_factory=time.monotonic)
    last: str = ""

    def show(self, text: str) -> None:
        if self.is_terminal:
            line = f"{time.monotonic() - self.started:4.0f} s  {text}"
            print(f"\r\033[K{line[: _columns() - 1]}", end="", file=sys.stderr, flush=True)
        elif text != self.last:
            print(text, file=sys.stderr, flush=True)
        self.last = text

    def clear(self) -> None:
        if self.is_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except OSError:
        return 100


class Died(Exception):
    """A program cannot live; the set will not become ready."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


def pairs_of(args: argparse.Namespace) -> list[str]:
    """The options that are settings, as ``--set`` pairs; ``--set`` itself and the environment."""
    pairs = [*os.environ.get("DECANT_SET", "").split(), *args.pairs]
    for value, name in (
        (args.model, "model.path"),
        (args.served_model_name, "model.served_name"),
        (args.host, "gateway.host"),
        (args.metrics_compat, "observability.metrics_compat"),
    ):
        if value:
            pairs.append(f"{name}={value}")
    if args.max_context:
        pairs.append(f"model.max_context={args.max_context}")
    if args.port is not None:
        pairs.append(f"gateway.port={args.port}")
    return pairs


def run(args: argparse.Namespace) -> int:
    if args.max_context < 0:
        raise ConfigError("--max-context is a number of tokens")
    # NOTE: signals before the set stands must not leave half of it behind: from here on SIGTERM
    # is an interrupt like Ctrl-C and goes through the same clean-up.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run_dir = run_dir_of(args)
    config = preflight.resolve(args.profile, pairs_of(args), run_dir)
    rundir.prepare(run_dir)
    lock = rundir.lock(run_dir)
    if found := rundir.sweep(config):
        print(f"removed what an earlier set left in {run_dir}: {found}", file=sys.stderr)
    weight_bytes = preflight.check(config)
    path = run_dir / supervisor.CONFIG_NAME
    path.write_text(dump(config))
    path.chmod(0o600)
    for old in (run_dir / "logs").glob("*"):
        old.unlink()  # the reasons of an earlier set would be read as this one's
    child = None
    try:
        child = supervisor.start(config, lock)
        os.close(lock)
        patience = 180.0 + weight_bytes / LOAD_BYTES_PER_S
        if config.device == "cuda":  # compiles kernels and captures graphs the first time
            patience += config.gpu.start_s
        wait_ready(config, child, args.ready_timeout or patience)
        if args.hello and config.draft.enabled:
            wait_draft(config)
        announce(config, args)
        if args.detach:
            return OK
        return stay(config, child)
    except KeyboardInterrupt:
        print("\nstopping (again to kill)", file=sys.stderr, flush=True)
        return _stop(config, child, INTERRUPTED)
    except Died as error:
        print(f"decant up: {error}", file=sys.stderr)
        _stop(config, child, error.code)
        return error.code
    except ApiError as error:  # the hello failed
        print(f"decant up: {error.message}", file=sys.stderr)
        return _stop(config, child, FAILED)


def stop_seconds(config: Config) -> float:
    return config.router.drain_s + supervisor.STOP_MARGIN_S + 5.0


def _stop(config: Config, child: subprocess.Popen[bytes] | None, code: int) -> int:
    """Stop the set; a second Ctrl-C kills it. Says what had to be removed by force."""
    try:
        forced = rundir.stop_set(config, stop_seconds(config))
    except KeyboardInterrupt:
        forced = rundir.sweep(config)
    if child is not None:
        child.wait(5.0)  # reap it
    if forced.pids or forced.segments:
        print(f"removed by force: {forced}", file=sys.stderr)
    left = rundir.leftovers(config)
    if left:
        print(f"decant up: left behind: {left}", file=sys.stderr)
        return FAILED
    print("stopped; no process, socket or shared memory segment is left", file=sys.stderr)
    return code


def wait_ready(config: Config, child: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Until /ready says yes. Raises: Died with the sentence that tells why not."""
    end = time.monotonic() + timeout_s
    progress = Progress()
    progress.show("starting")
    try:
        client = supervisor.connect(config.run_dir, 60.0, lambda: child.poll() is None)
    except ConnectionError as error:
        raise Died(f"supervisord did not start; see {config.run_dir}/logs") from error
    api = Api(url_of(config), key_of(config), timeout_s=5.0)
    while True:
        if child.poll() is not None:
            raise Died(f"supervisord ended; see {config.run_dir}/logs/supervisord.log")
        check_deaths(config)
        missing = what_is_missing(client, api)
        if not missing:
            progress.clear()
            return
        progress.show(f"waiting for {missing}")
        if time.monotonic() > end:
            progress.clear()
            raise Died(f"not ready after {timeout_s:.0f} s: {missing}; see {config.run_dir}/logs",
                       NOT_READY)  # fmt: skip
        time.sleep(POLL_S)


def wait_draft(config: Config) -> None:
    """The set serves without its draft process; the figures of the hello are those with it."""
    end = time.monotonic() + DRAFT_WAIT_S
    progress = Progress()
    while time.monotonic() < end:
        try:
            state = json.loads(unix_get(config.metrics_path("router"), "/state"))
            if any(p["service"] == "draft" and p["is_ready"] for p in state["processes"]):
                break
        except (ApiError, ValueError, KeyError):
            pass
        progress.show("ready; waiting for draft-0")
        time.sleep(POLL_S)
    progress.clear()


def check_deaths(config: Config) -> None:
    """Raises: Died for a program that refused its settings or keeps dying."""
    exits = [e for e in read_exits(config.run_dir) if not e.was_asked]
    counts = Counter(e.name for e in exits)
    for end in exits:
        if end.status == USAGE or counts[end.name] >= MAX_DEATHS:
            log = f"{config.run_dir}/logs/{end.name}.log"
            raise Died(f"{end.name} {_how(end)}: {last_words(log)} (see {log})",
                       USAGE if end.status == USAGE else FAILED)  # fmt: skip


def _how(end: Exit) -> str:
    return f"was {end.reason}" if end.signal else f"ended with {end.reason}"


def last_words(path: str) -> str:
    """The last line of a log, shortened; JSON records by their event and error."""
    try:
        lines = Path(path).read_text(errors="replace").strip().splitlines()
    except OSError:
        return "it wrote no log"
    for line in reversed(lines[-50:]):
        try:
            record = json.loads(line)
        except ValueError:
            return line[-300:]
        if isinstance(record, dict) and record.get("level") in ("error", "critical"):
            text = str(record.get("exception") or record.get("error") or record.get("event"))
            return text.strip().splitlines()[-1][-300:]
    return lines[-1][-300:] if lines else "it wrote nothing"


def what_is_missing(client: supervisor.SupervisorClient, api: Api) -> str:
    """A phrase for the progress line; empty when the set is ready."""
    try:
        status, body = api.call("GET", "/ready")
        if status == 200:
            return ""
        return reason_of(body) or f"/ready (HTTP {status})"
    except ApiError:
        pass
    try:
        infos = client.processes()
    except OSError:
        return "supervisord"
    waiting = [i["name"] for i in infos if i["statename"] != "RUNNING"]
    return ", ".join(waiting) if waiting else "the gateway"


def reason_of(body: Any) -> str:
    """The sentence in a body of /ready."""
    if isinstance(body, dict):
        for name in ("why", "reason", "message", "detail"):
            if isinstance(body.get(name), str) and body[name]:
                return str(body[name])
        if isinstance(body.get("error"), dict):
            return reason_of(body["error"])
    return ""


def announce(config: Config, args: argparse.Namespace) -> None:
    """Say where the set answers; the hello, if one is wanted. Raises: ApiError."""
    url, name = url_of(config), config.model.served_name
    print(f"ready: {name} at {url}/v1  (run directory {config.run_dir})")
    if args.hello:
        hello(config, args.hello)
    key = "-H 'Authorization: Bearer KEY' " if config.gateway.keys_file else ""
    print(
        f"try:   curl -sN {url}/v1/chat/completions {key}-H 'Content-Type: application/json' -d"
        f' \'{{"model": "{name}", "stream": true, "messages":'
        ' [{"role": "user", "content": "Sort these numbers: 7, 3, 9"}]}\'',
        flush=True,
    )


def hello(config: Config, prompt: str) -> None:
    """Ask once and show the streamed answer and its figures."""
    print(f"\n> {prompt}")

    def show(channel: str, text: str) -> None:
        print(text, end="", flush=True)

    api = Api(url_of(config), key_of(config), timeout_s=120.0)
    _, _, figures = api.chat(
        [{"role": "user", "content": prompt}],
        show,
        model=config.model.served_name,
        temperature=0,
        max_tokens=200,
    )
    print(f"\n[{figures_line(figures)}]\n", flush=True)


def stay(config: Config, child: subprocess.Popen[bytes]) -> int:
    """In the foreground until Ctrl-C. Deaths of programs are told as they happen."""
    log = Path(config.run_dir) / "logs" / "supervisord.log"
    told, size = len(read_exits(config.run_dir)), log.stat().st_size
    print("Ctrl-C stops the set.", flush=True)
    while child.poll() is None:
        time.sleep(0.5)
        if not log.exists() or log.stat().st_size == size:
            continue
        size, exits = log.stat().st_size, read_exits(config.run_dir)
        for end in exits[told:]:
            print(f"{end.time} {end.name} {_how(end)}; it is started anew", file=sys.stderr)
        told = len(exits)
    forced = rundir.sweep(config)
    print("the set was stopped" + (f"; removed {forced}" if forced else ""), file=sys.stderr)
    return OK
