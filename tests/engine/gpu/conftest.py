"""The GPU engine's CPU twin on the demo model and on a tiny random checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import triton.runtime.interpreter as triton_interpreter

from decant.engine.cpu_engine import CpuEngine
from decant.engine.gpu.engine import GpuEngine
from decant.engine.gpu.start import start_engine
from decant.engine.load import load_engine
from decant.engine.synthetic import make_checkpoint
from decant.kernels import tuned
from decant.protocol.config import (
    Config,
    DecodeConfig,
    DraftConfig,
    KVConfig,
    ModelConfig,
    PrefillConfig,
)

MakeTwin = Callable[..., GpuEngine]


def configure(folder: Path | None = None, quantise: bool = False) -> Config:
    return Config(
        model=ModelConfig(path=str(folder or ""), max_context=1024, quantise_activations=quantise),
        prefill=PrefillConfig(chunk_tokens=256),
        decode=DecodeConfig(pages=24, slots=4, max_batch=4),
        draft=DraftConfig(num_drafts=3),
        kv=KVConfig(page_tokens=128, max_drafts=3),
    )


@pytest.fixture
def interpreter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """What Triton's interpreter needs to run the kernels (as in tests/kernels/conftest.py); it has
    no CUDA C++."""
    table = tmp_path / "tuned.json"
    table.write_text("{}")
    monkeypatch.setenv("DECANT_TUNED", str(table))
    tuned._table.cache_clear()
    request.addfinalizer(tuned._table.cache_clear)
    patch = triton_interpreter._patch_lang_tensor

    def patched(tensor: object, scope: object) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]

    monkeypatch.setattr(triton_interpreter, "_patch_lang_tensor", patched)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of four narrow layers whose shapes every kernel takes."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint(folder, 4, "tiny", 1)
    return folder


@pytest.fixture(scope="module")
def make_twin() -> Iterator[MakeTwin]:
    """make_twin(folder=None): an engine on the CPU without kernels; closed after the module."""
    torch.set_num_threads(1)
    made: list[GpuEngine] = []

    def make(folder: Path | None = None) -> GpuEngine:
        engine = start_engine(configure(folder), "decode", set())
        assert isinstance(engine, GpuEngine)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def reference() -> Iterator[CpuEngine]:
    """The CPU engine on the demo model."""
    torch.set_num_threads(1)
    engine = load_engine(configure(), "decode")
    assert isinstance(engine, CpuEngine)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def configuration() -> Config:
    """The demo model with small pools, on a CPU."""
    return configure()
