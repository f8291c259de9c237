"""A plane: one encoding of a whole matrix, for the GEMM that reads it in one direction.

A linear layer runs three GEMMs, and each sums over another dimension of its operands:

    fprop  y  = x · Wᵀ     reads  x rowwise,     W rowwise
    dgrad  dx = dy · W     reads  dy rowwise,    W columnwise
    wgrad  dW = dyᵀ · x    reads  dy columnwise, x columnwise

A rowwise plane has its blocks along K, a columnwise plane along M. Seen as a GEMM *operand*, blocks
always run along the last dimension: the operand of a rowwise plane is the matrix [M, K], the operand
of a columnwise plane is its transpose [K, M]. Kernels read and write operands only; how an operand
lies in memory is told here, once, as strided views.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..formats import Format


class Direction(enum.Enum):
    ROWWISE = "rowwise"
    COLUMNWISE = "columnwise"

    __hash__ = object.__hash__  # members are unique; the default hashes the name, in Python, every time

    @property
    def other(self) -> Direction:
        return Direction.COLUMNWISE if self is Direction.ROWWISE else Direction.ROWWISE


ROWWISE, COLUMNWISE = Direction.ROWWISE, Direction.COLUMNWISE


@dataclass(frozen=True, eq=False)
class Plane:
    """Codes, scales and the format they are in: all that is needed to decode.

    ``shape``       (M, K) of the matrix
    ``transposed``  codes and scales are stored in the operand's orientation [K, M] (columnwise only)
    """

    format: Format
    direction: Direction
    shape: tuple[int, int]
    data: Tensor
    scale: Tensor | None = None
    amax: Tensor | None = None
    transposed: bool = False
    stale: bool = False  # the other direction was written since, through an alias without this plane

    def check_fresh(self) -> None:
        """Raise rather than let old numbers be read."""
        if self.stale:
            raise RuntimeError(
                f"the {self.direction.value} {self.format.name} plane of this {list(self.shape)} tensor is stale: its "
                f"{self.direction.other.value} plane was written since, through an alias that does not hold this one. "
                "Requantize the tensor."
            )

    def check_readable(self) -> None:
        """The same, and raise if the memory of the buffers was let go: reading it would crash."""
        if self.stale:
            self.check_fresh()
        if self.data.numel() and not self.data.untyped_storage().nbytes():
            raise RuntimeError(
                f"the {self.direction.value} {self.format.name} plane of this {list(self.shape)} tensor has no memory: "
                "it is part of a sharded parameter and was not gathered for this pass, or was let go after it"
            )

    def has_memory(self) -> bool:
        """False for a plane of a sharded parameter that is not gathered just now."""
        return self.data.numel() == 0 or self.data.untyped_storage().nbytes() > 0

    def check_buffers(self) -> None:
        """Raise if the buffers are not of the sizes and dtypes the format asks for; kernels trust them."""
        if self.format.element is None:
            if self.data.numel() != math.prod(self.shape):
                self._refuse_buffer("numbers", self.data, self.data.dtype, f"{math.prod(self.shape)} of them")
            return
        rowwise = self.direction is ROWWISE
        needed = _needed_buffers(self.format, self.shape if rowwise else self.shape[::-1])
        data, scale, amax = self.data, self.scale, self.amax
        if data.numel() != needed.codes or data.dtype != torch.uint8:
            self._refuse_buffer("codes", data, torch.uint8, f"{needed.codes} bytes")
        if self.transposed and data.dim() and data.shape[0] != self.shape[1]:
            self._refuse_buffer("codes", data, torch.uint8, f"transposed, {self.shape[1]} rows of them")
        if (
            scale is None
            or scale.dtype != needed.scale_dtype
            or not _is_grid(scale, needed.scale_grid, (rowwise or self.transposed) != self.format.layout.transposed)
        ):
            grid = "one number" if needed.scale_grid is None else f"{list(needed.scale_grid)} and padding"
            self._refuse_buffer("scales", scale, needed.scale_dtype, grid)
        if needed.amaxes and (amax is None or amax.numel() != needed.amaxes or amax.dtype != torch.float32):
            self._refuse_buffer("amax", amax, torch.float32, f"{needed.amaxes} numbers")

    def _refuse_buffer(self, name: str, buffer: Tensor | None, dtype: torch.dtype, needed: str) -> None:
        have = "nothing" if buffer is None else f"{buffer.dtype} {list(buffer.shape)}"
        raise ValueError(
            f"the {self.direction.value} {self.format.name} plane of {list(self.shape)} needs {name} of {dtype}, "
            f"{needed}; it has {have}"
        )

    def read(self, direction: Direction) -> Plane:
        """The same buffers for GEMMs that read them in ``direction``."""
        if direction is self.direction:
            return self
        return Plane(self.format, direction, self.shape, self.data, self.scale, self.amax, self.transposed, self.stale)

    @property
    def operand_shape(self) -> tuple[int, int]:
        rows, cols = self.shape
        return (rows, cols) if self.direction is ROWWISE else (cols, rows)

    def operand_codes(self) -> Tensor:
        """The codes as an operand [R, bytes per row]: a view, so writing to it writes the plane."""
        if self._is_operand_major:
            rows, length = self.operand_shape
            return self.data.view(rows, bytes_per_row(self.format, length))
        return self.data.view(self.shape).t()

    def operand_scales(self) -> Tensor:
        """The scales of the operand without padding, one row per operand row or tile: a view."""
        assert self.scale is not None
        if self.format.block is None:
            return self.scale.view(1, 1)
        rows, blocks = scale_grid(self.format, self.operand_shape)
        stored = self.scale if self._scales_operand_major else self.scale.t()
        return stored[:rows, :blocks]

    def scale_across(self, axes: Sequence[int]) -> Tensor | None:
        """The scale or amax that parts of the matrix have in common after cuts along ``axes`` (0: M, 1: K)."""
        own_axis = 0 if self.direction is ROWWISE else 1  # an amax per operand row is cut along with it
        if self.format.global_amax == "row":
            axes = [axis for axis in axes if axis != own_axis]
        if not axes:
            return None
        return self.scale if self.format.block is None else self.amax

    def buffers(self) -> list[Tensor]:
        """Those that there are."""
        if self.scale is None:
            return [self.data]
        return [self.data, self.scale] if self.amax is None else [self.data, self.scale, self.amax]

    @property
    def _is_operand_major(self) -> bool:
        return self.direction is ROWWISE or self.transposed

    @property
    def _scales_operand_major(self) -> bool:
        return self._is_operand_major != self.format.layout.transposed


class PlaneSource(Protocol):
    """Whatever has planes: a pair of them, a quantized storage or tensor."""

    def plane(self, direction: Direction) -> Plane | None:
        """The plane of one direction, or None if it is absent."""


class PlanePair(NamedTuple):
    """What a quantizer makes of a matrix; None where a direction was not asked for."""

    rowwise: Plane | None
    columnwise: Plane | None

    def plane(self, direction: Direction) -> Plane | None:
        return self.rowwise if direction is ROWWISE else self.columnwise


def _is_grid(scale: Tensor, grid: tuple[int, int] | None, operand_major: bool) -> bool:
    """Whether there is a scale for each block of the operand, or one for all."""
    if grid is None:
        return scale.numel() == 1
    if scale.dim() != 2:
        return False
    rows, blocks = grid if operand_major else grid[::-1]
    return scale.shape[0] >= rows and scale.shape[1] >= blocks


class _NeededBuffers(NamedTuple):
    codes: int  # bytes
    scale_dtype: torch.dtype
    scale_grid: tuple[int, int] | None  # of the operand; None: one scale
    amaxes: int


@lru_cache(maxsize=4096)
def _needed_buffers(fmt: Format, operand_shape: tuple[int, int]) -> _NeededBuffers:
    rows, length = operand_shape
    grid = None if fmt.block is None else scale_grid(fmt, operand_shape)
    amaxes = {None: 0, "tensor": 1, "row": rows}[fmt.global_amax]
    return _NeededBuffers(rows * bytes_per_row(fmt, length), scale_dtype(fmt), grid, amaxes)


def scale_dtype(fmt: Format) -> torch.dtype:
    return torch.float32 if fmt.scale_rule == "fp32" else torch.uint8


def bytes_per_row(fmt: Format, length: int) -> int:
    """Bytes that ``length`` codes take."""
    bits = 8 if fmt.element is None else fmt.element.bits
    return length * bits // 8


def scale_grid(fmt: Format, operand_shape: tuple[int, int]) -> tuple[int, int]:
    """Rows and blocks per row of an operand's unpadded scales."""
    assert fmt.block is not None
    rows = operand_shape[0] if fmt.layout.replicated else math.ceil(operand_shape[0] / fmt.block[0])
    return rows, math.ceil(operand_shape[1] / fmt.block[1])


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(M, K) of a tensor: all leading dimensions flattened; a vector is one row."""
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def data_shape(fmt: Format, direction: Direction, shape: Sequence[int], transposed: bool) -> tuple[int, ...]:
    """Shape of the code buffer of a tensor of ``shape``."""
    if not shape:  # one number, in formats without blocks
        return ()
    lead, last = tuple(shape[:-1]), shape[-1]
    if direction is ROWWISE or not transposed:
        return (*lead, bytes_per_row(fmt, last))
    if fmt.element is not None and fmt.element.bits < 8:
        return (last, bytes_per_row(fmt, math.prod(lead)))
    return (last, *lead)


def scale_shape(fmt: Format, direction: Direction, shape: Sequence[int], transposed: bool) -> tuple[int, ...]:
    """Shape of the scale buffer, padding included."""
    if fmt.block is None:
        return (1,)
    rows, cols = matrix_shape(shape)
    operand = (rows, cols) if direction is ROWWISE else (cols, rows)
    padded = tuple(round_up(n, to) for n, to in zip(scale_grid(fmt, operand), fmt.layout.pad, strict=True))
    operand_major = direction is ROWWISE or transposed
    return padded if operand_major != fmt.layout.transposed else padded[::-1]


def amax_shape(fmt: Format, direction: Direction, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Shape of the amax buffer, None for formats without a global amax."""
    if fmt.global_amax is None:
        return None
    rows, cols = matrix_shape(shape)
    if fmt.global_amax == "tensor":
        return (1,)
    return (rows if direction is ROWWISE else cols,)


