"""Marks and distribution for all tests, and the real set, started once for all that need it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    # NOTE: Triton reads this when it is imported, which a test module of another room may cause.
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
from real_set import SMALL, RealSet

from decant.services import rundir
from decant.services.preflight import demo_folder

HERE = Path(__file__).parent
REAL = (HERE / "e2e", HERE / "chaos")  # start real processes; those of a folder share one set


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One xdist group a file (``--dist loadgroup``), one for all tests that share the real set."""
    for item in items:
        folder = next((f for f in REAL if f in item.path.parents), None)
        if folder is not None:
            item.add_marker(pytest.mark.e2e)
        if item.get_closest_marker("xdist_group") is None:
            name = "real" if folder is not None else str(item.path.relative_to(HERE))
            item.add_marker(pytest.mark.xdist_group(name))


def _has_model() -> bool:
    return any(demo_folder().glob("*.safetensors"))


@pytest.fixture(scope="session")
def start_set() -> Iterator[Callable[..., RealSet]]:
    """Start sets with own settings; all of them are stopped at the end."""
    if not _has_model():
        pytest.skip("the demo's weights are not in this tree")
    started: list[tuple[RealSet, tempfile.TemporaryDirectory[str]]] = []

    def start(*pairs: str, profile: str = "demo") -> RealSet:
        folder = tempfile.TemporaryDirectory(prefix="dcnt-")
        real = RealSet(Path(folder.name) / "run", [*SMALL, *pairs], profile)
        started.append((real, folder))
        return real

    yield start
    for real, folder in started:
        if rundir.find_pids(real.run_dir):
            real.stop()
        folder.cleanup()


@pytest.fixture(scope="session")
def shared_set(start_set: Callable[..., RealSet]) -> RealSet:
    """The set that most tests share."""
    return start_set()


@pytest.fixture
def real_set(shared_set: RealSet) -> Iterator[RealSet]:
    """The shared set, ready before the test and without pages or requests after it."""
    shared_set.wait_ready()
    yield shared_set
    shared_set.wait_ready()
    shared_set.wait_clean()
