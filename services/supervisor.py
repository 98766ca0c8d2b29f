"""supervisord as we use it: the programs of a config, the generated file, and its XML-RPC.

Knows which processes exist and how they are started and stopped; nothing of readiness, which is the
router's knowledge. One program per process, named like its instance.
"""

from __future__ import annotations

import os
import resource
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xmlrpc.client import Fault, ProtocolError, ServerProxy

from decant.protocol.config import Config
from decant.protocol.errors import ConfigError
from decant.services import mps, observers

# NOTE: importlib.resources cannot read a namespace package of an editable install.
FOLDER = Path(__file__).parent.parent / "supervisord"  # profiles and templates
CONFIG_NAME = "config.toml"
SOCKET_NAME = "supervisord.sock"
MARK = "DECANT_SUPERVISED"  # environment: run directory of the set that a process belongs to
STOP_MARGIN_S = 10.0  # above the drain time, before supervisord kills
NOT_RUNNING_FAULT = 70  # supervisor.xmlrpc.Faults.NOT_RUNNING


@dataclass(frozen=True)
class Program:
    """One process of the set."""

    name: str  # the instance: decode-0
    service: str  # decode: the module decant.services.decode
    priority: int = 100  # lower starts first and stops last
    environment: dict[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()  # of a program that is not ours


def programs(config: Config) -> list[Program]:
    """The processes of a profile, in start order."""

    # NOTE: all GPUs of the set for every worker: memory of a GPU that a process does not see
    # cannot be mapped there. Ranks find theirs by number.
    gpus = ",".join(map(str, config.all_gpus()))

    def worker(service: str, room: Any, priority: int, number: int = 0) -> Program:
        threads = str(room.threads)
        environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        if config.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        elif gpus:
            environment["CUDA_VISIBLE_DEVICES"] = gpus
        if config.gpu.mps:
            environment |= mps.environment(config.run_dir)
            environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(room.sm_share)
        return Program(f"{service}-{number}", service, priority, environment)

    light = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    names = [Program("router-0", "router", 10, light)]
    if config.gpu.mps:
        names.insert(0, Program("mps-0", "mps", 5, light))
    for i in range(config.tokenizer.instances):
        names.append(Program(f"tokenizer-{i}", "tokenizer", 20, light))
    decode, prefill, draft = config.decode, config.prefill, config.draft
    names.append(worker("decode", decode, 30))
    for i in range(prefill.instances):
        names.append(worker("prefill", prefill, 40, i))
    if draft.enabled:
        names.append(worker("draft", draft, 50))
    for i in range(config.gateway.instances):
        names.append(Program(f"gateway-{i}", "gateway", 60, light))
    for other in observers.observers(config):
        names.append(Program(other.name, "", 90, other.environment, other.command))
    return names


def _quoted(value: str) -> str:
    """A value as supervisord reads it: % doubled, no comment sign, no line end."""
    if any(c in value for c in "\n\r\"'") or " ;" in value or " #" in value:
        raise ConfigError(f"supervisord cannot take {value!r}: quotes, line ends or comment signs")
    return value.replace("%", "%%")


def render(config: Config, password: str, python: str = sys.executable) -> str:
    """supervisord's configuration for a resolved config (``run_dir`` is absolute).

    Raises: ConfigError if a path cannot be written in supervisord's format.
    """
    run_dir = _quoted(config.run_dir)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    minfds = 65536 if hard == resource.RLIM_INFINITY else min(65536, hard)
    text = (FOLDER / "supervisord.conf").read_text()
    for name, value in (
        ("minfds", str(minfds)),
        ("run_dir", run_dir),
        ("username", "decant"),
        ("password", password),
    ):
        text = text.replace("{" + name + "}", value)
    template = (FOLDER / "program.conf").read_text()
    for program in programs(config):
        command = shlex.join(
            program.command
            or [python, "-P", "-m", f"decant.services.{program.service}"]
            + ["--config", f"{config.run_dir}/{CONFIG_NAME}", "--instance", program.name]
        )
        environment = ",".join(f'{k}="{_quoted(v)}"' for k, v in program.environment.items())
        part = template
        for name, value in (
            ("name", program.name),
            ("command", command.replace("%", "%%")),
            ("priority", str(program.priority)),
            ("stopwaitsecs", str(int(config.router.drain_s + STOP_MARGIN_S))),
            ("run_dir", run_dir),
            ("environment", environment),
        ):
            part = part.replace("{" + name + "}", value)
        text += part
    return text


def write_config(config: Config) -> Path:
    """Write supervisord.conf and the credentials into the run directory, both mode 0600."""
    run_dir = Path(config.run_dir)
    password = secrets.token_urlsafe(24)
    (run_dir / "logs").mkdir(mode=0o700, exist_ok=True)
    observers.write(config)
    for name, text in (
        ("credentials", f"decant:{password}\n"),
        ("supervisord.conf", render(config, password)),
    ):
        path = run_dir / name
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
    return run_dir / "supervisord.conf"


def start(config: Config, lock: int) -> subprocess.Popen[bytes]:
    """Start supervisord in a session of its own, so that a Ctrl-C on the terminal reaches only us.

    It stays in the foreground there: its parent is the caller, or init once the caller has left.
    lock: descriptor of the locked run directory; supervisord holds it from now on.
    """
    run_dir = Path(config.run_dir)
    path = write_config(config)
    environment = {
        **os.environ,
        MARK: config.run_dir,
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if paths := environment.get("PYTHONPATH"):  # the programs run in another directory
        absolute = [os.path.abspath(p) for p in paths.split(os.pathsep) if p]
        environment["PYTHONPATH"] = os.pathsep.join(absolute)
    path_out = run_dir / "logs" / "supervisord.out"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    with open(os.open(path_out, flags, 0o600), "ab") as out:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "decant.services.supervisord_main", "-c", str(path)]
            + ["--warm"] * (config.warm_start and config.device == "cpu"),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            pass_fds=(lock,),
            env=environment,
            cwd=run_dir,
            umask=0o077,  # its own files too; umask= in its file is for the programs
        )


