"""`Format`: how a whole tensor is encoded, as data.

A format consists of an element, the shape of blocks, and how the scale of a block is chosen and stored. Blocks are
written as ``(rows, length)``, where ``length`` is along the dimension that the GEMM sums over. So ``(1, 32)`` means 32
numbers along K in a rowwise plane, and 32 numbers along M in a columnwise plane.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, get_args

from .element import E2M1, E4M3, Element
from .table_element import TableElement
from .written import WrittenByFields

HADAMARD_SIZE = 16  # numbers that the rotation mixes: the length of a block of NVFP4

# The default signs of the rotation: bit i is set if sign i is -1. Transformer Engine has drawn them at random once, and
# they are fixed: + + + - + - - - - - - + - + - -. They must be, because both operands of a GEMM need the same rotation,
# in whatever process they were made, and because the bytes are the same as those of Transformer Engine. The mask 0
# means no signs: the Hadamard matrix itself.
DEFAULT_SIGN_MASK = 0xD7E8

AnyElement = Element | TableElement
ScaleRule = Literal["none", "fp32", "e8m0_up", "e8m0_floor", "two_level"]


@dataclass(frozen=True)
class ScaleLayout(WrittenByFields):
    """How the scales of blocks are stored in memory: a matrix with one row per row of the operand.

    Args:
        pad: rows and columns of the matrix are padded to multiples of these.
        transposed: the matrix is stored transposed.
        replicated: the scale of a 2-D tile is repeated for each of its rows, as hardware needs it.

    Examples:
        >>> cg.get_format("mxfp8").layout
        ScaleLayout(pad=(128, 4), transposed=False, replicated=False)
    """

    pad: tuple[int, int] = (1, 1)
    transposed: bool = False
    replicated: bool = False


@dataclass(frozen=True)
class Format(WrittenByFields):
    """A way to encode a matrix. It has everything that is needed to decode the bytes.

    Args:
        name: name of the format, for the registry and for recipes.
        element: what a code means: an `Element` or a `TableElement`. None keeps the numbers as they are (identity).
        block: (rows, length) of the numbers that share a scale; None for one scale per tensor.
        scale_rule: how the scale of a block is computed from its amax. "fp32": an fp32 number that maps the amax to the
            largest number. "e8m0_up": the smallest power of two with which the amax is not clipped. "e8m0_floor": a
            power of two by the rule of the OCP specification. "two_level": a number of ``scale_element``, and an fp32
            scale for the tensor or for each row. "none": no scales (identity).
        layout: how the scales are stored.
        transposes: columnwise planes are stored as [K, M].
        ragged: a dimension does not need to be a multiple of the block: the last block may be smaller.
        global_amax: for "two_level": one amax for the "tensor", or one for each "row"; otherwise None.
        scale_bound: for "two_level": the block scale of the block with the largest amax.
        rotation: signs of the Hadamard rotation of the data, as a bit mask; None if it is not rotated.
        amax_to: for "fp32": the number to which a scale maps the amax; None for the largest number of the element.
        scale_element: for "two_level": what the byte of a block scale means.

    Raises:
        ValueError: the arguments do not fit together.

    Examples:
        >>> mxfp4 = cg.get_format("mxfp4")
        >>> mxfp4.block, mxfp4.scale_rule
        ((1, 32), 'e8m0_floor')
        >>> mxfp4.element.max
        6.0
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
    scale_element: Element = E4M3

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise ValueError(f"format {self.name!r}: {problem}")

    def _problem(self) -> str | None:
        if self.scale_rule not in get_args(ScaleRule):
            return f"scale_rule must be one of {', '.join(get_args(ScaleRule))}, got {self.scale_rule!r}"
        if (self.element is None) != (self.scale_rule == "none"):
            return (
                "scale_rule='none' and element=None must be used together, got "
                f"{self.scale_rule!r} and {self.element!r}"
            )
        if self.element is None:
            return None
        if self.block is None and self.scale_rule != "fp32":
            return f"a scale for the whole tensor (block=None) needs scale_rule='fp32', got {self.scale_rule!r}"
        if self.block is not None and (min(self.block) < 1 or self.block[1] * self.element.bits % 8):
            return f"blocks of {self.block} codes of {self.element.bits} bits do not fill whole bytes"
        if self.element.bits < 8 and not self.transposes:
            return (
                f"codes of {self.element.bits} bits are packed along the blocks, so transposes must be True: the "
                "columnwise plane has to be stored transposed"
            )
        if self.element.bits < 8 and (self.block is None or self.ragged):
            return "packed codes need whole blocks: block must be given, and ragged must be False"
        if self.global_amax not in (None, "tensor", "row"):
            return f"global_amax must be None, 'tensor' or 'row', got {self.global_amax!r}"
        if (self.scale_rule == "two_level") != (self.global_amax is not None):
            return (
                "scale_rule='two_level' and a global_amax must be used together, got "
                f"{self.scale_rule!r} and {self.global_amax!r}"
            )
        if self.global_amax == "row" and self.block_rows > 1:
            return f"global_amax='row' needs blocks of one row, but {self.block_rows} rows share a scale"
        if self.ragged and self.layout.replicated and self.block_rows > 1:
            return "scales that are replicated for each row of a block need whole blocks: ragged must be False"
        if self.rotation is not None and self.block_length % HADAMARD_SIZE:
            return (
                f"the rotation mixes {HADAMARD_SIZE} numbers of one block, so the length of blocks must be a multiple "
                f"of {HADAMARD_SIZE}, got {self.block_length}"
            )
        if self.amax_to is not None and (self.scale_rule != "fp32" or not 0 < self.amax_to <= self.element.max):
            return (
                f"amax_to needs scale_rule='fp32' and must be above 0 and at most {self.element.max:g}, got "
                f"{self.amax_to} with {self.scale_rule!r}"
            )
        if self.scale_element != E4M3 and self.scale_rule != "two_level":
            return f"scale_element needs scale_rule='two_level', got {self.scale_element.name} with {self.scale_rule!r}"
        if self.scale_rule == "two_level" and not (self.scale_element.bits == 8 and self._bound_is_a_scale):
            return (
                f"block scales are bytes, and scale_bound must be above 0 and at most the largest of them; got "
                f"scale_bound={self.scale_bound} with {self.scale_element}"
            )
        if self.rotation is not None and self.ragged:
            return f"the rotation mixes {HADAMARD_SIZE} numbers, so it needs whole blocks: ragged must be False"
        return None

    @property
    def _bound_is_a_scale(self) -> bool:
        return 0 < self.scale_bound <= self.scale_element.max

    @property
    def is_identity(self) -> bool:
        """Whether the format keeps numbers as they are."""
        return self.element is None

    @property
    def block_rows(self) -> int:
        """Number of rows of a block; 1 without blocks."""
        return self.block[0] if self.block else 1

    @property
    def block_length(self) -> int:
        """Length of a block; 1 without blocks."""
        return self.block[1] if self.block else 1

    @property
    def target(self) -> float:
        """The number to which fp32 scales map the amax."""
        assert self.element is not None
        return self.element.max if self.amax_to is None else self.amax_to

    @property
    def is_symmetric(self) -> bool:
        """Whether the bytes of one direction determine those of the other: with per-tensor scales or square tiles."""
        square = self.block is None or self.block[0] == self.block[1]
        return square and self.rotation is None and self.global_amax != "row"

    @property
    def bits_per_element(self) -> float:
        """Stored bits of one plane per number, without padding and per-tensor scales."""
        if self.element is None:
            return 16.0
        bits = float(self.element.bits)
        if self.block is not None:
            rows = 1 if self.layout.replicated else self.block[0]
            bits += (32 if self.scale_rule == "fp32" else 8) / (rows * self.block[1])
        return bits

    def with_rotation(self, sign_mask: int | None) -> Format:
        """The format for rotated data.

        Args:
            sign_mask: signs of the rotation; None returns this format.

        Raises:
            ValueError: this format already has a rotation.
        """
        if sign_mask is None:
            return self
        if self.rotation is not None:
            raise ValueError(f"format {self.name!r} already has a rotation")
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


