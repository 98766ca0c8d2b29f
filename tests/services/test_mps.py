"""The MPS daemon of a set, and the order in which a GPU process is ended, with a control command of
our own that keeps a log."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from decant.engine.gpu.device import wait_for_mps
from decant.engine.gpu.header import Sizes, StepHeader
from decant.engine.load import pool_prefix
from decant.protocol.config import Config, GpuConfig, RouterConfig, build
from decant.protocol.errors import ConfigError
from decant.services import mps, preflight, rundir, supervisor
from decant.services.process import stop
from decant.services.reaper import Reaper

CONTROL = """#!{python}
import os, sys, time
from pathlib import Path
pipe = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
log = pipe.parent / "said"
if sys.argv[1:] == ["-f"]:
    (pipe / "control").touch()
    while not (pipe.parent / "quit").exists():
        time.sleep(0.02)
    sys.exit(0)
command = sys.stdin.read().strip()
with log.open("a") as file:
    file.write(f"{{time.monotonic()}} {{command}}\\n")
clients = pipe.parent / "clients"
if command == "get_server_list":
    print("777")
elif command.startswith("get_client_list 777"):
    print(clients.read_text() if clients.exists() else "")
elif command.startswith("terminate_client 777"):
    pids = clients.read_text().split()
    pids.remove(command.split()[-1])
    clients.write_text("\\n".join(pids))
elif command == "quit":
    (pipe.parent / "quit").touch()
else:
    sys.exit(1)
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A set whose control command is the script above."""
    tools = tmp_path / "bin"
    tools.mkdir()
    script = tools / mps.CONTROL
    script.write_text(CONTROL.format(python=sys.executable))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    run_dir = tmp_path / "run"
    (run_dir / "mps").mkdir(parents=True)
    return Config(
        run_dir=str(run_dir), device="cuda", gpu=GpuConfig(mps=True), router=RouterConfig(drain_s=5)
    )


def said(config: Config) -> list[tuple[float, str]]:
    path = Path(config.run_dir) / "said"
    rows = path.read_text().splitlines() if path.exists() else []
    return [(float(row.split()[0]), row.partition(" ")[2]) for row in rows]


def group() -> subprocess.Popen[bytes]:
    """A leader with one rank."""
    return subprocess.Popen(["bash", "-c", "sleep 100 & wait"])


async def test_a_fence_ends_clients_before_it_kills(config: Config) -> None:
    leader = group()
    deadline = time.monotonic() + 5
    while len(ranks := mps.family(leader.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    clients = Path(config.run_dir) / "clients"
    clients.write_text("\n".join(map(str, [*ranks, 1])))
    sizes = Sizes(1, 1, 1, 1, 1)
    header = StepHeader.create(f"{pool_prefix(config, 'decode')}-header", sizes)
    gone: list[float] = []
    reaper = Reaper(lambda key: gone.append(time.monotonic()), lambda key, own: None)
    try:
        reaper.watch("key", leader.pid)
        os.kill(leader.pid, signal.SIGSTOP)
        began = time.monotonic()
        reaper.fence("key", lambda pid: mps.fence(config, "decode-0", pid))
        while not gone and time.monotonic() < began + 10:
            await asyncio.sleep(0.02)
        assert header.is_aborted
        # the word first, a second to drain, then each rank at the daemon, then the kill
        ends = [(at, text) for at, text in said(config) if text.startswith("terminate_client")]
        assert {int(text.split()[-1]) for _, text in ends} == set(ranks)
        assert clients.read_text() == "1"  # nobody else's client
        assert min(at for at, _ in ends) - began >= mps.DRAIN_S
        assert gone and gone[0] > max(at for at, _ in ends)
    finally:
        header.close()
        reaper.close()
        for pid in mps.family(leader.pid):
            os.kill(pid, signal.SIGKILL)
        leader.wait()


def test_a_dead_daemon_does_not_stop_a_fence(config: Config, tmp_path: Path) -> None:
    (tmp_path / "bin" / mps.CONTROL).write_text("#!/bin/sh\nexit 1\n")
    mps.fence(config, "draft-0", os.getpid())
    with pytest.raises(ConnectionError):
        mps.clients(config.run_dir)


async def test_the_daemon_ends_after_its_clients(config: Config) -> None:
    clients = Path(config.run_dir) / "clients"
    clients.write_text("4711")
    asked = stop()  # before the task, which copies the context
    task = asyncio.create_task(mps.main(config, "mps-0"))
    control = Path(config.run_dir) / "mps" / "control"
    while not control.exists():
        await asyncio.sleep(0.02)
    wait_for_mps(config)
    asked.set()
    await asyncio.sleep(0.5)
    assert not task.done() and "quit" not in [text for _, text in said(config)]
    clients.write_text("")
    await asyncio.wait_for(task, 10)
    assert said(config)[-1][1] == "quit"


async def test_what_start_says_without_the_command(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=mps.CONTROL):
        await mps.main(config, "mps-0")


def test_workers_wait_for_the_daemon(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decant.engine.gpu.device.MPS_WAIT_S", 0.1)
    with pytest.raises(ConfigError, match="did not start"):
        wait_for_mps(config)


def test_a_sweep_forgets_the_socket(config: Config) -> None:
    (Path(config.run_dir) / "mps" / "control").touch()
    rundir.sweep(config)
    assert not (Path(config.run_dir) / "mps").exists()


def test_programs_of_the_gpu_profiles(tmp_path: Path) -> None:
    for profile, ranks in (("one-gpu", 1), ("one-gpu-tp4", 4)):
        wanted = ["gateway.port=1", "decode.sm_share=60"]
        config = preflight.resolve(profile, wanted, tmp_path)
        programs = {p.name: p for p in supervisor.programs(config)}
        first = next(iter(programs))
        assert first == "mps-0" and programs[first].service == "mps"
        for name in ("prefill-0", "decode-0", "draft-0"):
            environment = programs[name].environment
            assert environment["CUDA_MPS_PIPE_DIRECTORY"] == f"{tmp_path}/mps"
            assert environment["CUDA_VISIBLE_DEVICES"] == "0"
            share = int(environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"])
            assert share == (60 if name == "decode-0" else 100)
        assert "CUDA_MPS_PIPE_DIRECTORY" not in programs["router-0"].environment
        assert config.decode.tp == ranks
    config = preflight.resolve("eight-gpu", ["gateway.port=1"], tmp_path)
    programs = {p.name: p for p in supervisor.programs(config)}
    assert "mps-0" not in programs  # no two ranks of a GPU wait for each other
    assert config.gpus("prefill") == [0, 1, 2, 3] and config.gpus("draft") == [4, 5, 6, 7]
    visible = {programs[n].environment["CUDA_VISIBLE_DEVICES"] for n in ("prefill-0", "decode-0")}
    assert visible == {"0,1,2,3,4,5,6,7"}  # a pool of a GPU that is not seen cannot be mapped


def test_settings_that_do_not_fit() -> None:
    for table, text in (
        ({"gpu": {"mps": True}}, "device = cuda"),
        ({"gpu": {"collectives": "mpi"}}, "collectives"),
        ({"decode": {"sm_share": 0}}, "sm_share"),
        ({"decode": {"devices": "a,b"}}, "numbers of GPUs"),
    ):
        with pytest.raises(ConfigError, match=text):
            build(Config, table)
