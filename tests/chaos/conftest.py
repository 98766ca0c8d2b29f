"""One set for the short forms: it has failpoints, and one seed that is poison."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import rows
from real_set import RealSet
from stage import Stage

SEED = int(os.environ.get("DECANT_CHAOS_SEED", "1"))


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The set's DECANT_FAILPOINT_DIR."""
    return tmp_path_factory.mktemp("points")


@pytest.fixture(scope="module")
def chaos_set(start_set: Callable[..., RealSet], points: Path) -> Iterator[RealSet]:
    environment = {"DECANT_FAILPOINT_DIR": str(points), **rows.poison_environment()}
    os.environ.update(environment)
    try:
        real = start_set("gateway.slow_reader_s=3", "warm_start=true")
    finally:
        for name in environment:
            del os.environ[name]
    yield real
    real.stop()


@pytest.fixture(scope="module")
def stage(chaos_set: RealSet) -> Stage:
    """The set at rest, and the answers that it gave undisturbed."""
    return Stage(chaos_set, num_distinct=18)
