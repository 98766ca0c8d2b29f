"""supervisord's configuration, the run directory's census, and how ends are read."""

from __future__ import annotations

import configparser
import dataclasses
import os
import signal
import subprocess
import sys
import time
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import pytest

from decant.engine.load import group_name
from decant.protocol.config import Config, build, dump, load
from decant.protocol.errors import ConfigError
from decant.services import preflight, rundir, supervisor
from decant.services.exits import parse_exits, read_exits


@pytest.fixture
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("r")
    rundir.prepare(path)
    return path


def config_in(run_dir: Path, **changes: object) -> Config:
    made: Config = build(Config, {"run_dir": str(run_dir), **changes})
    return made


@pytest.mark.parametrize("profile", preflight.profiles())
def test_profiles_survive_the_round_trip(profile: str, run_dir: Path, tmp_path: Path) -> None:
    config = preflight.resolve(profile, ["model.path=/m", "gateway.port=1"], run_dir)
    assert config.profile == profile and config.model.served_name == "m"
    path = tmp_path / "config.toml"
    path.write_text(dump(config))
    assert load(path) == config


def test_the_shipped_profiles() -> None:
    assert {"demo", "demo-tp2", "one-gpu", "eight-gpu"} <= set(preflight.profiles())


def test_pools_grow_with_the_context(run_dir: Path) -> None:
    config = preflight.resolve("demo", ["model.path=/m", "model.max_context=100000"], run_dir)
    for room in (config.prefill, config.decode):
        assert room.pages * config.kv.page_tokens >= 100000


def test_render(run_dir: Path) -> None:
    config = config_in(run_dir, tokenizer={"instances": 2}, prefill={"threads": 3})
    parser = configparser.RawConfigParser()
    parser.read_string(supervisor.render(config, "secret"))
    names = [s.partition(":")[2] for s in parser.sections() if s.startswith("program:")]
    assert names == [p.name for p in supervisor.programs(config)]
    assert {"tokenizer-0", "tokenizer-1", "decode-0", "prefill-0", "draft-0"} <= set(names)
    assert parser["unix_http_server"]["chmod"] == "0700"
    assert "inet_http_server" not in parser.sections()
    prefill = parser["program:prefill-0"]
    assert 'OMP_NUM_THREADS="3"' in prefill["environment"]
    assert "-P -m decant.services.prefill" in prefill["command"]
    assert int(prefill["stopwaitsecs"]) > config.router.drain_s
    assert "secret" not in "".join(parser[f"program:{n}"]["command"] for n in names)


def test_several_prefills_share_the_devices(run_dir: Path) -> None:
    room = {"instances": 2, "tp": 2, "devices": "0,1,2,3"}
    config = config_in(run_dir, device="cuda", prefill=room)
    found = {p.name: p.environment for p in supervisor.programs(config) if p.service == "prefill"}
    assert {e["CUDA_VISIBLE_DEVICES"] for e in found.values()} == {"0,1,2,3"}
    assert [config.gpus("prefill", i) for i in (0, 1)] == [[0, 1], [2, 3]]
    groups = [group_name(dataclasses.replace(config, instance=name), "prefill") for name in found]
    assert groups == ["prefill", "prefill1"]  # locks and pools do not meet


