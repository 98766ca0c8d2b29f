"""Compile a kernel for an architecture without a GPU, and read what the compiler says about it.

Used by the cross-compile test: every shipped configuration must fit the architecture's shared
memory, spill no registers in its loops and contain the matrix instruction that it was written for.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = ("*fp16", "*bf16", "*fp32", "*u8", "*i8", "*i32", "*i64", "*fp8e4nv")


@dataclass(frozen=True)
class Compiled:
    """What the compiler made: bytes of shared memory, registers and spill bytes per thread, PTX."""

    shared: int
    registers: int
    spill_bytes: int
    ptx: str

    def count(self, instruction: str) -> int:
        """Number of PTX lines that contain the regular expression."""
        return sum(1 for line in self.ptx.splitlines() if re.search(instruction, line))


def ptxas() -> str:
    """Path of the PTX assembler that Triton carries."""
    return str(Path(triton.__file__).parent / "backends/nvidia/bin/ptxas")


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """(registers, local bytes per thread) of a cubin, read by cuobjdump."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name],
            check=True, capture_output=True, text=True, timeout=60,
        ).stdout  # fmt: skip
    match = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if match is None:
        raise ValueError(f"cuobjdump said nothing about registers: {text[:200]}")
    registers, stack, local = (int(g) for g in match.groups())
    return registers, stack + local


def compile_kernel(
    kernel: Any,
    arguments: dict[str, str | int | float | bool],
    arch: str,
    num_warps: int,
    num_stages: int,
) -> Compiled:
    """Compile a Triton kernel. Arguments: a type string ("*fp16", "i32") or a constexpr value, by
    name.

    Pointers are taken as 16-byte aligned, integers as plain.
    """
    names = kernel.arg_names
    missing = set(names) ^ set(arguments)
    if missing:
        raise ValueError(f"{kernel.__name__}: arguments do not match: {sorted(missing)}")
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, name in enumerate(names):
        value = arguments[name]
        if isinstance(value, str):
            signature[name] = value
            if value.startswith("*"):
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "constexpr"
            constants[(i,)] = value
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    source = ASTSource(kernel, signature, constants, attributes)
    built = triton.compile(
        source, target=target, options={"num_warps": num_warps, "num_stages": num_stages}
    )
    registers, local = resource_usage(built.asm["cubin"])
    return Compiled(built.metadata.shared, registers, local, built.asm["ptx"])
