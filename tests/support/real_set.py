"""A real set of processes for tests: started with ``decant up``, with hands to disturb it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from decant.protocol.config import Config
from decant.services import rundir
from decant.services.client import Api, Figures, unix_get
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
    "warm_start=false",  # loads torch once more, for sets that live longer
]
READY_S = 120.0


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
        """A JSON page of the router's Unix socket."""
        return json.loads(unix_get(self.config.metrics_path("router"), path))

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
            for member in self.state()["processes"]
        }

    def is_clean(self) -> bool:
        """No request is known, and every page of every pool is free or cached."""
        state = self.state()
        if sum(state["requests"].values()) or state["queued"]:
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
