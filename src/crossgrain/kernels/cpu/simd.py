"""SIMD values inside numba: a `Vector` of n numbers that lowers to an LLVM vector.

numba vectorizes loops when it can; these kernels must not depend on that. Here a kernel says itself that
it loads 32 floats, multiplies them and stores 32 bytes. Addresses are plain integers. Operators work on
two vectors, or on a vector and a number, which is broadcast. Shifts to the right are logical.

    v = load(address, 32, "f32")
    codes = narrow((as_int(v * 2.0) >> 20) & 0xFF)
    store(out, codes)
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model

_LLVM: dict[str, ir.Type] = {
    "f32": ir.FloatType(),
    "i32": ir.IntType(32),
    "u16": ir.IntType(16),
    "u8": ir.IntType(8),
}
_LLVM_BYTES = {"f32": 4, "i32": 4, "u16": 2, "u8": 1}
_I32 = _LLVM["i32"]


class Vector(types.Type):
    """The numba type of ``lanes`` numbers of one element type: f32, i32, u16 or u8."""

    def __init__(self, element: str, lanes: int) -> None:
        self.element = element
        self.lanes = lanes
        super().__init__(name=f"Vector({element}, {lanes})")

    @property
    def llvm(self) -> ir.VectorType:
        return ir.VectorType(_LLVM[self.element], self.lanes)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm)


def broadcast(builder: Any, scalar: Any, lanes: int) -> Any:
    empty = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    return _shuffle(builder, builder.insert_element(empty, scalar, ir.Constant(_I32, 0)), [0] * lanes)


def _constant(vector: Vector, value: float) -> Any:
    if vector.element == "f32":
        return ir.Constant(vector.llvm, [float(value)] * vector.lanes)
    number = int(value)
    return ir.Constant(vector.llvm, [number - (1 << 32) if number >= 1 << 31 else number] * vector.lanes)


def _shuffle(builder: Any, vector: Any, lanes: list[int]) -> Any:
    """The named lanes of a vector, in this order."""
    order = ir.Constant(ir.VectorType(_I32, len(lanes)), lanes)
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), order)


def _as_vector(context: Any, builder: Any, value: Any, type_: Any, like: Vector) -> Any:
    """``value`` as a vector like ``like``: itself, or a number broadcast to all lanes."""
    if isinstance(type_, Vector):
        return value
    if isinstance(type_, types.Literal):
        return _constant(like, type_.literal_value)
    scalar = types.float32 if like.element == "f32" else types.int32
    return broadcast(builder, context.cast(builder, value, type_, scalar), like.lanes)


# ---- memory ------------------------------------------------------------------------------------------


def pointer(builder: Any, address: Any, type_: Any) -> Any:
    return builder.inttoptr(address, type_.as_pointer())


def load_at(builder: Any, address: Any, vector: Vector) -> Any:
    value = builder.load(pointer(builder, address, vector.llvm))
    value.align = 1
    return value


def load_bf16_at(builder: Any, address: Any, vector: Vector) -> Any:
    wide = Vector("i32", vector.lanes)
    halves = load_at(builder, address, Vector("u16", vector.lanes))
    return builder.bitcast(builder.shl(builder.zext(halves, wide.llvm), _constant(wide, 16)), vector.llvm)


@intrinsic(prefer_literal=True)
def load(typing_context, address, lanes, element):
    """``lanes`` numbers from any address."""
    vector = Vector(element.literal_value, lanes.literal_value)

    def generate(context, builder, signature, args):
        return load_at(builder, args[0], vector)

    return vector(types.intp, lanes, element), generate


@intrinsic(prefer_literal=True)
def load_bf16(typing_context, address, lanes):
    """``lanes`` bfloat16 numbers, widened to f32."""
    vector = Vector("f32", lanes.literal_value)

    def generate(context, builder, signature, args):
        return load_bf16_at(builder, args[0], vector)

    return vector(types.intp, lanes), generate


@intrinsic
def store(typing_context, address, vector):
    """Write a vector to any address."""

    def generate(context, builder, signature, args):
        builder.store(args[1], pointer(builder, args[0], vector.llvm)).align = 1
        return context.get_dummy_value()

    return types.void(types.intp, vector), generate


@intrinsic
def stream(typing_context, address, vector):
    """Write a vector past the caches; the address is a multiple of its size, or of 64."""

    def generate(context, builder, signature, args):
        instruction = builder.store(args[1], pointer(builder, args[0], vector.llvm))
        instruction.align = min(64, vector.lanes * _LLVM_BYTES[vector.element])
        instruction.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_I32, 1)]))
        return context.get_dummy_value()

    return types.void(types.intp, vector), generate


def prefetch_line(builder: Any, address: Any) -> None:
    place = pointer(builder, address, _LLVM["u8"])
    function = ir.FunctionType(ir.VoidType(), [place.type, _I32, _I32, _I32])
    called = cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0")
    builder.call(called, [place, *(ir.Constant(_I32, number) for number in (0, 2, 1))])  # read, second level, data


@intrinsic
def prefetch(typing_context, address):
    """Ask for the cache line at an address, which may be any: nothing fails."""

    def generate(context, builder, signature, args):
        prefetch_line(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.intp), generate


@intrinsic
def store_apart(typing_context, address, step, vector):
    """Write each i32 lane ``step`` bytes after the one before."""

    def generate(context, builder, signature, args):
        address, step, value = args
        for lane in range(vector.lanes):
            word = builder.extract_element(value, ir.Constant(_I32, lane))
            builder.store(word, pointer(builder, address, _I32)).align = 1
            address = builder.add(address, step)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, vector), generate


def _scalar_load(numba_type: Any, llvm_type: Any, widened: Any = None) -> Any:
    @intrinsic
    def load_scalar(typing_context, address):
        def generate(context, builder, signature, args):
            value = builder.load(pointer(builder, args[0], llvm_type))
            value.align = 1
            return value if widened is None else builder.zext(value, widened)

        return numba_type(types.intp), generate

    return load_scalar


load_u8 = _scalar_load(types.int32, _LLVM["u8"], _I32)
load_i32 = _scalar_load(types.int32, _I32)
load_f32 = _scalar_load(types.float32, _LLVM["f32"])
load_i64 = _scalar_load(types.int64, ir.IntType(64))


@intrinsic
def store_u8(typing_context, address, value):
    """Write the low byte of an integer."""

    def generate(context, builder, signature, args):
        byte = builder.trunc(context.cast(builder, args[1], value, types.int32), _LLVM["u8"])
        builder.store(byte, pointer(builder, args[0], _LLVM["u8"]))
        return context.get_dummy_value()

    return types.void(types.intp, value), generate


@intrinsic
def store_i32(typing_context, address, value):
    def generate(context, builder, signature, args):
        word = context.cast(builder, args[1], value, types.int32)
        builder.store(word, pointer(builder, args[0], _I32)).align = 1
        return context.get_dummy_value()

    return types.void(types.intp, value), generate


@intrinsic
def opaque(typing_context, number):
    """The number, which the compiler does not know: it does not unroll a loop whose vectors would not fit."""

    def generate(context, builder, signature, args):
        same = ir.FunctionType(args[0].type, [args[0].type])
        return builder.asm(same, "", "=r,0", args, side_effect=False)

    return types.intp(types.intp), generate


# ---- making and changing vectors ---------------------------------------------------------------------


@intrinsic(prefer_literal=True)
def splat(typing_context, value, lanes, element):
    """One number in every lane."""
    vector = Vector(element.literal_value, lanes.literal_value)

    def generate(context, builder, signature, args):
        return _as_vector(context, builder, args[0], value, vector)

    return vector(value, lanes, element), generate


def _conversion(element: str, emit: Callable[[Any, Any, Any], Any]) -> Any:
    @intrinsic
    def convert(typing_context, vector):
        result = Vector(element, vector.lanes)

        def generate(context, builder, signature, args):
            return emit(builder, args[0], result.llvm)

        return result(vector), generate

    return convert


as_int = _conversion("i32", lambda builder, value, to: builder.bitcast(value, to))
as_float = _conversion("f32", lambda builder, value, to: builder.bitcast(value, to))
narrow = _conversion("u8", lambda builder, value, to: builder.trunc(value, to))
widen = _conversion("i32", lambda builder, value, to: builder.zext(value, to))
to_int = _conversion("i32", lambda builder, value, to: builder.fptosi(value, to))
to_float = _conversion("f32", lambda builder, value, to: builder.sitofp(value, to))


def round_to_bf16(builder: Any, value: Any, vector: Vector) -> Any:
    """The bits of f32 numbers rounded to bf16, nearest even, the low halves zero; NaN is the one torch writes."""
    bits = Vector("i32", vector.lanes)
    word = builder.bitcast(value, bits.llvm)
    odd = builder.and_(builder.lshr(word, _constant(bits, 16)), _constant(bits, 1))
    rounded = builder.add(word, builder.add(odd, _constant(bits, 0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", value, value)  # rounding up could turn one into a zero
    chosen = builder.select(is_nan, _constant(bits, 0xFFFFFFFF), rounded)
    return builder.and_(chosen, _constant(bits, 0xFFFF0000))


@intrinsic
def to_bf16(typing_context, vector):
    """f32 -> bfloat16, nearest even, as u16 lanes."""
    wide, halves = Vector("i32", vector.lanes), Vector("u16", vector.lanes)

    def generate(context, builder, signature, args):
        word = round_to_bf16(builder, args[0], vector)
        return builder.trunc(builder.lshr(word, _constant(wide, 16)), halves.llvm)

    return halves(vector), generate


def _scalar_bitcast(source: Any, result: Any, llvm_type: Any) -> Any:
    @intrinsic
    def bitcast(typing_context, value):
        def generate(context, builder, signature, args):
            return builder.bitcast(context.cast(builder, args[0], value, source), llvm_type)

        return result(value), generate

    return bitcast


bits_of = _scalar_bitcast(types.float32, types.int32, _I32)
float_of = _scalar_bitcast(types.int32, types.float32, _LLVM["f32"])


def in_sixteens(builder: Any, vector: Any) -> list[Any]:
    """The parts of 16 lanes of a vector, as long as one instruction works on."""
    return [_shuffle(builder, vector, list(range(lane, lane + 16))) for lane in range(0, vector.type.count, 16)]


def joined(builder: Any, parts: list[Any]) -> Any:
    """Vectors of the same length, one behind the other; a power of two of them."""
    while len(parts) > 1:
        lanes = 2 * parts[0].type.count
        order = ir.Constant(ir.VectorType(_I32, lanes), list(range(lanes)))
        parts = [builder.shuffle_vector(a, b, order) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


@intrinsic
def side_by_side(typing_context, left, right):
    """The lanes of two vectors of the same type, one behind the other."""
    result = Vector(left.element, 2 * left.lanes)
    return result(left, right), lambda context, builder, signature, args: joined(builder, list(args))


@intrinsic
def alternating(typing_context, first, second):
    """The lanes of two vectors of the same type, taken in turns."""
    lanes = first.lanes
    result = Vector(first.element, 2 * lanes)

    def generate(context, builder, signature, args):
        order = [lane for number in range(lanes) for lane in (number, lanes + number)]
        return builder.shuffle_vector(args[0], args[1], ir.Constant(ir.VectorType(_I32, 2 * lanes), order))

    return result(first, second), generate


@intrinsic
def as_bytes(typing_context, words):
    """The bytes of n i32 lanes, lowest first, in 4n u8 lanes."""
    bytes_ = Vector("u8", 4 * words.lanes)
    return bytes_(words), lambda context, builder, signature, args: builder.bitcast(args[0], bytes_.llvm)


@intrinsic
def as_words(typing_context, bytes_):
    """4n u8 lanes as n i32 lanes, the first byte lowest."""
    words = Vector("i32", bytes_.lanes // 4)
    return words(bytes_), lambda context, builder, signature, args: builder.bitcast(args[0], words.llvm)


def _reduction(name: str) -> Any:
    """From an i32 vector to one number."""

    @intrinsic
    def reduce(typing_context, vector):
        def generate(context, builder, signature, args):
            function = ir.FunctionType(_I32, [vector.llvm])
            full_name = f"llvm.vector.reduce.{name}.v{vector.lanes}i32"
            return builder.call(cgutils.get_or_insert_function(builder.module, function, full_name), [args[0]])

        return types.int32(vector), generate

    return reduce


largest = _reduction("smax")
total_of = _reduction("add")


@intrinsic
def sum_of_halves(typing_context, vector):
    """The sum of all f32 lanes: the first half plus the second, until there is one."""

    def generate(context, builder, signature, args):
        value, lanes = args[0], vector.lanes
        while lanes > 1:
            lanes //= 2
            low, high = list(range(lanes)), list(range(lanes, 2 * lanes))
            value = builder.fadd(_shuffle(builder, value, low), _shuffle(builder, value, high))
        return builder.extract_element(value, ir.Constant(_I32, 0))

    return types.float32(vector), generate


# ---- arithmetic --------------------------------------------------------------------------------------


def _binary(emit: Callable[[Any, Vector, Any, Any], Any]) -> Any:
    @intrinsic(prefer_literal=True)
    def apply(typing_context, left, right):
        def generate(context, builder, signature, args):
            return emit(builder, left, args[0], _as_vector(context, builder, args[1], right, left))

        return left(left, right), generate

    return apply


def _operator(python_operator: Any, emit: Callable[[Any, Vector, Any, Any], Any]) -> None:
    """An operator of vectors, told to numba itself: an overload would be a function that is compiled for each use."""

    class OnVectors(AbstractTemplate):
        prefer_literal = True

        def generic(self, args: Any, kws: Any) -> Any:
            left, right = args
            return signature(left, left, right) if isinstance(left, Vector) else None

    infer_global(python_operator)(OnVectors)

    @lower_builtin(python_operator, Vector, types.Any)
    def generate(context: Any, builder: Any, found: Any, args: Any) -> Any:
        left, right = found.args
        return emit(builder, left, args[0], _as_vector(context, builder, args[1], right, left))


def _float_or_int(on_floats: str, on_ints: str) -> Callable[[Any, Vector, Any, Any], Any]:
    return lambda builder, vector, x, y: getattr(builder, on_floats if vector.element == "f32" else on_ints)(x, y)


_operator(operator.add, _float_or_int("fadd", "add"))
_operator(operator.sub, _float_or_int("fsub", "sub"))
_operator(operator.mul, _float_or_int("fmul", "mul"))
_operator(operator.truediv, lambda builder, vector, x, y: builder.fdiv(x, y))
_operator(operator.and_, lambda builder, vector, x, y: builder.and_(x, y))
_operator(operator.or_, lambda builder, vector, x, y: builder.or_(x, y))
_operator(operator.xor, lambda builder, vector, x, y: builder.xor(x, y))
_operator(operator.lshift, lambda builder, vector, x, y: builder.shl(x, y))
_operator(operator.rshift, lambda builder, vector, x, y: builder.lshr(x, y))


@intrinsic(prefer_literal=True)
def fused(typing_context, x, y, z):
    """x * y + z of f32 vectors (y may be a number), in one rounding or in two: only for products that are exact."""

    def generate(context, builder, signature, args):
        by = _as_vector(context, builder, args[1], y, x)
        return builder.fadd(builder.fmul(args[0], by, flags=("contract",)), args[2], flags=("contract",))

    return x(x, y, z), generate


@intrinsic
def remainder_by(typing_context, x, quotient, divisor):
    """x - quotient * divisor (a number), rounded once. Needs fused multiply-adds."""

    def generate(context, builder, signature, args):
        by = builder.fneg(_as_vector(context, builder, args[2], divisor, x))
        return _fma(builder, x, args[1], by, args[0])

    return x(x, quotient, divisor), generate


@intrinsic
def corrected(typing_context, x, error, factor):
    """x + error * factor (a number), rounded once. Needs fused multiply-adds."""

    def generate(context, builder, signature, args):
        return _fma(builder, x, args[1], _as_vector(context, builder, args[2], factor, x), args[0])

    return x(x, error, factor), generate


def _fma(builder: Any, vector: Vector, *operands: Any) -> Any:
    function = ir.FunctionType(vector.llvm, [vector.llvm] * 3)
    fma = cgutils.get_or_insert_function(builder.module, function, f"llvm.fma.v{vector.lanes}f32")
    return builder.call(fma, operands)


maximum = _binary(lambda builder, vector, x, y: builder.select(builder.icmp_signed(">", x, y), x, y))
minimum = _binary(lambda builder, vector, x, y: builder.select(builder.icmp_signed("<", x, y), x, y))
float_minimum = _binary(lambda builder, vector, x, y: builder.select(builder.fcmp_ordered("<", x, y), x, y))


def _choice(compare: Callable[[Any, Any, Any], Any]) -> Any:
    """A function of ``left, right, then, otherwise``: ``then`` in the lanes where the comparison holds."""

    @intrinsic(prefer_literal=True)
    def choose(typing_context, left, right, then, otherwise):
        result = then if isinstance(then, Vector) else otherwise

        def generate(context, builder, signature, args):
            condition = compare(builder, args[0], _as_vector(context, builder, args[1], right, left))
            chosen = _as_vector(context, builder, args[2], then, result)
            other = _as_vector(context, builder, args[3], otherwise, result)
            return builder.select(condition, chosen, other)

        return result(left, right, then, otherwise), generate

    return choose


where_greater = _choice(lambda builder, x, y: builder.icmp_signed(">", x, y))  # integers
where_less = _choice(lambda builder, x, y: builder.fcmp_ordered("<", x, y))  # floats
