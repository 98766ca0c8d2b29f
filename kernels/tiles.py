"""Device helpers that several kernels share: matrix product, FP4 and FP8 conversions.

Everything here is called from inside Triton kernels. Under ``TRITON_INTERPRET=1`` the interpreter
has no inline PTX and multiplies bf16 bit patterns as integers, so each helper has a plain branch
for it; the branch is chosen at compile time and costs nothing on the GPU.
"""

import os

import triton
import triton.language as tl

INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")

FP8_MAX = tl.constexpr(448.0)
AMAX_FLOOR = tl.constexpr(1e-4)  # smallest amax that a quantisation group is given (model rule)

# Four bytes in $4; $0, $1: their low elements as four fp16, $2, $3: the high ones. Each result
# depends on its own byte only (a test runs this text over every byte in every lane).
FP4_PTX = tl.constexpr("""
{
.reg .b32 s, t, u;
prmt.b32 s, $4, 0, 0x1404;
prmt.b32 t, $4, 0, 0x3424;
and.b32 $0, s, 0x8E008E00;
and.b32 $1, t, 0x8E008E00;
shl.b32 u, s, 1;
and.b32 u, u, 0x82008200;
shr.b32 s, s, 2;
lop3.b32 $2, s, 0x0C000C00, u, 0xEA;
shl.b32 u, t, 1;
and.b32 u, u, 0x82008200;
shr.b32 t, t, 2;
lop3.b32 $3, t, 0x0C000C00, u, 0xEA;
}
""")


@triton.jit
def mma(a, b, acc):
    """acc + a @ b with fp32 accumulation; operands fp16, bf16 or e4m3."""
    if INTERPRET:
        acc += tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def power_of_two_scale(amax):
    """2^ceil(log2(max(amax, 1e-4) / 448)), exact: works on the exponent bits, no log2.

    Returns (scale, 1 / scale, biased exponent as int32), all exact for every finite amax.
    """
    ratio = tl.maximum(amax, AMAX_FLOOR) * (1.0 / FP8_MAX)
    bits = ratio.to(tl.int32, bitcast=True)
    exponent = (bits + 0x7FFFFF) >> 23
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return scale, inverse, exponent


@triton.jit
def to_e4m3(x):
    """fp32 to e4m3 with saturation at +-448, round to nearest even."""
    x = tl.minimum(tl.maximum(x, -FP8_MAX), FP8_MAX)
    if INTERPRET:
        # the interpreter's own conversion loses carries into the exponent: round to the e4m3 grid
        # first
        exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 0xFF, 121)
        step = ((exponent - 3) << 23).to(tl.float32, bitcast=True)
        x = ((x / step + 12582912.0) - 12582912.0) * step
    return x.to(tl.float8e4nv)


@triton.jit
def fp4_tile(pointers):
    """Load a tile of recoded FP4 bytes and return (low, high) as fp16 values / 2^14.

    A byte holds two e2m1 codes, each extracted as an fp16 whose value is the code's times 2^-14
    (the two exponent bits of e2m1 land in the low exponent bits of fp16; fp16 subnormals make code
    1 exact). Bits of a byte: the low element's sign 7 and magnitude 3..1, which are in place once
    the byte is the upper half of an fp16; the high element's sign 6, exponent 5..4 and mantissa 0.
    Byte by byte, so that it is right for any distribution of the tile over threads.
    """
    if INTERPRET:
        lane = tl.load(pointers).to(tl.uint16) << 8
        low = lane & 0x8E00
        high = ((lane << 1) & 0x8200) | ((lane >> 2) & 0x0C00)
        low = low.to(tl.uint16).to(tl.float16, bitcast=True)
        high = high.to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        packed = tl.load(pointers, eviction_policy="evict_first")
        low, high = tl.inline_asm_elementwise(
            FP4_PTX,
            "=r,=r,=r,=r,r",
            [packed],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    return low, high


@triton.jit
def to_bf16(x):
    """fp32 to bf16, round to nearest even."""
    if INTERPRET:  # the interpreter truncates: round the bit pattern first
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, rounded, bits).to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def cast_like(x, pointer):
    """fp32 values in the element type of a pointer, rounded to nearest even."""
    if pointer.dtype.element_ty == tl.bfloat16:
        return to_bf16(x)
    else:
        return x.to(pointer.dtype.element_ty)


@triton.jit
def keep_layout(x):
    """x (16-bit elements) unchanged. The compiler may not move what made x past this point: without
    it, arithmetic in front of a matrix operand is done in the operand's layout, which several warps
    repeat and which needs several times the registers.
    """
    if INTERPRET:
        return x
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
        )


@triton.jit
def scale_keep(x, factor):
    """x * factor, both fp16 of one shape, two elements an instruction; stays where it is like
    ``keep_layout``.
    """
    if INTERPRET:
        return x * factor
    else:
        return tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, factor], dtype=tl.float16, is_pure=False,
            pack=2,
        )  # fmt: skip
