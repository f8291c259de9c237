"""Hybrid tensors: one child holds the rowwise plane, another child the columnwise plane in another format.

Each child is a quantized tensor of one format, of which one direction is used. Views, copies and moves are done child
by child. This module makes sure that both children stay consistent: a write reaches all children or none, and a child
that missed a write is stale.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor

from ..formats import Format
from ..planes import COLUMNWISE, ROWWISE, Direction, Plane, matrix_shape, overlaps
from ..runtime.settings import settings
from ..runtime.strict import refuse_if_strict
from ..tensor import QuantizedTensor, QuantizedTensorStorage
from ..tensor.holder import Epoch, Extent, PlaneHolder, extent_of, next_write_number
from .child_names import ChildNames

if TYPE_CHECKING:
    from .base import Quantizer

_WAS_DROPPED = (
    " It was dropped (update_usage), as Megatron-FSDP drops the columns of all weights that are kept quantized, except "
    "MXFP8Tensors: use columnwise_source='rowwise_dequantized', or keep the weights in high precision."
)


class HybridQuantizedTensorStorage(ChildNames, QuantizedTensorStorage):
    """The children of a hybrid tensor: ``_rowwise_storage`` and ``_columnwise_storage``. Either may be None.

    Examples:
        >>> quantizer = cg.HybridQuantizer(
        ...     rowwise_quantizer=cg.quantizer_for("mxfp8"), columnwise_quantizer=cg.quantizer_for("nvfp4")
        ... )
        >>> quantizer.internal = True  # planes without a torch.Tensor around them
        >>> type(quantizer(torch.ones(128, 128)))
        <class 'crossgrain.quantizers.hybrid_tensor.HybridQuantizedTensorStorage'>
    """

    _attribute_names = ("_rowwise_storage", "_columnwise_storage", "_quantizer", "_dtype", "_shape", "_matrix")
    _strict_refuses_cuts = True

    _rowwise_storage: QuantizedTensorStorage | None
    _columnwise_storage: QuantizedTensorStorage | None
    _agreed: Mapping[Direction, int]  # the last write of each child when they were put together
    # What notes the writes to children that were dropped here and that aliases may still hold.
    _dropped: Mapping[Direction, Sequence[Epoch]] = MappingProxyType({})
    # Of a slice whose columns have memory of their own, and of its aliases: the part of the rows that counts for them.
    _made_for: Extent | None = None

    def _init_fields(
        self,
        rowwise_storage: QuantizedTensorStorage | None,
        columnwise_storage: QuantizedTensorStorage | None,
        quantizer: Quantizer | None = None,
        fake_dtype: torch.dtype | None = None,
        *,
        shape: Sequence[int] | None = None,
    ) -> None:
        orphan = quantizer is None and rowwise_storage is columnwise_storage is None  # nothing could make a quantizer
        is_parent = hasattr(quantizer, "rowwise_quantizer") and hasattr(quantizer, "columnwise_quantizer")
        if orphan or not (quantizer is None or is_parent):
            raise TypeError(
                f"{type(self).__name__} requires a parent HybridQuantizer, with two children, got "
                f"{type(quantizer).__name__}"
            )
        self._quantizer = None if quantizer is None else quantizer.copy()
        children = {ROWWISE: rowwise_storage, COLUMNWISE: columnwise_storage}
        if shape is None:
            shape = next((child.shape for child in children.values() if child is not None), None)
            if shape is None:
                raise ValueError(f"{type(self).__name__} without any data needs shape=...")
        self._put_together(children, shape, torch.float32 if fake_dtype is None else fake_dtype)

    def _put_together(
        self, children: Mapping[Direction, Any], shape: Sequence[int], dtype: torch.dtype, agreed: Any = None
    ) -> None:
        self._shape, self._dtype = torch.Size(shape), dtype
        self._matrix = matrix_shape(self._shape)
        for direction in Direction:
            child = children.get(direction)
            if child is not None:
                if not isinstance(child, QuantizedTensorStorage) or isinstance(child, HybridQuantizedTensorStorage):
                    raise TypeError(
                        f"the {direction.value} child of a {type(self).__name__} must be a quantized tensor or storage "
                        f"of one format, got {type(child).__name__}"
                    )
                child = child if child.shape == self._shape else child._viewed(self._shape)
            self._set_child(direction, child)
        self._agree(agreed)

    def _agree(self, agreed: Mapping[Direction, int] | None = None) -> None:
        """Record that the children hold the same numbers now, regardless of when each was written."""
        if agreed is None:
            agreed = {direction: child._last_write() for direction, child in self._children().items()}
        self._agreed = agreed

    # ---- what is there -------------------------------------------------------------------------

    @property
    def rowwise_sub_storage(self) -> QuantizedTensorStorage | None:
        """The rowwise child; None if there is none. Raises RuntimeError if it is stale."""
        return self._fresh_child(ROWWISE)

    @property
    def columnwise_sub_storage(self) -> QuantizedTensorStorage | None:
        """The columnwise child; None if there is none. Raises RuntimeError if it is stale."""
        return self._fresh_child(COLUMNWISE)

    def _fresh_child(self, direction: Direction) -> QuantizedTensorStorage | None:
        child = self._children().get(direction)
        if child is not None and self._is_stale(direction):
            raise RuntimeError(
                f"the {direction.value} {type(child).__name__} of this {type(self).__name__} of shape "
                f"{list(self._shape)} is stale: its {direction.other.value} child was written later, alone or through "
                "an alias that does not have this one. Requantize the tensor."
            )
        return child

    def _children(self) -> dict[Direction, QuantizedTensorStorage]:
        """The children that exist, rowwise first."""
        both = {ROWWISE: self._rowwise_storage, COLUMNWISE: self._columnwise_storage}
        return {direction: child for direction, child in both.items() if child is not None}

    def plane(self, direction: Direction) -> Plane | None:
        child = self._children().get(direction)
        plane = None if child is None else child.plane(direction)
        return plane and replace(plane, stale=plane.stale or self._is_stale(direction))

    def planes(self) -> list[Plane]:
        """The planes with buffers of their own. A child may use a rowwise plane for its direction."""
        return [
            replace(plane, stale=plane.stale or self._is_stale(direction))
            for direction, child in self._children().items()
            for plane in child.planes()
        ]

    def _reset_caches(self) -> None:
        for child in self._children().values():
            child._reset_caches()

    def get_usages(self) -> dict[str, bool]:
        children = self._children()
        return {
            direction.value: direction in children and children[direction].get_usages()[direction.value]
            for direction in Direction
        }

    def _is_stale(self, direction: Direction) -> bool:
        """Whether the other child was written since the two held the same numbers, and this one was not."""
        children = self._children()
        if direction not in children:
            return False
        other = children.get(direction.other)
        within = {ROWWISE: self._made_for}
        if other is not None:
            others = other._last_write(within.get(direction.other))
        else:  # aliases may still hold it, and write it
            part = within.get(direction.other)
            marks = self._dropped.get(direction.other, ())
            others = max((mark.number if part is None else mark.last_within(part) for mark in marks), default=0)
        mine = children[direction]._last_write(within.get(direction))
        return mine < others and others > self._agreed.get(direction.other, 0)

    @property
    def _formats(self) -> dict[Direction, Format]:  # type: ignore[override]
        return {direction: child._formats[direction] for direction, child in self._children().items()}

    @property
    def _cut_axes(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple({axis for child in self._children().values() for axis in child._cut_axes})

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for direction, child in self._children().items():
            for name, buffer in child._buffers():
                yield f"{direction.value}{name}", buffer

    def get_data_tensors(self, rowwise_data: bool = True, columnwise_data: bool = True) -> Any:
        """The codes of both children, two entries for each; or the codes of one direction."""
        if not (rowwise_data or columnwise_data):
            raise ValueError("get_data_tensors: rowwise_data and columnwise_data cannot both be False")
        if rowwise_data and columnwise_data:
            return tuple(data for child in self._children().values() for data in child.get_data_tensors())
        plane = self.plane(ROWWISE if rowwise_data else COLUMNWISE)
        return None if plane is None else plane.data

    def get_metadata(self) -> dict[str, Any]:
        metadata = {
            "rowwise_storage": self.rowwise_sub_storage,  # raises if it is stale: a new hybrid would not know
            "columnwise_storage": self.columnwise_sub_storage,
            "quantizer": self._quantizer,
            "fake_dtype": self._dtype,
        }
        return self._lending(metadata)

    # ---- child by child ------------------------------------------------------------------------

    @classmethod
    def _shared_names(cls) -> tuple[str, ...]:
        # The history of other writes is with the children.
        return (*cls._state_names(), "_agreed", "_dropped", "_made_for")

    def _join(self, other: PlaneHolder) -> None:
        if isinstance(other, HybridQuantizedTensorStorage):
            self._dropped, self._made_for = other._dropped, other._made_for
        for direction, child in self._children().items():
            self._set_child(direction, _shallow(child))  # so that clearing one leaves the other as it is

    def _plain_state(self) -> dict[str, Any]:
        for direction, child in self._children().items():
            if not isinstance(child, QuantizedTensor):
                raise TypeError(
                    f"{type(self).__name__} cannot be pickled: its {direction.value} child is a storage, not a tensor "
                    "(make it with internal=False)"
                )
        return {**{name: getattr(self, name) for name in self._state_names()}, "_shape": tuple(self._shape)}

    def _take_plain_state(self, state: Mapping[str, Any]) -> None:
        children = {direction: state[f"_{direction.value}_storage"] for direction in Direction}
        self._quantizer = state["_quantizer"]
        self._put_together(children, state["_shape"], state["_dtype"])

    def _set_child(self, direction: Direction, child: QuantizedTensorStorage | None) -> None:
        setattr(self, f"_{direction.value}_storage", child)

    def _mapped(
        self,
        change: Callable[[QuantizedTensorStorage], Any],
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        alias: bool = False,
    ) -> Self:
        """A new hybrid of the same class whose children are ``change(child)``; ``alias``: over the same buffers."""
        for direction, child in self._children().items():
            if change is not _shallow and not child._plane_buffers:
                raise NotImplementedError(
                    f"{type(self).__name__}: its {direction.value} child is a {type(child).__name__}, which does not "
                    "consist of planes: it can be detached, read and saved for backward, but not viewed, copied or "
                    "moved"
                )
        children = {direction: change(child) for direction, child in self._children().items()}
        if shape is None:
            shape = self._shape
        dtype = self._dtype if dtype is None else dtype
        buffers = {name: buffer for child in children.values() for name, buffer in child._buffers()}
        new = self._blank(torch.Size(shape), dtype, buffers)
        new._put_together(children, shape, dtype, self._agreed)
        if alias:
            new._dropped, new._made_for = self._dropped, self._made_for
        new._quantizer = None if self._quantizer is None else self._quantizer.copy()
        new._shard = self._shard
        return new

    def _rewrap(self, *, shape: Any = None, dtype: torch.dtype | None = None, **changes: Any) -> Self:
        if shape is None and dtype is None and not changes:
            return self._mapped(_shallow, alias=True)
        return self._mapped(
            lambda child: child._rewrap(shape=shape, dtype=dtype, **changes),
            shape=shape,
            dtype=dtype,
            alias=not changes.get("fresh", False),
        )

    def _map_buffers(self, change: Callable[[Tensor], Tensor], **changes: Any) -> Self:
        self._check_fresh()  # the copy would not know that a child is stale
        return self._mapped(lambda child: child._map_buffers(change, **changes), **changes)

    def _empty_like(
        self, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> Self:
        new = self._mapped(lambda child: child._empty_like(shape, dtype, device), shape=shape, dtype=dtype)
        if new._quantizer is not None:
            new._quantizer.set_usage(**new.get_usages())
        return new

    def _viewed(self, shape: Sequence[int]) -> Self:
        return self._mapped(lambda child: child._viewed(shape), shape=shape, alias=True)

    def _sliced(self, dim: int, start: int, stop: int) -> Self:
        shape = (*self._shape[:dim], stop - start, *self._shape[dim + 1 :])
        return self._mapped(lambda child: child._sliced(dim, start, stop), shape=shape, alias=True)

    def _clone(self) -> Self:
        self._check_fresh()
        clone = self._mapped(lambda child: child._clone())
        clone._agree()
        return clone

    def _check_fresh(self) -> None:
        for direction in Direction:
            self._fresh_child(direction)
        super()._check_fresh()

    def _write_marks(self) -> list[Epoch]:
        return [mark for child in self._children().values() for mark in child._write_marks()]

    def _last_write(self, within: Extent | None = None) -> int:
        return max((child._last_write(within) for child in self._children().values()), default=0)

    def _mark_written(self, number: int | None = None) -> None:
        number = next_write_number() if number is None else number
        for child in self._children().values():
            child._mark_written(number)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A context manager: everything that is written to the children inside counts as one write.

        If it fails, a child that was written makes the other one stale. A child of a slice that was stale before
        stays stale, because the rest of its tensor still is.
        """
        children = self._children()
        behind = {
            direction: child._last_write()
            for direction, child in children.items()
            if child._cut_axes and self._is_stale(direction)
        }
        yield
        self._mark_written()
        for direction, number in behind.items():
            children[direction]._mark_written(number)

    def clear(self) -> None:
        for child in self._children().values():
            child.clear()

    def _decoded(self, dtype: torch.dtype, direction: Direction | None) -> Tensor:
        """Decode to new memory, also from an identity child: writing to its buffer would change only one child."""
        usages = self.get_usages()
        held_directions = (found for found in Direction if usages[found.value])
        chosen = next(held_directions, ROWWISE) if direction is None else direction
        child = self._fresh_child(chosen)
        if child is None:
            return super()._decoded(dtype, direction)  # raises, and names what is missing
        has_plane = child.plane(chosen) is not None
        decoded = child._decoded(dtype, chosen) if has_plane else child.dequantize(dtype=dtype)
        held = {buffer.data_ptr() for _, buffer in child._buffers()}
        return decoded.clone() if decoded.numel() and decoded.data_ptr() in held else decoded

    # ---- usages and writing --------------------------------------------------------------------

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop children, or make columns that are defined to be made from the rows (``columnwise_source``).

        No other missing child can be made, because its format does not follow from the other one.

        Args:
            rowwise_usage: False drops the rowwise child; True requires it; None leaves it as it is.
            columnwise_usage: the same for the columnwise child.

        Raises:
            RuntimeError: a child is required that does not exist and cannot be made.
        """
        wanted = {ROWWISE: rowwise_usage, COLUMNWISE: columnwise_usage}
        usages = self.get_usages()
        missing = [direction for direction, want in wanted.items() if want and not usages[direction.value]]
        for direction in missing:
            if not self._can_make(direction):
                raise RuntimeError(
                    f"{type(self).__name__} of shape {list(self._shape)}: {direction.value} usage requested, but there "
                    "is no such child, and its format cannot be made from the other child. Request it when quantizing."
                    f"{_WAS_DROPPED if direction in self._dropped else ''}"
                )
        for direction in missing:
            quantizer: Any = self._get_quantizer()
            rows = self._children()[ROWWISE]
            with torch.no_grad():
                self._set_child(direction, quantizer.columns_from_rows(rows))
            self._made_for = _extent(rows) if rows._cut_axes else None
            self._dropped = {gone: marks for gone, marks in self._dropped.items() if gone is not direction}
            self._agree()
        for direction, child in self._children().items():
            if wanted[direction] is False:
                self._dropped = {**self._dropped, direction: child._write_marks()}
                self._set_child(direction, None)

    def _can_make(self, direction: Direction) -> bool:
        """Whether a missing child is made from the other one by definition."""
        derives = direction is COLUMNWISE and self._quantizer is not None and self._quantizer.derives_columns
        return derives and not settings.strict and ROWWISE in self._children() and not self._is_stale(ROWWISE)

    def _derivable(self, direction: Direction) -> Plane | None:
        return None

    def copy_from_storage(self, src: QuantizedTensorStorage) -> None:
        """Copy the bytes of another hybrid tensor.

        Raises:
            TypeError: ``src`` is not a hybrid tensor.
            RuntimeError: ``src`` does not have the planes that this tensor has.
        """
        if not isinstance(src, HybridQuantizedTensorStorage):
            raise TypeError(f"copy_from_storage: cannot copy {type(src).__name__} to {type(self).__name__}")
        if not self._copy_bytes_from(src):
            raise RuntimeError(f"copy_from_storage: {src!r} does not have the planes of {self!r}")

    def _copy_bytes_from(self, src: QuantizedTensorStorage) -> bool:
        """Copy the bytes of children that ``src`` has in the same formats, and quantize other children from its values.

        Returns:
            False if no child fits; then nothing is written. Otherwise all children are written.
        """
        if isinstance(src, HybridQuantizedTensorStorage) and src.get_usages() != self.get_usages():
            refuse_if_strict("other usages", f"copy_ from {src!r} to {self!r}")
        src._check_fresh()
        src = self._apart(src)
        mine = self._children()
        pairs = {direction: self._matching_planes(direction, src) for direction in mine}
        fitting = {direction: child for direction, child in mine.items() if pairs[direction]}
        rest = {direction: child for direction, child in mine.items() if direction not in fitting}
        if not fitting or (rest and not self._get_quantizer()._can_write_alone(rest)):  # type: ignore[attr-defined]
            return False
        for direction, child in fitting.items():  # before anything is written
            child._check_scales_shared(pairs[direction])
        with self._writing():
            if rest:
                self._get_quantizer()._write_children(src.dequantize().to(self.device), rest)  # type: ignore[attr-defined]
            for direction, child in fitting.items():
                child._copy_planes(pairs[direction])
        return True

    def _matching_planes(self, direction: Direction, src: QuantizedTensorStorage) -> list[tuple[Plane, Plane]]:
        """Pairs of planes of the child and of ``src`` whose bytes can be copied; empty if a plane has no partner.

        A direction that ``src`` does not have is made from its other one if that is exact, unless columns are defined
        to be made from decoded rows.
        """
        theirs = _part(src, direction)
        derives = direction is COLUMNWISE and self._quantizer is not None and self._quantizer.derives_columns
        missing = not src.get_usages()[direction.value] and not derives
        pairs = []
        for plane in self._children()[direction].planes():
            other = None if theirs is None else theirs.plane(plane.direction)
            if other is None and missing:
                other = src._plane_for(plane.direction, plane.format)
            if other is None or _layout(other) != _layout(plane):
                return []
            pairs.append((plane, other))
        return pairs

    def _apart_from(self, src: Tensor) -> Tensor:
        """``src``, or a copy if writing to a child would change it."""
        return src.clone() if any(overlaps(src, buffer) for _, buffer in self._buffers()) else src

    # ---- saving, shards ------------------------------------------------------------------------

    def prepare_for_saving(self) -> tuple[list[Tensor | None], Self]:
        buffers: list[Tensor | None] = []
        lent = []
        for child in self._children().values():
            own = child.prepare_for_saving()[0]
            lent.append((child, len(own)))
            buffers.extend(own)
            if not child._plane_buffers:
                child._epochs = dict.fromkeys(Direction, Epoch(child._last_write()))  # as planes do for themselves
        self._lent = lent  # a child that is dropped meanwhile still has its place in the list
        self._dropped = {}  # later writes are not ours
        return buffers, self

    def restore_from_saved(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        lent = self.__dict__.get("_lent", [])
        count = sum(own for _, own in lent)
        if len(tensors) < count:
            raise RuntimeError(
                f"{type(self).__name__} needs {count} saved buffers, but only {len(tensors)} tensors are left"
            )
        for child, _ in lent:
            tensors = child.restore_from_saved(tensors)
        self.__dict__.pop("_lent", None)
        return tensors

    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        return tuple(
            f"{direction.value}{field}"
            for direction, child in self._children().items()
            for field in child.fsdp_buffer_fields()
        )

    def fsdp_extract_buffers(self) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        self._check_fresh()
        buffers: list[Tensor] = []
        metas = {}
        for direction, child in self._children().items():
            own, metas[direction] = child.fsdp_extract_buffers()
            buffers.extend(own)
        return tuple(buffers), {"field_names": self.fsdp_buffer_fields(), "children": metas}

    def fsdp_assign_gathered(self, gathered: Sequence[Tensor], meta: dict[str, Any]) -> None:
        names = meta["field_names"]
        if len(gathered) != len(names):
            raise RuntimeError(
                f"{type(self).__name__}: got {len(gathered)} gathered buffers for the {len(names)} fields {list(names)}"
            )
        children = self._children()
        if set(children) != set(meta["children"]):
            raise RuntimeError(f"{type(self).__name__}: the gathered shards have other directions than this tensor")
        rest = list(gathered)
        # Fill other objects first, so that a failure changes nothing.
        filled = {direction: _shallow(child) for direction, child in children.items()}
        for direction, child_meta in meta["children"].items():
            count = len(child_meta["field_names"])
            filled[direction].fsdp_assign_gathered(rest[:count], child_meta)
            rest = rest[count:]
        self._put_together(filled, self._shape, self._dtype)
        self._mark_written()

    def _planes_that_travel(self, directions: Sequence[Direction]) -> list[Plane]:
        return [plane for child, own in self._serving(directions) for plane in child._planes_that_travel(own)]

    def _planes_of(self, directions: Sequence[Direction]) -> list[Plane]:
        return [plane for child, own in self._serving(directions) for plane in child._planes_of(own)]

    def _derive_planes(self, directions: Sequence[Direction]) -> None:
        for child, own in self._serving(directions):
            child._derive_planes(own)

    def _serving(self, directions: Sequence[Direction]) -> list[tuple[QuantizedTensorStorage, list[Direction]]]:
        """The children that have ``directions``."""
        return [(child, [direction]) for direction, child in self._children().items() if direction in directions]

    def _note_zeros(self) -> None:
        for child in self._children().values():
            child._note_zeros()

    def _stand_alone(self) -> None:
        for child in self._children().values():
            child._stand_alone()

    def _build_default_quantizer(self) -> Quantizer:
        from .hybrid import HybridQuantizer  # which builds on this module

        missing = [direction.value for direction in Direction if direction not in self._children()]
        if missing:
            raise RuntimeError(
                f"{type(self).__name__} has no quantizer, and without a {missing[0]} child none can be made for it"
            )
        row, column = (child._get_quantizer().copy() for child in self._children().values())
        return HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column)

    def __repr__(self) -> str:
        both = {ROWWISE: self._rowwise_storage, COLUMNWISE: self._columnwise_storage}
        held = [f"{d.value}={None if child is None else type(child).__name__}" for d, child in both.items()]
        return f"{type(self).__name__}({', '.join(held)}, shape={list(self._shape)}, dtype={self._dtype})"


class HybridQuantizedTensor(QuantizedTensor, HybridQuantizedTensorStorage):
    """A tensor whose two directions are in two formats.

    Examples:
        >>> quantizer = cg.HybridQuantizer(
        ...     rowwise_quantizer=cg.quantizer_for("mxfp8"), columnwise_quantizer=cg.quantizer_for("nvfp4")
        ... )
        >>> q = quantizer(torch.ones(128, 128))
        >>> q.plane(cg.ROWWISE).format.name, q.plane(cg.COLUMNWISE).format.name
        ('mxfp8', 'nvfp4')
    """

    def detach(self) -> Self:
        self._refuse_storages_if_strict("detach()")
        return cast(Self, super().detach())

    def _check_gather(self) -> None:
        self._refuse_storages_if_strict("the FSDP2 all-gather")
        for direction, child in self._children().items():
            if any(plane.format.scale_rule == "two_level" for plane in child.planes()):
                refuse_if_strict("NVFP4 of a hybrid in FSDP2", f"{self!r}: its {direction.value} child is NVFP4")

    def _refuse_storages_if_strict(self, operation: str) -> None:
        for direction, child in self._children().items():
            if not isinstance(child, QuantizedTensor):
                refuse_if_strict(
                    "storages in a hybrid",
                    f"{operation} of {self!r} does not support storage-only {direction.value} children",
                )

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        self._check_fresh()
        names = [f"_{direction.value}_storage" for direction in self._children()]
        for name in names:
            if not isinstance(getattr(self, name), QuantizedTensor):
                raise NotImplementedError(
                    f"{type(self).__name__} cannot be traced: its {name[1:]} is a storage, not a tensor (make it with "
                    "internal=False)"
                )
        return names, {"_quantizer": self._quantizer, "_dtype": self._dtype}

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Mapping[str, Any], context: Mapping[str, Any], outer_size: Any, outer_stride: Any
    ) -> Self:
        device = next((child.device for child in inner.values()), torch.device("cpu"))
        new = cls._wrapper(outer_size, context["_dtype"], device)
        new._quantizer = context["_quantizer"]
        children = {direction: inner.get(f"_{direction.value}_storage") for direction in Direction}
        new._put_together(children, outer_size, context["_dtype"])
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) not in memo:
            new = super().__deepcopy__(memo)
            for child in new._children().values():
                child._quantizer = copy.deepcopy(child._quantizer, memo)
        return cast(Self, memo[id(self)])


def _shallow(child: QuantizedTensorStorage) -> QuantizedTensorStorage:
    """Another object with the same buffers."""
    if child._plane_buffers:
        return child._rewrap()
    child._whole_epochs()  # both objects share them
    return copy.copy(child)


def _extent(rows: QuantizedTensorStorage) -> Extent | None:
    """Which part of its memory the codes of a rowwise child are; None if that is not known."""
    plane = rows.plane(ROWWISE)
    return None if plane is None else extent_of(plane.data)


def _part(src: QuantizedTensorStorage, direction: Direction) -> QuantizedTensorStorage | None:
    """What has a direction of ``src``: the child of a hybrid, otherwise ``src`` itself."""
    return src._children().get(direction) if isinstance(src, HybridQuantizedTensorStorage) else src


def _layout(plane: Plane) -> tuple[Any, ...]:
    return plane.format, plane.shape, plane.transposed
