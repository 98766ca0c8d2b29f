"""Engines on the small golden models, for tests of the engine's room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import torch

from decant.engine.cpu_engine import CpuEngine
from decant.engine.load import load_engine
from decant.protocol.config import Config, DecodeConfig, DraftConfig, KVConfig, ModelConfig

GOLDEN = Path(__file__).parents[1] / "golden"

MakeEngine = Callable[..., CpuEngine]


@pytest.fixture(scope="module")
def make_engine() -> Iterator[MakeEngine]:
    """make_engine(name or folder, quantise=False, slots=20, pages=64): closed after the module."""
    torch.set_num_threads(1)
    made: list[CpuEngine] = []

    def make(
        folder: str | Path, quantise: bool = False, slots: int = 20, pages: int = 64
    ) -> CpuEngine:
        path = GOLDEN / folder if isinstance(folder, str) else folder
        config = Config(
            model=ModelConfig(path=str(path), max_context=1024, quantise_activations=quantise),
            decode=DecodeConfig(pages=pages, slots=slots, max_batch=slots),
            draft=DraftConfig(num_drafts=3),
            kv=KVConfig(page_tokens=128, max_drafts=3),
        )
        made.append(cast(CpuEngine, load_engine(config, "decode")))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
