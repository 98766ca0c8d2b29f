"""The CUDA C++ kernels compile for both architectures within their limits.

`make test` compiles one configuration of every kernel, `make test-full` every candidate of
``autotune``. Needs nvcc or NVRTC (the wheel nvidia-cuda-nvrtc).
"""

import subprocess
from pathlib import Path

import pytest

from decant.kernels import cuda, tuning
from decant.kernels.aot import ptxas
from decant.protocol.errors import KernelError

KERNELS = {
    "attention": "attend_kernel", "linear": "linear_kernel", "mhc": "boundary_kernel",
    "gate": "route_kernel", "select": "select_kernel", "all_reduce": "all_reduce_kernel",
    "sampling": "sample_kernel", "linear_wide": "linear_wide_kernel",
    "gate_few": "route_few_kernel",
}  # fmt: skip
WITH_MATRIX = ("fp4_moe", "attention", "linear", "linear_wide", "gate", "gate_few")


def variants(arch: str) -> dict[str, list[dict[str, int]]]:
    """Constants of every candidate that exists on an architecture, by source."""
    found: dict[str, list[dict[str, int]]] = {}
    for job in tuning.jobs([]):
        for options in tuning.candidates(job):
            if not tuning.problem(job, options, arch):
                for name, constants in tuning.builds(job, options):
                    if constants not in found.setdefault(name, []):
                        found[name].append(constants)
    if arch == "sm_90":
        found["linear_wide"].append(found["linear_wide"][0] | {"IN": 0})
    found["all_reduce"] = [{"IN": 1, "OUT": 1}, {"IN": 0, "OUT": 0}]
    return found


def check(name: str, arch: str, constants: dict[str, int]) -> bytes:
    code, log = cuda.compile_source(name, arch, constants)
    kernel = KERNELS.get(name) or ("gate_up_kernel" if constants["K"] == 4096 else "down_kernel")
    usage = cuda.usage(log, kernel)
    assert usage.stack == usage.spills == 0, f"{name} {arch} {constants}: {usage}"
    assert usage.registers * threads(name, constants) <= 65_536
    return code


def threads(name: str, c: dict[str, int]) -> int:
    if name == "fp4_moe":
        return c["RG"] * c["KG"] * 32
    return {"gate": 128, "gate_few": 512, "all_reduce": 512}.get(name) or c.get("THREADS", 256)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
def test_one_configuration_of_every_kernel(arch: str, tmp_path: Path) -> None:
    for name, candidates in variants(arch).items():
        some = [candidates[0]]
        if name == "fp4_moe":
            some.append(next(c for c in candidates if c["K"] != candidates[0]["K"]))
        for constants in some:
            cubin = tmp_path / "kernel.cubin"
            cubin.write_bytes(check(name, arch, constants))
            if name in WITH_MATRIX:
                tool = Path(ptxas()).parent / "cuobjdump"
                text = subprocess.run(
                    [str(tool), "-sass", str(cubin)], capture_output=True, text=True, timeout=120
                ).stdout
                wanted = "QGMMA.64x" if name == "linear_wide" else "HMMA.16816"
                assert wanted in text, f"{name}: no matrix instruction"
                assert name == "gate_few" or "LDGSTS" in text, f"{name}: no asynchronous copy"


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
def test_every_candidate(arch: str) -> None:
    for name, candidates in variants(arch).items():
        for constants in candidates:
            check(name, arch, constants)


def test_a_compiler_that_refuses_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.cu").write_text('extern "C" __global__ void bad() { nonsense; }')
    monkeypatch.setattr(cuda, "FOLDER", tmp_path)
    monkeypatch.setenv("DECANT_CACHE", str(tmp_path))
    with pytest.raises(KernelError, match="nonsense"):
        cuda.compile_source("bad", "sm_90", {})


def test_without_a_compiler_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "nvcc", lambda: None)
    monkeypatch.setattr(cuda, "_nvrtc", lambda: None)
    with pytest.raises(KernelError, match="nvcc on PATH"):
        cuda.compile_source("all_reduce", "sm_90", {"IN": 0, "OUT": 0})


def test_nvrtc_compiles_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "nvcc", lambda: None)
    monkeypatch.setenv("DECANT_CACHE", str(tmp_path))
    code, log = cuda.compile_source("all_reduce", "sm_120", {"IN": 1, "OUT": 0})
    assert code[:4] == b"\x7fELF" and b"all_reduce_kernel" in code
    if "Compiling entry function" in log:  # some versions keep the assembler's report to themselves
        assert cuda.usage(log, "all_reduce_kernel").registers > 0
