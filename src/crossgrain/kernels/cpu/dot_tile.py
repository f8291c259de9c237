"""The innermost loop of an NVFP4 GEMM: a tile of the product, from panels of small integers.

Twice an E2M1 number is an integer of at most 12. Four products of such integers are one lane of the CPU's
dot-product instruction (AVX-512 VNNI), sixteen lanes at once, so a block of 16 costs four instructions
where fp32 takes sixteen. The sum over a block is exact; it is converted, scaled by both block scales and
added up in fp32. That instruction takes one unsigned factor, so the right operand is kept 12 higher, and
the left one brings what that adds to the sum of each block, to start from.

    left panel    for each block: [TILE_ROWS][16] bytes, [TILE_ROWS] int32 to start from, [TILE_ROWS] scales
    right panel   for each block: [4][TILE_COLUMNS][4] bytes, [TILE_COLUMNS] scales
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .simd import Vector, broadcast, load_at, pointer

TILE_ROWS = 8  # with two vectors of columns, the sums and one block of the right panel fill the registers
TILE_VECTORS = 2
TILE_COLUMNS = 16 * TILE_VECTORS
OFFSET = 12
"""What makes the integers of the right operand unsigned."""
LEFT_BLOCK_BYTES = TILE_ROWS * (16 + 4 + 4)
RIGHT_CODES_BYTES = TILE_COLUMNS * 16
RIGHT_BLOCK_BYTES = RIGHT_CODES_BYTES + TILE_COLUMNS * 4

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_INTS, _FLOATS, _BYTES = Vector("i32", 16), Vector("f32", 16), Vector("u8", 64)


class _Emitter:
    """Instructions of the tile; addresses are integers, offsets known when it is compiled."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        module = builder.module
        ints, floats = _INTS.llvm, _FLOATS.llvm
        dot = ir.FunctionType(ints, [ints, ints, ints])
        self.dot = cgutils.get_or_insert_function(module, dot, "llvm.x86.avx512.vpdpbusd.512")
        fma = ir.FunctionType(floats, [floats, floats, floats])
        self.fma = cgutils.get_or_insert_function(module, fma, "llvm.fma.v16f32")

    def at(self, address: Any, offset: int) -> Any:
        return self.builder.add(address, ir.Constant(_I64, offset))

    def vector(self, address: Any, offset: int, vector: Vector) -> Any:
        return load_at(self.builder, self.at(address, offset), vector)

    def everywhere(self, address: Any, offset: int, type_: Any) -> Any:
        """One number of memory in all lanes."""
        value = self.builder.load(pointer(self.builder, self.at(address, offset), type_))
        value.align = 1
        return broadcast(self.builder, value, 16)

    def add_block(self, sums: list[list[Any]], left: Any, right: Any) -> None:
        """One block of 16 along the sum, for every row and column of the tile."""
        builder, vectors = self.builder, range(TILE_VECTORS)
        codes = [[self.vector(right, 64 * (TILE_VECTORS * q + v), _INTS) for v in vectors] for q in range(4)]
        scales = [self.vector(right, RIGHT_CODES_BYTES + 64 * v, _FLOATS) for v in vectors]
        for row in range(TILE_ROWS):
            totals = [self.everywhere(left, 16 * TILE_ROWS + 4 * row, _I32)] * TILE_VECTORS
            for q in range(4):
                four = self.everywhere(left, 16 * row + 4 * q, _I32)
                totals = [builder.call(self.dot, [totals[v], codes[q][v], four]) for v in vectors]
            row_scale = self.everywhere(left, 20 * TILE_ROWS + 4 * row, _F32)
            for v in vectors:
                factor = builder.fmul(scales[v], row_scale)
                exact = builder.sitofp(totals[v], _FLOATS.llvm)
                builder.store(builder.call(self.fma, [exact, factor, builder.load(sums[row][v])]), sums[row][v])


@intrinsic
def multiply_tile(typing_context, left, right, blocks, out, out_stride, factor):
    """Write ``factor`` times the product of two panels: [TILE_ROWS, TILE_COLUMNS] fp32 at ``out``."""

    def generate(context, builder, signature, args):
        left, right, blocks, out, out_stride, factor = args
        emit = _Emitter(builder)
        zeros = ir.Constant(_FLOATS.llvm, [0.0] * 16)
        sums = [[cgutils.alloca_once(builder, _FLOATS.llvm) for _ in range(TILE_VECTORS)] for _ in range(TILE_ROWS)]
        for row in sums:
            for total in row:
                builder.store(zeros, total)
        with cgutils.for_range(builder, blocks) as loop:
            here = [
                builder.add(panel, builder.mul(loop.index, ir.Constant(_I64, size)))
                for panel, size in ((left, LEFT_BLOCK_BYTES), (right, RIGHT_BLOCK_BYTES))
            ]
            emit.add_block(sums, *here)
        factors = broadcast(builder, factor, 16)
        for number, row in enumerate(sums):
            line = builder.add(out, builder.mul(out_stride, ir.Constant(_I64, number)))
            for v, total in enumerate(row):
                place = pointer(builder, emit.at(line, 64 * v), _FLOATS.llvm)
                builder.store(builder.fmul(builder.load(total), factors), place).align = 1
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5, types.float32), generate
