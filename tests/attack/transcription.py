"""The number formats, written a second time: numpy from the text of the specification, nothing of the library.

`encode` makes the codes and scales of one direction of a matrix, `decode` the numbers they stand for. What programs
expect of the library is computed with these two, so a mistake would have to be made twice, in two ways, to go unseen.
Golden vectors check them (`test_transcription`).

Everything is an operand [R, C] of a GEMM, with blocks along C: the matrix itself rowwise, its transpose columnwise.
fp32 arithmetic is numpy's on float32 arrays, one IEEE rounding for each operation.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

Array = np.ndarray

FP32_MAX = np.float32(np.finfo(np.float32).max)


class Format(NamedTuple):
    """What a format stores. An empty ``element`` keeps numbers as they are."""

    name: str
    element: str = ""
    block: tuple[int, int] | None = None  # rows and length; None: the tensor is one block
    rule: str = "fp32"  # how the scale of a block follows from its amax: fp32, e8m0_up, e8m0_floor, two_level
    amax: str = ""  # of two-level scales: one amax for the "tensor" or for each "row"
    power_of_two: bool = False
    epsilon: float = 0.0
    ragged: bool = True  # whether the last block may be a part of one

    @property
    def symmetric(self) -> bool:
        """Whether columnwise codes are the transposed rowwise codes."""
        return bool(self.element) and (self.block is None or self.block[0] == self.block[1]) and self.amax != "row"


FORMATS = {
    fmt.name: fmt
    for fmt in (
        Format("identity"),
        Format("fp8", "e4m3"),
        Format("fp8_e5m2", "e5m2"),
        Format("fp8_block", "e4m3", (1, 128), power_of_two=True),
        Format("fp8_block_2d", "e4m3", (128, 128), power_of_two=True),
        Format("mxfp8", "e4m3", (1, 32), "e8m0_up", ragged=False),
        Format("mxfp8_e5m2", "e5m2", (1, 32), "e8m0_up", ragged=False),
        Format("mxfp8_2d", "e4m3", (32, 32), "e8m0_up", ragged=False),
        Format("mxfp4", "e2m1", (1, 32), "e8m0_floor", ragged=False),
        Format("nvfp4", "e2m1", (1, 16), "two_level", "tensor", ragged=False),
        Format("nvfp4_2d", "e2m1", (16, 16), "two_level", "tensor", ragged=False),
        Format("nvfp4_row_scaled", "e2m1", (1, 16), "two_level", "row", ragged=False),
    )
}


class Encoded(NamedTuple):
    """One direction of a matrix, as operand."""

    codes: Array  # uint8 [R, C], one for each number
    scales: Array  # one for each block: float32 or uint8
    amax: Array | None  # float32 [1] or [R], of two-level scales


# ---- elements ------------------------------------------------------------------------------------------------

_BITS = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15), "e2m1": (2, 1, 1)}  # exponent, mantissa, bias
_LARGEST = {"e4m3": 0x7E, "e5m2": 0x7B, "e2m1": 7}  # code of the largest finite number


@cache
def finite_values(element: str) -> Array:
    """The numbers of the codes 0 to the largest finite one, in float64."""
    _, mantissa_bits, bias = _BITS[element]
    codes = np.arange(_LARGEST[element] + 1)
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    normal = (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
    return np.where(exponent == 0, mantissa / (1 << mantissa_bits) * 2.0 ** (1 - bias), normal)


@cache
def decode_table(element: str) -> Array:
    """The float32 number of every code."""
    exponent_bits, mantissa_bits, _ = _BITS[element]
    table = np.full(1 << (exponent_bits + mantissa_bits), np.nan)
    values = finite_values(element)
    table[: len(values)] = values
    if element == "e5m2":
        table[0x7C] = np.inf
    return np.concatenate([table, -table]).astype(np.float32)


@np.errstate(invalid="ignore")
def cast(v: Array, element: str) -> Array:
    """fp32 to codes: to nearest, ties to even, saturating. NaN is 0x7F in FP8 and +6 in FP4."""
    values = finite_values(element)
    ties = (values[1:] + values[:-1]) / 2
    magnitude = np.abs(v.astype(np.float64))
    below, above = np.searchsorted(ties, magnitude, "left"), np.searchsorted(ties, magnitude, "right")
    code = np.where(below % 2 == 0, below, above)  # they differ only at a tie
    sign = np.signbit(v).astype(np.int64) * (len(decode_table(element)) // 2)
    return np.where(np.isnan(v), 0x7F if element != "e2m1" else 7, code + sign).astype(np.uint8)


def largest(element: str) -> np.float32:
    return np.float32(finite_values(element)[-1])


# ---- scales --------------------------------------------------------------------------------------------------


def amax_of(x: Array, axis: int | tuple[int, ...] | None = None) -> Array:
    """The largest magnitude; NaNs do not count, and without any number it is 0."""
    return np.max(np.where(np.isnan(x), np.float32(0), np.abs(x)), axis=axis, initial=np.float32(0))


def block_amax(operand: Array, block: tuple[int, int]) -> Array:
    """The amax of every block; the parts that stick out count as zeros."""
    rows, length = block
    (r, c), zero = operand.shape, np.float32(0)
    padded = np.pad(operand, ((0, -r % rows), (0, -c % length)), constant_values=zero)
    tiles = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // length, length)
    return amax_of(tiles, (1, 3))


def fp32_scale(amax: Array, fmt: Format, infinite: np.float32) -> tuple[Array, Array]:
    """Section 2: the decode scale that is stored, and the encode scale."""
    amax = np.where(amax < np.float32(fmt.epsilon), np.float32(fmt.epsilon), amax)
    usable = (amax > 0) & np.isfinite(amax)
    scale = largest(fmt.element) / np.where(usable, amax, np.float32(1))
    scale = np.where(np.isinf(scale), infinite, scale)
    if fmt.power_of_two:
        scale = (scale.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    scale = np.where(usable, scale, np.float32(1))
    return np.float32(1) / scale, scale


@np.errstate(invalid="ignore")
def e8m0_up(v: Array) -> Array:
    """Section 1.2: the smallest byte b with 2^(b - 127) >= v, at most 254; NaN is 255."""
    powers = np.ldexp(1.0, np.arange(255) - 127)
    byte = np.minimum(np.searchsorted(powers, v.astype(np.float64), "left"), 254)
    return np.where(np.isnan(v), 255, byte).astype(np.uint8)


def e8m0_floor(amax: Array, element: str) -> Array:
    """The OCP rule: the power of two in amax, divided by the power of two in the largest number of the element."""
    exponent = (amax.view(np.uint32) >> 23).astype(np.int64)
    top = int(np.floor(np.log2(finite_values(element)[-1])))
    return np.clip(exponent - top, 0, 254).astype(np.uint8)


def e8m0_value(byte: Array) -> Array:
    value = np.ldexp(1.0, byte.astype(np.int64) - 127)
    return np.where(byte == 255, np.nan, value).astype(np.float32)


def e8m0_reciprocal(byte: Array) -> Array:
    value = np.ldexp(1.0, 127 - byte.astype(np.int64))
    return np.where(byte == 255, np.nan, value).astype(np.float32)


def two_level(block_max: Array, amax: Array) -> tuple[Array, Array]:
    """Section 6.1, steps 2 to 5: the E4M3 byte that is stored, and the factor that elements are multiplied with."""
    encode = np.minimum(np.float32(2688) / amax, FP32_MAX)
    encode = np.where((amax == 0) | (encode == 0), np.float32(1), encode)
    decode = np.float32(1) / encode
    wanted = np.minimum(block_max * (encode * np.float32(1 / 6)), FP32_MAX)
    stored = cast(wanted, "e4m3")
    factor = np.minimum(np.float32(1) / (decode_table("e4m3")[stored] * decode), FP32_MAX)
    return stored, factor


# ---- planes --------------------------------------------------------------------------------------------------


@np.errstate(all="ignore")
def encode(operand: Array, fmt: Format, *, infinite: float = float(FP32_MAX)) -> Encoded:
    """Encode an operand of float32 numbers.

    Args:
        operand: the operand [R, C].
        fmt: the format.
        infinite: the largest number of the dtype that the numbers came in; it stands for scales of blocks that would
            be infinite.
    """
    operand = np.ascontiguousarray(operand, dtype=np.float32)
    amax = None
    if fmt.block is None:
        stored, factor = fp32_scale(amax_of(operand).reshape(1, 1), fmt, FP32_MAX)
    elif fmt.rule == "fp32":
        stored, factor = fp32_scale(block_amax(operand, fmt.block), fmt, np.float32(infinite))
    elif fmt.rule == "two_level":
        amax = amax_of(operand, 1) if fmt.amax == "row" else amax_of(operand).reshape(1)
        stored, factor = two_level(block_amax(operand, fmt.block), amax.reshape(-1, 1))
    else:
        largest_of_blocks = block_amax(operand, fmt.block)
        up = fmt.rule == "e8m0_up"
        reciprocal = np.float32(1) / largest(fmt.element)
        stored = e8m0_up(largest_of_blocks * reciprocal) if up else e8m0_floor(largest_of_blocks, fmt.element)
        factor = e8m0_reciprocal(stored)
    codes = cast(operand * spread(factor, fmt.block, operand.shape), fmt.element)
    return Encoded(codes, stored, amax)


@np.errstate(all="ignore")
def decode(plane: Encoded, fmt: Format) -> Array:
    """The float32 numbers of an operand."""
    values, factor = decode_table(fmt.element)[plane.codes], plane.scales
    if fmt.rule.startswith("e8m0"):
        factor = e8m0_value(plane.scales)
    elif fmt.rule == "two_level":
        assert plane.amax is not None
        factor = decode_table("e4m3")[plane.scales] * plane.amax.reshape(-1, 1) * np.float32(1 / 2688)
    return values * spread(factor, fmt.block, plane.codes.shape)


def spread(factor: Array, block: tuple[int, int] | None, shape: tuple[int, ...]) -> Array:
    """One factor for each number instead of one for each block."""
    if block is None:
        return factor
    rows, length = block
    return factor.repeat(rows, 0)[: shape[0]].repeat(length, 1)[:, : shape[1]]
