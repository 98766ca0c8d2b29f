"""Every shipped configuration compiles for its architecture, within its limits.

Runs in a process of its own, because these tests interpret kernels and the compiler must not.
"""

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.timeout(600)
def test_every_shipped_configuration() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "decant.kernels.shipped"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=590,
    )
    assert done.stdout, f"the kernels could not be compiled here: {done.stderr[-500:]}"
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert {r["arch"] for r in results} == {"sm_90", "sm_120"}
    wrong = [f"{r['arch']} {r['name']}: {r['problem']}" for r in results if r["problem"]]
    assert not wrong, "\n".join(wrong)
