"""Codes in lanes of 32 bits -> the bytes they are stored in, and back."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from .known import ELEMENTS
from .simd import Vector, _constant, _shuffle, in_sixteens


@intrinsic
def pack_nibbles(typing_context, codes):
    """2n codes of 4 bits (i32) -> n bytes, the first code in the low half."""
    lanes = codes.lanes
    packed = Vector("u8", lanes // 2)

    def generate(context, builder, signature, args):
        pairs = Vector("u16", lanes // 2).llvm
        bytes_ = builder.trunc(args[0], Vector("u8", lanes).llvm)
        words = builder.bitcast(bytes_, pairs)
        both = builder.or_(words, builder.lshr(words, ir.Constant(pairs, [4] * (lanes // 2))))
        return builder.trunc(both, packed.llvm)

    return packed(codes), generate


@intrinsic
def unpack_nibbles(typing_context, packed):
    """n bytes -> 2n codes of 4 bits (i32)."""
    lanes = packed.lanes
    codes = Vector("i32", 2 * lanes)

    def generate(context, builder, signature, args):
        pairs = Vector("u16", lanes).llvm
        words = builder.zext(args[0], pairs)
        apart = builder.or_(words, builder.shl(words, ir.Constant(pairs, [4] * lanes)))
        halves = builder.and_(apart, ir.Constant(pairs, [0x0F0F] * lanes))
        return builder.zext(builder.bitcast(halves, Vector("u8", 2 * lanes).llvm), codes.llvm)

    return codes(packed), generate


@intrinsic
def pack_sixes(typing_context, codes):
    """4n codes of 6 bits (i32) -> 3n bytes, the first code in the lowest bits."""
    groups = codes.lanes // 4
    words, packed = Vector("i32", groups), Vector("u8", 3 * groups)

    def generate(context, builder, signature, args):
        word = builder.bitcast(builder.trunc(args[0], Vector("u8", codes.lanes).llvm), words.llvm)
        together = builder.and_(word, _constant(words, 0x3F))
        for place in (1, 2, 3):  # from 8 bits apart to 6
            moved = builder.lshr(word, _constant(words, 2 * place))
            together = builder.or_(together, builder.and_(moved, _constant(words, 0x3F << 6 * place)))
        bytes_ = builder.bitcast(together, Vector("u8", codes.lanes).llvm)
        return _shuffle(builder, bytes_, [byte for byte in range(codes.lanes) if byte % 4 != 3])

    return packed(codes), generate


@intrinsic
def unpack_sixes(typing_context, packed):
    """3n bytes -> 4n codes of 6 bits (i32)."""
    groups = packed.lanes // 3
    words, codes = Vector("i32", groups), Vector("i32", 4 * groups)

    def generate(context, builder, signature, args):
        spread = [3 * group + min(byte, 2) for group in range(groups) for byte in range(4)]
        word = builder.bitcast(_shuffle(builder, args[0], spread), words.llvm)
        apart = builder.and_(word, _constant(words, 0x3F))
        for place in (1, 2, 3):  # from 6 bits apart to 8
            moved = builder.shl(word, _constant(words, 2 * place))
            apart = builder.or_(apart, builder.and_(moved, _constant(words, 0x3F << 8 * place)))
        return builder.zext(builder.bitcast(apart, Vector("u8", 4 * groups).llvm), codes.llvm)

    return codes(packed), generate


@intrinsic
def sixty_four_bytes(typing_context, v, sums, element):
    """The bytes of 64 codes of 8 bits, from numbers and their `rounded_sums`. Needs AVX-512 (BW).

    These are fewer instructions than to narrow words one vector at a time.
    """
    result = Vector("u8", 64)
    mantissa = ELEMENTS[element.tag].mantissa_bits

    def generate(context, builder, signature, args):
        words, halves = Vector("i32", 16).llvm, Vector("u16", 32).llvm

        def call(name: str, type_: Any, *operands: Any) -> Any:
            function = ir.FunctionType(type_, [operand.type for operand in operands])
            full_name = f"llvm.x86.avx512.{name}.512"
            return builder.call(cgutils.get_or_insert_function(builder.module, function, full_name), operands)

        def same(number: int) -> Any:
            return ir.Constant(halves, [number] * 32)

        def codes(pair: tuple[int, int]) -> Any:
            """32 codes in the high halves of 16-bit lanes; packing saturates, so that signs are kept."""
            numbers, added = (
                [vectors[i] for i in pair] for vectors in (in_sixteens(builder, each) for each in args[:2])
            )
            weights = ir.Constant(halves, [1 << 7 - mantissa, 1] * 16)
            counted = [call("pmaddw.d", words, builder.bitcast(each, halves), weights) for each in added]
            shifted = builder.shl(call("packssdw", halves, *counted), same(mantissa + 1))
            floats = [builder.bitcast(number, words) for number in numbers]
            signs = builder.and_(call("packssdw", halves, *floats), same(0x8000))
            return builder.lshr(builder.or_(shifted, signs), same(8))

        packed = builder.bitcast(call("packuswb", result.llvm, codes((0, 1)), codes((2, 3))), words)
        order = ir.Constant(words, [4 * (lane % 4) + lane // 4 for lane in range(16)])  # packing works in quarters
        return builder.bitcast(builder.shuffle_vector(packed, packed, order), result.llvm)

    return result(v, sums, element), generate
