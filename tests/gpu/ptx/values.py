"""Values of registers: raw bits, one number for each lane, and which of their bytes are undefined."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_UNSIGNED: dict[int, type[np.generic]] = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_SIGNED: dict[int, type[np.generic]] = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
_FLOATING: dict[int, type[np.generic]] = {16: np.float16, 32: np.float32, 64: np.float64}


class Bits(NamedTuple):
    """Numbers of several lanes; a number without dimensions stands for all of them.

    ``undefined`` is None, or a mask for each lane with a bit for each byte: bit 0 for the lowest.
    """

    value: Array
    undefined: Array | None = None


Undefined = Callable[[tuple[Bits, ...]], Array]  # of the sources -> which bytes of the result are undefined


@dataclass(frozen=True)
class Operation:
    """An instruction that makes one register of others, lane by lane."""

    result: int  # bits
    operands: tuple[int, ...]  # bits of each
    compute: Callable[..., Array]  # unsigned arrays of these widths -> an unsigned array of the result's
    undefined: Undefined | None = None  # None: any undefined byte makes the whole result undefined
    any_width: bool = False  # cvt: registers may be wider than their types
    signed: bool = False  # the type of the result is signed: its sign fills a register that is wider
    fused: bool = False  # a multiply-add with one rounding


def unsigned(bits: int) -> type[Any]:
    """The dtype of raw bits; bool for predicates."""
    return _UNSIGNED[bits]


def signed(bits: int) -> type[Any]:
    """The dtype of two's complement."""
    return _SIGNED[bits]


def floating(bits: int) -> type[Any]:
    """The dtype of an IEEE number."""
    return _FLOATING[bits]


def of_type(name: str) -> type[Any]:
    """The dtype of a PTX type: s32, u16, b64, f32."""
    bits = int(name[1:])
    return {"s": _SIGNED, "u": _UNSIGNED, "b": _UNSIGNED, "f": _FLOATING}[name[0]][bits]


def every_byte(bits: int) -> int:
    """The mask of a value that is undefined as a whole."""
    return (1 << max(1, bits // 8)) - 1


def undefined_mask(source: Bits) -> Array:
    """Undefined bytes, also where there are none."""
    return np.zeros((), np.uint8) if source.undefined is None else source.undefined