def empty_plane(
    fmt: Format,
    direction: Direction,
    shape: Sequence[int],
    *,
    device: torch.device,
    transposed: bool | None = None,
    pin_memory: bool = False,
    dtype: torch.dtype | None = None,
) -> Plane:
    """A plane for a tensor of ``shape``, uninitialised but for the padding of its scales, which is zero.

    Identity planes have no codes but numbers, of ``dtype``.
    """
    if transposed is None:
        transposed = fmt.transposes and direction is COLUMNWISE
    options: Any = {"device": device, "pin_memory": True} if pin_memory else {"device": device}
    if fmt.is_identity:
        if dtype is None:
            raise ValueError("an identity plane needs the dtype of its numbers")
        return Plane(fmt, direction, matrix_shape(shape), torch.empty(tuple(shape), dtype=dtype, **options))
    sizes = buffer_shapes(fmt, direction, tuple(shape), transposed)
    data = torch.empty(sizes.data, dtype=torch.uint8, **options)
    scale = (torch.zeros if sizes.pads else torch.empty)(sizes.scale, dtype=scale_dtype(fmt), **options)
    amax = None if sizes.amax is None else torch.empty(sizes.amax, dtype=torch.float32, **options)
    return Plane(fmt, direction, sizes.matrix, data, scale, amax, transposed)


