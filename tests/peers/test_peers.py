"""Other people's clients against the real set, each in an environment of its own.

``make test-peers`` makes the environments (``.peers/NAME``, requirements.txt) and sets
DECANT_PEERS; then a missing environment is a failure. Elsewhere these tests are skipped.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_set import SMALL, RealSet

HERE = Path(__file__).parent
FOLDER = Path(os.environ.get("DECANT_PEERS", HERE.parents[1] / ".peers"))
pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def clients() -> list[str]:
    lines = (HERE / "requirements.txt").read_text().splitlines()
    return [m[0] for line in lines if (m := re.match(r"[\w-]+", line))]


@pytest.fixture(scope="module")
def real_set() -> Iterator[RealSet]:
    with tempfile.TemporaryDirectory(prefix="dcnt-") as folder:
        real = RealSet(Path(folder) / "run", SMALL)
        yield real
        real.stop()


def test_every_client_has_a_script() -> None:
    scripts = {p.stem.removeprefix("use_") for p in HERE.glob("use_*.py")}
    assert scripts == {name.replace("-", "_") for name in clients()}


@pytest.mark.parametrize("name", clients())
def test_client(name: str, request: pytest.FixtureRequest) -> None:
    python = FOLDER / name / "bin" / "python"
    if not python.exists():
        assert "DECANT_PEERS" not in os.environ, f"no environment for {name} in {FOLDER}"
        pytest.skip(f"no environment for {name}; make test-peers makes it")
    real_set: RealSet = request.getfixturevalue("real_set")  # not before we know that it is needed
    script = HERE / f"use_{name.replace('-', '_')}.py"
    done = subprocess.run(
        [str(python), "-P", str(script), real_set.url, real_set.model],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": ""},
        check=False,
    )
    assert done.returncode == 0 and done.stdout.strip().endswith("ok"), done.stdout + done.stderr
