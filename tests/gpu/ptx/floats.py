"""Floating-point arithmetic, by full names: what PTX defines to the last bit, and nothing else.

A NaN that an instruction makes is the canonical one. ``abs`` and ``neg`` change the sign alone, of NaNs as well, which
PTX leaves open: what a kernel stores must not depend on the payload of a NaN.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from . import undefined
from .integers import on_halves
from .rounding import BF16, F16, Layout, decode, encode, odd_sum
from .values import Array, Operation, floating, unsigned

TABLE: dict[str, Operation] = {}
Compute = Callable[..., Array]

_CANONICAL = {16: 0x7FFF, 32: 0x7FFFFFFF, 64: 0x7FFFFFFFFFFFFFFF}


def _ieee() -> None:
    """f32 and f64, which numpy computes as IEEE 754 says."""
    for bits in (32, 64):
        two = (bits, bits)
        for verb, ufunc in {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}.items():
            TABLE[f"{verb}.rn.f{bits}"] = Operation(bits, two, _computed(ufunc, bits))
        TABLE[f"rcp.rn.f{bits}"] = Operation(bits, (bits,), _computed(np.reciprocal, bits))
        TABLE[f"sqrt.rn.f{bits}"] = Operation(bits, (bits,), _computed(np.sqrt, bits))
        TABLE[f"copysign.f{bits}"] = Operation(bits, two, _copied_sign(bits))
    TABLE["fma.rn.f32"] = Operation(32, (32,) * 3, _fused, fused=True)
    for verb in ("add", "sub", "mul", "fma"):
        one = TABLE[f"{verb}.rn.f32"]
        pair = on_halves(one.compute, 64)
        TABLE[f"{verb}.rn.f32x2"] = Operation(
            64, (64,) * len(one.operands), pair, undefined.of_halves(64), fused=one.fused
        )
    for name, layout in {"f16": F16, "bf16": BF16}.items():  # a narrow number and one of 32 bits
        TABLE[f"add.rn.f32.{name}"] = Operation(32, (16, 32), _mixed(np.add, layout))
        TABLE[f"sub.rn.f32.{name}"] = Operation(32, (16, 32), _mixed(np.subtract, layout))


def _narrow() -> None:
    """f16 and bf16, alone and in pairs: exact in float64, or rounded there to odd, then rounded once."""
    for name, layout in {"f16": F16, "bf16": BF16}.items():
        _with_pairs("add.rn.", name, 2, _rounded(odd_sum, layout))
        _with_pairs("sub.rn.", name, 2, _rounded(lambda a, b: odd_sum(a, -b), layout))
        _with_pairs("mul.rn.", name, 2, _rounded(np.multiply, layout))
        _with_pairs("fma.rn.", name, 3, _rounded(lambda a, b, c: odd_sum(a * b, c), layout), fused=True)


def _signs_and_extremes() -> None:
    for name, bits in {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}.items():
        sign = unsigned(bits)(1 << (bits - 1))
        values = _bf16_values if name == "bf16" else _viewed_values(bits)
        operations = {"abs.": (1, _without(sign)), "neg.": (1, _flipped(sign))} | {
            f"{verb}.{nan}": (2, extreme(verb, values, bits, nan == "NaN."))
            for verb in ("min", "max")
            for nan in (("", "NaN.") if bits < 64 else ("",))
        }
        for verb, (count, compute) in operations.items():
            if bits == 16:
                _with_pairs(verb, name, count, compute)
            else:
                TABLE[verb + name] = Operation(bits, (bits,) * count, compute)


def _with_pairs(verb: str, name: str, count: int, compute: Compute, fused: bool = False) -> None:
    TABLE[verb + name] = Operation(16, (16,) * count, compute, fused=fused)
    pair = on_halves(compute, 32)
    TABLE[f"{verb}{name}x2"] = Operation(32, (32,) * count, pair, undefined.of_halves(32), fused=fused)


def canonical(value: Array, bits: int) -> Array:
    """Raw bits of IEEE numbers, with the one NaN that instructions make."""
    raw = np.asarray(value).view(unsigned(bits))
    nan = np.isnan(value)
    return np.asarray(np.where(nan, unsigned(bits)(_CANONICAL[bits]), raw) if nan.any() else raw)


def extreme(verb: str, values: Compute, bits: int, keeps_nan: bool) -> Compute:
    """min or max of raw bits: -0 is below +0, and a NaN gives way to a number, or with ``keeps_nan`` does not."""

    def compute(a: Array, b: Array) -> Array:
        x, y = values(a), values(b)
        # Equal numbers differ in the sign of zero at most; the raw bits of -0 are the larger ones.
        first = (x < y) | ((x == y) & (a > b)) if verb == "min" else (x > y) | ((x == y) & (a < b))
        out = np.where(first | np.isnan(y), a, b)
        spoiled = np.isnan(x) | np.isnan(y) if keeps_nan else np.isnan(x) & np.isnan(y)
        return np.where(spoiled, unsigned(bits)(_CANONICAL[bits]), out)

    return compute


def _computed(ufunc: Callable[..., Any], bits: int) -> Compute:
    dtype = floating(bits)
    return lambda *operands: canonical(ufunc(*(each.view(dtype) for each in operands)), bits)


def _fused(a: Array, b: Array, c: Array) -> Array:
    """The product of two float32 numbers is exact in float64."""
    x, y, z = (each.view(np.float32).astype(np.float64) for each in (a, b, c))
    return canonical(odd_sum(np.asarray(x * y), z).astype(np.float32), 32)


def _mixed(ufunc: Callable[..., Any], layout: Layout) -> Compute:
    def compute(a: Array, b: Array) -> Array:
        return canonical(ufunc(decode(a, layout).astype(np.float32), b.view(np.float32)), 32)

    return compute


def _rounded(exact: Compute, layout: Layout) -> Compute:
    def compute(*operands: Array) -> Array:
        return encode(np.asarray(exact(*(decode(each, layout) for each in operands))), layout)

    return compute


def _copied_sign(bits: int) -> Compute:
    """The sign of the first operand on the size of the second."""
    sign = unsigned(bits)(1 << (bits - 1))
    return lambda a, b: (a & sign) | (b & ~sign)


def _without(sign: Any) -> Compute:
    return lambda a: a & ~sign


def _flipped(sign: Any) -> Compute:
    return lambda a: a ^ sign


def _viewed_values(bits: int) -> Compute:
    dtype = floating(bits)
    return lambda a: a.view(dtype)


def _bf16_values(a: Array) -> Array:
    return np.asarray(a.astype(np.uint32) << np.uint32(16)).view(np.float32)


_ieee()
_narrow()
_signs_and_extremes()

# In the order sm_100 has it: three operands, compared one after the other.
THREE_OPERANDS = ("min.f32", "max.f32", "min.NaN.f32", "max.NaN.f32")
