"""What kernels are compiled for, as constants: elements, planes, and how planes are written.

Everything that a kernel needs to know when it is compiled is a number or a flag in one of these classes. Kernels are
made from these fields, not from names, so a format that a user has registered has kernels as well if it is of a kind
that they can be made for.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

import torch

from ...formats import AnyElement, Element, Format
from ...formats.mxint8 import INT8
from ...planes import ROWWISE, Direction
from ..reference.elements import FP32_MAX
from ..reference.marks import loses_nonfinite
from ..target import Target, Within
from .traits import Traits

_MOST_EXPONENT = 100  # larger exponents would be lost when the power of two for rounding is added
_BLOCK_OF_SIXTEEN = ((1, 16), (16, 16))


@dataclass(frozen=True)
class ElementKind:
    """An element. Magnitudes are counted as in `reference.elements`.

    Attributes:
        bits: bits of a code.
        mantissa_bits: bits of its mantissa.
        min_exponent_field: the exponent of the smallest normal number, as fp32 stores it.
        max: largest number.
        max_bits: its bits as fp32.
        nan_code: the code of NaN.
        last_code: the code of the largest number, or of infinity if there is one.
        magnitude_mask: all bits but the sign.
        signed: whether there is a sign bit.
        twos_complement: codes are integers in two's complement instead.
        has_nan: whether codes above ``last_code`` are NaN.
        has_infinity: whether ``last_code`` is infinity.
        unit: the number by which `bits.element_values` multiplies.
        steps_per_one: distances between subnormal numbers from 0 to 1.
        is_e4m3, is_e5m2, is_e2m1: whether it is just this element, for which there are instructions.
    """

    bits: int
    mantissa_bits: int
    min_exponent_field: int
    max: float
    max_bits: int
    nan_code: int
    last_code: int
    magnitude_mask: int
    signed: bool
    twos_complement: bool
    has_nan: bool
    has_infinity: bool
    unit: float
    steps_per_one: float
    is_e4m3: bool
    is_e5m2: bool
    is_e2m1: bool


@dataclass(frozen=True)
class PlaneKind:
    """A plane, in the coordinates of its operand [R, C].

    Attributes:
        element: its element.
        block_rows: rows of a block; 0 for one scale per tensor.
        block_length: length of a block; 0 for one scale per tensor.
        rule: how scales are computed, see `Format.scale_rule`.
        rowwise: whether the operand is the matrix, and not its transpose.
        operand_major: whether the codes of a row of the operand are next to each other.
        replicated: scales of tiles are stored once for each row.
        row_amax: there is an amax for each row of the operand, not one for the tensor.
        rotation: signs of the rotation; -1 if there is none.
        bound: the largest block scale times the largest number, for two-level scales.
        bound_reciprocal: its reciprocal, in fp32.
        max_reciprocal: the reciprocal of the element's largest number, in fp32.
        max_exponent: exponent of the element's largest number.
        scale_element: element of block scales, for two-level scales.
        hardware: the conversion instructions that kernels may use.
    """

    element: ElementKind
    block_rows: int
    block_length: int
    rule: str
    rowwise: bool
    operand_major: bool
    replicated: bool
    row_amax: bool
    rotation: int
    bound: float
    bound_reciprocal: float
    max_reciprocal: float
    max_exponent: int
    scale_element: ElementKind | None
    hardware: Traits

    @property
    def sixteen(self) -> bool:
        """Whether blocks are handled as 16 separate numbers, see `sixteens`."""
        return self.rule == "two_level"


@dataclass(frozen=True)
class EncodingKind:
    """How a plane is written.

    Attributes:
        plane: the plane.
        stochastic: whether numbers are rounded stochastically.
        wide_counter: whether random words are counted in 64 bits.
        four_over_six: "", "MAE" or "MSE".
        target: the number to which fp32 scales map the amax.
        epsilon: the smallest amax, for fp32 scales.
        power_of_two: round fp32 scales down to powers of two.
        overflow: the scale to use instead of one beyond fp32.
        given_scale: the scale of the tensor is given (delayed scaling).
        watch: the plane may lose NaNs and infinities, so that it must be known whether there are some.
    """

    plane: PlaneKind
    stochastic: bool
    wide_counter: bool
    four_over_six: str
    target: float
    epsilon: float
    power_of_two: bool
    overflow: float
    given_scale: bool
    watch: bool


@lru_cache(maxsize=64)
def element_kind(element: AnyElement) -> ElementKind | None:
    """The kind of an element; None if kernels cannot be made for it."""
    if element == INT8:  # counted like subnormal numbers between -2 and 2
        return ElementKind(
            8, 7, 128, 127 / 64, _bits(127 / 64), 127, 127, 127,
            signed=True, twos_complement=True, has_nan=False, has_infinity=False,
            unit=1 / 64, steps_per_one=64.0, is_e4m3=False, is_e5m2=False, is_e2m1=False,
        )  # fmt: skip
    if not isinstance(element, Element) or not element.mantissa_bits or element.max_exponent > _MOST_EXPONENT:
        return None
    if not 0 <= element.bias <= _MOST_EXPONENT:
        return None  # a factor or a distance between neighbours would be beyond fp32
    same_bits = (element.exponent_bits, element.mantissa_bits, element.bias, element.max, element.specials)
    return ElementKind(
        element.bits,
        element.mantissa_bits,
        element.min_exponent + 127,
        element.max,
        _bits(element.max),
        element.nan_code,
        element.max_code + (element.specials == "ieee"),
        element.magnitude_mask,
        signed=element.signed,
        twos_complement=False,
        has_nan=element.specials != "none",
        has_infinity=element.specials == "ieee",
        unit=2.0 ** (127 - element.bias),
        steps_per_one=2.0 ** (element.mantissa_bits - element.min_exponent),
        is_e4m3=element.signed and same_bits == (4, 3, 7, 448.0, "nan"),
        is_e5m2=element.signed and same_bits == (5, 2, 15, 57344.0, "ieee"),
        is_e2m1=element.signed and same_bits == (2, 1, 1, 6.0, "none"),
    )


@lru_cache(maxsize=1024)
def plane_kind(fmt: Format, direction: Direction, operand_major: bool, hardware: Traits) -> PlaneKind | None:
    """The kind of a plane; None if kernels cannot be made for it."""
    if fmt.element is None:
        return None
    element = element_kind(fmt.element)
    scale_element = element_kind(fmt.scale_element) if fmt.scale_rule == "two_level" else None
    if element is None or (fmt.scale_rule == "two_level" and scale_element is None):
        return None
    if fmt.scale_rule == "two_level" and (fmt.block not in _BLOCK_OF_SIXTEEN or element.bits != 4):
        return None
    rows, length = fmt.block or (0, 0)
    if fmt.scale_rule == "two_level" and rows > 1 and not fmt.layout.replicated:
        return None  # `write_sixteens` stores a scale for each row
    if fmt.block is not None and any(n & (n - 1) or n > 128 for n in (rows, length)):
        return None  # tiles of kernels have powers of two, and hold whole blocks
    if fmt.rotation is not None and fmt.scale_rule != "two_level":
        return None
    bound = fmt.element.max * fmt.scale_bound
    return PlaneKind(
        element,
        rows,
        length,
        fmt.scale_rule,
        direction is ROWWISE,
        operand_major,
        fmt.layout.replicated,
        fmt.global_amax == "row",
        -1 if fmt.rotation is None else fmt.rotation,
        bound,
        _fp32(1.0 / bound),
        _fp32(1.0 / fmt.element.max),
        fmt.element.max_exponent,
        scale_element,
        hardware,
    )


def encoding_kind(target: Target, dtype: torch.dtype, hardware: Traits) -> EncodingKind | None:
    """How a target is written from a tensor of ``dtype``; None if kernels cannot be made for it."""
    plane, encoding, fmt = target.plane, target.encoding, target.encoding.format
    kind = plane_kind(fmt, plane.direction, plane.has_whole_rows, hardware)
    if kind is None or encoding.random != "hash":
        return None
    if encoding.stochastic and not _words_fit(plane.direction, target.within):
        return None
    block_scales_in_range_of_input = fmt.block is not None
    return EncodingKind(
        kind,
        encoding.stochastic,
        encoding.stochastic and _words(plane.shape, target.within) >= 1 << 31,
        encoding.four_over_six or "",
        fmt.target,
        encoding.epsilon,
        encoding.power_of_two,
        _finite_fp32(torch.finfo(dtype).max if block_scales_in_range_of_input else FP32_MAX),
        target.scale is not None,
        loses_nonfinite(fmt),
    )


def _words_fit(direction: Direction, within: Within | None) -> bool:
    """Whether the first number of each row of the operand is the first of four that share a random word."""
    return within is None or (within.column if direction is ROWWISE else within.row) % 4 == 0


def _words(shape: tuple[int, int], within: Within | None) -> int:
    """Random words up to the last one that is used."""
    top, left, width = within or (0, 0, shape[1])
    return (top + shape[0]) * max(width, left + shape[1])


def _bits(value: float) -> int:
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    return int(bits)


def _fp32(value: float) -> float:
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    return float(rounded)


def _finite_fp32(value: float) -> float:
    return min(value, FP32_MAX)