# Hardware reads scales in tiles of 128 rows and 4 columns.
_GEMM_TILE = ScaleLayout(pad=(128, 4))
_GEMM_TILE_2D = ScaleLayout(pad=(128, 4), replicated=True)

IDENTITY = Format("identity", None, scale_rule="none", transposes=False, ragged=True)


@cache
def fp8_format(element: Element = E4M3) -> Format:
    """FP8 with one fp32 scale per tensor.

    Examples:
        >>> cg.formats.fp8_format().block is None  # one scale for the tensor
        True
    """
    return Format(_name("fp8", element), element, ragged=True)


@cache
def fp8_block_format(element: Element = E4M3, *, two_d: bool = False) -> Format:
    """FP8 with an fp32 scale per 1x128 block, or with ``two_d`` per 128x128 tile.

    Examples:
        >>> cg.formats.fp8_block_format(two_d=True).block
        (128, 128)
    """
    if two_d:
        name, block, layout = "fp8_block_2d", (128, 128), ScaleLayout(pad=(1, 4))
    else:
        name, block, layout = "fp8_block", (1, 128), ScaleLayout(pad=(4, 1), transposed=True)
    return Format(_name(name, element), element, block, layout=layout, ragged=True)


@cache
def mxfp8_format(element: Element = E4M3, *, two_d: bool = False) -> Format:
    """MXFP8: a power-of-two scale, rounded up, per 32 numbers, or with ``two_d`` per 32x32 tile.

    Examples:
        >>> cg.formats.mxfp8_format().block, cg.formats.mxfp8_format(two_d=True).block
        ((1, 32), (32, 32))
    """
    name, block = ("mxfp8_2d", (32, 32)) if two_d else ("mxfp8", (1, 32))
    layout = _GEMM_TILE_2D if two_d else _GEMM_TILE
    return Format(_name(name, element), element, block, "e8m0_up", layout, transposes=False)


