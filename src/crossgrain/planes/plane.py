"""`Plane`: one encoding of a whole matrix, for the GEMMs that read it in one direction.

A linear layer runs three GEMMs, and each sums over another dimension of its operands:

    fprop  y  = x · Wᵀ     reads  x rowwise,     W rowwise
    dgrad  dx = dy · W     reads  dy rowwise,    W columnwise
    wgrad  dW = dyᵀ · x    reads  dy columnwise, x columnwise

The blocks of a rowwise plane are along K, those of a columnwise plane along M. In the *operand* of a GEMM, blocks are
always along the last dimension: the operand of a rowwise plane is the matrix [M, K], and the operand of a columnwise
plane is its transpose [K, M]. Kernels read and write only operands. This module defines how an operand is stored in
memory, as strided views.

Columns of MXFP8 are not stored transposed: their buffer is [M, K]. On GPUs that multiply MXFP8 codes this buffer has
other strides, (1, M), so that its columns lie in memory as these GPUs read them. Shapes and numbers are the same.
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
from ..runtime.gpu_capability import multiplies_mxfp8


class Direction(enum.Enum):
    """A direction of a tensor: rowwise or columnwise.

    Examples:
        >>> q = cg.quantize(torch.ones(32, 32), "mxfp8", columnwise=False)
        >>> q.plane(cg.Direction.ROWWISE) is None, q.plane(cg.Direction.COLUMNWISE) is None
        (False, True)
        >>> cg.COLUMNWISE is cg.Direction.COLUMNWISE
        True
    """

    ROWWISE = "rowwise"
    COLUMNWISE = "columnwise"

    __hash__ = object.__hash__  # faster than the default, which hashes the name in Python; members are unique

    @property
    def other(self) -> Direction:
        """The other direction."""
        return Direction.COLUMNWISE if self is Direction.ROWWISE else Direction.ROWWISE


ROWWISE, COLUMNWISE = Direction.ROWWISE, Direction.COLUMNWISE


@dataclass(frozen=True, eq=False, init=False)
class Plane:
    """Codes, scales and their format: everything that is needed to decode a matrix.

    Attributes:
        format: the format.
        direction: the direction in which GEMMs read the plane.
        shape: (M, K) of the matrix.
        data: the codes; in the identity format, the numbers.
        scale: the scales; None in the identity format.
        amax: the amax of the tensor, or of each row of the operand; None if the format has none.
        transposed: codes and scales are stored as [K, M] (only columnwise planes).
        stale: the other direction was written later, through an alias that does not have this plane.

    Examples:
        >>> plane = cg.quantize(torch.ones(32, 64), "mxfp8").plane(cg.ROWWISE)
        >>> plane.format.name, plane.data.shape, plane.scale.shape
        ('mxfp8', torch.Size([32, 64]), torch.Size([128, 4]))
    """

    format: Format
    direction: Direction
    shape: tuple[int, int]
    data: Tensor
    scale: Tensor | None = None
    amax: Tensor | None = None
    transposed: bool = False
    stale: bool = False

    def __init__(
        self,
        format: Format,
        direction: Direction,
        shape: tuple[int, int],
        data: Tensor,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
        transposed: bool = False,
        stale: bool = False,
    ) -> None:
        # A layer makes a dozen planes in a step. The constructor of a frozen dataclass takes three times as long.
        self.__dict__.update(
            format=format,
            direction=direction,
            shape=shape,
            data=data,
            scale=scale,
            amax=amax,
            transposed=transposed,
            stale=stale,
        )

    def check_fresh(self) -> None:
        """Raise RuntimeError if the plane is stale."""
        if self.stale:
            raise RuntimeError(
                f"the {self.direction.value} {self.format.name} plane of this {list(self.shape)} tensor is stale: its "
                f"{self.direction.other.value} plane was written later, through an alias that does not have this one. "
                "Requantize the tensor."
            )

    def check_readable(self) -> None:
        """Raise RuntimeError if the plane is stale, or if its memory was freed: reading it would crash."""
        if self.stale:
            self.check_fresh()
        if self.data.numel() and not self.data.untyped_storage().nbytes():
            raise RuntimeError(
                f"the {self.direction.value} {self.format.name} plane of this {list(self.shape)} tensor has no memory: "
                "it belongs to a sharded parameter that was not gathered for this pass, or was freed after it"
            )

    def has_memory(self) -> bool:
        """Whether the plane has memory. A plane of a sharded parameter has none while it is not gathered."""
        return self.data.numel() == 0 or self.data.untyped_storage().nbytes() > 0

    def check_buffers(self) -> None:
        """Raise ValueError if the buffers do not have the sizes and dtypes of the format. Kernels do not check them."""
        if self.format.element is None:
            if self.data.numel() != math.prod(self.shape):
                self._refuse_buffer("numbers", self.data, self.data.dtype, f"{math.prod(self.shape)} of them")
            return
        key = id(self.format), self.direction, self.shape, self.transposed
        needed = _needed.get(key)
        if needed is None:
            needed = _needed_buffers(key, self.format)
        data, scale, amax = self.data, self.scale, self.amax
        if data.numel() != needed.codes or data.dtype != torch.uint8:
            self._refuse_buffer("codes", data, torch.uint8, f"{needed.codes} bytes")
        if self.transposed and data.dim() and data.shape[0] != self.shape[1]:
            self._refuse_buffer("codes", data, torch.uint8, f"transposed, {self.shape[1]} rows of them")
        least = needed.scales
        if (
            scale is None
            or scale.dtype != needed.scale_dtype
            or (scale.numel() != 1 if least is None else scale.dim() != 2)
            or (least is not None and (scale.shape[0] < least[0] or scale.shape[1] < least[1]))
        ):
            grid = "one number" if least is None else f"{list(least)} and padding"
            self._refuse_buffer("scales", scale, needed.scale_dtype, grid)
        if needed.amaxes and (amax is None or amax.numel() != needed.amaxes or amax.dtype != torch.float32):
            self._refuse_buffer("amax", amax, torch.float32, f"{needed.amaxes} numbers")

    def _refuse_buffer(self, name: str, buffer: Tensor | None, dtype: torch.dtype, needed: str) -> None:
        have = "nothing" if buffer is None else f"{buffer.dtype} {list(buffer.shape)}"
        raise ValueError(
            f"the {self.direction.value} {self.format.name} plane of shape {list(self.shape)} needs {name} of {dtype}, "
            f"{needed}; it has {have}"
        )

    def read(self, direction: Direction) -> Plane:
        """A plane with the same buffers that is read in another direction."""
        if direction is self.direction:
            return self
        return Plane(self.format, direction, self.shape, self.data, self.scale, self.amax, self.transposed, self.stale)

    @property
    def operand_shape(self) -> tuple[int, int]:
        """The shape of the operand: [M, K] or [K, M]."""
        rows, cols = self.shape
        return (rows, cols) if self.direction is ROWWISE else (cols, rows)

    def operand_codes(self) -> Tensor:
        """The codes as an operand [rows, bytes per row]. It is a view: writing to it changes the plane."""
        if self._is_operand_major:
            rows, length = self.operand_shape
            return self.data.view(rows, bytes_per_row(self.format, length))
        return self.data.view(self.shape).t()

    @property
    def has_whole_rows(self) -> bool:
        """Whether the codes of each row of the operand lie next to each other in memory."""
        return self._is_operand_major or self.operand_codes().stride(1) == 1

    def operand_scales(self) -> Tensor:
        """The scales of the operand without padding: one row per row or tile of the operand. It is a view."""
        assert self.scale is not None
        if self.format.block is None:
            return self.scale.view(1, 1)
        rows, blocks = scale_grid(self.format, self.operand_shape)
        stored = self.scale if self._scales_operand_major else self.scale.t()
        return stored[:rows, :blocks]

    def scale_across(self, axes: Sequence[int]) -> Tensor | None:
        """The scale or amax that slices of the matrix along ``axes`` (0: M, 1: K) share; None if they share none."""
        own_axis = 0 if self.direction is ROWWISE else 1  # an amax per row of the operand is sliced with its rows
        if self.format.global_amax == "row":
            axes = [axis for axis in axes if axis != own_axis]
        if not axes:
            return None
        return self.scale if self.format.block is None else self.amax

    def buffers(self) -> list[Tensor]:
        """The buffers that the plane has."""
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
    """Something that has planes: a `PlanePair`, a quantized storage or a quantized tensor."""

    def plane(self, direction: Direction) -> Plane | None:
        """The plane of one direction; None if there is none."""


class PlanePair(NamedTuple):
    """The planes that a quantizer makes from a matrix; None for a direction that is not wanted."""

    rowwise: Plane | None
    columnwise: Plane | None

    def plane(self, direction: Direction) -> Plane | None:
        """The plane of one direction."""
        return self.rowwise if direction is ROWWISE else self.columnwise


class _NeededBuffers(NamedTuple):
    format: Format  # its address is in the key, so it is kept alive
    codes: int  # bytes
    scale_dtype: torch.dtype
    scales: tuple[int, int] | None  # as they are stored, without padding; None for one scale
    amaxes: int


_Key = tuple[int, Direction, tuple[int, int], bool]
_needed: dict[_Key, _NeededBuffers] = {}  # by the address of the format, which is faster than its hash
_MOST_NEEDED = 4096


def _needed_buffers(key: _Key, fmt: Format) -> _NeededBuffers:
    _, direction, shape, transposed = key
    rowwise = direction is ROWWISE
    rows, length = shape if rowwise else shape[::-1]
    scales = None
    if fmt.block is not None:
        scales = scale_grid(fmt, (rows, length))
        scales = scales if (rowwise or transposed) != fmt.layout.transposed else scales[::-1]
    amaxes = {None: 0, "tensor": 1, "row": rows}[fmt.global_amax]
    if len(_needed) >= _MOST_NEEDED:
        _needed.clear()
    found = _needed[key] = _NeededBuffers(fmt, rows * bytes_per_row(fmt, length), scale_dtype(fmt), scales, amaxes)
    return found


def scale_dtype(fmt: Format) -> torch.dtype:
    """The dtype of the scale buffer."""
    return torch.float32 if fmt.scale_rule == "fp32" else torch.uint8


def bytes_per_row(fmt: Format, length: int) -> int:
    """The number of bytes of ``length`` codes."""
    bits = 8 if fmt.element is None else fmt.element.bits
    return length * bits // 8


def scale_grid(fmt: Format, operand_shape: tuple[int, int]) -> tuple[int, int]:
    """The scales of an operand without padding: number of rows, and blocks per row."""
    assert fmt.block is not None
    rows = operand_shape[0] if fmt.layout.replicated else math.ceil(operand_shape[0] / fmt.block[0])
    return rows, math.ceil(operand_shape[1] / fmt.block[1])


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(M, K) of a tensor: K is the last dimension, M the product of all others. A vector is one row."""
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def data_shape(fmt: Format, direction: Direction, shape: Sequence[int], transposed: bool) -> tuple[int, ...]:
    """Shape of the buffer of codes for a tensor of ``shape``."""
    if not shape:  # one number, in formats without blocks
        return ()
    lead, last = tuple(shape[:-1]), shape[-1]
    if direction is ROWWISE or not transposed:
        return (*lead, bytes_per_row(fmt, last))
    if fmt.element is not None and fmt.element.bits < 8:
        return (last, bytes_per_row(fmt, math.prod(lead)))
    return (last, *lead)


