"""The FP4 recoding as the GPU runs it: the inline PTX, executed here instruction by instruction.

The interpreter takes a branch of its own for this code, so a fault in the PTX would show on a GPU
only: as it once did, when a version that mixed neighbouring bytes was given register fragments of a
matrix instruction, in which other bytes are neighbours than in memory.
"""

import random
import re

import torch

from decant.kernels.fp4_moe import E2M1, recode
from decant.kernels.tiles import FP4_PTX

MASK = 0xFFFFFFFF


def run_ptx(text: str, word: int) -> list[int]:
    """Execute the few instructions that the recoding uses; returns the registers $0 .. $3."""
    registers = {"$4": word}

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    for instruction in re.findall(r"^([a-z]+[0-9]?\.b32) (.+);$", text, re.MULTILINE):
        name, operands = instruction[0], [o.strip() for o in instruction[1].split(",")]
        a = value(operands[1])
        b = value(operands[2])
        if name == "prmt.b32":
            octets = [(a >> 8 * i) & 0xFF for i in range(4)]
            octets += [(b >> 8 * i) & 0xFF for i in range(4)]
            selector = value(operands[3])
            assert not selector & 0x8888, "sign replication is not used"
            result = sum(octets[(selector >> 4 * i) & 7] << 8 * i for i in range(4))
        elif name == "and.b32":
            result = a & b
        elif name == "shl.b32":
            result = a << b
        elif name == "shr.b32":
            result = a >> b
        elif name == "lop3.b32":
            c, table = value(operands[3]), value(operands[4])
            result = 0
            for bit in range(32):
                index = ((a >> bit & 1) << 2) | ((b >> bit & 1) << 1) | (c >> bit & 1)
                result |= (table >> index & 1) << bit
        else:
            raise AssertionError(f"unknown instruction {name}")
        registers[operands[0]] = result & MASK
    return [registers[f"${i}"] for i in range(4)]


def halves(registers: list[int]) -> list[float]:
    """Two 32-bit registers as four fp16 values."""
    bits = [(register >> shift) & 0xFFFF for register in registers for shift in (0, 16)]
    signed = [b - 0x10000 if b >= 0x8000 else b for b in bits]
    return [float(v) for v in torch.tensor(signed, dtype=torch.int16).view(torch.float16)]


def test_each_byte_gives_its_own_two_values() -> None:
    text = FP4_PTX.value
    assert len(re.findall(r";$", text, re.MULTILINE)) == 13, "every line is one instruction"
    values = E2M1 + tuple(-v for v in E2M1)
    generator = random.Random(1)
    for low in range(16):
        for high in range(16):
            octet = int(
                recode(
                    torch.tensor([low], dtype=torch.uint8), torch.tensor([high], dtype=torch.uint8)
                )
            )
            for lane in range(4):
                noise = generator.getrandbits(32) & ~(0xFF << 8 * lane)
                got = run_ptx(text, noise | octet << 8 * lane)
                assert halves(got[:2])[lane] == values[low] * 2.0**-14
                assert halves(got[2:])[lane] == values[high] * 2.0**-14
