"""The two-plane storage: everything that can be done to quantized data without being a torch.Tensor.

Buffers are plain attributes with the names the field knows (``_rowwise_data``, ``_scale_inv``, ...); a
format's class says which attribute belongs to which plane, and `plane` puts them together with the
format they are in. All lifecycle code below works on buffers or on planes and never on a format.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from .. import kernels
from ..formats import Format
from ..plane import (
    COLUMNWISE,
    ROWWISE,
    Direction,
    Plane,
    data_shape,
    empty_plane,
    matrix_shape,
)
from ..settings import settings
from .slicing import slice_plane

if TYPE_CHECKING:
    from ..quantizer import Quantizer


class PlaneBuffers(NamedTuple):
    """Names of the attributes that hold one plane."""

    data: str
    scale: str | None
    amax: str | None = None


class QuantizedTensorStorage:
    """Up to two planes of one logical tensor, and the quantizer that can make them again.

    A format's class provides the class variables, a constructor with the arguments of the field
    (`_init_fields`), `get_metadata` and `_build_default_quantizer`.
    """

    _buffer_names: ClassVar[tuple[str, ...]]  # in the order they are saved for backward
    _plane_buffers: ClassVar[Mapping[Direction, PlaneBuffers]]
    _attribute_names: ClassVar[tuple[str, ...]] = ("_formats", "_quantizer", "_dtype", "_shape", "_matrix", "_is_slice")
    _strict_decodes_rowwise_only: ClassVar[bool] = False
    _missing_plane_error: ClassVar[type[Exception]] = RuntimeError

    _shape: torch.Size
    _matrix: tuple[int, int]  # (M, K) of the planes; differs from the shape only in a flat view
    _dtype: torch.dtype
    _formats: Mapping[Direction, Format]
    _quantizer: Quantizer | None
    _is_slice: bool  # cut from a larger tensor, whose per-tensor scales it shares

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._init_fields(*args, **kwargs)

    def _init_fields(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def _init_common(
        self,
        formats: Mapping[Direction, Format],
        quantizer: Quantizer | None,
        fake_dtype: torch.dtype | None,
        shape: Sequence[int] | None,
        buffers: Sequence[Tensor | None],
    ) -> None:
        """``buffers`` are in the order of `_buffer_names`."""
        for name, buffer in zip(self._buffer_names, buffers, strict=True):
            setattr(self, name, buffer)
        self._formats = dict(formats)
        self._quantizer = None if quantizer is None else quantizer.copy()
        self._dtype = torch.float32 if fake_dtype is None else fake_dtype
        self._shape = torch.Size(self._inferred_shape() if shape is None else shape)
        self._matrix = matrix_shape(self._shape)
        self._is_slice = False

    def _inferred_shape(self) -> Sequence[int]:
        """The logical shape, for callers that have only buffers."""
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
        raise ValueError(f"{type(self).__name__} without any data needs its shape to be given")

    # ---- what is there -------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        return self._shape

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self._shape if dim is None else self._shape[dim]

    @property
    def dtype(self) -> torch.dtype:
        """The nominal dtype: what the tensor pretends to be, and what it decodes to by default."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        for _, buffer in self._buffers():
            return buffer.device
        raise RuntimeError(f"{type(self).__name__} holds no data, so it is on no device")

    def plane(self, direction: Direction) -> Plane | None:
        """The plane of one direction, or None if it is absent."""
        names = self._plane_buffers[direction]
        data = getattr(self, names.data)
        if data is None or (data.numel() == 0 and math.prod(self._matrix) != 0):  # the latter: cleared
            return None
        fmt = self._formats[direction]
        scale = getattr(self, names.scale) if names.scale else None
        amax = getattr(self, names.amax) if names.amax else None
        return Plane(fmt, direction, self._matrix, data, scale, amax, self._stores_transposed(direction))

    def planes(self) -> list[Plane]:
        """The planes that are present, rowwise first."""
        return [plane for direction in Direction if (plane := self.plane(direction)) is not None]

    def get_usages(self) -> dict[str, bool]:
        """Which directions are really there: ``{"rowwise": True, "columnwise": False}``."""
        return {direction.value: self.plane(direction) is not None for direction in Direction}

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
        """The raw code buffers: a pair, or the one that was asked for."""
        if not (rowwise_data or columnwise_data):
            raise ValueError("get_data_tensors: neither rowwise nor columnwise data was asked for")
        row, column = (getattr(self, self._plane_buffers[direction].data) for direction in Direction)
        if rowwise_data and columnwise_data:
            return row, column
        return row if rowwise_data else column

    def get_metadata(self) -> dict[str, Any]:
        """Constructor arguments that rebuild the same object."""
        raise NotImplementedError

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of every buffer that is there, in the order they are saved."""
        for name in self._buffer_names:
            buffer = getattr(self, name)
            if buffer is not None:
                yield name, buffer

    @classmethod
    def _state_names(cls) -> tuple[str, ...]:
        """All attributes that make up the storage."""
        return cls._buffer_names + cls._attribute_names

    def _stores_transposed(self, direction: Direction) -> bool:
        return direction is COLUMNWISE and self._formats[direction].transposes

    def _set_plane(self, direction: Direction, plane: Plane | None) -> None:
        names = self._plane_buffers[direction]
        setattr(self, names.data, plane and plane.data)
        if names.scale:
            setattr(self, names.scale, plane and plane.scale)
        if names.amax:
            setattr(self, names.amax, plane and plane.amax)

    # ---- reading and writing -------------------------------------------------------------------

    def dequantize(self, *, dtype: torch.dtype | None = None, direction: Direction | None = None) -> Tensor:
        """The high-precision tensor, from ``direction`` or, by default, rowwise if present."""
        plane = self._readable_plane(direction)
        return kernels.decode(plane, self._dtype if dtype is None else dtype).view(self._shape)

    def _readable_plane(self, direction: Direction | None) -> Plane:
        plane = next(iter(self.planes()), None) if direction is None else self.plane(direction)
        if plane is None:
            what = "any" if direction is None else f"its {direction.value}"
            raise RuntimeError(f"{type(self).__name__} of shape {list(self._shape)} does not hold {what} data")
        if settings.strict and self._strict_decodes_rowwise_only and plane.transposed:
            raise NotImplementedError(
                f"strict mode: {type(self).__name__} cannot be dequantized from columnwise data alone"
            )
        return plane

    def quantize_(self, tensor: Tensor, *, noop_flag: Tensor | None = None) -> Self:
        """Requantize in place: every plane that is present is written. A non-zero flag does nothing."""
        self._get_quantizer().update_quantized(tensor, self, noop_flag=noop_flag)
        return self

    def copy_from_storage(self, src: QuantizedTensorStorage) -> None:
        """Copy the bytes of ``src``, which must be of the same class, formats and shape."""
        if type(src)._storage_class() is not self._storage_class():
            raise TypeError(f"copy_from_storage: cannot copy {type(src).__name__} to {type(self).__name__}")
        pairs = []
        for plane in self.planes():
            other = src.plane(plane.direction)
            if other is None:
                raise RuntimeError(f"copy_from_storage: the source has no {plane.direction.value} plane")
            if other.format != plane.format or other.shape != plane.shape:
                raise RuntimeError(
                    f"copy_from_storage: {plane.direction.value} plane of {other.format.name} {list(other.shape)} "
                    f"does not fit {plane.format.name} {list(plane.shape)}"
                )
            pairs.append((plane, other))
        self._copy_planes(pairs)

    def _copy_bytes_from(self, src: QuantizedTensorStorage) -> bool:
        """Copy what ``src`` has in our formats as bytes; make the rest from it. False: nothing fits.

        A plane that ``src`` lacks is derived from its other plane where that is exact, else quantized
        from its values: no plane is ever left as it was.
        """
        pairs, rest = [], []
        for plane in self.planes():
            theirs = src.plane(plane.direction) or src._derivable(plane.direction)
            if theirs is not None and theirs.format == plane.format and theirs.shape == plane.shape:
                pairs.append((plane, theirs))
            else:
                rest.append(plane)
        if not pairs:
            return False
        self._check_scales_shared(pairs)
        if rest:
            self._get_quantizer()._encode_planes(src.dequantize().to(self.device), self, rest)
        self._copy_planes(pairs)
        return True

    def _copy_planes(self, pairs: Sequence[tuple[Plane, Plane]]) -> None:
        """Copy bytes between planes of equal formats, into this tensor."""
        self._check_scales_shared(pairs)
        for mine, theirs in pairs:
            mine.operand_codes().copy_(theirs.operand_codes())
            if mine.scale is not None and theirs.scale is not None:
                mine.operand_scales().copy_(theirs.operand_scales())
            if mine.amax is not None and theirs.amax is not None:
                mine.amax.copy_(theirs.amax)
        self._mark_written()

    def _check_scales_shared(self, pairs: Sequence[tuple[Plane, Plane]]) -> None:
        """Bytes may be copied into a slice only under the per-tensor scale that it shares."""
        for mine, theirs in pairs:
            if self._is_slice and not _tensor_scales_equal(mine, theirs):
                self._refuse_slice_write(mine)

    def _refuse_slice_write(self, plane: Plane) -> None:
        raise RuntimeError(
            f"{type(self).__name__}: the {plane.direction.value} plane of this slice of shape {list(self._shape)} "
            f"shares its per-tensor {plane.format.name} scale with the tensor it was cut from; writing here would "
            "change the scale under the rest. Clone the slice, or write the whole tensor."
        )

    def _mark_written(self) -> None:
        """Tell autograd that the buffers changed: tensors saved for backward must not go stale unseen."""
        tracked = [buffer for _, buffer in self._buffers() if not buffer.is_inference()]
        torch.autograd.graph.increment_version(tracked)

    # ---- usages --------------------------------------------------------------------------------

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Keep (None), drop (False) or have (True) each direction.

        A missing direction is made from the other where that is exact (per-tensor scales, square
        tiles); otherwise this raises, and nothing has changed.
        """
        wanted = {ROWWISE: rowwise_usage, COLUMNWISE: columnwise_usage}
        made = {
            direction: self._synthesise(direction)
            for direction, want in wanted.items()
            if want and self.plane(direction) is None
        }
        for direction, want in wanted.items():
            if want is False:
                self._set_plane(direction, None)
        for direction, plane in made.items():
            self._set_plane(direction, plane)

    def _derivable(self, direction: Direction) -> Plane | None:
        """The missing plane of ``direction`` made from the other one, where that is exact."""
        source, fmt = self.plane(direction.other), self._formats[direction]
        if source is None or fmt.is_identity or not fmt.is_symmetric or source.format != fmt:
            return None
        return kernels.transposed_plane(source, self._plane_tensor_shape(), self._stores_transposed(direction))

    def _synthesise(self, direction: Direction) -> Plane:
        """The missing plane of ``direction``, byte for byte what quantizing would have given."""
        refused = settings.strict and not self._strict_synthesises(direction)
        plane = None if refused else self._derivable(direction)
        if plane is None:
            source, fmt = self.plane(direction.other), self._formats[direction]
            have = "nothing" if source is None else f"only {source.format.name} {direction.other.value} data"
            raise self._missing_plane_error(
                f"{type(self).__name__} of shape {list(self._shape)}: {direction.value} usage requested, but there is "
                f"{have}, from which {fmt.name} {direction.value} data cannot be made. Request it when quantizing."
            )
        return plane

    def _strict_synthesises(self, direction: Direction) -> bool:
        """Whether Transformer Engine would make this direction from the other."""
        return False

    # ---- saving for backward -------------------------------------------------------------------

    def prepare_for_saving(self) -> tuple[list[Tensor | None], Self]:
        """Hand out the buffers and forget them: ``(buffers, self)``."""
        buffers = [getattr(self, name) for name in self._buffer_names]
        for name in self._buffer_names:
            setattr(self, name, None)
        return buffers, self

    def restore_from_saved(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        """Take the buffers back from the front of ``tensors``; returns the rest."""
        count = len(self._buffer_names)
        for name, buffer in zip(self._buffer_names, tensors[:count], strict=True):
            setattr(self, name, buffer)
        return tensors[count:]

    def clear(self) -> None:
        """Free the memory of the buffers, also for others that share them. Scales shared by many stay."""
        for plane in self.planes():
            shared = plane.scale if plane.format.block is None else None
            for buffer in plane.buffers():
                if buffer is not shared:
                    buffer.data = buffer.new_empty(0)

    # ---- same data, another wrapper ------------------------------------------------------------

    @classmethod
    def _storage_class(cls) -> type[QuantizedTensorStorage]:
        """The format's storage class, for tensors too."""
        return cls

    def _blank(self, shape: torch.Size, dtype: torch.dtype, buffers: Mapping[str, Tensor | None]) -> Self:
        """A new, unfilled object of the same class."""
        return object.__new__(type(self))

    def _rewrap(
        self,
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        buffers: Mapping[str, Tensor | None] | None = None,
        is_slice: bool | None = None,
        matrix: tuple[int, int] | None = None,
    ) -> Self:
        """A new object of the same class over the same buffers, but for what is given."""
        current = {name: getattr(self, name) for name in self._buffer_names}
        current.update(buffers or {})
        shape = torch.Size(self._shape if shape is None else shape)
        dtype = self._dtype if dtype is None else dtype
        new = self._blank(shape, dtype, current)
        for name, buffer in current.items():
            setattr(new, name, buffer)
        new._formats = self._formats
        new._quantizer = None if self._quantizer is None else self._quantizer.copy()
        new._dtype = dtype
        new._shape = shape
        new._matrix = self._matrix if matrix is None else matrix
        new._is_slice = self._is_slice if is_slice is None else is_slice
        return new

    def _map_buffers(self, change: Callable[[Tensor], Tensor], **changes: Any) -> Self:
        """A new object whose buffers are ``change(buffer)``."""
        return self._rewrap(buffers={name: change(buffer) for name, buffer in self._buffers()}, **changes)

    def _empty_like(
        self, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> Self:
        """An object of the same class, formats and usages with buffers of its own."""
        shape = self._plane_tensor_shape() if shape is None else shape
        device = self.device if device is None else device
        fresh = {
            plane.direction: empty_plane(
                plane.format, plane.direction, shape, device=device, transposed=plane.transposed
            )
            for plane in self.planes()
        }
        return self._with_planes(fresh, shape=shape, dtype=dtype, is_slice=False)

    def _with_planes(self, planes: Mapping[Direction, Plane], *, shape: Sequence[int], **changes: Any) -> Self:
        """A new object of the same class that holds just ``planes``."""
        holder = object.__new__(self._storage_class())
        for name in self._buffer_names:
            setattr(holder, name, None)
        for direction, plane in planes.items():
            holder._set_plane(direction, plane)
        buffers = {name: getattr(holder, name) for name in self._buffer_names}
        return self._rewrap(shape=shape, buffers=buffers, **{"matrix": matrix_shape(shape), **changes})

    def _plane_tensor_shape(self) -> Sequence[int]:
        """The shape the planes are laid out for: the own shape, or (M, K) in a flat view."""
        return self._shape if matrix_shape(self._shape) == self._matrix else self._matrix

    def _clone(self) -> Self:
        new = self._empty_like()
        pairs = zip(new.planes(), self.planes(), strict=True)
        new._copy_planes(list(pairs))
        return new if new._shape == self._shape else new._rewrap(shape=self._shape)

    def view(self, *shape: Any) -> Self:
        """The same bytes under another shape. The last dimension must stay, or all be flattened."""
        flat = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return self._viewed(resolved_shape(self._shape, flat))

    def _viewed(self, shape: Sequence[int]) -> Self:
        shape = torch.Size(shape)
        if shape == self._shape:
            return self._rewrap()
        flat = len(shape) == 1 and shape[0] != self._matrix[1]
        if not flat:
            self._check_viewable(shape)
        layout = self._matrix if flat else shape  # a flat handle: the planes keep their matrix
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
                f"{type(self).__name__}: cannot view {list(self._shape)} as {list(shape)}: its blocks fix the last "
                f"dimension (K) at {self._matrix[1]}"
            )

    def _sliced(self, dim: int, start: int, stop: int) -> Self:
        """The part ``start:stop`` of a dimension, over the same buffers."""
        if (start, stop) == (0, self._shape[dim]):
            return self._rewrap()
        if dim not in (0, len(self._shape) - 1) or matrix_shape(self._shape) != self._matrix:
            raise ValueError(
                f"{type(self).__name__} of shape {list(self._shape)} with planes of {list(self._matrix)} can be cut "
                f"along the first and the last dimension of its planes, not along dimension {dim}"
            )
        planes = {plane.direction: slice_plane(plane, self._shape, dim, start, stop) for plane in self.planes()}
        shape = (*self._shape[:dim], stop - start, *self._shape[dim + 1 :])
        return self._with_planes(planes, shape=shape, is_slice=True)

    def _strided(self, size: Sequence[int], stride: Sequence[int], offset: int) -> Self:
        """as_strided: the tensor itself or a run of its first dimension; all else would cut through blocks."""
        rows = math.prod(self._shape[1:])
        contiguous = torch.empty(self._shape, device="meta").stride()
        if tuple(size[1:]) != self._shape[1:] or tuple(stride) != contiguous or offset % max(rows, 1):
            raise ValueError(
                f"as_strided(size={list(size)}, stride={list(stride)}, offset={offset}) of a {type(self).__name__} of "
                f"shape {list(self._shape)} is not a run of its first dimension; dequantize() it first"
            )
        first = offset // max(rows, 1)
        return self._sliced(0, first, first + size[0])

    # ---- the quantizer -------------------------------------------------------------------------

    def update_quantizer(self, quantizer: Quantizer) -> None:
        """Use another quantizer for future writes. The bytes stay as they are."""
        if self._quantizer is None:
            raise RuntimeError(f"{type(self).__name__} has no quantizer that could be updated")
        if self._quantizer is not quantizer:
            warnings.warn(
                f"the quantizer of a {type(self).__name__} is replaced: future writes may differ", stacklevel=2
            )
        self._quantizer = quantizer

    def _get_quantizer(self) -> Quantizer:
        return self._build_default_quantizer() if self._quantizer is None else self._quantizer

    def _build_default_quantizer(self) -> Quantizer:
        """A quantizer that writes these planes' formats, for tensors that were built by hand."""
        raise NotImplementedError

    def __repr__(self) -> str:
        held = ", ".join(f"{plane.direction.value}={plane.format.name}" for plane in self.planes()) or "no data"
        return f"{type(self).__name__}({held}, shape={list(self._shape)}, dtype={self._dtype})"


def _tensor_scales_equal(mine: Plane, theirs: Plane) -> bool:
    if mine.format.block is None and mine.scale is not None and theirs.scale is not None:
        return torch.equal(mine.scale.cpu(), theirs.scale.cpu())
    if mine.amax is not None and theirs.amax is not None:
        return torch.equal(mine.amax.cpu(), theirs.amax.cpu())
    return True


def resolved_shape(current: Sequence[int], shape: Sequence[int]) -> list[int]:
    """``shape`` with a -1 filled in."""
    resolved, count = list(shape), math.prod(current)
    if resolved.count(-1) == 1:
        known = math.prod(n for n in resolved if n != -1)
        resolved[resolved.index(-1)] = count // known if known else 0
    if math.prod(resolved) != count or min(resolved, default=0) < 0:
        raise RuntimeError(f"shape {list(shape)} is invalid for {count} elements")
    return resolved
