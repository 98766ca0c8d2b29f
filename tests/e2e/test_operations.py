"""``decant`` against the running set: status, chat, restart, a second up, down."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from real_set import RealSet, decant

from decant.engine import synthetic
from decant.services import rundir
from decant.services.preflight import demo_folder


def test_status(real_set: RealSet) -> None:
    done = decant("status", "--json", "--run-dir", str(real_set.run_dir))
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert status["is_ready"]
    assert {p["state"] for p in status["processes"]} == {"running"}
    total = sum(p["rss_bytes"] for p in status["processes"])
    assert total < 3e9, f"{total / 1e9:.2f} GB resident"
    done = decant("status", "--run-dir", str(real_set.run_dir))
    assert "decode-0" in done.stdout and "ready" in done.stdout


def test_chat_command(real_set: RealSet) -> None:
    run_dir = str(real_set.run_dir)
    done = decant("chat", "What is 12 + 30?", "--figures", "--temperature", "0",
                  "--run-dir", run_dir)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "TTFT" in done.stdout and len(done.stdout.splitlines()) >= 2


def test_metrics_of_all_processes(real_set: RealSet) -> None:
    status, page = real_set.api.call("GET", "/metrics")
    assert status == 200
    for service in ("gateway", "tokenizer", "router", "prefill", "decode", "draft"):
        assert f'svc="{service}"' in page, service


def test_sockets_are_closed_to_others(real_set: RealSet) -> None:
    assert stat.S_IMODE(real_set.run_dir.stat().st_mode) == 0o700
    for path in real_set.run_dir.iterdir():
        if path.is_socket():
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_a_second_set_in_the_run_dir_is_refused(real_set: RealSet) -> None:
    done = decant("up", "--detach", "--port", "0", "--run-dir", str(real_set.run_dir))
    assert done.returncode == 2
    assert "already runs" in done.stderr
    real_set.wait_ready(5.0)


def test_the_port_is_taken(real_set: RealSet, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("r")
    port = str(real_set.config.gateway.port)
    done = decant("up", "--detach", "--port", port, "--run-dir", str(folder))
    assert done.returncode == 2
    assert port in done.stderr


@pytest.mark.timeout(240)
@pytest.mark.parametrize("service", ["tokenizer", "decode", "prefill", "draft", "router"])
def test_restart_under_load(service: str, real_set: RealSet) -> None:
    fields = {"temperature": 0, "max_tokens": 200, "ignore_eos": True}
    expected = real_set.chat("Sort these numbers: 5, 3, 8, 1", **fields)[0]
    answers: list[str] = []

    def ask() -> None:
        answers.append(real_set.chat("Sort these numbers: 5, 3, 8, 1", **fields)[0])

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    done = decant("restart", service, "--run-dir", str(real_set.run_dir))
    for thread in threads:
        thread.join()
    assert done.returncode == 0, done.stderr + real_set.logs()
    assert answers == [expected] * 3


@pytest.mark.timeout(240)
def test_foreground_until_interrupt(
    start_set: Callable[..., RealSet], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What ``make run`` does: hello, figures, a curl line; Ctrl-C leaves nothing behind."""
    import signal

    run_dir = tmp_path_factory.mktemp("r")
    words = ["up", "--hello", "--port", "0", "--run-dir", str(run_dir)]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "decant.services.cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        lines = []
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if "Ctrl-C" in line:
                break
        out = "".join(lines)
        assert "TTFT" in out and "TPOT" in out and "curl" in out and "ready:" in out, out
        config = rundir.read_config(run_dir)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=90)
        assert process.returncode == 130, err
        assert not rundir.leftovers(config)
        assert "by force" not in err
    finally:
        process.kill()
        process.wait()
        if (run_dir / "config.toml").exists():
            rundir.sweep(rundir.read_config(run_dir))


@pytest.mark.timeout(240)
def test_down_after_the_supervisor_was_killed(start_set: Callable[..., RealSet]) -> None:
    """kill -9 of supervisord: the processes end by themselves or by ``down``; nothing is left."""
    real = start_set()
    supervisor = int((real.run_dir / "supervisord.pid").read_text())
    rundir.kill([supervisor])
    done = decant("down", "--run-dir", str(real.run_dir))
    assert done.returncode == 0, done.stderr
    assert not rundir.leftovers(real.config)
    assert not rundir.is_alive(supervisor)


@pytest.mark.timeout(240)
def test_a_downloaded_folder(
    start_set: Callable[..., RealSet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The published tensor names, dtypes and shard index in tiny shapes, by its path only."""
    tiny = {**synthetic.WIDTHS["tiny"], "vocab_size": 2560}
    monkeypatch.setitem(synthetic.WIDTHS, "tiny", tiny)
    folder = tmp_path / "DeepSeek-V4-Flash"
    synthetic.make_checkpoint(folder, 5, "tiny", 1)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(demo_folder() / name, folder / name)
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    real_set = start_set(f"model.path={folder}")
    try:
        done = decant("chat", "Why is the sky blue?", "--figures", "--max-tokens", "20",
                      "--run-dir", str(real_set.run_dir))  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "TTFT" in done.stdout
        _, models = real_set.api.call("GET", "/v1/models")
        assert "DeepSeek-V4-Flash" in str(models)
        real_set.wait_clean()
    finally:
        real_set.stop()