def scale_shape(fmt: Format, direction: Direction, shape: Sequence[int], transposed: bool) -> tuple[int, ...]:
    """Shape of the buffer of scales, including padding."""
    if fmt.block is None:
        return (1,)
    rows, cols = matrix_shape(shape)
    operand = (rows, cols) if direction is ROWWISE else (cols, rows)
    padded = tuple(round_up(n, to) for n, to in zip(scale_grid(fmt, operand), fmt.layout.pad, strict=True))
    operand_major = direction is ROWWISE or transposed
    return padded if operand_major != fmt.layout.transposed else padded[::-1]


def amax_shape(fmt: Format, direction: Direction, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Shape of the buffer of amaxes; None for formats without a global amax."""
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
    """Allocate a plane for a tensor. Only the padding of its scales is initialised, with zeros.

    Args:
        fmt: the format.
        direction: the direction.
        shape: shape of the tensor.
        device: the device.
        transposed: see `Plane`; None for what the format says.
        pin_memory: allocate pinned memory.
        dtype: dtype of the numbers, for the identity format.

    Raises:
        ValueError: the format is identity, and no dtype is given.
    """
    if transposed is None:
        transposed = fmt.transposes and direction is COLUMNWISE
    options: Any = {"device": device, "pin_memory": True} if pin_memory else {"device": device}
    if fmt.is_identity:
        if dtype is None:
            raise ValueError("empty_plane: an identity plane needs dtype=..., the dtype of its numbers")
        return Plane(fmt, direction, matrix_shape(shape), torch.empty(tuple(shape), dtype=dtype, **options))
    sizes = buffer_shapes(fmt, direction, tuple(shape), transposed)
    data = torch.empty(sizes.data, dtype=torch.uint8, **options)
    if sizes.cuts_rows and device.type != "cpu" and multiplies_mxfp8(device):
        data = stored_by_columns(data)
    scale = (torch.zeros if sizes.pads else torch.empty)(sizes.scale, dtype=scale_dtype(fmt), **options)
    amax = None if sizes.amax is None else torch.empty(sizes.amax, dtype=torch.float32, **options)
    return Plane(fmt, direction, sizes.matrix, data, scale, amax, transposed)


class BufferShapes(NamedTuple):
    """The shapes of the buffers of a plane."""

    matrix: tuple[int, int]
    data: tuple[int, ...]
    data_strides: tuple[int, ...]  # of contiguous memory
    scale: tuple[int, ...]
    scale_strides: tuple[int, ...]
    amax: tuple[int, ...] | None
    pads: bool  # whether the scale buffer has padding
    cuts_rows: bool  # whether the codes of a row of the operand are not next to each other, if memory is contiguous


@lru_cache(maxsize=4096)
def buffer_shapes(fmt: Format, direction: Direction, shape: tuple[int, ...], transposed: bool) -> BufferShapes:
    """The shapes of the buffers of a plane, for a tensor of ``shape``."""
    rows, cols = matrix_shape(shape)
    grid = None if fmt.block is None else scale_grid(fmt, (rows, cols) if direction is ROWWISE else (cols, rows))
    codes, scales = data_shape(fmt, direction, shape, transposed), scale_shape(fmt, direction, shape, transposed)
    return BufferShapes(
        (rows, cols),
        codes,
        _contiguous_strides(codes),
        scales,
        _contiguous_strides(scales),
        amax_shape(fmt, direction, shape),
        grid is not None and math.prod(grid) != math.prod(scales),
        direction is COLUMNWISE and not transposed and fmt.block is not None,
    )


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape)))


def stored_by_columns(codes: Tensor) -> Tensor:
    """The memory of codes [..., K], with the strides that put the codes of a column next to each other."""
    return codes.view(codes.shape[-1], *codes.shape[:-1]).movedim(0, -1)


def overlaps(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are different parts of one memory, so that writing to one may change the other."""
    if a.device != b.device or a.device.type == "meta" or a.numel() == 0:
        return False
    if isinstance(a, FakeTensor) or isinstance(b, FakeTensor):  # which have no memory
        return False
    same = (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())
    return not same and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def same_codes_in_both(row: Format, column: Format) -> bool:
    """Whether columnwise codes are the transposed rowwise codes, so that one direction can be made from the other."""
    return row == column and row.is_symmetric and not row.is_identity


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``n``."""
    return -(-n // multiple) * multiple


def shape_problem(fmt: Format, direction: Direction, shape: Sequence[int]) -> str | None:
    """Why a tensor of ``shape`` cannot have a plane of this format and direction; None if it can."""
    return _shape_problem(fmt, direction, tuple(shape))


@lru_cache(maxsize=4096)
def _shape_problem(fmt: Format, direction: Direction, shape: tuple[int, ...]) -> str | None:
    if fmt.block is not None and not fmt.ragged and len(shape) < 2:
        return f"it has {len(shape)} dimensions, but needs at least 2"
    if fmt.ragged or fmt.block is None:
        return None
    rows, cols = matrix_shape(shape)
    along_m, along_k = fmt.block if direction is ROWWISE else fmt.block[::-1]
    if cols % along_k:
        return f"its last dimension (K) is {cols}, which is not a multiple of {along_k}"
    if rows % along_m:
        return f"the product of its other dimensions (M) is {rows}, which is not a multiple of {along_m}"
    return None
