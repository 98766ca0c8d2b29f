"""``decant doctor`` finds what is wrong and says how to mend it."""

from __future__ import annotations

import json
import os
import resource
import socket
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from decant.protocol.config import Config, GatewayConfig, ModelConfig
from decant.services import cli
from decant.services.commands import doctor

SMI = """\
0, NVIDIA H200, 580.95.05, 143167, 143771, 9.0, {mig}
1, NVIDIA H200, 580.95.05, 143167, 143771, {compute}, Disabled
"""
TOPOLOGY = """\
       GPU0  GPU1
 GPU0   X     {pair}
 GPU1   {pair}    X

Legend:
  X    = Self
"""


def by_name(findings: list[doctor.Finding]) -> dict[str, doctor.Finding]:
    """The worst finding of each name."""
    order = ("ok", "warn", "fail")
    found: dict[str, doctor.Finding] = {}
    for f in sorted(findings, key=lambda f: order.index(f.status)):
        found[f.name] = f
    return found


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(run_dir=str(tmp_path / "run"), gateway=GatewayConfig(port=0))


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def smi(folder: Path, mig: str = "Disabled", compute: str = "9.0", pair: str = "OK") -> None:
    """An nvidia-smi that prints what the real one would."""
    (folder / "gpus").write_text(SMI.format(mig=mig, compute=compute))
    (folder / "topology").write_text(TOPOLOGY.format(pair=pair))
    tool = folder / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\n"
        f'case "$1" in topo) f={folder}/topology;; *) f={folder}/gpus;; esac\n'
        'while IFS= read -r line; do echo "$line"; done < $f\n'
    )
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)


def test_every_problem_has_a_fix(config: Config, tools: Path) -> None:
    for f in doctor.examine(config):
        assert f.text
        assert (f.status == "ok") == (f.fix == ""), f


def test_no_gpu(config: Config, tools: Path) -> None:
    assert by_name(list(doctor.gpus(config)))["gpu"].status == "ok"
    found = by_name(list(doctor.gpus(replace(config, device="cuda"))))["gpu"]
    assert found.status == "fail" and "--gpus all" in found.fix


def test_good_gpus(config: Config, tools: Path) -> None:
    smi(tools)
    found = by_name(list(doctor.gpus(replace(config, device="cuda"))))
    assert "H200" in found["gpu 0"].text
    assert found["peer access"].status == found["gpu 1"].status == "ok"
    assert found["mps"].status == "warn"  # 3 ranks on 2 GPUs


@pytest.mark.parametrize(
    ("what", "name", "status"),
    [
        ({"mig": "Enabled"}, "gpu 0", "warn"),
        ({"compute": "8.0"}, "gpu 1", "fail"),
        ({"pair": "CNS"}, "peer access", "fail"),
    ],
)
def test_bad_gpus(
    config: Config, tools: Path, what: dict[str, str], name: str, status: str
) -> None:
    smi(tools, **what)
    found = by_name(list(doctor.gpus(replace(config, device="cuda"))))[name]
    assert found.status == status and found.fix


def test_port_in_use(config: Config) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = replace(config, gateway=GatewayConfig(port=other.getsockname()[1]))
        (found,) = doctor.port(taken)
    assert found.status == "fail" and "--port" in found.fix


def test_model_folder_cut_short(config: Config, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v4"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs")
    (found,) = doctor.model(replace(config, model=ModelConfig(path=str(tmp_path))))
    assert found.status == "fail" and "model.safetensors" in found.text


def test_long_run_dir(config: Config) -> None:
    (found,) = doctor.run_dir(replace(config, run_dir="/tmp/" + "x" * 100))
    assert found.status == "fail" and "--run-dir" in found.fix


def test_few_files(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    found = by_name(list(doctor.limits(config)))["ulimit"]
    assert found.status == "warn" and "LimitNOFILE" in found.fix


def test_command(
    tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["doctor", "--run-dir", str(tmp_path / "run"), "--set", "gateway.port=0"]
    code = cli.main([*words, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == (1 if any(f["status"] == "fail" for f in found) else 0)
    assert {"python", "cores", "model", "memory", "shm", "ulimit", "port"} <= {
        f["name"] for f in found
    }
    assert cli.main(words) == code
    assert "profile demo" in capsys.readouterr().out
    assert cli.main([*words, "--profile", "one-gpu"]) == cli.FAILED
    assert "nvidia-smi shows no GPU" in capsys.readouterr().out
    assert os.listdir(tmp_path) == ["bin"]  # it made nothing
