"""cvt, by full names. Rounding and saturation must be said where the result depends on them; .relu is refused."""

from collections.abc import Callable

import numpy as np

from . import undefined
from .errors import PtxError
from .floats import canonical
from .rounding import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, F16, Layout, decode, encode
from .values import Array, Operation, floating, of_type, unsigned

TABLE: dict[str, Operation] = {}
Compute = Callable[..., Array]

_INTEGERS = [f"{kind}{bits}" for kind in "us" for bits in (8, 16, 32, 64)]
_NARROW = {"f16": F16, "bf16": BF16}
_ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _integers() -> None:
    for source in _INTEGERS:
        for to in _INTEGERS:
            bits, wide = int(source[1:]), int(to[1:])
            resized = undefined.of_resize(bits, wide, source[0] == "s")
            TABLE[f"cvt.{to}.{source}"] = Operation(
                wide, (bits,), _resized(source, wide), resized, any_width=True, signed=to[0] == "s"
            )
        for size in (32, 64):
            TABLE[f"cvt.rn.f{size}.{source}"] = Operation(
                size, (int(source[1:]),), _to_float(source, size), any_width=True
            )
        for name, layout in _NARROW.items():
            if bits < 64:  # exact in float64
                TABLE[f"cvt.rn.{name}.{source}"] = Operation(16, (bits,), _to_narrow(source, layout), any_width=True)
        for size in (32, 64):
            for rounding in _ROUND:
                compute = _to_integer(source, size, rounding)
                TABLE[f"cvt.{rounding}.{source}.f{size}"] = Operation(
                    int(source[1:]), (size,), compute, any_width=True, signed=source[0] == "s"
                )


def _floats() -> None:
    for bits in (32, 64):
        for rounding in _ROUND:
            TABLE[f"cvt.{rounding}.f{bits}.f{bits}"] = Operation(bits, (bits,), _integral(rounding, bits))
    TABLE["cvt.f64.f32"] = Operation(64, (32,), lambda a: canonical(a.view(np.float32).astype(np.float64), 64))
    TABLE["cvt.rn.f32.f64"] = Operation(32, (64,), lambda a: canonical(a.view(np.float64).astype(np.float32), 32))
    for name, layout in _NARROW.items():
        TABLE[f"cvt.f32.{name}"] = Operation(32, (16,), _widened(layout))
        for rounding in ("rn", "rz"):
            for saturation in ("", "satfinite."):
                small = _small(layout, 32, rounding == "rz", bool(saturation))
                TABLE[f"cvt.{rounding}.{saturation}{name}.f32"] = Operation(16, (32,), small)
                TABLE[f"cvt.{rounding}.{saturation}{name}x2.f32"] = _packed(small, 16, 32)


def _small_floats() -> None:
    """fp8 and fp6, which fill bytes, and fp4, two in a byte: the first operand goes to the upper half."""
    for name, layout in {"e4m3": E4M3, "e5m2": E5M2, "e2m3": E2M3, "e3m2": E3M2}.items():
        TABLE[f"cvt.rn.satfinite.{name}x2.f32"] = _packed(_small(layout, 32, False, True), 8, 16)
        TABLE[f"cvt.rn.f16x2.{name}x2"] = Operation(32, (16,), _unpacked(layout, 8), undefined.of_bytes_widened)
    for name, layout in {"e4m3": E4M3, "e5m2": E5M2}.items():
        pair = _of_halves(_small(layout, 16, False, True))
        TABLE[f"cvt.rn.satfinite.{name}x2.f16x2"] = Operation(16, (32,), pair, undefined.of_halves_narrowed)
    TABLE["cvt.rn.satfinite.e2m1x2.f32"] = _packed(_small(E2M1, 32, False, True), 4, 8)
    TABLE["cvt.rn.f16x2.e2m1x2"] = Operation(32, (8,), _unpacked(E2M1, 4))
    for rounding in ("rz", "rp"):
        TABLE[f"cvt.{rounding}.satfinite.ue8m0x2.f32"] = _packed(_power_of_two(rounding == "rp"), 8, 16)
    TABLE["cvt.rn.bf16x2.ue8m0x2"] = Operation(32, (16,), _powers, undefined.of_bytes_widened)
    TABLE["cvt.rs.satfinite.e2m1x4.f32"] = Operation(16, (32,) * 5, _four_stochastic, undefined.of_packed(4, 4))


def _resized(source: str, bits: int) -> Compute:
    # Sign or zeros come from the source; the destination says how many bits are kept, and what fills its register.
    dtype = of_type(source)
    wide = of_type(f"{source[0]}{bits}")
    return lambda a: a.view(dtype).astype(wide).view(unsigned(bits))


def _to_float(source: str, bits: int) -> Compute:
    return lambda a: a.view(of_type(source)).astype(floating(bits)).view(unsigned(bits))


def _to_narrow(source: str, layout: Layout) -> Compute:
    return lambda a: encode(a.view(of_type(source)).astype(np.float64), layout)