class BufferShapes(NamedTuple):
    """What `empty_plane` allocates."""

    matrix: tuple[int, int]
    data: tuple[int, ...]
    scale: tuple[int, ...]
    amax: tuple[int, ...] | None
    pads: bool  # whether more scales are stored than needed


@lru_cache(maxsize=4096)
def buffer_shapes(fmt: Format, direction: Direction, shape: tuple[int, ...], transposed: bool) -> BufferShapes:
    rows, cols = matrix_shape(shape)
    grid = None if fmt.block is None else scale_grid(fmt, (rows, cols) if direction is ROWWISE else (cols, rows))
    scales = scale_shape(fmt, direction, shape, transposed)
    return BufferShapes(
        (rows, cols),
        data_shape(fmt, direction, shape, transposed),
        scales,
        amax_shape(fmt, direction, shape),
        grid is not None and math.prod(grid) != math.prod(scales),
    )


def overlaps(a: Tensor, b: Tensor) -> bool:
    """Whether writing one may change the other elsewhere: parts of one memory, but not the same part."""
    if a.device != b.device or a.device.type == "meta" or a.numel() == 0:
        return False
    if isinstance(a, FakeTensor) or isinstance(b, FakeTensor):  # which have no memory
        return False
    same = (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())
    return not same and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def same_codes_in_both(row: Format, column: Format) -> bool:
    """Whether the columnwise codes are the rowwise ones, transposed: one direction follows from the other, exactly."""
    return row == column and row.is_symmetric and not row.is_identity


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def shape_problem(fmt: Format, direction: Direction, shape: Sequence[int]) -> str | None:
    """Why a tensor of ``shape`` has no plane of this format and direction; None if it has."""
    return _shape_problem(fmt, direction, tuple(shape))


@lru_cache(maxsize=4096)
def _shape_problem(fmt: Format, direction: Direction, shape: tuple[int, ...]) -> str | None:
    if fmt.block is not None and len(shape) < 2:
        return f"it has {len(shape)} dimensions and needs at least 2"
    if fmt.ragged or fmt.block is None:
        return None
    rows, cols = matrix_shape(shape)
    along_m, along_k = fmt.block if direction is ROWWISE else fmt.block[::-1]
    if cols % along_k:
        return f"its last dimension (K) is {cols}, which is not a multiple of {along_k}"
    if rows % along_m:
        return f"the product of its other dimensions (M) is {rows}, which is not a multiple of {along_m}"
    return None
