"""The life of a process: exit codes, drain, second signal, parent's death, lock, metrics page."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from decant.protocol.config import Config, dump
from decant.protocol.errors import ConfigError
from decant.services.process import check_run_dir, lock

SERVICE = """
import asyncio, sys
from decant.services import metrics
from decant.services.process import run, stop

async def main(config, instance):
    registry = metrics.registry("test", instance)
    page = asyncio.create_task(metrics.serve(registry, config.metrics_path(instance)))
    print("up", flush=True)
    await stop().wait()
    print("draining", flush=True)
    await asyncio.sleep({drain})
    page.cancel()

run("test", main)
"""


def start(tmp_path: Path, drain: float = 0.0, launcher: bool = False) -> subprocess.Popen[str]:
    """A real process with the main above; with ``launcher`` below a parent that we can kill."""
    (tmp_path / "service.py").write_text(SERVICE.replace("{drain}", str(drain)))
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700, exist_ok=True)
    (tmp_path / "config.toml").write_text(dump(Config(run_dir=str(run_dir))))
    command = [sys.executable, "-P", str(tmp_path / "service.py")]
    command += ["--config", str(tmp_path / "config.toml"), "--instance", "test-0"]
    if launcher:
        code = f"import subprocess, time; p = subprocess.Popen({command!r}); time.sleep(60)"
        command = [sys.executable, "-c", code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_line(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout
    for line in process.stdout:
        if line.strip() == text:
            return
    raise AssertionError(f"the process ended before it said {text!r}: {process.communicate()}")


def test_sigterm_drains_and_exits_0(tmp_path: Path) -> None:
    process = start(tmp_path)
    wait_line(process, "up")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=10)
    assert "draining" in out
    assert process.returncode == 0
    last = json.loads(out.strip().splitlines()[-1])
    assert (last["event"], last["svc"], last["instance"]) == ("stopped", "test", "test-0")


def test_second_signal_stops_at_once(tmp_path: Path) -> None:
    process = start(tmp_path, drain=60)
    wait_line(process, "up")
    process.send_signal(signal.SIGTERM)
    wait_line(process, "draining")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert time.monotonic() - began < 4


def test_parents_death_ends_the_process(tmp_path: Path) -> None:
    parent = start(tmp_path, drain=60, launcher=True)
    wait_line(parent, "up")
    parent.kill()
    parent.wait()
    descriptor = lock(str(tmp_path / "run" / "test-0.process"), wait_s=8)  # free once it is gone
    os.close(descriptor)


def test_lock_keeps_a_second_process_out(tmp_path: Path) -> None:
    descriptor = lock(str(tmp_path / "a.lock"))
    with pytest.raises(ConfigError, match="another process holds"):
        lock(str(tmp_path / "a.lock"), wait_s=0.2)
    os.close(descriptor)
    os.close(lock(str(tmp_path / "a.lock"), wait_s=0.2))


def test_bad_configuration_exits_2_with_one_sentence(tmp_path: Path) -> None:
    process = start(tmp_path)
    wait_line(process, "up")
    process.terminate()
    process.communicate(timeout=10)
    (tmp_path / "run").chmod(0o755)
    process = start(tmp_path)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 2
    assert "open to others" in err
    assert len(err.strip().splitlines()) == 1


def test_run_dir_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not set"):
        check_run_dir("")
    with pytest.raises(ConfigError, match="No such file"):
        check_run_dir(str(tmp_path / "none"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="not a directory"):
        check_run_dir(str(tmp_path / "file"))


def test_metrics_page(tmp_path: Path) -> None:
    process = start(tmp_path)
    wait_line(process, "up")
    path, page = str(tmp_path / "run" / "test-0.metrics"), b""
    deadline = time.monotonic() + 5
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.02)
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5)
        client.connect(path)
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        while piece := client.recv(65536):
            page += piece
    assert page.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"process_resident_memory_bytes" in page
    assert b'decant_build_info{instance="test-0",service="test"' in page
    assert b"decant_loop_lag_seconds" in page
    process.terminate()
    process.communicate(timeout=10)
    assert process.returncode == 0
    assert not os.path.exists(path)