class SupervisorClient:
    """XML-RPC of the supervisord of a run directory. Every call raises OSError if it is away."""

    def __init__(self, run_dir: str | Path) -> None:
        from supervisor.xmlrpc import SupervisorTransport

        self._path = Path(run_dir)
        try:
            user, _, password = (self._path / "credentials").read_text().strip().partition(":")
        except OSError as error:
            raise ConnectionError(f"no supervisord runs in {run_dir}") from error
        transport = SupervisorTransport(user, password, f"unix://{self._path / SOCKET_NAME}")
        self._proxy = ServerProxy("http://127.0.0.1", transport=transport)

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._proxy.supervisor, method)(*arguments)
        except ProtocolError as error:
            raise ConnectionError(f"supervisord refused: {error.errmsg}") from error

    def processes(self) -> list[dict[str, Any]]:
        """supervisord's process infos: name, statename, pid, start, now, exitstatus, spawnerr."""
        infos: list[dict[str, Any]] = self._call("getAllProcessInfo")
        return infos

    def stop(self, name: str) -> None:
        """SIGTERM, wait for the drain, then SIGKILL; returns when the process is gone."""
        try:
            self._call("stopProcess", name, True)
        except Fault as fault:
            if fault.faultCode != NOT_RUNNING_FAULT:
                raise

    def start(self, name: str) -> None:
        """Start without waiting for ``startsecs``."""
        self._call("startProcess", name, False)

    def signal(self, name: str, signal: str) -> None:
        self._call("signalProcess", name, signal)

    def shutdown(self) -> None:
        """Stop the gateways and wait until they have answered what they have; then stop all others
        at once (supervisord alone would wait for one after the other) and ask it to end.
        """
        with suppress(Fault):  # it is shutting down already
            for info in self.processes():
                if info["name"].startswith("gateway"):
                    self.stop(info["name"])
            self._call("stopAllProcesses", False)
            self._call("shutdown")


def connect(
    run_dir: str | Path, timeout_s: float = 10.0, is_alive: Callable[[], bool] = lambda: True
) -> SupervisorClient:
    """A client whose first call succeeded. Raises: ConnectionError after ``timeout_s``, or as soon
    as supervisord is not alive.
    """
    end = time.monotonic() + timeout_s
    while True:
        try:
            client = SupervisorClient(run_dir)
            client.processes()
            return client
        except OSError as error:
            if time.monotonic() >= end or not is_alive():
                raise ConnectionError(f"no supervisord answers in {run_dir}") from error
            time.sleep(0.05)
