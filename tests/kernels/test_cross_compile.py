"""Shipped configurations compile for their architecture, within its limits.

Runs in processes of their own, because these tests interpret kernels and the compiler must not.
`make test` compiles one configuration of every kernel for each architecture, `make test-full` all.
"""

import json
import os
import subprocess
import sys

import pytest

from decant.kernels.shipped import GROUPS, one_of_each, shipped


def compile_group(*arguments: str) -> list[dict[str, object]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "decant.kernels.shipped", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=890,
    )
    assert done.stdout, f"the kernels could not be compiled here: {done.stderr[-500:]}"
    results: list[dict[str, object]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert {r["arch"] for r in results} == {"sm_90", "sm_120"}
    wrong = [f"{r['arch']} {r['name']}: {r['problem']}" for r in results if r["problem"]]
    assert not wrong, "\n".join(wrong)
    return results


@pytest.mark.timeout(900)
@pytest.mark.parametrize("group", GROUPS)
def test_one_configuration_of_every_kernel(group: str) -> None:
    results = compile_group(group, "--one-of-each")
    kernels = {item.kernel.__name__ for item in shipped("sm_90", group)}
    assert len(results) == 2 * len(kernels)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("group", GROUPS)
def test_every_shipped_configuration(group: str) -> None:
    results = compile_group(group)
    assert len(results) == sum(1 for arch in ("sm_90", "sm_120") for _ in shipped(arch, group))


def test_one_of_each_takes_the_second() -> None:
    items = list(shipped("sm_90", "moe"))
    names = [item.name for item in one_of_each(items)]
    assert names == ["moe gate_up group 32 <= 64", "moe down group 32 <= 64", "moe combine"]