def _to_integer(to: str, bits: int, rounding: str) -> Compute:
    """Clamped to the range; a NaN is 0 where both have at most 32 bits, else the highest bit alone."""
    size = int(to[1:])
    low, high = int(np.iinfo(of_type(to)).min), int(np.iinfo(of_type(to)).max)
    nan = 0 if bits < 64 and size < 64 else 1 << (size - 1)

    def compute(a: Array) -> Array:
        value = a.view(floating(bits)).astype(np.float64)
        whole = _ROUND[rounding](value)
        inside = (whole >= low) & (whole < float(high) + 1)  # 2.0**n: the range itself may not be exact in float64
        safe = np.where(inside, whole, 0)
        out = safe.astype(np.uint64) if to == "u64" else safe.astype(np.int64).view(np.uint64)
        clamped = np.where(whole < low, np.uint64(low % 2**64), np.uint64(high))
        out = np.where(np.isnan(value), np.uint64(nan), np.where(inside, out, clamped))
        return out.astype(unsigned(size))

    return compute


def _integral(rounding: str, bits: int) -> Compute:
    return lambda a: canonical(_ROUND[rounding](a.view(floating(bits))), bits)


def _widened(layout: Layout) -> Compute:
    if layout is BF16:
        return lambda a: np.asarray(a.astype(np.uint32) << np.uint32(16))
    return lambda a: canonical(a.view(np.float16).astype(np.float32), 32)


def _small(layout: Layout, bits: int, towards_zero: bool, saturate: bool) -> Compute:
    def compute(a: Array) -> Array:
        value = a.view(floating(bits)).astype(np.float64)
        return encode(value, layout, saturate=saturate, towards_zero=towards_zero)

    return compute


def _packed(convert: Compute, each: int, bits: int) -> Operation:
    """Two f32 to two numbers of ``each`` bits."""
    word = unsigned(bits)

    def compute(a: Array, b: Array) -> Array:
        return np.asarray(convert(a).astype(word) << word(each) | convert(b).astype(word))

    return Operation(bits, (32, 32), compute, undefined.of_packed(each, 2), any_width=True)


def _of_halves(convert: Compute) -> Compute:
    return lambda a: convert((a >> np.uint32(16)).astype(np.uint16)) << np.uint16(8) | convert(a.astype(np.uint16))


def _unpacked(layout: Layout, each: int) -> Compute:
    """Two small numbers to two f16; all of them are exact there."""

    def compute(a: Array) -> Array:
        parts = (a >> a.dtype.type(each), a & a.dtype.type((1 << each) - 1))
        if layout.bits == 6 and any((part >> part.dtype.type(6)).any() for part in parts):
            raise PtxError("the two highest bits of a byte with six bits must be zero")
        high, low = (encode(decode(part, layout), F16).astype(np.uint32) for part in parts)
        return high << np.uint32(16) | low

    return compute


def _power_of_two(up: bool) -> Compute:
    """f32 to the exponent of a power of two, ue8m0: 0 is 2**-127, 255 a NaN."""

    def compute(a: Array) -> Array:
        if ((a >> np.uint32(31)).astype(bool) & (a != np.uint32(0x80000000)) & ~np.isnan(a.view(np.float32))).any():
            raise PtxError("a negative number has no power of two, and PTX does not say what becomes of it")
        size = a & np.uint32(0x7FFFFFFF)
        exponent = size >> np.uint32(23)
        fraction = size & np.uint32(0x7FFFFF)
        # 2**-127 is a subnormal f32, half of the smallest normal one.
        above = np.where(exponent > 0, fraction > 0, fraction > 0x400000)
        code = np.minimum(exponent + (above if up else np.zeros_like(above)), 254)
        return np.where(size > 0x7F800000, 0xFF, code).astype(np.uint16)

    return compute


def _powers(a: Array) -> Array:
    def one(code: Array) -> Array:
        return np.where(code == 255, 0x7FFF, np.where(code == 0, 0x0040, code << np.uint32(7))).astype(np.uint32)

    word = a.astype(np.uint32)
    return one(word >> np.uint32(8)) << np.uint32(16) | one(word & np.uint32(0xFF))


def _four_stochastic(a: Array, b: Array, c: Array, d: Array, random: Array) -> Array:
    """As this project reads the instruction: the lowest number is rounded with the lowest byte, and so on.

    The manual speaks of lower and upper halves of 16 bits; nobody here has compared either reading with hardware.
    """
    out = np.zeros((), np.uint16)
    for place, value in enumerate((d, c, b, a)):
        byte = random >> np.uint32(8 * place) & np.uint32(0xFF)
        out = out | _stochastic_e2m1(value, byte) << np.uint16(4 * place)
    return out


def _stochastic_e2m1(raw: Array, byte: Array) -> Array:
    """Add byte / 256 of a step to the size, and cut it off to a number of the format."""
    value = raw.view(np.float32).astype(np.float64)
    size = np.minimum(np.where(np.isnan(value), 6, np.abs(value)), 6)
    step = np.where(size < 2, 0.5, np.where(size < 4, 1, 2))
    code = encode(size + byte / 256 * step, E2M1, towards_zero=True)
    sign = np.where(np.isnan(value), 0, raw >> np.uint32(31) << np.uint32(3))
    return np.asarray(code | sign.astype(np.uint16))


_integers()
_floats()
_small_floats()
