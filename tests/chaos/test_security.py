"""Secrets, modes and logs of a running set; its start on an unfriendly machine."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real_set import RealSet, decant

from decant.services import rundir

KEY = "sk-chaos-5f1d0c7b9a"
PROMPT = "a prompt that nobody shall find in a log 83461"
ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def locked_set(
    start_set: Callable[..., RealSet], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealSet]:
    """A set with a key, that logs everything it ever logs."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{KEY} name=chaos\n")
    keys.chmod(0o600)
    real = start_set(f"gateway.keys_file={keys}", "log_level=debug")
    real.wait_ready()
    yield real
    real.stop()


def raw(real: RealSet, head: bytes, body: bytes = b"") -> bytes:
    """The answer to bytes that no client library would send."""
    host, _, port = real.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head + body)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
        return answer


def chat(key: bytes, more: bytes = b"", prompt: str = PROMPT) -> tuple[bytes, bytes]:
    body = json.dumps(
        {
            "model": "decant-tiny",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 4,
            "user": "line\nbreak \x1b[31mred",
        }
    ).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += b"Authorization: Bearer " + key + b"\r\n" + more
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    return head, body


def test_logs_hold_no_secret_and_cannot_be_forged(locked_set: RealSet) -> None:
    """Keys and prompts stay out; whatever a client sends, a log line is one line of plain JSON."""
    answer = raw(locked_set, *chat(KEY.encode()))
    assert b" 200 " in answer[:20] or b" 404 " in answer[:20], answer[:300]
    forged = b'{"event":"forged"}'
    for more in (
        b"X-Request-Id: a\tb" + forged + b"\r\n",
        b"X-Request-Id: \x1b[2J" + forged + b"\r\n",
        b"traceparent: 00-" + forged + b"\r\n",
    ):
        raw(locked_set, *chat(KEY.encode(), more))
        raw(locked_set, *chat(b"wrong-" + KEY.encode()[:6] + forged, more))
    path = b"/v1/%0a" + forged.replace(b'"', b"%22") + b"\x1b[31m"
    raw(locked_set, b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    raw(locked_set, b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + KEY.encode() + b"\x00\r\n\r\n")
    num_lines = 0
    for log in (locked_set.run_dir / "logs").glob("*.log"):
        text = log.read_bytes()
        assert KEY.encode() not in text and b"83461" not in text, log.name
        assert b"\x1b" not in text, log.name
        if log.name == "supervisord.log":
            continue
        for line in text.splitlines():
            entry = json.loads(line)
            assert entry["event"] != "forged"
            num_lines += 1
    assert num_lines > 20


def test_no_secret_in_files_environments_and_command_lines(locked_set: RealSet) -> None:
    key = KEY.encode()
    password = (locked_set.run_dir / "credentials").read_text().strip().partition(":")[2]
    pids = rundir.find_pids(locked_set.run_dir)
    assert len(pids) >= 7
    for pid in pids:
        for name in ("cmdline", "environ"):
            text = Path(f"/proc/{pid}/{name}").read_bytes()
            assert key not in text and password.encode() not in text, (pid, name)
    for path in locked_set.run_dir.rglob("*"):
        if path.is_file() and path.name not in ("credentials", "supervisord.conf"):
            assert password.encode() not in path.read_bytes(), path
        if path.is_file():
            assert key not in path.read_bytes(), path


def test_only_the_owner_reads_anything(locked_set: RealSet) -> None:
    assert stat.S_IMODE(locked_set.run_dir.stat().st_mode) == 0o700
    segments = list(Path("/dev/shm").glob(f"{locked_set.config.shm_prefix}*"))
    assert segments
    num_sockets = 0
    for path in (*locked_set.run_dir.rglob("*"), *segments):
        mode = path.lstat().st_mode
        assert not stat.S_IMODE(mode) & 0o077, f"{path}: {stat.filemode(mode)}"
        num_sockets += stat.S_ISSOCK(mode)
    assert num_sockets >= 8
    for pid in rundir.find_pids(locked_set.run_dir):
        status = Path(f"/proc/{pid}/status").read_text()
        assert re.search(r"^Umask:\s*0077$", status, re.MULTILINE), pid


def test_only_loopback_is_listened_on(locked_set: RealSet) -> None:
    """No process of the set has a TCP socket but the gateway's, on 127.0.0.1."""
    inodes = set()
    for pid in rundir.find_pids(locked_set.run_dir):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(descriptor)
            except OSError:
                continue
            if target.startswith("socket:"):
                inodes.add(target[8:-1])
    listening = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                address, _, port = words[1].partition(":")
                listening.append((address, int(port, 16)))
    assert listening == [("0100007F", locked_set.config.gateway.port)]


def test_deadlines_do_not_hang_on_the_wall_clock() -> None:
    """A jump of the clock by an hour must not matter: wall time is only ever shown."""
    shown = {f"services/{n}.py" for n in ("gateway", "capture", "panels", "snapshot")}
    shown |= {f"services/api/{n}.py" for n in ("chat", "completions", "responses")}
    found = []
    for room in ("services", "engine", "protocol"):
        for path in (ROOT / room).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            if name.startswith("engine/demo/"):  # training
                continue
            text = path.read_text()
            if re.search(r"\btime\.time(_ns)?\(|datetime\.(now|utcnow)\(", text):
                found.append(name)
    assert set(found) <= shown, found


def test_a_run_dir_that_cannot_be_written(tmp_path: Path) -> None:
    done = decant("up", "--detach", "--port", "0", "--run-dir", "/proc/decant")
    assert done.returncode == 2
    assert "cannot write in the run directory /proc/decant" in done.stderr
    assert "Traceback" not in done.stderr


def test_few_file_descriptors(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A limit of 256 descriptors: the set starts and answers, or says in a sentence why not."""
    run_dir = tmp_path_factory.mktemp("f") / "run"
    limit = (256, 256)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "decant.services.cli", "up", "--detach", "--port", "0",
         "--run-dir", str(run_dir)],
        capture_output=True,
        text=True,
        timeout=200,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit),
        check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    if done.returncode == 0:
        done = decant("down", "--run-dir", str(run_dir))
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode == 2 and "descriptors" in done.stderr, done.stderr
    assert not rundir.find_pids(run_dir)


def test_a_full_disk_under_the_logs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Answers, deaths and restarts go on; see ``full_disk.py``."""
    prefix = ["unshare", "-rm"]
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces here")
    script = str(Path(__file__).parent / "full_disk.py")
    run_dir = tmp_path_factory.mktemp("d") / "run"
    done = subprocess.run(
        [*prefix, sys.executable, "-P", script, str(run_dir)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.endswith("good\n"), done.stdout + done.stderr
