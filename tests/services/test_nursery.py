"""Workers that are forked instead of executed: they are their asker's children, with its pipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from decant.services.nursery import can_raise
from decant.services.rundir import is_alive

WARM = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
COMMAND = ["python", "-P", "-m", "decant.services.decode", "--config", "x", "--instance", "a-0"]


def test_what_can_be_raised() -> None:
    assert can_raise(COMMAND, WARM) == COMMAND[3:]
    assert not can_raise([*COMMAND[:3], "decant.services.gateway", *COMMAND[4:]], WARM)
    assert not can_raise(["prometheus", "--config", "x"], WARM)
    assert not can_raise(["python", "-m", *COMMAND[3:]], WARM)
    assert not can_raise(COMMAND, {**WARM, "OMP_NUM_THREADS": "2"})
    assert not can_raise(COMMAND, {**WARM, "CUDA_VISIBLE_DEVICES": "0"})
    assert not can_raise(COMMAND, {"OMP_NUM_THREADS": "1"})


# A supervisord in small: it is a subreaper, and waits for whom it is given.
ASKER = """
import ctypes, json, os, signal, sys, time
from decant.services import nursery
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
home = nursery.Nursery(0.0)
null = os.open(os.devnull, os.O_RDONLY)
order = ["decant.services.draft", "--config", "/nowhere/config.toml", "--instance", "draft-7"]
environment = {**os.environ, "MARK": "yes"}
assert home.fork(order, environment, [null, 1, 1]) == 0  # it has not been started
home.start()
assert home.fork(order, environment, [null, 1, 1]) == 0  # it is not ready
while not home.is_ready:
    time.sleep(0.05)
found = []
for _ in range(2):
    source, sink = os.pipe()
    pid = home.fork(order, environment, [null, sink, sink])
    os.close(sink)
    stat = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
    while "draft-7" not in (command := open(f"/proc/{pid}/cmdline").read()):
        time.sleep(0.01)
    with open(source) as said:
        text = said.read()
    _, status = os.waitpid(pid, 0)  # our child
    found.append([pid, int(stat[2]), os.waitstatus_to_exitcode(status), text, command])
os.kill(home.pid, signal.SIGKILL)
before = home.pid
assert home.fork(order, environment, [null, 1, 1]) == 0 and home.pid != before  # another one
left = home.pid
home.close()
print(json.dumps([found, left]))
"""


@pytest.mark.timeout(120)
def test_a_worker_is_its_asker_s_child(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", ASKER], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    found, left = json.loads(done.stdout.splitlines()[-1])
    for pid, group, status, text, command in found:
        shown = [sys.executable, "-P", "-m", "decant.services.draft", "--config"]
        assert command.split("\0")[:5] == shown and command.rstrip("\0").endswith("draft-7")
        assert group == pid  # stopasgroup and killasgroup of supervisord reach it alone
        assert status == 2 and "draft-7: cannot read /nowhere/config.toml" in text
    assert not os.path.exists(f"/proc/{left}")


def test_it_does_not_outlive_its_asker() -> None:
    """Also one that is gone before the nursery has begun."""
    code = "from decant.services import nursery; n = nursery.Nursery(0.0); n.start(); print(n.pid)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    end = time.monotonic() + 30.0
    while is_alive(int(done.stdout)):
        assert time.monotonic() < end
        time.sleep(0.05)
