"""Formats: how a whole tensor is encoded, as data.

A format is an element, a block shape, and how the scale of a block is chosen and stored. Blocks are
written ``(rows, length)``: ``length`` runs along the dimension that the GEMM sums over, whichever
direction that is, so ``(1, 32)`` means 32 neighbours along K in a rowwise plane and 32 neighbours
along M in a columnwise one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, get_args

from .element import E2M1, E4M3, Element
from .table_element import TableElement
from .written import WrittenByFields

HADAMARD_SIZE = 16

# The signs of the rotation by default: bit i is set where sign i is -1. They were drawn at random once, by
# Transformer Engine, and are fixed, + + + - + - - - - - - + - + - -, because both operands of a GEMM have to be
# rotated alike, in whatever process they were made, and because its bytes are ours. A mask of 0 is H16 itself.
DEFAULT_SIGN_MASK = 0xD7E8

AnyElement = Element | TableElement
ScaleRule = Literal["none", "fp32", "e8m0_up", "e8m0_floor", "two_level"]


@dataclass(frozen=True)
class ScaleLayout(WrittenByFields):
    """Where the scale of a block lies in memory.

    The logical scales of an operand with R rows and C/length blocks per row are padded to multiples
    of ``pad`` and, if ``transposed``, stored block-major. ``replicated`` repeats the one scale of a
    2-D tile for each of its rows, which is how the hardware wants it.
    """

    pad: tuple[int, int] = (1, 1)
    transposed: bool = False
    replicated: bool = False


@dataclass(frozen=True)
class Format(WrittenByFields):
    """One way to encode a matrix. Everything a reader needs to decode the bytes is here.

    ``element``             what a code means; None keeps the numbers as they are (identity)
    ``block``               (rows, length) of the elements that share a scale; None: the whole tensor
    ``scale_rule``          how a scale follows from the largest magnitude (see ``kernels``)
    ``layout``              where the scales lie
    ``transposes``          a columnwise plane is stored as [K, M]
    ``ragged``              a last, partial block is allowed
    ``global_amax``         two-level formats: one amax for the "tensor" or for each "row"
    ``scale_bound``         two-level formats: the largest block scale the global scale aims at
    ``rotation``            sign mask of the 16-point Hadamard rotation, None if not rotated
    ``amax_to``             fp32 scales: the code that the largest magnitude becomes, None: the largest code
    """

    name: str
    element: AnyElement | None
    block: tuple[int, int] | None = None
    scale_rule: ScaleRule = "fp32"
    layout: ScaleLayout = ScaleLayout()
    transposes: bool = True
    ragged: bool = False
    global_amax: Literal["tensor", "row"] | None = None
    scale_bound: int = 448
    rotation: int | None = None
    amax_to: float | None = None

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise ValueError(f"format {self.name!r}: {problem}")

    def _problem(self) -> str | None:
        if self.scale_rule not in get_args(ScaleRule):
            return f"the scale rule is one of {', '.join(get_args(ScaleRule))}, not {self.scale_rule!r}"
        if (self.element is None) != (self.scale_rule == "none"):
            return "without an element there is no scale, and the other way round"
        if self.element is None:
            return None
        if self.block is None and self.scale_rule != "fp32":
            return f"a scale for the whole tensor is fp32, not {self.scale_rule}"
        if self.block is not None and (min(self.block) < 1 or self.block[1] * self.element.bits % 8):
            return f"blocks of {self.block} codes of {self.element.bits} bits do not fill whole bytes"
        if self.element.bits < 8 and not self.transposes:
            return (
                f"codes of {self.element.bits} bits are packed along the blocks, so the columnwise plane has to be "
                "stored transposed"
            )
        if self.element.bits < 8 and (self.block is None or self.ragged):
            return "packed codes need whole blocks"
        if self.global_amax not in (None, "tensor", "row"):
            return f"the global amax is per 'tensor' or per 'row', not {self.global_amax!r}"
        if (self.scale_rule == "two_level") != (self.global_amax is not None):
            return "a two-level scale and a global amax go together"
        if self.global_amax == "row" and self.block_rows > 1:
            return f"{self.block_rows} rows share a scale, so none of them can have an amax of its own"
        if self.ragged and self.layout.replicated and self.block_rows > 1:
            return "scales that are replicated for each row of a block need whole blocks"
        if self.rotation is not None and self.block_length % HADAMARD_SIZE:
            return f"the rotation mixes {HADAMARD_SIZE} neighbours, which must lie in one block"
        if self.amax_to is not None and (self.scale_rule != "fp32" or not 0 < self.amax_to <= self.element.max):
            return (
                f"the largest magnitude goes to {self.amax_to}: that is a choice of fp32 scales, from 0 to "
                f"{self.element.max:g}"
            )
        if self.rotation is not None and self.ragged:
            return f"the rotation mixes {HADAMARD_SIZE} neighbours, so it needs whole blocks"
        return None

    @property
    def is_identity(self) -> bool:
        return self.element is None

    @property
    def block_rows(self) -> int:
        return self.block[0] if self.block else 1

    @property
    def block_length(self) -> int:
        return self.block[1] if self.block else 1

    @property
    def target(self) -> float:
        """What fp32 scales take the largest magnitude to."""
        assert self.element is not None
        return self.element.max if self.amax_to is None else self.amax_to

    @property
    def is_symmetric(self) -> bool:
        """Whether one direction's bytes determine the other's: whole-tensor scales and square tiles."""
        square = self.block is None or self.block[0] == self.block[1]
        return square and self.rotation is None and self.global_amax != "row"

    @property
    def bits_per_element(self) -> float:
        """Stored bits of one plane per element, padding and per-tensor scalars aside."""
        if self.element is None:
            return 16.0
        bits = float(self.element.bits)
        if self.block is not None:
            rows = 1 if self.layout.replicated else self.block[0]
            bits += (32 if self.scale_rule == "fp32" else 8) / (rows * self.block[1])
        return bits

    def with_rotation(self, sign_mask: int | None) -> Format:
        """This format on rotated data."""
        if sign_mask is None:
            return self
        if self.rotation is not None:
            raise ValueError(f"format {self.name!r} is rotated already")
        signs = "" if sign_mask == DEFAULT_SIGN_MASK else f"_{sign_mask:04x}"
        return replace(self, name=f"{self.name}_rht{signs}", rotation=sign_mask)

    def __str__(self) -> str:
        element = self.element.name if self.element else "-"
        block = f"{self.block[0]}x{self.block[1]}" if self.block else ("tensor" if self.element else "-")
        amax = f"amax per {self.global_amax}, " if self.global_amax else ""
        column = "[K, M]" if self.transposes else "[M, K]"
        bits = f"{self.bits_per_element:.2f}"
        return f"{self.name:<26} {element:<8} {block:<8} {amax + self.scale_rule:<26} {column} {bits:>6}"

    def __hash__(self) -> int:
        return hash(self.name)


_GEMM_TILE = ScaleLayout(pad=(128, 4))
_GEMM_TILE_2D = ScaleLayout(pad=(128, 4), replicated=True)

IDENTITY = Format("identity", None, scale_rule="none", transposes=False, ragged=True)


@cache
def fp8_format(element: Element = E4M3) -> Format:
    """FP8 with one fp32 scale for the tensor."""
    return Format(_name("fp8", element), element, ragged=True)


@cache
def fp8_block_format(element: Element = E4M3, *, two_d: bool = False) -> Format:
    """FP8 with an fp32 scale per 1x128 row piece or per 128x128 tile."""
    if two_d:
        name, block, layout = "fp8_block_2d", (128, 128), ScaleLayout(pad=(1, 4))
    else:
        name, block, layout = "fp8_block", (1, 128), ScaleLayout(pad=(4, 1), transposed=True)
    return Format(_name(name, element), element, block, layout=layout, ragged=True)


@cache
def mxfp8_format(element: Element = E4M3, *, two_d: bool = False) -> Format:
    """MXFP8: a power-of-two scale, rounded up, per 32 elements (or per 32x32 tile)."""
    name, block = ("mxfp8_2d", (32, 32)) if two_d else ("mxfp8", (1, 32))
    layout = _GEMM_TILE_2D if two_d else _GEMM_TILE
    return Format(_name(name, element), element, block, "e8m0_up", layout, transposes=False)


def ocp_mx_format(name: str, element: Element) -> Format:
    """A sub-byte OCP microscaling format: 32 elements share a power-of-two scale, rounded down."""
    return Format(name, element, (1, 32), "e8m0_floor", _GEMM_TILE)


@cache
def nvfp4_format(
    *,
    two_d: bool = False,
    row_scaled: bool = False,
    scale_bound: int = 448,
    rotation: int | None = None,
) -> Format:
    """NVFP4: an E4M3 scale per 16 elements under one fp32 amax per tensor (or per row)."""
    if scale_bound not in (448, 256):
        raise ValueError(f"NVFP4 block scales are bounded by 448 or 256, not {scale_bound}")
    if row_scaled and two_d:
        raise ValueError("NVFP4: 16x16 tiles span rows, so they cannot have an amax per row")
    if rotation is not None and (two_d or row_scaled):
        raise ValueError("NVFP4: the Hadamard rotation needs 1x16 blocks under one tensor amax")
    name = "nvfp4" + "_2d" * two_d + "_row_scaled" * row_scaled + f"_max{scale_bound}" * (scale_bound != 448)
    base = Format(
        name,
        E2M1,
        (16, 16) if two_d else (1, 16),
        "two_level",
        _GEMM_TILE_2D if two_d else _GEMM_TILE,
        global_amax="row" if row_scaled else "tensor",
        scale_bound=scale_bound,
    )
    return base.with_rotation(rotation)


def _name(family: str, element: Element) -> str:
    return family if element == E4M3 else f"{family}_{element.name}"
