"""What a quantized tensor must hold, as plain arrays: codes, scales, and which write each number came from.

Aliases in the library share buffers; here they share numpy views, so what a write through one alias does to the others
follows from numpy. The same goes for staleness: every plane remembers, for each number, the write that it came from,
and the tensor remembers the last write of each number through any alias. A plane is behind where it missed a write.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from . import transcription as tr
from .transcription import Array, Encoded, Format

ROW, COLUMN = "rowwise", "columnwise"
DIRECTIONS = (ROW, COLUMN)
OTHER = {ROW: COLUMN, COLUMN: ROW}

_writes = itertools.count(1)


@dataclass
class Memory:
    """What all planes over the same codes have in common, whichever part of them they see."""

    format: Format
    written: Array  # the write that each number came from, of the whole memory
    truth: Array  # the last write of each number through any alias
    dtype: torch.dtype | None = None  # of identity planes
    loose: bool = False  # codes lie as the numbers do, so that the last dimension may change too
    part_of: Array | None = None  # it was made for a slice: the last writes of the whole tensor
    suspect: bool = False  # it was behind, and parts of it have been written since

    def is_behind(self) -> bool:
        """Whether the library may take it for stale, which it knows only of all of it."""
        if self.suspect:
            return True
        if self.part_of is not None and self.written.min() < self.part_of.max():
            return True
        return bool((self.written < self.truth).any())


@dataclass
class PlaneModel:
    """One direction. All arrays are views, laid out as the matrix [M, K] and the grid of its blocks."""

    memory: Memory
    direction: str
    codes: Array  # the numbers themselves, if the format is identity
    scales: Array
    amax: Array | None
    written: Array

    @property
    def format(self) -> Format:
        return self.memory.format

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the matrix that share a scale."""
        rows, length = self.format.block or self.codes.shape
        return (rows, length) if self.direction == ROW else (length, rows)

    def operand(self) -> Encoded:
        turn = self.direction == COLUMN
        codes, scales = (self.codes.T, self.scales.T) if turn else (self.codes, self.scales)
        return Encoded(codes, scales, self.amax)

    def decoded(self) -> Array:
        """float32 [M, K]."""
        if not self.format.element:
            return self.codes.copy()
        numbers = tr.decode(self.operand(), self.format)
        return numbers.T if self.direction == COLUMN else numbers

    def store(self, x: Array, infinite: float) -> None:
        """Encode float32 numbers [M, K]."""
        if not self.format.element:
            assert self.memory.dtype is not None
            self.codes[...] = rounded(x, self.memory.dtype)
            return
        self.take(tr.encode(x if self.direction == ROW else x.T, self.format, infinite=infinite))

    def take(self, theirs: Encoded) -> None:
        """Copy bytes; of identity planes, numbers."""
        mine = self.operand()
        if not self.format.element:
            assert self.memory.dtype is not None
            mine.codes[...] = rounded(theirs.codes, self.memory.dtype)
            return
        mine.codes[...], mine.scales[...] = theirs.codes, theirs.scales
        if mine.amax is not None:
            mine.amax[...] = theirs.amax

    def cut(self, rows: slice, columns: slice) -> PlaneModel:
        """The plane of a part of the matrix, which begins and ends between blocks."""
        high, wide = self.grid
        within = (
            slice(rows.start // high, -(-rows.stop // high)),
            slice(columns.start // wide, -(-columns.stop // wide)),
        )
        by_row = self.format.amax == "row"
        own = rows if self.direction == ROW else columns
        return replace(
            self,
            codes=self.codes[rows, columns],
            scales=self.scales if self.format.block is None else self.scales[within],
            amax=self.amax[own] if by_row and self.amax is not None else self.amax,
            written=self.written[rows, columns],
        )

    def reshaped(self, matrix: tuple[int, int]) -> PlaneModel:
        """The same memory as another matrix; raises ValueError if numpy would have to copy it."""
        codes, written = (np.reshape(array, matrix, copy=False) for array in (self.codes, self.written))
        return replace(self, codes=codes, written=written)


def rounded(x: Array, dtype: torch.dtype) -> Array:
    """float32 numbers as a dtype would hold them."""
    return torch.from_numpy(np.ascontiguousarray(x)).to(dtype).float().numpy()


@dataclass
class TensorModel:
    """A tensor with up to two planes.

    Attributes:
        shape: the shape.
        dtype: the nominal dtype.
        formats: the formats of both directions, also of a direction that it does not have.
        planes: the planes that it has.
        truth: the last write of each number [M, K], a view.
        hybrid: whether each direction has its own tensor.
        derives: columns are made from decoded rows.
        cut: the axes along which it is a part of a larger tensor.
        one_buffer: one plane serves both directions.
        kept_dtype: the dtype that an identity quantizer was told to keep numbers in.
        flat: it has one dimension, but its planes still have the matrix.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    formats: dict[str, Format]
    planes: dict[str, PlaneModel]
    truth: Array
    hybrid: bool = False
    derives: bool = False
    cut: frozenset[int] = frozenset()
    one_buffer: bool = False
    kept_dtype: torch.dtype | None = None
    flat: bool = False

    @property
    def matrix(self) -> tuple[int, int]:
        rows, columns = self.truth.shape
        return rows, columns

    def distinct_planes(self) -> list[PlaneModel]:
        return list({id(plane): plane for plane in self.planes.values()}.values())

    def first(self) -> PlaneModel | None:
        """The plane that is decoded: rows if there are any."""
        return self.planes.get(ROW) or self.planes.get(COLUMN)

    # ---- staleness -------------------------------------------------------------------------------------------

    def must_be_stale(self, direction: str) -> bool:
        """Whether a number of this plane is behind."""
        return bool((self.planes[direction].written < self.truth).any())

    def may_be_stale(self, direction: str) -> bool:
        """Whether a number is behind anywhere in the memory: the library need not know more than that."""
        return self.planes[direction].memory.is_behind() or self.must_be_stale(direction)

    def read_problem(self, directions: list[str]) -> tuple[str | None, bool]:
        """Why planes must not be read, and whether it is open if they may."""
        stale = [direction for direction in directions if self.must_be_stale(direction)]
        if stale:
            return f"its {stale[0]} plane is stale", False
        return None, any(self.may_be_stale(direction) for direction in directions)

    # ---- reading and writing ---------------------------------------------------------------------------------

    def decoded(self) -> Tensor:
        """A plain tensor in the nominal dtype, of the first plane."""
        plane = self.first()
        assert plane is not None
        return torch.from_numpy(plane.decoded().copy()).to(self.dtype).reshape(self.shape)

    def write_problem(self, directions: list[str] | None = None) -> str | None:
        """Why numbers cannot be written to planes, by default to all of them."""
        if not self.planes:
            return "it has no planes"
        directions = list(self.planes) if directions is None else directions
        for direction in directions:
            plane = self.planes[direction]
            if self.shares_scale(plane):
                return f"its {direction} scale belongs to the whole tensor"
            if self.cut and plane.format != self.formats[direction]:
                return "a slice cannot get another format than the whole tensor"
        return self.shape_problem(self.matrix, directions)

    def shape_problem(self, matrix: tuple[int, int], directions: list[str]) -> str | None:
        """Why a matrix cannot be quantized: it has no whole blocks. Columns that are made from rows need rows too."""
        made = {*directions, ROW} if self.derives and COLUMN in directions else set(directions)
        for direction in made:
            fmt = self.formats[direction]
            high, wide = (fmt.block or (1, 1))[:: 1 if direction == ROW else -1]
            if not fmt.ragged and (matrix[0] % high or matrix[1] % wide):
                return f"{direction} blocks of {fmt.name} do not fit into it"
        return None

    def shares_scale(self, plane: PlaneModel) -> bool:
        """Whether this is a slice whose plane has a scale in common with the rest of its tensor."""
        fmt = plane.format
        own = {0 if plane.direction == ROW else 1} if fmt.amax == "row" else set()
        per_tensor = bool(fmt.element) and (fmt.block is None or bool(fmt.amax))
        return per_tensor and bool(self.cut - own)

    def write(self, values: Tensor) -> None:
        """Quantize ``values`` into all planes."""
        self.encode(values, list(self.planes))
        self.mark_written()

    def encode(self, values: Tensor, directions: list[str]) -> None:
        x = values.detach().float().numpy().reshape(self.matrix)
        infinite = torch.finfo(values.dtype).max
        for direction in directions:
            self.planes[direction].memory.format = self.formats[direction]
        if ROW in directions:
            self.planes[ROW].store(x, infinite)
        if COLUMN not in directions or (self.one_buffer and ROW in directions):
            return
        if self.derives:
            x, infinite = self.rounded_by_rows(x, infinite, directions), torch.finfo(self.dtype).max
        self.planes[COLUMN].store(x, infinite)

    def rounded_by_rows(self, x: Array, infinite: float, directions: list[str]) -> Array:
        """What columns are made of, if they are made from rows: the rows that were just written, or rows of ``x``."""
        fmt = self.formats[ROW]
        if ROW in directions:
            x = self.planes[ROW].decoded()
        elif fmt.element:
            x = tr.decode(tr.encode(x, fmt, infinite=infinite), fmt)
        return rounded(x, self.dtype)

    def mark_written(self) -> None:
        number = next(_writes)
        self.truth[...] = number
        for plane in self.planes.values():
            plane.written[...] = number
            if plane.written.size == plane.memory.written.size:
                plane.memory.suspect = False

    # ---- other objects over the same memory ------------------------------------------------------------------

    def alias(self) -> TensorModel:
        return replace(self, planes=dict(self.planes), formats=dict(self.formats))

    def _with(self, planes: dict[str, PlaneModel], **changes: object) -> TensorModel:
        return replace(self.alias(), planes=planes, **changes)  # type: ignore[arg-type]

    def _each(self, change: object) -> dict[str, PlaneModel]:
        """``change(plane)`` for each plane; a plane for both directions stays one."""
        made = {id(plane): change(plane) for plane in self.distinct_planes()}  # type: ignore[operator]
        return {direction: made[id(plane)] for direction, plane in self.planes.items()}

    def sliced(self, dim: int, start: int, stop: int) -> TensorModel:
        rows, columns = self._extent(dim, start, stop)
        shape = (*self.shape[:dim], stop - start, *self.shape[dim + 1 :])
        axis = 1 if dim == len(self.shape) - 1 else 0
        planes = self._each(lambda plane: plane.cut(rows, columns))
        return self._with(planes, shape=shape, truth=self.truth[rows, columns], cut=self.cut | {axis})

    def _extent(self, dim: int, start: int, stop: int) -> tuple[slice, slice]:
        """Rows and columns of a slice along the first or last dimension."""
        rows, columns = self.matrix
        if dim == len(self.shape) - 1:
            return slice(0, rows), slice(start, stop)
        unit = rows // self.shape[0]
        return slice(start * unit, stop * unit), slice(0, columns)

    def slice_problem(self, dim: int, start: int, stop: int) -> str | None:
        """Why a slice is not possible."""
        if (start, stop) == (0, self.shape[dim]):
            return None
        if self.planes and not any(plane.format.element for plane in self.planes.values()):
            return None  # plain numbers can be cut like any tensor
        if self.flat or dim not in (0, len(self.shape) - 1):
            return "it can be cut along the first and last dimension only"
        extent = self._extent(dim, start, stop)
        for plane in self.distinct_planes():
            if plane.format.block is None:
                continue
            for axis in (0, 1):
                for position in (extent[axis].start, extent[axis].stop):
                    if position % plane.grid[axis] and position != self.matrix[axis]:
                        return f"{position} lies inside a {plane.direction} block"
        return None

    def viewed(self, shape: tuple[int, ...]) -> TensorModel | None:
        """The same numbers in another shape; None if that is not possible."""
        columns = self.matrix[1]
        count = math.prod(shape)
        if not shape or count != math.prod(self.shape):
            return None
        kept = all(not plane.format.element for plane in self.planes.values())
        if shape == self.shape:
            return self.alias()
        if len(shape) == 1 and shape[0] != columns and not (kept and self.planes):
            return self._with(dict(self.planes), shape=shape, flat=True)
        if shape[-1] == columns:
            return self._with(dict(self.planes), shape=shape, flat=False)
        if not self.planes or not all(plane.memory.loose for plane in self.planes.values()):
            return None
        matrix = (count // shape[-1], shape[-1])
        try:
            planes = self._each(lambda plane: plane.reshaped(matrix))
            truth = np.reshape(self.truth, matrix, copy=False)
        except ValueError:
            return None
        return self._with(planes, shape=shape, truth=truth, flat=False)

    # ---- copies ----------------------------------------------------------------------------------------------

    def clone(self, dtype: torch.dtype | None = None) -> TensorModel:
        """A copy with memory of its own; identity planes are cast to another nominal dtype."""
        dtype = self.dtype if dtype is None else dtype
        new = made_empty(self, dtype)
        for direction, plane in self.planes.items():
            new.planes[direction].take(plane.operand())
        return new


def made_empty(like: TensorModel, dtype: torch.dtype) -> TensorModel:
    """New memory with the directions and formats of ``like``."""
    truth = np.zeros(like.matrix, np.int64)
    planes: dict[str, PlaneModel] = {}
    for direction, plane in like.planes.items():
        fmt = plane.format
        shared = planes.get(OTHER[direction])
        if like.one_buffer and shared is not None:
            planes[direction] = shared
            continue
        kept = plane.memory.dtype
        if kept is not None and like.kept_dtype is None and kept == like.dtype:
            kept = dtype  # numbers that are not cast to a dtype of their own follow the nominal one
        stored = ROW if like.one_buffer else direction
        planes[direction] = empty_plane(fmt, stored, truth, kept, plane.memory.loose)
        if shared is not None and fmt.block is None and fmt.element and not like.hybrid:
            planes[direction].scales = shared.scales  # both directions of per-tensor FP8 have one scale
    return replace(like.alias(), dtype=dtype, planes=planes, truth=truth, cut=frozenset())


def empty_plane(
    fmt: Format, direction: str, truth: Array, dtype: torch.dtype | None = None, loose: bool = False
) -> PlaneModel:
    """A plane in new memory, for a tensor whose writes ``truth`` counts."""
    memory = Memory(fmt, np.zeros_like(truth), truth, None if fmt.element else dtype, loose or not fmt.element)
    matrix = truth.shape
    if not fmt.element:
        return PlaneModel(memory, direction, np.zeros(matrix, np.float32), np.zeros(0), None, memory.written)
    operand = matrix if direction == ROW else matrix[::-1]
    blank = tr.encode(np.zeros(operand, np.float32), fmt)
    codes, scales = (blank.codes, blank.scales) if direction == ROW else (blank.codes.T.copy(), blank.scales.T.copy())
    return PlaneModel(memory, direction, codes, scales, blank.amax, memory.written)


def derived(model: TensorModel, direction: str) -> PlaneModel:
    """The missing direction of a symmetric format: the same codes and scales in new memory."""
    source = model.planes[OTHER[direction]]
    new = empty_plane(source.format, direction, model.truth, loose=source.format.block is None and direction == ROW)
    new.codes[...], new.written[...] = source.codes, source.written
    if model.cut:
        new.memory.part_of = source.memory.truth if source.memory.part_of is None else source.memory.part_of
    if source.format.block is None:
        new.scales = source.scales  # one scale for both directions
    else:
        new.scales[...] = source.scales
    if new.amax is not None and source.amax is not None:
        new.amax[...] = source.amax
    return new


def columns_of_rows(model: TensorModel, direction: str) -> PlaneModel:
    """Columns that are defined to be made from the decoded rows, in new memory."""
    rows, fmt = model.planes[ROW], model.formats[direction]
    new = empty_plane(fmt, direction, model.truth, model.kept_dtype or model.dtype, fmt.block is None)
    new.store(rounded(rows.decoded(), model.dtype), torch.finfo(model.dtype).max)
    new.written[...] = rows.written
    return new
