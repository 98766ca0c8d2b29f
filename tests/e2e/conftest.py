"""The real set, started once a session with ``decant up``, and hands to disturb it with."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from decant.protocol.config import Config
from decant.services import rundir
from decant.services.client import Api, Figures
from decant.services.preflight import demo_folder
from decant.services.supervisor import SupervisorClient
from decant.services.target import url_of

SMALL = [
    "gateway.port=0",
    "decode.pages=96",
    "decode.slots=24",
    "decode.max_batch=16",
    "prefill.pages=64",
    "prefill.slots=8",
    "router.drain_s=5",
]
READY_S = 120.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder starts real processes and shares one set."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.xdist_group("e2e"))


def decant(*words: str, timeout_s: float = 200.0, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user would."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "decant.services.cli", *words],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, **extra},
        check=False,
    )


class RealSet:
    """A running set of processes."""

    def __init__(self, run_dir: Path, pairs: list[str], profile: str = "demo") -> None:
        self.run_dir = run_dir
        words = ["up", "--detach", "--run-dir", str(run_dir), "--profile", profile]
        for pair in pairs:
            words += ["--set", pair]
        done = decant(*words)
        assert done.returncode == 0, done.stdout + done.stderr + self.logs()
        self.config: Config = rundir.read_config(run_dir)
        self.url = url_of(self.config)
        self.api = Api(self.url, timeout_s=120.0)
        self.model = self.config.model.served_name

    def logs(self, num_lines: int = 15) -> str:
        """The ends of all logs, for the message of a failed assertion."""
        parts = []
        for path in sorted((self.run_dir / "logs").glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-num_lines:]
            parts.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(parts)

    def pid(self, name: str) -> int:
        """Process id of a program; 0 while it is down."""
        for info in SupervisorClient(self.run_dir).processes():
            if info["name"] == name:
                return int(info["pid"])
        raise KeyError(name)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Signal a process (once it runs); returns its pid."""
        end = time.monotonic() + 30.0
        while not (pid := self.pid(name)):
            assert time.monotonic() < end, f"{name} does not start\n{self.logs()}"
            time.sleep(0.1)
        os.kill(pid, number)
        return pid

    def router(self, path: str) -> Any:
        """A page of the router's Unix socket, parsed if it is JSON."""

        async def get() -> Any:
            connector = aiohttp.UnixConnector(str(self.run_dir / "router.metrics"))
            async with (
                aiohttp.ClientSession(connector=connector) as session,
                session.get(f"http://router{path}", timeout=aiohttp.ClientTimeout(5)) as answer,
            ):
                text = await answer.text()
                return json.loads(text) if "json" in answer.content_type else text

        return asyncio.run(get())

    def state(self) -> dict[str, Any]:
        """The router's records and the pages of every pool."""
        state: dict[str, Any] = self.router("/state")
        return state

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        end = time.monotonic() + timeout_s
        why: Any = ""
        while time.monotonic() < end:
            try:
                status, why = self.api.call("GET", "/ready")
                if status == 200:
                    return
            except Exception as error:
                why = error
            time.sleep(0.1)
        raise AssertionError(f"not ready after {timeout_s} s: {why}\n{self.logs()}")

    def pages(self) -> dict[str, dict[str, float]]:
        """Pages of each worker by state, from its heartbeat."""
        return {
            member["instance"]: {
                key: value
                for key, value in member.get("stats", {}).items()
                if key.startswith("pages_")
            }
            for member in self.state()["members"]
        }

    def is_clean(self) -> bool:
        """No request is known, and every page of every pool is free or cached."""
        state = self.state()
        if state["num_requests"]:
            return False
        for counts in self.pages().values():
            busy = {k: v for k, v in counts.items() if k not in ("pages_free", "pages_cached")}
            if any(busy.values()):
                return False
        return True

    def wait_clean(self, timeout_s: float = 15.0) -> None:
        end = time.monotonic() + timeout_s
        while not self.is_clean():
            assert time.monotonic() < end, f"not clean: {self.state()}\n{self.logs()}"
            time.sleep(0.1)

    def chat(self, prompt: str, **fields: Any) -> tuple[str, str, Figures]:
        """A streamed chat answer: content, reasoning, figures."""
        fields = {"model": self.model, "temperature": 0, "max_tokens": 64, **fields}
        return self.api.chat([{"role": "user", "content": prompt}], lambda c, t: None, **fields)

    def stop(self) -> None:
        done = decant("down", "--run-dir", str(self.run_dir))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "by force" not in done.stderr, done.stderr


def _has_model() -> bool:
    return any(demo_folder().glob("*.safetensors"))


@pytest.fixture(scope="session")
def start_set() -> Iterator[Callable[..., RealSet]]:
    """Start sets with own settings; all of them are stopped at the end."""
    if not _has_model():
        pytest.skip("the demo's weights are not in this tree")
    started: list[tuple[RealSet, tempfile.TemporaryDirectory[str]]] = []

    def start(*pairs: str, profile: str = "demo") -> RealSet:
        folder = tempfile.TemporaryDirectory(prefix="dcnt-")
        real = RealSet(Path(folder.name) / "run", [*SMALL, *pairs], profile)
        started.append((real, folder))
        return real

    yield start
    for real, folder in started:
        if rundir.find_pids(real.run_dir):
            real.stop()
        folder.cleanup()


@pytest.fixture(scope="session")
def shared_set(start_set: Callable[..., RealSet]) -> RealSet:
    """The set that most tests share."""
    return start_set()


@pytest.fixture
def real_set(shared_set: RealSet) -> Iterator[RealSet]:
    """The shared set, ready before the test and without pages or requests after it."""
    shared_set.wait_ready()
    yield shared_set
    shared_set.wait_ready()
    shared_set.wait_clean()
