"""The decant command: help, exit codes, one sentence for everything that is wrong around it."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from decant.services import cli, preflight

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def short_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory whose name is short enough for sockets."""
    return tmp_path_factory.mktemp("r")


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A copy of the model folder that ships."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        shutil.copyfile(preflight.demo_folder() / name, folder / name)
    return folder


def decant(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = cli.main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_overview_names_every_command_and_code(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = decant("--help", capsys=capsys)
    assert code == 0
    for name in cli.COMMANDS:
        assert re.search(rf"^  {name} ", out, re.MULTILINE)
    for number in (0, 1, 2, 3, 4, 130):
        assert re.search(rf"^  {number} ", out, re.MULTILINE)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_every_command_is_complete(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = decant(name, "--help", capsys=capsys)
    assert code == 0
    assert "exit codes:" in out
    parser = cli.parser_for(name)
    for action in parser._actions:
        assert action.help, f"{name}: {action.dest} has no help"


def test_every_command_module_is_wired() -> None:
    files = {p.stem for p in (ROOT / "services" / "commands").glob("*.py")}
    assert files == {module for module, _ in cli.COMMANDS.values()}


def test_no_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert decant(capsys=capsys)[0] == 2
    code, _, err = decant("fly", capsys=capsys)
    assert code == 2 and "fly" in err
    assert decant("up", "--fly", capsys=capsys)[0] == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = decant("--version", capsys=capsys)
    assert code == 0 and out.startswith("decant ")


def one_sentence(err: str) -> str:
    lines = [line for line in err.strip().splitlines() if line]
    assert len(lines) == 1, err
    return lines[0]


def test_port_in_use(model_dir: Path, short_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, _, err = decant(
            "up", "--model", str(model_dir), "--port", port, "--run-dir", str(short_dir),
            capsys=capsys,
        )  # fmt: skip
    assert code == 2
    assert port in one_sentence(err) and "in use" in err
    assert not (short_dir / "supervisord.sock").exists()


def test_run_dir_in_use(
    model_dir: Path, short_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from decant.services import rundir

    held = rundir.lock(short_dir)
    try:
        code, _, err = decant(
            "up", "--model", str(model_dir), "--port", "0", "--run-dir", str(short_dir),
            capsys=capsys,
        )  # fmt: skip
    finally:
        os.close(held)
    assert code == 2 and str(short_dir) in one_sentence(err)


def edit(folder: Path, **changes: object) -> None:
    """Change config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda d: (d / "config.json").unlink(), "config.json"),
        (lambda d: (d / "config.json").write_text("{"), "config.json"),
        (lambda d: (d / "config.json").write_text("[]"), "config.json"),
        (lambda d: edit(d, model_type="llama"), "llama"),
        (lambda d: edit(d, vocab_size=77), "embed"),
        (lambda d: edit(d, dspark_layers=3), "0731"),
        (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda d: (d / "model.safetensors").unlink(), "safetensors"),
        (lambda d: (d / "model.safetensors").write_text("version https://git-lfs"), "complete"),
        (lambda d: os.truncate(d / "model.safetensors", 20_000_000), "cut short"),
        (
            lambda d: (d / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'
            ),
            "model-00001",
        ),
    ],
)
def test_wrong_model_folder(
    spoil: object, word: str, model_dir: Path, short_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(spoil)
    spoil(model_dir)
    code, _, err = decant(
        "up", "--model", str(model_dir), "--port", "0", "--run-dir", str(short_dir), capsys=capsys
    )
    assert code == 2 and word in one_sentence(err)


def test_no_gpu(
    short_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "GPU_FILES", (short_dir / "none",))
    up = "up", "--profile", "one-gpu", "--port", "0", "--run-dir", str(short_dir)
    code, _, err = decant(*up, capsys=capsys)
    assert code == 2 and "no NVIDIA driver" in one_sentence(err)


def test_missing_model_folder(short_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = decant("up", "--model", "/nowhere", "--run-dir", str(short_dir), capsys=capsys)
    assert code == 2 and "/nowhere does not exist" in one_sentence(err)


@pytest.mark.parametrize(
    ("pair", "word"),
    [
        ("fly=1", "fly"),
        ("decode.pages=many", "decode.pages"),
        ("decode.pages", "key=value"),
        ("draft.num_drafts=9", "num_drafts"),
        ("gateway.host=0.0.0.0", "keys_file"),
        ("decode.pages=2", "max_context"),
        ("decode.pages=100000000", "memory"),
    ],
)
def test_wrong_settings(
    pair: str, word: str, model_dir: Path, short_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = decant(
        "up", "--model", str(model_dir), "--port", "0", "--run-dir", str(short_dir),
        "--set", pair, capsys=capsys,
    )  # fmt: skip
    assert code == 2 and word in one_sentence(err)


def test_unknown_profile_and_long_run_dir(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = decant("up", "--profile", "none", capsys=capsys)
    assert code == 2 and "demo" in one_sentence(err)
    long = tmp_path / ("x" * 100)
    code, _, err = decant("up", "--model", str(model_dir), "--run-dir", str(long), capsys=capsys)
    assert code == 2 and "--run-dir" in one_sentence(err)
    assert not long.exists()


def test_full_shared_memory(
    model_dir: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    import psutil

    usage = psutil.disk_usage("/dev/shm")
    monkeypatch.setattr(psutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    code, _, err = decant(
        "up", "--model", str(model_dir), "--port", "0", "--run-dir", str(short_dir), capsys=capsys
    )
    assert code == 2 and "/dev/shm" in one_sentence(err)


def test_status_and_down_without_a_set(short_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = decant("status", "--json", "--run-dir", str(short_dir), capsys=capsys)
    assert code == 3 and json.loads(out)["processes"] == []
    assert decant("status", "--run-dir", str(short_dir), capsys=capsys)[0] == 3
    assert decant("down", "--run-dir", str(short_dir), capsys=capsys)[0] == 0
    code, _, err = decant("chat", "hello", "--run-dir", str(short_dir), capsys=capsys)
    assert code == 2 and "nothing was started" in one_sentence(err)


def test_chat_with_a_dead_server_fails(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = decant("chat", "hello", "--url", "http://127.0.0.1:9", capsys=capsys)
    assert code == 1 and "no answer" in one_sentence(err)


def test_bench_kernels_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = decant("bench-kernels", capsys=capsys)
    assert code == 2 and "no GPU" in one_sentence(err)


def test_bench_kernels_hands_its_arguments_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown operation is answered with the known ones, by the benchmark itself."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    code, _, err = decant("bench-kernels", "moe", "fly", "--json", "k.json", capsys=capsys)
    assert code == 2
    assert "unknown: fly" in err and "attention" in err


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -P -m decant.services.cli --help | true"
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
