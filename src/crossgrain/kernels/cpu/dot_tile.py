"""The innermost loop of an NVFP4 GEMM: a tile of the product, from panels of small integers.

Twice an E2M1 number is an integer of at most 12. Four products of such integers are one lane of the CPU's
instructions for bytes, so a block of 16 costs a few of them where fp32 takes sixteen. The sum over a block is exact;
it is converted, scaled by both block scales and added up in fp32. These instructions take one unsigned factor, so the
right operand is kept 12 higher, and the left one brings what that adds to the sum of each block, to start from.

    left panel    for each block: [TILE_ROWS][16] bytes, [TILE_ROWS] int32 to start from, [TILE_ROWS] scales
    right panel   for each block: [4][TILE_COLUMNS][4] bytes, [TILE_COLUMNS] scales

There are three forms, and all give the same bits. AVX-512 VNNI adds four products in one instruction. Without it, two
products are added in 16 bits, which a block cannot leave (at most 4 x 2 x 24 x 12, and the start), and pairs of 16 bits
in one instruction at its end: so do AVX-512 BW and, in vectors of half the length, AVX2.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .features import compiled_for
from .simd import Vector, broadcast, load_at, pointer

WIDE = compiled_for("avx512f", "avx512bw")
FOUR_AT_ONCE = WIDE and compiled_for("avx512vnni")
AVAILABLE = WIDE or compiled_for("avx2", "fma")
"""Whether kernels are compiled for a CPU with one of the three forms."""

TILE_ROWS = 8  # with these columns, the sums and one block of the right panel fill the registers
LANES, TILE_VECTORS = (16, 2) if WIDE else (8, 1)
TILE_COLUMNS = LANES * TILE_VECTORS
OFFSET = 12
"""What makes the integers of the right operand unsigned."""
START_MASK = -1 if FOUR_AT_ONCE else 0xFFFF
"""Sums start in 32 bits, or in the lower one of two numbers of 16 bits."""
LEFT_BLOCK_BYTES = TILE_ROWS * (16 + 4 + 4)
RIGHT_CODES_BYTES = TILE_COLUMNS * 16
RIGHT_BLOCK_BYTES = RIGHT_CODES_BYTES + TILE_COLUMNS * 4

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_INTS, _FLOATS = Vector("i32", LANES).llvm, Vector("f32", LANES).llvm
_PAIRS, _BYTES = Vector("u16", 2 * LANES).llvm, Vector("u8", 4 * LANES).llvm
_VECTOR_BYTES = 4 * LANES
# Sums of two products of bytes in 16 bits, and of two numbers of 16 bits in 32.
_SUMS_OF_PAIRS = (
    ("llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512")
    if WIDE
    else ("llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd")
)


class _Emitter:
    """Instructions of the tile; addresses are integers, offsets known when it is compiled."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def at(self, address: Any, offset: int) -> Any:
        return self.builder.add(address, ir.Constant(_I64, offset))

    def vector(self, address: Any, offset: int, element: str) -> Any:
        return load_at(self.builder, self.at(address, offset), Vector(element, LANES))

    def everywhere(self, address: Any, offset: int, type_: Any) -> Any:
        """One number of memory in all lanes."""
        value = self.builder.load(pointer(self.builder, self.at(address, offset), type_))
        value.align = 1
        return broadcast(self.builder, value, LANES)

    def call(self, name: str, result: Any, *operands: Any) -> Any:
        """Call an instruction of the CPU, or of LLVM, by the name that LLVM has for it."""
        function = ir.FunctionType(result, [each.type for each in operands])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, function, name), operands)

    def dot(self, start: Any, codes: list[Any], fours: list[Any]) -> Any:
        """``start`` plus the products of 16 unsigned ``codes`` of each lane and 16 signed ones, four for each entry."""
        if FOUR_AT_ONCE:
            for unsigned, signed in zip(codes, fours, strict=True):
                start = self.call("llvm.x86.avx512.vpdpbusd.512", _INTS, start, unsigned, signed)
            return start
        in_twos, in_fours = _SUMS_OF_PAIRS
        pairs = self.builder.bitcast(start, _PAIRS)
        for unsigned, signed in zip(codes, fours, strict=True):
            factors = [self.builder.bitcast(each, _BYTES) for each in (unsigned, signed)]
            pairs = self.builder.add(pairs, self.call(in_twos, _PAIRS, *factors))
        return self.call(in_fours, _INTS, pairs, ir.Constant(_PAIRS, [1] * (2 * LANES)))

    def add_block(self, sums: list[list[Any]], left: Any, right: Any) -> None:
        """One block of 16 along the sum, for every row and column of the tile."""
        builder, vectors = self.builder, range(TILE_VECTORS)
        codes = [[self.vector(right, _VECTOR_BYTES * (TILE_VECTORS * q + v), "i32") for q in range(4)] for v in vectors]
        scales = [self.vector(right, RIGHT_CODES_BYTES + _VECTOR_BYTES * v, "f32") for v in vectors]
        for row in range(TILE_ROWS):
            start = self.everywhere(left, 16 * TILE_ROWS + 4 * row, _I32)
            fours = [self.everywhere(left, 16 * row + 4 * q, _I32) for q in range(4)]
            row_scale = self.everywhere(left, 20 * TILE_ROWS + 4 * row, _F32)
            for v in vectors:
                factor = builder.fmul(scales[v], row_scale)
                exact = builder.sitofp(self.dot(start, codes[v], fours), _FLOATS)
                total = builder.load(sums[row][v])
                builder.store(self.call(f"llvm.fma.v{LANES}f32", _FLOATS, exact, factor, total), sums[row][v])


@intrinsic
def multiply_tile(typing_context, left, right, blocks, out, out_stride, factor):
    """Write ``factor`` times the product of two panels: [TILE_ROWS, TILE_COLUMNS] fp32 at ``out``."""

    def generate(context, builder, signature, args):
        left, right, blocks, out, out_stride, factor = args
        emit = _Emitter(builder)
        zeros = ir.Constant(_FLOATS, [0.0] * LANES)
        sums = [[cgutils.alloca_once(builder, _FLOATS) for _ in range(TILE_VECTORS)] for _ in range(TILE_ROWS)]
        for row in sums:
            for total in row:
                builder.store(zeros, total)
        with cgutils.for_range(builder, blocks) as loop:
            here = [
                builder.add(panel, builder.mul(loop.index, ir.Constant(_I64, size)))
                for panel, size in ((left, LEFT_BLOCK_BYTES), (right, RIGHT_BLOCK_BYTES))
            ]
            emit.add_block(sums, *here)
        factors = broadcast(builder, factor, LANES)
        for number, row in enumerate(sums):
            line = builder.add(out, builder.mul(out_stride, ir.Constant(_I64, number)))
            for v, total in enumerate(row):
                place = pointer(builder, emit.at(line, _VECTOR_BYTES * v), _FLOATS)
                builder.store(builder.fmul(builder.load(total), factors), place).align = 1
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5, types.float32), generate
