"""Loading: memory, time-critical imports, and what the configuration may ask."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from decant.engine import synthetic
from decant.engine.load import load_draft, load_engine, model_folder, model_info
from decant.protocol.config import Config, DecodeConfig, ModelConfig
from decant.protocol.errors import CheckpointError, ConfigError

GOLDEN = Path(__file__).parents[1] / "golden"

MEASURE = """
import re, sys
import torch
def peak():  # of this program; getrusage counts what the parent held when it forked
    return int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
before = peak()
from decant.engine.load import load_engine
from decant.protocol.config import Config, DecodeConfig, ModelConfig
config = Config(
    model=ModelConfig(path=sys.argv[1]), decode=DecodeConfig(pages=8, slots=2, max_batch=2)
)
engine = load_engine(config, "decode")
after = peak()
weights = 0
seen = set()
def walk(x):
    global weights
    if isinstance(x, torch.Tensor):
        if x.data_ptr() not in seen:
            seen.add(x.data_ptr())
            weights += x.numel() * x.element_size()
    elif isinstance(x, (list, tuple)):
        for y in x: walk(y)
    elif hasattr(x, "__dataclass_fields__"):
        for name in x.__dataclass_fields__: walk(getattr(x, name))
walk(engine.model)
engine.close()
print(before >> 10, after >> 10, weights >> 20)
"""


def measure(path: str) -> tuple[int, int, int]:
    """MiB: peak of the process before loading, in all, and of the weights."""
    command = [sys.executable, "-P", "-c", MEASURE, path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, peak, weights = (int(x) for x in done.stdout.split())
    return before, peak, weights


@pytest.mark.slow
def test_memory_of_a_larger_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of gigabytes: the peak is theirs and less than 1 GB, the mapped files included."""
    wide = {**synthetic.WIDTHS["tiny"], "hidden_size": 1024, "moe_intermediate_size": 1024,
            "n_routed_experts": 32}  # fmt: skip
    monkeypatch.setitem(synthetic.WIDTHS, "wide", wide)
    synthetic.make_checkpoint(tmp_path / "wide", 4, "wide", 0)
    before, peak, weights = measure(str(tmp_path / "wide"))
    assert weights > 1500
    assert peak - before <= weights + 1000


def test_memory_of_a_process() -> None:
    """The shipped model: peak is the weights and little more, streamed tensor by tensor."""
    before, peak, weights = measure("")
    assert weights > 50
    assert peak - before <= weights + 100
    assert peak <= 700


def test_model_info_needs_no_torch() -> None:
    code = (
        "import sys; from decant.engine.load import model_info; from decant.protocol.config import"
        " Config; print(model_info(Config()).served_name, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["demo", "False"]


def test_facts() -> None:
    info = model_info(Config(model=ModelConfig(max_context=1000)))
    assert info.max_context == 1000
    assert (info.eos_token_id, info.has_mtp) == (1, True)
    long = model_info(Config(model=ModelConfig(path=str(GOLDEN / "kv-state"))))
    assert long.max_context == 1024  # the model's own limit
    assert model_folder(Config()).name == "demo"


def test_what_is_refused() -> None:
    config = Config(model=ModelConfig(path=str(GOLDEN / "trunk-fp32")))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA GPU"):
            load_engine(dataclasses.replace(config, device="cuda"), "decode")
        with pytest.raises(ConfigError, match="no CUDA GPU"):
            load_draft(dataclasses.replace(config, device="cuda"))
    with pytest.raises(ConfigError, match=r"set decode.threads = 1"):
        load_engine(dataclasses.replace(config, decode=DecodeConfig(threads=2)), "decode")
    with pytest.raises(ConfigError, match="no engine for role 'router'"):
        load_engine(config, "router")
    wide = dataclasses.replace(config.model, quantise_activations=True)
    with pytest.raises(CheckpointError, match="quantise_activations needs hidden_size % 128"):
        load_engine(dataclasses.replace(config, model=wide), "decode")
    with pytest.raises(CheckpointError, match="does not exist"):
        load_draft(Config(model=ModelConfig(path="/nowhere")))