@pytest.mark.parametrize(
    "room", [{"instances": 0}, {"tier_file_mb": 5}, {"tier_memory_mb": -1}, {"cache_pages": -1}]
)
def test_sizes_of_prefill_are_checked(run_dir: Path, room: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        config_in(run_dir, prefill=room)


def test_no_draft_no_program(run_dir: Path) -> None:
    config = config_in(run_dir, draft={"enabled": False})
    assert "draft-0" not in [p.name for p in supervisor.programs(config)]


@pytest.mark.parametrize("name", ["a\nb", 'a"b', "a ;b"])
def test_render_refuses_what_it_cannot_write(name: str) -> None:
    with pytest.raises(ConfigError):
        supervisor.render(Config(run_dir=f"/tmp/{name}"), "x")


def test_files_are_closed_to_others(run_dir: Path) -> None:
    supervisor.write_config(config_in(run_dir))
    for name in ("credentials", "supervisord.conf"):
        assert (run_dir / name).stat().st_mode & 0o777 == 0o600


def test_prepare_closes_the_directory(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o755)
    rundir.prepare(path)
    assert path.stat().st_mode & 0o777 == 0o700


def test_default_run_dir_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DECANT_RUN_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", "/h")
    short = len(str(tmp_path)) < 70
    if short:
        assert rundir.default_run_dir() == tmp_path / "decant"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/" + "x" * 200)
    assert rundir.default_run_dir() == Path("/h/.decant/run")
    monkeypatch.setenv("DECANT_RUN_DIR", str(tmp_path / "mine"))
    assert rundir.default_run_dir() == tmp_path / "mine"


LOG = """\
2026-01-02 03:04:05,100 INFO spawned: 'decode-0' with pid 41
2026-01-02 03:04:06,100 INFO success: decode-0 entered RUNNING state
2026-01-02 03:04:07,100 WARN exited: decode-0 (terminated by SIGKILL; not expected)
2026-01-02 03:04:08,100 INFO spawned: 'decode-0' with pid 42
2026-01-02 03:04:09,100 WARN exited: decode-0 (terminated by SIGSEGV (core dumped); not expected)
2026-01-02 03:04:10,100 INFO spawned: 'decode-0' with pid 43
2026-01-02 03:04:11,100 WARN exited: decode-0 (exit status 1; not expected)
2026-01-02 03:04:12,100 INFO spawned: 'decode-0' with pid 44
2026-01-02 03:04:13,100 INFO exited: decode-0 (exit status 0; expected)
2026-01-02 03:04:14,100 INFO spawned: 'decode-0' with pid 45
2026-01-02 03:04:15,100 INFO stopped: decode-0 (exit status 0)
"""


def test_ends_are_read_from_the_log() -> None:
    exits = parse_exits(LOG)
    assert [e.pid for e in exits] == [41, 42, 43, 44, 45]
    assert [e.signal for e in exits] == ["SIGKILL", "SIGSEGV", "", "", ""]
    assert [e.status for e in exits] == [None, None, 1, 0, 0]
    assert [e.is_own_fault for e in exits] == [False, True, True, False, False]
    assert [e.was_asked for e in exits] == [False] * 4 + [True]


SLEEPER = "import sys, time; sys.argv; time.sleep(600)"


def sleeper(run_dir: Path) -> subprocess.Popen[bytes]:
    """A process that looks like one of the set."""
    arguments = ["--config", str(run_dir / "config.toml")]
    return subprocess.Popen([sys.executable, "-c", SLEEPER, *arguments])


def test_census_and_sweep(run_dir: Path) -> None:
    config = config_in(run_dir)
    assert not rundir.leftovers(config)
    child = sleeper(run_dir)
    marked = subprocess.Popen(
        [sys.executable, "-c", SLEEPER], env={**os.environ, supervisor.MARK: str(run_dir)}
    )
    stranger = subprocess.Popen([sys.executable, "-c", SLEEPER])
    segment = shared_memory.SharedMemory(f"{config.shm_prefix}pool", create=True, size=4096)
    resource_tracker.unregister(segment._name, "shared_memory")  # type: ignore[attr-defined]
    try:
        time.sleep(0.2)
        found = rundir.leftovers(config)
        assert set(found.pids) == {child.pid, marked.pid}
        assert [p.name for p in found.segments] == [f"{config.shm_prefix}pool"]
        assert "2 processes" in str(found) and "1 shared memory segment" in str(found)
        rundir.sweep(config)
        assert child.wait(5) == -signal.SIGKILL and marked.wait(5) == -signal.SIGKILL
        assert stranger.poll() is None
        assert not rundir.leftovers(config)
    finally:
        segment.close()
        for process in (child, marked, stranger):
            process.kill()
            process.wait()


def test_the_lock_is_exclusive(run_dir: Path) -> None:
    held = rundir.lock(run_dir)
    with pytest.raises(rundir.RunDirBusy):
        rundir.lock(run_dir)
    os.close(held)
    os.close(rundir.lock(run_dir))


def test_real_supervisord_restarts_and_stops(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real daemon with small programs: restart after kill -9, ends in the log, clean stop."""
    config = config_in(run_dir)
    program = [sys.executable, "-c", SLEEPER, "--config", str(run_dir / "config.toml")]
    text = supervisor.render(config, "x")
    head = text.split("[program:")[0].replace("password=x", "password={password}")
    short = head + (
        f'[program:decode-0]\ncommand={program[0]} -c "{SLEEPER}" {program[3]} {program[4]}\n'
        "autorestart=true\nstartsecs=0\nstopwaitsecs=5\nredirect_stderr=true\n"
    )
    monkeypatch.setattr(
        supervisor, "render", lambda c, password: short.replace("{password}", password)
    )
    (run_dir / "config.toml").write_text(dump(config))
    lock = rundir.lock(run_dir)
    daemon = supervisor.start(config, lock)
    os.close(lock)
    try:
        client = supervisor.connect(run_dir, 20.0)
        with pytest.raises(rundir.RunDirBusy):
            rundir.lock(run_dir)
        (info,) = client.processes()
        first = info["pid"]
        assert first in rundir.find_pids(run_dir)
        os.kill(first, signal.SIGKILL)
        end = time.monotonic() + 15
        while client.processes()[0]["pid"] in (0, first) and time.monotonic() < end:
            time.sleep(0.1)
        second = client.processes()[0]["pid"]
        assert second not in (0, first)
        ended = [e for e in read_exits(run_dir) if e.pid == first]
        assert [e.signal for e in ended] == ["SIGKILL"] and not ended[0].is_own_fault
        client.stop("decode-0")
        client.stop("decode-0")  # not running: no error
        client.start("decode-0")
        forced = rundir.stop_set(config, 20.0)
        daemon.wait(10)
        assert not forced.pids
        assert not rundir.leftovers(config)
        os.close(rundir.lock(run_dir))
    finally:
        rundir.sweep(config)
        daemon.kill()
        daemon.wait()


def test_wrong_credentials_are_refused(run_dir: Path) -> None:
    with pytest.raises(ConnectionError):
        supervisor.SupervisorClient(run_dir)
    (run_dir / "credentials").write_text("decant:wrong\n")
    with pytest.raises(OSError):
        supervisor.SupervisorClient(run_dir).processes()


def test_free_settings_are_frozen(run_dir: Path) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config_in(run_dir).device = "cuda"  # type: ignore[misc]


FULL_DISK = """
from supervisor.loggers import LogRecord, LevelsByName, RotatingFileHandler
from decant.services import supervisord_main
supervisord_main.forgive()
handler = RotatingFileHandler("/dev/full", maxBytes=100, backupCount=0)
for _ in range(50):
    handler.emit(LogRecord(LevelsByName.WARN, "x" * 1000))
handler.close()
handler = RotatingFileHandler("log", maxBytes=100, backupCount=1)
handler.stream.close()  # as after a rotation that failed
for _ in range(3):
    handler.emit(LogRecord(LevelsByName.WARN, "again"))
handler.close()
"""


def test_a_full_disk_does_not_end_supervisord(tmp_path: Path) -> None:
    """Its complaint about a full log went to a full stderr, and that ended it and the set."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", FULL_DISK], stderr=full, cwd=tmp_path, timeout=60, check=False
        )
    assert done.returncode == 0
    assert (tmp_path / "log").read_text() == "again" * 2  # the first line was dropped


def test_supervisords_own_process_is_recognised() -> None:
    assert not rundir._is_supervisord(os.getpid())
    code = [sys.executable, "-c", "input()", "decant.services.supervisord_main"]
    with subprocess.Popen(code, stdin=subprocess.PIPE) as child:
        end = time.monotonic() + 10  # the kernel shows a command line a little after the start
        while not rundir._is_supervisord(child.pid):
            assert time.monotonic() < end
            time.sleep(0.01)
        child.kill()