def ocp_mx_format(name: str, element: Element) -> Format:
    """An OCP microscaling format with codes of 4 or 6 bits: 32 numbers share a power-of-two scale, rounded down.

    Examples:
        >>> fmt = cg.formats.ocp_mx_format("my_mxfp4", cg.formats.get_element("e2m1"))
        >>> fmt.scale_rule
        'e8m0_floor'
    """
    return Format(name, element, (1, 32), "e8m0_floor", _GEMM_TILE)


@cache
def nvfp4_format(
    *,
    two_d: bool = False,
    row_scaled: bool = False,
    scale_bound: int = 448,
    rotation: int | None = None,
) -> Format:
    """NVFP4: an E4M3 scale per 16 numbers, and one fp32 amax per tensor.

    Args:
        two_d: one scale per 16x16 tile.
        row_scaled: one amax per row instead of one per tensor.
        scale_bound: the block scale of the block with the largest amax: 448, or 256 for 4-over-6.
        rotation: signs of the Hadamard rotation; None if the data is not rotated.

    Raises:
        ValueError: the options cannot be combined.

    Examples:
        >>> cg.formats.nvfp4_format(two_d=True).block
        (16, 16)
    """
    if scale_bound not in (448, 256):
        raise ValueError(f"NVFP4: scale_bound must be 448 or 256, got {scale_bound}")
    if row_scaled and two_d:
        raise ValueError("NVFP4: row_scaled and two_d cannot be combined: a 16x16 tile has several rows")
    if rotation is not None and (two_d or row_scaled):
        raise ValueError("NVFP4: a Hadamard rotation cannot be combined with two_d or row_scaled")
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
