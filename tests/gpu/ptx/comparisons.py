"""setp, set and selp, by full names."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from . import undefined
from .rounding import BF16, F16, decode
from .values import Array, Operation, of_type, unsigned

Compute = Callable[..., Array]

_ORDER: dict[str, Compute] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_UNSIGNED_ORDER = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


@dataclass(frozen=True)
class Comparison:
    """Two operands of ``bits`` -> a truth value, or two for a pair of numbers: the lower one first."""

    bits: int
    compute: Compute
    pair: bool = False


SETP: dict[str, Comparison] = {}
TABLE: dict[str, Operation] = {}


def _integers() -> None:
    for bits in (16, 32, 64):
        for kind in "bus":
            dtype = of_type(f"{kind}{bits}")
            for verb in ("eq", "ne") if kind == "b" else tuple(_ORDER):
                SETP[f"setp.{verb}.{kind}{bits}"] = Comparison(bits, _ordered(_ORDER[verb], dtype))
            for verb, order in _UNSIGNED_ORDER.items() if kind == "u" else ():
                SETP[f"setp.{verb}.u{bits}"] = Comparison(bits, _ordered(_ORDER[order], dtype))


def _floats() -> None:
    readings: dict[str, tuple[int, Compute]] = {
        "f16": (16, lambda a: decode(a, F16)), "bf16": (16, lambda a: decode(a, BF16)),
        "f32": (32, lambda a: a.view(np.float32)), "f64": (64, lambda a: a.view(np.float64)),
    }  # fmt: skip
    for name, (bits, values) in readings.items():
        for verb, compute in _float_comparisons(values).items():
            SETP[f"setp.{verb}.{name}"] = Comparison(bits, compute)
            if bits == 16:
                SETP[f"setp.{verb}.{name}x2"] = Comparison(16, compute, pair=True)
                one = {"f16": 0x3C00, "bf16": 0x3F80}[name]
                truth = Operation(32, (32, 32), _numbers(compute, one), undefined.of_halves(32))
                TABLE[f"set.{verb}.{name}x2.{name}x2"] = truth


def _selections() -> None:
    for bits in (16, 32, 64):
        for kind in "bus" if bits == 16 else "busf":
            TABLE[f"selp.{kind}{bits}"] = Operation(bits, (bits, bits, 1), _selected, undefined.of_selection)


def _selected(yes: Array, no: Array, which: Array) -> Array:
    return np.where(which, yes, no)


def _ordered(order: Compute, dtype: type[np.generic]) -> Compute:
    return lambda a, b: order(a.view(dtype), b.view(dtype))


def _float_comparisons(values: Compute) -> dict[str, Compute]:
    """Ordered ones are false if a NaN is there, those with a u are true."""

    def ordered(order: Compute) -> Compute:
        return lambda a, b: order(values(a), values(b)) & ~_nan(values(a), values(b))

    def unordered(order: Compute) -> Compute:
        return lambda a, b: order(values(a), values(b)) | _nan(values(a), values(b))

    return (
        {verb: ordered(order) for verb, order in _ORDER.items()}
        | {f"{verb}u": unordered(order) for verb, order in _ORDER.items()}
        | {
            "nan": lambda a, b: _nan(values(a), values(b)),
            "num": lambda a, b: ~_nan(values(a), values(b)),
        }
    )


def _nan(a: Array, b: Array) -> Array:
    return np.isnan(a) | np.isnan(b)


def _numbers(compute: Compute, one: int) -> Compute:
    """A pair of truth values as a pair of numbers, one or zero."""

    def both(a: Array, b: Array) -> Array:
        low, high = (
            np.where(compute(*((each >> np.uint32(shift)).astype(unsigned(16)) for each in (a, b))), one, 0)
            for shift in (0, 16)
        )
        return (high << 16 | low).astype(np.uint32)

    return both


_integers()
_floats()
_selections()
