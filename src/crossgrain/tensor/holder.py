"""`PlaneHolder`: the buffers of a quantized tensor, as named attributes, and aliases of the same buffers.

Buffers are plain attributes with the names of Transformer Engine (``_rowwise_data``, ``_scale_inv``, ...). The class of
a format says which attribute belongs to which plane, and `PlaneHolder.plane` combines them with their format. The code
in this module is the same for all formats.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..formats import Format
from ..planes import COLUMNWISE, ROWWISE, Direction, Plane, data_shape, empty_plane, matrix_shape
from ..planes.slicing import CutsBlocks, slice_plane

if TYPE_CHECKING:
    from .protocol import TensorQuantizer


class PlaneBuffers(NamedTuple):
    """Names of the attributes with the buffers of one plane."""

    data: str
    scale: str | None
    amax: str | None = None


_write_numbers = itertools.count(1)


def next_write_number() -> int:
    """A number for a new write, larger than those of all earlier writes."""
    return next(_write_numbers)


class LastWrite:
    """The number of the last write to any plane of a tensor, through any object that is or was an alias of it."""

    __slots__ = ("number",)

    def __init__(self, number: int = 0) -> None:
        self.number = number


class Extent(NamedTuple):
    """Where the codes of a slice lie in the memory of the whole plane."""

    first: int
    rows: int
    columns: int
    pitch: int  # from the beginning of a row to that of the next one

    def meets(self, other: Extent) -> bool:
        """Whether the two may have codes in common. If their rows are of different lengths, only the ends count."""
        if self.pitch != other.pitch or self.pitch == 0 or not (self._is_matrix() and other._is_matrix()):
            return self.first < other._end() and other.first < self._end()
        (row, column), (other_row, other_column) = divmod(self.first, self.pitch), divmod(other.first, other.pitch)
        apart_in_rows = row >= other_row + other.rows or other_row >= row + self.rows
        apart_in_columns = column >= other_column + other.columns or other_column >= column + self.columns
        return not (apart_in_rows or apart_in_columns)

    def _is_matrix(self) -> bool:
        return self.first % self.pitch + self.columns <= self.pitch

    def _end(self) -> int:
        return self.first + (self.rows - 1) * self.pitch + self.columns


def extent_of(codes: Tensor) -> Extent:
    """The extent of a buffer of codes."""
    columns = codes.shape[-1] if codes.dim() else 1
    return Extent(
        int(codes.storage_offset()),
        math.prod(codes.shape[:-1]),
        columns,
        codes.stride(-2) if codes.dim() > 1 else columns,
    )


_MOST_PARTS = 64  # of the writes to slices, so many are told apart


class Epoch:
    """A record of writes to a plane. All objects with the same buffers share it.

    Attributes:
        number: number of the last write.
        tensor: the last write to any plane of the tensor. The plane is stale if that is a later one.
        received: number of the last write with bytes from another rank; 0 if there was none.
        init_value: the `InitValue` that the plane was made from, if it is preserved.
    """

    __slots__ = ("__weakref__", "_parts", "_whole", "init_value", "number", "received", "tensor")

    def __init__(self, number: int = 0, tensor: LastWrite | None = None) -> None:
        self.number = number
        self._whole = number  # the last write to all of it
        self._parts: dict[Extent, int] = {}  # the writes to slices since then
        self.tensor = LastWrite(number) if tensor is None else tensor
        self.received = 0
        self.init_value: Any = None

    def note(self, number: int) -> None:
        """Record a write."""
        self.number = number
        self.tensor.number = max(number, self.tensor.number)

    def note_part(self, number: int, part: Extent | None) -> None:
        """Record a write to a slice; None for all of the plane."""
        if part is None:
            self._whole = number
            self._parts.clear()
        elif part in self._parts or len(self._parts) < _MOST_PARTS:
            self._parts[part] = number
        else:
            self._whole = max(number, self._whole, *self._parts.values())
            self._parts.clear()
        self.number = number

    def last_within(self, part: Extent) -> int:
        """The number of the last write that may have changed a slice."""
        if self.number != max(self._whole, *self._parts.values(), 0):  # the number was set by itself
            return self.number
        return max(self._whole, *(number for other, number in self._parts.items() if other.meets(part)), 0)


def new_epochs() -> dict[Direction, Epoch]:
    """The records of a tensor that shares its buffers with no other."""
    tensor = LastWrite()
    return {ROWWISE: Epoch(0, tensor), COLUMNWISE: Epoch(0, tensor)}


def copied_epochs(epochs: Mapping[Direction, Epoch]) -> dict[Direction, Epoch]:
    """Records with the same numbers, which later writes to ``epochs`` do not change."""
    tensor = LastWrite(max((epoch.tensor.number for epoch in epochs.values()), default=0))
    return {direction: Epoch(epoch.number, tensor) for direction, epoch in epochs.items()}


_lenders = WeakTensorKeyDictionary()  # for buffers that `get_metadata` has returned: of whom, by class of storage

Cuts = tuple[tuple[int, int, int], ...]  # slices, in their order: dimension, start, stop


class PlaneHolder:
    """Up to two planes of one tensor.

    The class of a format provides the class variables, a constructor with the arguments of Transformer Engine
    (`_init_fields`) and `get_metadata`.

    Args:
        *args: arguments of the format's class, as `get_metadata` returns them.
        **kwargs: the same. If another object has lent its buffers by `get_metadata`, both share the record of writes.
    """

    _buffer_names: ClassVar[tuple[str, ...]] = ()  # in the order in which they are saved for backward
    _plane_buffers: ClassVar[Mapping[Direction, PlaneBuffers]] = {}  # empty for a custom storage without planes
    _shares_scale: ClassVar[bool] = False  # whether both planes have the same scale buffer
    _attribute_names: ClassVar[tuple[str, ...]] = ("_formats", "_quantizer", "_dtype", "_shape", "_matrix", "_cut_axes")

    _shape: torch.Size
    _matrix: tuple[int, int]  # (M, K) of the planes; differs from the shape only in a flat view
    _dtype: torch.dtype
    _formats: dict[Direction, Format]  # all aliases have the same dict: it changes when the bytes do
    _quantizer: Any = None  # a `TensorQuantizer`, or None
    _epochs: Mapping[Direction, Epoch] = MappingProxyType({})
    _cut_axes: tuple[int, ...] = ()  # axes (0: M, 1: K) along which it is a slice of a larger tensor
    _cuts: Cuts = ()  # the slices of torch that led from the tensor with the same record of writes to this one
    _begins_at: int = 0  # which element of that tensor is the first one here
    _shard: Any = None  # of a parameter that FSDP2 gathered: the shard of this rank
    _strict_refuses_cuts: ClassVar[bool] = False  # in strict mode, whether `split` through blocks raises
    _made_of_zeros: bool = False  # FSDP2 fills its first rows, so a slice of them may end inside a block

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._init_fields(*args, **kwargs)
        lender = self._lender()
        if lender is not None:
            if kwargs.get("shape") is None:
                self._shape = lender._shape
            self._join(lender)

    def _lending(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Note that the buffers are lent, so that an object that is made of them is known to be an alias."""
        for _, buffer in self._buffers():
            _lenders.setdefault(buffer, {})[self._storage_class()] = weakref.ref(self)
        return metadata

    def _lender(self) -> PlaneHolder | None:
        """The object of this kind whose `get_metadata` gave a buffer of this one; None if there is none (any more)."""
        for _, buffer in self._buffers():
            ref = _lenders.get(buffer, {}).get(self._storage_class())
            lender: PlaneHolder | None = None if ref is None else ref()
            if lender is not None and lender is not self and self._shares_buffers_with(lender):
                return lender
        return None

    def _init_fields(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def _init_common(
        self,
        formats: Mapping[Direction, Format],
        quantizer: TensorQuantizer | None,
        fake_dtype: torch.dtype | None,
        shape: Sequence[int] | None,
        buffers: Sequence[Tensor | None],
    ) -> None:
        """Set all attributes. ``buffers`` are in the order of `_buffer_names`."""
        self.__dict__.update(zip(self._buffer_names, buffers, strict=True))
        self._formats = dict(formats)
        self._quantizer = None if quantizer is None else quantizer.copy()
        self._dtype = torch.float32 if fake_dtype is None else fake_dtype
        self._shape = torch.Size(self._inferred_shape() if shape is None else shape)
        self._matrix = matrix_shape(self._shape)
        self._cut_axes = ()
        self._epochs = new_epochs()

    def _shares_buffers_with(self, other: PlaneHolder) -> bool:
        theirs = [id(buffer) for _, buffer in other._buffers()]
        return any(id(buffer) in theirs for _, buffer in self._buffers())

    def _join(self, other: PlaneHolder) -> None:
        """Share with another object of the same buffers: formats, record of writes, and where it is a slice."""
        self._epochs, self._cut_axes = other._epochs, other._cut_axes
        if self._formats == other._formats:
            self._formats = other._formats
        if self._shape == other._shape:
            self._matrix = other._matrix

    def _inferred_shape(self) -> Sequence[int]:
        """The shape of the tensor, computed from the buffers."""
        for direction in Direction:
            data = getattr(self, self._plane_buffers[direction].data)
            if data is None:
                continue
            fmt = self._formats[direction]
            bits = 8 if fmt.element is None else fmt.element.bits
            if direction is COLUMNWISE and fmt.transposes:
                last, *lead = data.shape
                return (*lead[:-1], lead[-1] * 8 // bits, last) if lead else (last,)
            return (*data.shape[:-1], data.shape[-1] * 8 // bits)
        raise ValueError(f"{type(self).__name__} without any data needs shape=...")

    # ---- what is there -------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor."""
        return self._shape

    def size(self, dim: int | None = None) -> torch.Size | int:
        """The shape, or the size of one dimension."""
        return self._shape if dim is None else self._shape[dim]

    @property
    def dtype(self) -> torch.dtype:
        """The nominal dtype: what torch sees, and what `dequantize` returns by default."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """The device of the buffers."""
        for _, buffer in self._buffers():
            return buffer.device
        raise RuntimeError(f"this {type(self).__name__} has no data, and therefore no device")

    def plane(self, direction: Direction) -> Plane | None:
        """The plane of one direction; None if the tensor does not have it."""
        names = self._plane_buffers.get(direction)
        if names is None:
            return None
        data = getattr(self, names.data)
        if data is None or (data.numel() == 0 and math.prod(self._matrix) != 0):  # the latter after `clear`
            return None
        fmt = self._formats[direction]
        scale = getattr(self, names.scale) if names.scale else None
        amax = getattr(self, names.amax) if names.amax else None
        transposed = self._stores_transposed(direction)
        return Plane(fmt, direction, self._matrix, data, scale, amax, transposed, self._is_stale(direction))

    def _is_stale(self, direction: Direction) -> bool:
        epoch = self._epochs[direction]
        return epoch.number < epoch.tensor.number

    def _check_fresh(self) -> None:
        """Raise if a plane is stale, or if its memory was freed."""
        for plane in self.planes():
            plane.check_readable()

    def planes(self) -> list[Plane]:
        """The planes that the tensor has, rowwise first."""
        return [plane for direction in Direction if (plane := self.plane(direction)) is not None]

    def get_usages(self) -> dict[str, bool]:
        """Which directions the tensor has: ``{"rowwise": True, "columnwise": False}``."""
        return {direction.value: self.plane(direction) is not None for direction in Direction}

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
        """The buffers of the codes.

        Args:
            rowwise_data: return the rowwise codes.
            columnwise_data: return the columnwise codes.

        Returns:
            A pair, or one buffer if only one is asked for. A buffer is None if the tensor does not have it.

        Raises:
            ValueError: both arguments are False.
        """
        if not (rowwise_data or columnwise_data):
            raise ValueError("get_data_tensors: rowwise_data and columnwise_data cannot both be False")
        row, column = (getattr(self, self._plane_buffers[direction].data) for direction in Direction)
        if rowwise_data and columnwise_data:
            return row, column
        return row if rowwise_data else column

    def get_metadata(self) -> dict[str, Any]:
        """Arguments of the constructor for an object with the same buffers."""
        raise NotImplementedError

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of every buffer that exists, in the order in which they are saved."""
        for name in self._buffer_names:
            buffer = getattr(self, name)
            if buffer is not None:
                yield name, buffer

    @classmethod
    def _state_names(cls) -> tuple[str, ...]:
        """Names of all attributes of the storage."""
        return cls._buffer_names + cls._attribute_names

    @classmethod
    def _shared_names(cls) -> tuple[str, ...]:
        """Names of all attributes that aliases share."""
        return (*cls._state_names(), "_epochs")

    def _plain_state(self) -> dict[str, Any]:
        """The state in types that ``torch.load(weights_only=True)`` knows."""
        state = {name: getattr(self, name) for name in self._state_names()}
        return {**state, "_formats": tuple(self._formats.items()), "_shape": tuple(self._shape)}

    def _take_plain_state(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._formats = dict(state["_formats"])
        self._shape = torch.Size(state["_shape"])
        self._epochs = new_epochs()

    def _stores_transposed(self, direction: Direction) -> bool:
        return direction is COLUMNWISE and self._formats[direction].transposes

    def _set_plane(self, direction: Direction, plane: Plane | None) -> None:
        names = self._plane_buffers[direction]
        setattr(self, names.data, plane and plane.data)
        if names.scale:
            setattr(self, names.scale, plane and plane.scale)
        if names.amax:
            setattr(self, names.amax, plane and plane.amax)

    def _adopt_plane(self, plane: Plane) -> None:
        """Add a plane in new buffers that holds the same numbers as the other plane."""
        tensor = self._epochs[plane.direction].tensor
        self._epochs = {**self._epochs, plane.direction: Epoch(tensor.number, tensor)}
        self._set_plane(plane.direction, plane)

    def _write_marks(self) -> list[Epoch]:
        """The records of writes to each plane, which all objects with the same buffers share."""
        return [self._epochs[direction] for direction in Direction if direction in self._epochs]

    def _last_write(self, within: Extent | None = None) -> int:
        """The number of the last write to any plane, or to a slice of it."""
        if within is None:
            return max((epoch.number for epoch in self._epochs.values()), default=0)
        return max((epoch.last_within(within) for epoch in self._epochs.values()), default=0)

    def _mark_written(self, number: int | None = None) -> None:
        """Record that all planes of this object were just written.

        A plane that this object does not have becomes stale in all aliases that have it. Autograd is told that the
        buffers changed, so that it notices if they were saved for backward.

        Args:
            number: number of the write, if it is part of a larger one.
        """
        number = next_write_number() if number is None else number
        self._made_of_zeros = False
        if not self._plane_buffers:
            for epoch in self._whole_epochs().values():
                epoch.note(number)
            return
        epochs = dict(self._epochs)
        stale = {direction: self._is_stale(direction) for direction in Direction}
        for direction, names in self._plane_buffers.items():
            tensor = epochs[direction].tensor
            tensor.number = max(number, tensor.number)
            if getattr(self, names.data) is None:
                epochs[direction] = Epoch(number, tensor)  # a plane that is added later belongs to this write
            elif not (self._cut_axes and stale[direction]):  # writing a slice does not make the whole plane valid
                codes = getattr(self, names.data)
                epochs[direction].note_part(number, extent_of(codes) if self._cut_axes else None)
        self._epochs = epochs
        tracked = [buffer for _, buffer in self._buffers() if not buffer.is_inference()]
        torch.autograd.graph.increment_version(tracked)

    def _whole_epochs(self) -> Mapping[Direction, Epoch]:
        """The record of writes of a storage without planes: one for all of it, which its aliases share."""
        if not self._epochs:
            self._epochs = dict.fromkeys(Direction, Epoch())
        return self._epochs

    # ---- the same buffers in another object ----------------------------------------------------

    @classmethod
    def _storage_class(cls) -> type[PlaneHolder]:
        """The storage class of the format, also for a tensor class."""
        return cls

    def _blank(self, shape: torch.Size, dtype: torch.dtype, buffers: Mapping[str, Tensor | None]) -> Self:
        """A new object of the same class without attributes."""
        return object.__new__(type(self))

    def _rewrap(
        self,
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        buffers: Mapping[str, Tensor | None] | None = None,
        cut_axes: tuple[int, ...] | None = None,
        matrix: tuple[int, int] | None = None,
        fresh: bool = False,
    ) -> Self:
        """A new object of the same class with the same buffers, except for what is given.

        Args:
            shape: another shape.
            dtype: another nominal dtype.
            buffers: other buffers, by name.
            cut_axes: other axes along which it is a slice.
            matrix: another (M, K) of the planes.
            fresh: the buffers are not those of this object, so a write to one does not make the other stale.
        """
        current = {name: getattr(self, name) for name in self._buffer_names}
        current.update(buffers or {})
        shape = torch.Size(self._shape if shape is None else shape)
        dtype = self._dtype if dtype is None else dtype
        new = self._blank(shape, dtype, current)
        for name, buffer in current.items():
            setattr(new, name, buffer)
        new._formats = dict(self._formats) if fresh else self._formats
        new._quantizer = None if self._quantizer is None else self._quantizer.copy()
        new._dtype = dtype
        new._shape = shape
        new._matrix = self._matrix if matrix is None else matrix
        new._cut_axes = self._cut_axes if cut_axes is None else cut_axes
        new._epochs = new_epochs() if fresh else self._epochs
        if self._shard is not None and not fresh:
            new._shard = self._shard
        return new

    def _map_buffers(self, change: Callable[[Tensor], Tensor], **changes: Any) -> Self:
        """A new object whose buffers are ``change(buffer)``; they must be copies."""
        self._check_fresh()  # the copy would not know that a plane is stale
        return self._rewrap(buffers={name: change(buffer) for name, buffer in self._buffers()}, fresh=True, **changes)

    def _empty_like(
        self, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> Self:
        """An object of the same class, formats and directions with new, uninitialised buffers."""
        if shape is None and self._shape != torch.Size(self._plane_tensor_shape()):
            return self._empty_like(self._plane_tensor_shape(), dtype, device)._viewed(self._shape)
        shape = self._shape if shape is None else shape
        device = self.device if device is None else device
        fresh = {
            plane.direction: empty_plane(
                plane.format, plane.direction, shape, device=device, transposed=plane.transposed
            )
            for plane in self.planes()
        }
        return self._with_planes(fresh, shape=shape, dtype=dtype, cut_axes=(), fresh=True)

    def _with_planes(self, planes: Mapping[Direction, Plane], *, shape: Sequence[int], **changes: Any) -> Self:
        """A new object of the same class that has only ``planes``."""
        holder = object.__new__(self._storage_class())
        for name in self._buffer_names:
            setattr(holder, name, None)
        for direction, plane in planes.items():
            holder._set_plane(direction, plane)
        buffers = {name: getattr(holder, name) for name in self._buffer_names}
        return self._rewrap(shape=shape, buffers=buffers, **{"matrix": matrix_shape(shape), **changes})

    def _plane_tensor_shape(self) -> Sequence[int]:
        """The shape for which the planes are laid out: that of the tensor, or (M, K) in a flat view."""
        if not self._plane_buffers or matrix_shape(self._shape) == self._matrix:
            return self._shape
        return self._matrix

    def view(self, *shape: Any) -> Self:
        """The same bytes with another shape.

        The last dimension must stay as it is; or the new shape has one dimension for all numbers.

        Raises:
            RuntimeError: the shape is not possible.
        """
        flat = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return self._viewed(resolved_shape(self._shape, flat))

    def _viewed(self, shape: Sequence[int]) -> Self:
        shape = torch.Size(shape)
        if shape == self._shape:
            return self._rewrap()
        flat = len(shape) == 1 and shape[0] != self._matrix[1]
        if not flat:
            self._check_viewable(shape)
        layout = self._matrix if flat else shape  # in a flat view the planes keep their matrix
        planes = {
            plane.direction: replace(
                plane, data=plane.data.view(data_shape(plane.format, plane.direction, layout, plane.transposed))
            )
            for plane in self.planes()
        }
        return self._with_planes(planes, shape=shape, matrix=matrix_shape(layout))

    def _check_viewable(self, shape: torch.Size) -> None:
        if shape[-1] != self._matrix[1]:
            raise RuntimeError(
                f"{type(self).__name__}: cannot view {list(self._shape)} as {list(shape)}: its blocks are along the "
                f"last dimension, which must stay {self._matrix[1]}"
            )

    def _sliced(self, dim: int, start: int, stop: int) -> Self:
        """The slice ``start:stop`` of a dimension, with the same memory."""
        if (start, stop) == (0, self._shape[dim]):
            return self._rewrap()
        if dim not in (0, len(self._shape) - 1) or matrix_shape(self._shape) != self._matrix:
            raise CutsBlocks(
                f"{type(self).__name__} of shape {list(self._shape)} with planes of shape {list(self._matrix)} can be "
                f"sliced along the first and the last dimension of its planes, but not along dimension {dim}"
            )
        ragged = self._made_of_zeros and dim == start == 0
        planes = {plane.direction: slice_plane(plane, self._shape, dim, start, stop, ragged) for plane in self.planes()}
        shape = (*self._shape[:dim], stop - start, *self._shape[dim + 1 :])
        axis = 1 if dim == len(self._shape) - 1 else 0
        return self._with_planes(planes, shape=shape, cut_axes=tuple({*self._cut_axes, axis}))

    def _strided(self, size: Sequence[int], stride: Sequence[int], offset: int | None) -> Self:
        """as_strided: the tensor itself or a run of its first dimension; all else would cut through blocks.

        As in torch, an offset counts from the beginning of the memory: of the tensor that a slice was cut from.
        """
        offset = 0 if offset is None else offset - self._begins_at
        if offset < 0:
            raise ValueError(
                f"as_strided: this {type(self).__name__} of shape {list(self._shape)} is a slice that begins at "
                f"element {self._begins_at} of the tensor it was cut from, and the offset lies before that: "
                f"{offset + self._begins_at}. Call as_strided on the whole tensor."
            )
        rows = math.prod(self._shape[1:])
        contiguous = torch.empty(self._shape, device="meta").stride()
        first = offset // max(rows, 1)
        whole_rows = tuple(size[1:]) == self._shape[1:] and tuple(stride) == contiguous and offset % max(rows, 1) == 0
        if not whole_rows or first + size[0] > self._shape[0]:
            raise CutsBlocks(
                f"as_strided(size={list(size)}, stride={list(stride)}, offset={offset}) of a {type(self).__name__} of "
                f"shape {list(self._shape)} is not a slice of its first dimension"
            )
        return self._sliced(0, first, first + size[0])


def resolved_shape(current: Sequence[int], shape: Sequence[int]) -> list[int]:
    """``shape`` with the number for a -1.

    Raises:
        RuntimeError: the shape is not possible for the number of elements.
    """
    resolved, count = list(shape), math.prod(current)
    if resolved.count(-1) == 1:
        known = math.prod(n for n in resolved if n != -1)
        resolved[resolved.index(-1)] = count // known if known else 0
    if math.prod(resolved) != count or min(resolved, default=0) < 0:
        raise RuntimeError(f"shape {list(shape)} is invalid for {count} elements")
    return resolved
