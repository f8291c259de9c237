"""Integer and logic instructions, by their full names."""

from collections.abc import Callable
from typing import Any

import numpy as np

from . import undefined
from .errors import PtxError
from .values import Array, Operation, of_type, signed, unsigned

TABLE: dict[str, Operation] = {}


def _arithmetic() -> None:
    for bits in (16, 32, 64):
        for kind in "su":
            name, dtype = f"{kind}{bits}", of_type(f"{kind}{bits}")
            two = (bits, bits)
            for verb, ufunc in {"add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum}.items():
                TABLE[f"{verb}.{name}"] = Operation(bits, two, _viewed(ufunc, dtype, bits))
            TABLE[f"mul.lo.{name}"] = Operation(bits, two, _viewed(np.multiply, dtype, bits))
            TABLE[f"mad.lo.{name}"] = Operation(bits, (bits,) * 3, lambda a, b, c: a * b + c)
            TABLE[f"div.{name}"] = Operation(bits, two, _divided(dtype, bits, remainder=False))
            TABLE[f"rem.{name}"] = Operation(bits, two, _divided(dtype, bits, remainder=True))
            if bits > 16:
                TABLE[f"mul.hi.{name}"] = Operation(bits, two, _high_half(dtype, bits))
            if bits < 64:
                wide = _widened(dtype, of_type(f"{kind}{2 * bits}"), 2 * bits)
                TABLE[f"mul.wide.{name}"] = Operation(2 * bits, two, wide)
                TABLE[f"mad.wide.{name}"] = Operation(2 * bits, (*two, 2 * bits), _added(wide))
        TABLE[f"neg.s{bits}"] = Operation(bits, (bits,), _viewed(np.negative, signed(bits), bits))
        TABLE[f"abs.s{bits}"] = Operation(bits, (bits,), _viewed(np.abs, signed(bits), bits))
    for kind in "su":
        for verb, ufunc in {"add": np.add, "min": np.minimum, "max": np.maximum}.items():
            halves = on_halves(_viewed(ufunc, of_type(f"{kind}16"), 16), 32)
            TABLE[f"{verb}.{kind}16x2"] = Operation(32, (32, 32), halves, undefined.of_halves(32))


def _logic() -> None:
    for bits in (16, 32, 64):
        two = (bits, bits)
        TABLE[f"and.b{bits}"] = Operation(bits, two, np.bitwise_and, undefined.of_and(bits))
        TABLE[f"or.b{bits}"] = Operation(bits, two, np.bitwise_or, undefined.of_or(bits))
        TABLE[f"xor.b{bits}"] = Operation(bits, two, np.bitwise_xor, undefined.of_bytes)
        TABLE[f"not.b{bits}"] = Operation(bits, (bits,), np.invert, undefined.of_bytes)
        TABLE[f"shl.b{bits}"] = Operation(bits, (bits, 32), _shift_left, undefined.of_shift_left(bits))
        for name in (f"u{bits}", f"b{bits}", f"s{bits}"):
            rule = undefined.of_shift_right(bits, name[0] == "s")
            TABLE[f"shr.{name}"] = Operation(bits, (bits, 32), _shift_right(of_type(name), bits), rule)
    for verb, ufunc in {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}.items():
        TABLE[f"{verb}.pred"] = Operation(1, (1, 1), ufunc)
    TABLE["not.pred"] = Operation(1, (1,), np.logical_not)
    TABLE["lop3.b32"] = Operation(32, (32, 32, 32, 32), _lop3)
    TABLE["prmt.b32"] = Operation(32, (32, 32, 32), _prmt, undefined.of_prmt)


def _fields() -> None:
    for bits in (32, 64):
        for kind in "us":
            extract = _field(bits, kind == "s")
            TABLE[f"bfe.{kind}{bits}"] = Operation(bits, (bits, 32, 32), extract, undefined.of_field)
        TABLE[f"bfi.b{bits}"] = Operation(bits, (bits, bits, 32, 32), _insert(bits))
        TABLE[f"popc.b{bits}"] = Operation(32, (bits,), lambda a: np.bitwise_count(a).astype(np.uint32))
        TABLE[f"clz.b{bits}"] = Operation(32, (bits,), _leading_zeros(bits))
        TABLE[f"brev.b{bits}"] = Operation(bits, (bits,), _reversed(bits))
    for mode in ("clamp", "wrap"):
        for left in (True, False):
            name = f"shf.{'l' if left else 'r'}.{mode}.b32"
            TABLE[name] = Operation(32, (32, 32, 32), _funnel(left, mode == "clamp"))


def on_halves(compute: Callable[..., Array], bits: int) -> Callable[..., Array]:
    """The computation on both halves of registers of ``bits``."""
    half = unsigned(bits // 2)
    wide = unsigned(bits)

    def both(*operands: Array) -> Array:
        low = compute(*(each.astype(half) for each in operands))
        high = compute(*((each >> wide(bits // 2)).astype(half) for each in operands))
        return np.asarray(low.astype(wide) | high.astype(wide) << wide(bits // 2))

    return both


def _viewed(ufunc: Callable[..., Any], dtype: type[Any], bits: int) -> Callable[..., Array]:
    return lambda *operands: np.asarray(ufunc(*(each.view(dtype) for each in operands))).view(unsigned(bits))


def _widened(dtype: type[Any], wide: type[Any], bits: int) -> Callable[[Array, Array], Array]:
    return lambda a, b: np.asarray(a.view(dtype).astype(wide) * b.view(dtype).astype(wide)).view(unsigned(bits))


def _added(product: Callable[[Array, Array], Array]) -> Callable[[Array, Array, Array], Array]:
    return lambda a, b, c: product(a, b) + c


def _divided(dtype: type[Any], bits: int, remainder: bool) -> Callable[[Array, Array], Array]:
    """Rounded towards zero; the remainder has the sign of the dividend."""

    def compute(a: Array, b: Array) -> Array:
        if (b == 0).any():
            raise PtxError("division of integers by zero: PTX does not say what comes out")
        x, y = a.view(dtype), b.view(dtype)
        over, under = (np.where(each < 0, -each.view(signed(bits)), each).view(unsigned(bits)) for each in (x, y))
        if dtype is unsigned(bits):
            over, under = x, y
        size = over % under if remainder else over // under
        negative = x < 0 if remainder else (x < 0) != (y < 0)
        return np.asarray(np.where(negative, -size.view(signed(bits)), size.view(signed(bits))).view(unsigned(bits)))

    return compute


def _high_half(dtype: type[Any], bits: int) -> Callable[[Array, Array], Array]:
    if bits == 32:
        wide = np.int64 if dtype is np.int32 else np.uint64
        return lambda a, b: ((a.view(dtype).astype(wide) * b.view(dtype).astype(wide)) >> wide(32)).astype(np.uint32)

    def compute(a: Array, b: Array) -> Array:
        low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
        a0, a1, b0, b1 = a & low, a >> shift, b & low, b >> shift
        middle = a1 * b0 + (a0 * b0 >> shift)
        other = a0 * b1 + (middle & low)
        high = a1 * b1 + (middle >> shift) + (other >> shift)
        if dtype is np.int64:  # a negative factor counts 2**64 too much
            zero = np.uint64(0)
            high = high - np.where(a.view(np.int64) < 0, b, zero) - np.where(b.view(np.int64) < 0, a, zero)
        return np.asarray(high)

    return compute


def _shift_left(a: Array, by: Array) -> Array:
    bits = a.dtype.itemsize * 8
    return np.asarray(np.where(by < bits, a << np.minimum(by, bits - 1).astype(a.dtype), a.dtype.type(0)))


def _shift_right(dtype: type[Any], bits: int) -> Callable[[Array, Array], Array]:
    fills = dtype is not unsigned(bits)

    def compute(a: Array, by: Array) -> Array:
        out = np.asarray(a.view(dtype) >> np.minimum(by, bits - 1).astype(dtype)).view(unsigned(bits))
        return out if fills else np.asarray(np.where(by < bits, out, unsigned(bits)(0)))

    return compute


def _funnel(left: bool, clamp: bool) -> Callable[[Array, Array, Array], Array]:
    """A shift of the 64 bits b:a, of which 32 remain: the upper ones to the left, the lower ones to the right."""

    def compute(a: Array, b: Array, by: Array) -> Array:
        amount = (np.minimum(by, 32) if clamp else by & np.uint32(31)).astype(np.uint64)
        both = b.astype(np.uint64) << np.uint64(32) | a
        return ((both << amount) >> np.uint64(32) if left else both >> amount).astype(np.uint32)

    return compute


def _lop3(a: Array, b: Array, c: Array, table: Array) -> Array:
    out = np.zeros_like(a)
    for row in range(8):
        picked = [each if row >> place & 1 else ~each for place, each in ((2, a), (1, b), (0, c))]
        out = np.where(table >> np.uint32(row) & 1, out | (picked[0] & picked[1] & picked[2]), out)
    return out


def _prmt(a: Array, b: Array, selector: Array) -> Array:
    both = b.astype(np.uint64) << np.uint64(32) | a
    out = np.zeros((), np.uint32)
    for place in range(4):
        nibble = (selector >> np.uint32(4 * place) & np.uint32(15)).astype(np.uint64)
        byte = (both >> (nibble & np.uint64(7)) * np.uint64(8)).astype(np.uint8)
        sign = np.where(byte & 0x80, np.uint8(0xFF), np.uint8(0))
        out = out | np.where(nibble & np.uint64(8), sign, byte).astype(np.uint32) << np.uint32(8 * place)
    return out


def _field(bits: int, with_sign: bool) -> Callable[[Array, Array, Array], Array]:
    """bfe: ``length`` bits from ``position`` on; beyond the end of the register, its highest bit or zero."""
    word = unsigned(bits)

    def compute(a: Array, position: Array, length: Array) -> Array:
        start, size = position & np.uint32(0xFF), length & np.uint32(0xFF)
        kept = np.where(size < bits, (word(1) << np.minimum(size, bits - 1).astype(word)) - word(1), ~word(0))
        field = np.where(start < bits, a >> np.minimum(start, bits - 1).astype(word), word(0)) & kept
        if not with_sign:
            return np.asarray(field)
        top = np.minimum(np.maximum(start.astype(np.int64) + size - 1, 0), bits - 1).astype(word)
        sign = (a >> top & word(1)).astype(bool) & (size > 0)
        # Bits of the field that lie beyond the register are the sign as well.
        inside = np.clip(bits - start.astype(np.int64), 0, size)
        real = np.where(inside < bits, (word(1) << np.minimum(inside, bits - 1).astype(word)) - word(1), ~word(0))
        return np.asarray(np.where(sign, field | ~real, field & real))

    return compute


def _insert(bits: int) -> Callable[[Array, Array, Array, Array], Array]:
    """bfi: the low ``length`` bits of a, put over those of b at ``position``."""
    word = unsigned(bits)

    def compute(a: Array, b: Array, position: Array, length: Array) -> Array:
        start, size = position & np.uint32(0xFF), length & np.uint32(0xFF)
        ones = np.where(size < bits, (word(1) << np.minimum(size, bits - 1).astype(word)) - word(1), ~word(0))
        place = _shift_left(np.asarray(ones, word), start)
        return np.asarray((b & ~place) | (_shift_left(np.asarray(a), start) & place))

    return compute


def _leading_zeros(bits: int) -> Callable[[Array], Array]:
    def compute(a: Array) -> Array:
        filled = a
        for by in (1, 2, 4, 8, 16, 32)[: bits.bit_length() - 1]:
            filled = filled | filled >> unsigned(bits)(by)
        return (bits - np.bitwise_count(filled)).astype(np.uint32)

    return compute


def _reversed(bits: int) -> Callable[[Array], Array]:
    def compute(a: Array) -> Array:
        out = np.zeros_like(a)
        for place in range(bits):
            out |= (a >> unsigned(bits)(place) & unsigned(bits)(1)) << unsigned(bits)(bits - 1 - place)
        return out

    return compute


_arithmetic()
_logic()
_fields()
