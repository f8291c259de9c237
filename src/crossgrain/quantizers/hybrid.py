"""`HybridQuantizer`: another quantizer for each direction of a tensor.

The columnwise quantizer gets the input itself (``"original"``), or the decoded rowwise plane
(``"rowwise_dequantized"``), so that backward uses the numbers that forward has rounded. From the original, both planes
are made in one pass over the input if there is a kernel for the two formats. What is made from the rowwise plane can be
made at any time: ``"rowwise_dequantized_late"`` keeps only the rowwise plane until the columnwise one is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from .. import kernels
from ..formats.encoding import Encoding
from ..planes import COLUMNWISE, ROWWISE, Direction, Plane, PlanePair, PlaneSource
from ..runtime.passes import current_pass
from ..runtime.random_numbers import draw_seed
from ..runtime.settings import settings
from ..runtime.strict import refuse_if_strict
from ..tensor import QuantizedTensorStorage
from .base import Quantizer
from .hybrid_tensor import HybridQuantizedTensor, HybridQuantizedTensorStorage
from .identity import IdentityQuantizer
from .noop_flag import is_set, undone_if_set
from .nvfp4 import NVFP4Quantizer
from .request import QuantizerRequest
from .writing import Job, Layout, as_matrix, make_planes, write_planes

__all__ = ["HybridQuantizedTensor", "HybridQuantizedTensorStorage", "HybridQuantizer"]

ColumnwiseSource = Literal["original", "rowwise_dequantized", "rowwise_dequantized_late"]


class HybridQuantizer(Quantizer):
    """A quantizer with two children, one for each direction.

    The usages of the hybrid say which of the children run.

    Args:
        rowwise_quantizer: the child that makes rowwise planes. It may be a `QuantizerRequest`, for which the state of a
            recipe makes the quantizer later.
        columnwise_quantizer: the child that makes columnwise planes. It must be another object.
        columnwise_source: what the columnwise child quantizes: "original" for the input, "rowwise_dequantized" for the
            decoded rowwise plane, "rowwise_dequantized_late" for the same, but not before it is needed: a tensor is
            made with rows only, and `update_usage` adds columns; a linear layer makes them in backward.

    Raises:
        TypeError: a child is not a quantizer.
        ValueError: a child is itself a hybrid, both children are the same object, ``columnwise_source`` is wrong, or
            columns that are made late would not have the same bytes then.

    Examples:
        >>> quantizer = cg.HybridQuantizer(
        ...     rowwise_quantizer=cg.quantizer_for("mxfp8"), columnwise_quantizer=cg.quantizer_for("nvfp4")
        ... )
        >>> q = quantizer(torch.ones(128, 128))
        >>> type(q)
        <class 'crossgrain.quantizers.hybrid_tensor.HybridQuantizedTensor'>
    """

    _tensor_class = HybridQuantizedTensor
    _value_fields = ("rowwise_quantizer", "columnwise_quantizer", "columnwise_source")

    rowwise_quantizer: Any
    columnwise_quantizer: Any

    def __init__(
        self,
        *,
        rowwise_quantizer: Quantizer | QuantizerRequest,
        columnwise_quantizer: Quantizer | QuantizerRequest,
        columnwise_source: ColumnwiseSource = "original",
    ) -> None:
        super().__init__(rowwise=True, columnwise=True)
        if columnwise_source not in get_args(ColumnwiseSource):
            raise ValueError(
                "columnwise_source must be 'original', 'rowwise_dequantized' or 'rowwise_dequantized_late', got "
                f"{columnwise_source!r}"
            )
        self.columnwise_source = columnwise_source
        self._set_children({ROWWISE: rowwise_quantizer, COLUMNWISE: columnwise_quantizer})

    # ---- children ------------------------------------------------------------------------------

    def child(self, direction: Direction) -> Any:
        """The quantizer (or the request for one) of a direction."""
        return self.rowwise_quantizer if direction is ROWWISE else self.columnwise_quantizer

    def _set_children(self, children: Mapping[Direction, Any]) -> None:
        """Set children. If one is refused, nothing changes."""
        for direction, child in children.items():
            if isinstance(child, QuantizerRequest):
                refuse_if_strict("nested request", f"the {direction.value} child of a HybridQuantizer is a request")
            elif not isinstance(child, Quantizer):
                raise TypeError(
                    f"the {direction.value} child of a HybridQuantizer must be a quantizer, got {type(child).__name__}"
                )
            elif isinstance(child, HybridQuantizer):
                raise ValueError(
                    f"the {direction.value} child of a HybridQuantizer cannot be another HybridQuantizer: pass its "
                    f"{direction.value} quantizer"
                )
            if self.makes_columns_late and (problem := _why_not_late(child, direction)):
                raise ValueError(
                    f"the {direction.value} child of a HybridQuantizer with columnwise_source="
                    f"'rowwise_dequantized_late' {problem}. Use 'rowwise_dequantized'."
                )
        both = [children.get(direction, getattr(self, _name(direction), None)) for direction in Direction]
        if both[0] is both[1] and isinstance(both[0], Quantizer):
            raise ValueError(
                "a HybridQuantizer requires distinct rowwise and columnwise quantizers, two objects, because it sets "
                "the usages of each to one direction: pass a copy() for the other direction"
            )
        for direction, child in children.items():
            setattr(self, _name(direction), child)
            if isinstance(child, Quantizer):
                _pin(child, direction)

    def _quantizer_of(self, direction: Direction) -> Quantizer:
        """The child of a direction, set to make only that direction.

        Raises:
            RuntimeError: the child is still a request.
        """
        child = self.child(direction)
        if not isinstance(child, Quantizer):
            waiting = ", ".join(direction.value for direction in self.pending())
            raise RuntimeError(
                f"this HybridQuantizer cannot quantize: its {waiting} quantizer is a request, which only the state of "
                "a recipe can turn into a quantizer"
            )
        _pin(child, direction)
        return child

    def pending(self) -> dict[Direction, QuantizerRequest]:
        """The children that are still requests, by direction."""
        return {
            direction: child for direction in Direction if isinstance(child := self.child(direction), QuantizerRequest)
        }

    def resolved(self, children: Mapping[Direction, Quantizer]) -> HybridQuantizer:
        """A copy of this hybrid with ``children`` instead of its requests."""
        new = self.copy()
        new._set_children(children)
        return new

    def _wanted(self) -> list[Direction]:
        for direction in Direction:
            self._quantizer_of(direction)  # a request is an error even if its direction is not wanted
        wanted = super()._directions_to_make()
        return [ROWWISE] if self.makes_columns_late and ROWWISE in wanted else wanted

    @property
    def derives_columns(self) -> bool:  # type: ignore[override]
        return self.columnwise_source != "original"

    @property
    def makes_columns_late(self) -> bool:  # type: ignore[override]
        return self.columnwise_source == "rowwise_dequantized_late"

    def plain_quantizers(self) -> list[Any]:
        return [self.rowwise_quantizer, self.columnwise_quantizer]

    def encoding(self, direction: Direction) -> Encoding:
        return self._quantizer_of(direction).encoding(direction)

    # ---- quantizing ----------------------------------------------------------------------------

    def quantize_impl(self, tensor: Tensor) -> Any:
        wanted = self._wanted()
        tensor = self._checked_by_children(tensor, wanted)
        children: dict[Direction, Any] = {}
        if self.derives_columns and COLUMNWISE in wanted:
            row = self._made_child(ROWWISE).quantize_impl(tensor)
            children[ROWWISE] = row if ROWWISE in wanted else None  # it may have been needed only for the columns
            children[COLUMNWISE] = self._made_child(COLUMNWISE).quantize_impl(_decoded_like(row, tensor))
        else:
            children = self._made_together(tensor, wanted)
            self._draw_for_what_is_left_out(wanted)
        if current_pass().hides_gradients:
            row = children.get(ROWWISE) if self.derives_columns else None
            self._show_to_what_is_left_out(tensor if row is None else _decoded_like(row, tensor), children)
        return self._wrap(children, tensor.shape, tensor.dtype, tensor.device)

    def quantized_from_rows(self, row: QuantizedTensorStorage) -> Any:
        """Make a hybrid tensor from an existing rowwise child. The columnwise child, if wanted, is made from it.

        Raises:
            ValueError: ``columnwise_source`` is "original", and the columnwise usage is set.
        """
        wanted = self._wanted()
        if COLUMNWISE in wanted and not self.derives_columns:
            raise ValueError(
                "this HybridQuantizer cannot make the columnwise plane from rows: its columnwise_source is 'original'"
            )
        children: dict[Direction, Any] = {ROWWISE: row}
        if COLUMNWISE in wanted:
            children[COLUMNWISE] = self.columns_from_rows(row)
        else:
            self._draw_for_what_is_left_out(wanted)
        if self.derives_columns and current_pass().hides_gradients:
            self._show_to_what_is_left_out(_decoded_like(row, row), children)
        return self._wrap(children, row.shape, row.dtype, row.device)

    def columns_from_rows(self, row: QuantizedTensorStorage) -> Any:
        """The columnwise child that is made from a decoded rowwise child."""
        return self._made_child(COLUMNWISE).quantize_impl(_decoded_like(row, row))

    def columns_of_plane(self, rows: Plane, dtype: torch.dtype) -> Plane:
        """The columnwise plane that is made from a rowwise plane of a tensor of ``dtype``."""
        made = self._quantizer_of(COLUMNWISE).make_planes(_decoded(rows, dtype), rowwise=False, columnwise=True)
        columns = made.plane(COLUMNWISE)
        assert columns is not None
        return columns

    def make_planes(self, matrix: Tensor, *, rowwise: bool, columnwise: bool) -> PlaneSource:
        row, column = self.rowwise_quantizer, self.columnwise_quantizer
        if not (isinstance(row, Quantizer) and isinstance(column, Quantizer)):
            self._wanted()  # raises: a request is waiting
        if not (self.makes_planes and row.makes_planes and column.makes_planes):
            return self._planes_of_storage(matrix, rowwise, columnwise)
        derives = self.columnwise_source != "original"
        if derives and columnwise:
            return self._derived_planes(matrix, row, column, rowwise)
        made = _planes_made_together(matrix, row if rowwise else None, column if columnwise else None)
        if rowwise and columnwise:
            return made
        wanted = [ROWWISE if rowwise else COLUMNWISE]
        self._draw_for_what_is_left_out(wanted)
        if current_pass().hides_gradients:
            rows = made.rowwise if derives else None
            self._show_to_what_is_left_out(matrix if rows is None else _decoded(rows, matrix.dtype), wanted)
        return made

    def layout_for_step(self, shape: tuple[int, int]) -> Layout | None:
        row, column = self.rowwise_quantizer, self.columnwise_quantizer
        plain = self.makes_planes and self._makes_known_planes() and not self.makes_columns_late
        if not (plain and isinstance(row, Quantizer) and isinstance(column, Quantizer)):
            return None
        rows = row._layout_for_step(shape, ROWWISE)
        columns = None if rows is None else column._layout_for_step(shape, COLUMNWISE)
        if rows is None or columns is None:
            return None
        derives = self.columnwise_source != "original"
        if derives and (rows.stochastic or columns.stochastic):
            return None  # each plane has a seed of its own
        return rows.beside(columns, derives=derives)

    def _derived_planes(self, matrix: Tensor, row: Quantizer, column: Quantizer, rowwise: bool) -> PlanePair:
        """The columnwise plane of the decoded rowwise plane. Both are checked before either is made."""
        column._check_matrix(matrix, rowwise=False, columnwise=True)
        rows = row.make_planes(matrix, rowwise=True, columnwise=False).plane(ROWWISE)
        assert rows is not None
        return PlanePair(rows if rowwise else None, self.columns_of_plane(rows, matrix.dtype))

    def _draw_for_what_is_left_out(self, wanted: Sequence[Direction]) -> None:
        """Draw a seed also for a plane that is not made, so that later seeds do not depend on which planes are made."""
        rounded = [d for d in (ROWWISE, COLUMNWISE) if getattr(self.child(d), "stochastic_rounding", False)]
        left_out = [direction for direction in rounded if direction not in wanted]
        if left_out and (self.derives_columns or len(left_out) == len(rounded)):
            draw_seed(self.child(left_out[0]).subject)

    def _show_to_what_is_left_out(self, tensor: Tensor, made: Collection[Direction]) -> None:
        """In the first pass of a checkpoint, record amaxes also for planes that only its recomputation makes."""
        if not current_pass().hides_gradients:
            return
        for direction in Direction:
            child = self._quantizer_of(direction)
            if direction not in made and type(child).calibrate is not Quantizer.calibrate:
                child.calibrate(tensor)

    def _made_together(self, tensor: Tensor, wanted: Sequence[Direction]) -> dict[Direction, Any]:
        """Make children from the same input, with one call that writes all their planes."""
        quantizers = {direction: self._made_child(direction) for direction in wanted}
        together = [quantizer for quantizer in quantizers.values() if _writes_planes(quantizer)]
        if len(together) < 2:
            return {direction: quantizer.quantize_impl(tensor) for direction, quantizer in quantizers.items()}
        first, second = together
        layout = first._layout_by_usages(tensor).beside(second._layout_by_usages(tensor))
        planes = iter(make_planes(as_matrix(tensor), layout, together))
        return {
            direction: quantizer._holding(list(islice(planes, count)), tensor.shape, tensor.dtype)
            for (direction, quantizer), count in zip(quantizers.items(), layout.counts, strict=True)
        }

    def _made_child(self, direction: Direction) -> Quantizer:
        """The child of a direction, set to make a storage if the hybrid makes one."""
        child = self._quantizer_of(direction)
        if self.internal and not child.internal:
            child = child.copy()
            child.internal = True
        return child

    def _wrap(self, children: Mapping[Direction, Any], shape: Sequence[int], dtype: torch.dtype, device: Any) -> Any:
        row, column = children.get(ROWWISE), children.get(COLUMNWISE)
        storage: dict[str, Any] = {"rowwise_storage": row, "columnwise_storage": column, "quantizer": self}
        if self.internal:
            made: Any = HybridQuantizedTensorStorage(**storage, fake_dtype=dtype, shape=shape)
        else:
            made = HybridQuantizedTensor(shape, dtype, device=device, **storage)
        for child in children.values():
            if child is not None and child._quantizer is not None:
                child._quantizer.leave_group()
        return made

    def _checked_by_children(self, tensor: Any, wanted: Sequence[Direction]) -> Tensor:
        if isinstance(tensor, QuantizedTensorStorage):
            tensor = tensor.dequantize()
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{type(self).__name__} can only quantize tensors, got {type(tensor).__name__}")
        for direction in Direction if self.derives_columns and COLUMNWISE in wanted else wanted:
            child = self._quantizer_of(direction)
            if not child.custom:
                child._checked(tensor, child._directions_to_make())
        return tensor

    def update_quantized(self, src: Any, dst: Any, *, noop_flag: Tensor | None = None) -> Any:
        """Quantize a tensor into an existing hybrid tensor, in place. All its children are written.

        In strict mode only children whose usage is set are written, as in Transformer Engine. The other one is stale
        then: reading it raises. See `Quantizer.update_quantized`.
        """
        if not isinstance(dst, HybridQuantizedTensorStorage):
            raise ValueError(f"HybridQuantizer can only write to a hybrid tensor, got a {type(dst).__name__}")
        if is_set(noop_flag):
            return dst
        children = dst._children()
        if not any(dst.get_usages().values()):
            raise RuntimeError(f"this {type(dst).__name__} of shape {list(dst.shape)} has no planes to write to")
        if isinstance(src, QuantizedTensorStorage):
            src = src.dequantize()
        self._check_source(src, children)
        if src.shape != dst.shape or src.device != dst.device:
            raise ValueError(
                f"HybridQuantizer: cannot write a tensor of shape {list(src.shape)} on {src.device} to a "
                f"{type(dst).__name__} of shape {list(dst.shape)} on {dst.device}"
            )
        self.check_writable(dst)
        with undone_if_set(noop_flag, dst, self):
            if settings.strict and (unused := [d for d in children if not self.get_usages()[d.value]]):
                self._write_in_use(src, dst, unused)
                return dst
            with dst._writing():
                self._write_children(dst._apart_from(src.detach()), children)
        return dst

    def _write_in_use(self, src: Tensor, dst: Any, unused: Sequence[Direction]) -> None:
        """Write all children but ``unused``, which are stale from then on."""
        written = {direction: child for direction, child in dst._children().items() if direction not in unused}
        self._write_children(dst._apart_from(src.detach()), written)
        for child in written.values():
            child._mark_written()

    def _check_source(self, src: Any, children: Mapping[Direction, QuantizedTensorStorage]) -> None:
        self._wanted()
        if not isinstance(src, Tensor):
            raise TypeError(f"{type(self).__name__} can only quantize tensors, got {type(src).__name__}")
        for direction, storage in children.items():
            child = self._quantizer_of(direction)
            if not child.custom:
                child._checked(src, child._directions_to_make(), storage._plane_tensor_shape())

    def _can_write_alone(self, children: Mapping[Direction, QuantizedTensorStorage]) -> bool:
        """Whether ``children`` can be written while bytes are copied to the others."""
        if self.derives_columns and ROWWISE in children:
            return False
        self._check_children_writable(children)
        return True

    def _write_children(self, src: Tensor, children: Mapping[Direction, QuantizedTensorStorage]) -> None:
        """Write ``src``, which is already checked, to children of a hybrid tensor."""
        if self.derives_columns and COLUMNWISE in children:
            row = children.get(ROWWISE)
            if row is None:
                matrix = src.reshape(tuple(children[COLUMNWISE]._plane_tensor_shape()))
                row = self._quantizer_of(ROWWISE).quantize_impl(matrix)
            else:
                self._write_together(src, {ROWWISE: row})
                row._mark_written()  # if writing the column fails, it is known to be stale
            # In the dtype of the tensor, as when it was made: what is copied in may be of another.
            src = row.dequantize(dtype=children[COLUMNWISE].dtype).detach().reshape(src.shape)
            children = {COLUMNWISE: children[COLUMNWISE]}
        self._write_together(src, children)

    def _write_together(self, src: Tensor, children: Mapping[Direction, QuantizedTensorStorage]) -> None:
        """Write children. Steps that can fail come first; a copy to an identity child cannot fail and comes last."""
        jobs, written, kept = [], [], []
        for direction, storage in children.items():
            quantizer = self._quantizer_of(direction)
            if quantizer.custom:
                quantizer.update_quantized(src, storage)
                storage._mark_written()
            elif _writes_planes(quantizer):
                jobs.append(Job(quantizer, quantizer._in_own_formats(storage.planes())))
                written.append(storage)
            else:
                kept.append(storage)
        _write_matrix(src, jobs)
        for job, storage in zip(jobs, written, strict=True):
            job.quantizer._note_formats(storage, job.planes)
        for storage in kept:
            storage.quantize_(src)  # through to its buffer, which aliases share

    def check_writable(self, dst: QuantizedTensorStorage) -> None:
        children = dst._children()  # type: ignore[attr-defined]
        self._check_children_writable(children)
        if self.derives_columns and list(children) == [COLUMNWISE]:  # they are made from rows, which must be possible
            row = self._quantizer_of(ROWWISE)
            if not row.custom:
                row._check_shape(children[COLUMNWISE]._plane_tensor_shape(), [ROWWISE])

    def _check_children_writable(self, children: Mapping[Direction, QuantizedTensorStorage]) -> None:
        for direction, storage in children.items():
            child = self._quantizer_of(direction)
            if child.custom:
                continue
            if not isinstance(storage, child._tensor_class._storage_class()):
                raise ValueError(
                    f"the {direction.value} child of this hybrid tensor of shape {list(storage.shape)} is a "
                    f"{type(storage).__name__}, which {type(child).__name__} cannot write to"
                )
            child.check_writable(storage)

    def _made(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, pin_memory: bool = False) -> Any:
        children = {}
        for direction in self._wanted():
            child = self._made_child(direction)
            make = child.make_empty if child.custom else child._made  # custom quantizers implement make_empty
            children[direction] = make(shape, dtype=dtype, device=device, pin_memory=pin_memory)
        return self._wrap(children, shape, dtype, device)

    def _directions_to_make(self) -> list[Direction]:
        return self._wanted()

    def _check_shape(self, shape: Sequence[int], directions: Sequence[Direction]) -> None:
        for direction in directions:
            child = self._quantizer_of(direction)
            if not child.custom:
                child._check_shape(shape, [direction])

    # ---- properties ----------------------------------------------------------------------------

    @property
    def with_amax_reduction(self) -> bool:
        """Whether a child reduces its amax. Setting it sets all children that can."""
        return any(child.with_amax_reduction for child in self._reducing_children())

    @with_amax_reduction.setter
    def with_amax_reduction(self, value: bool) -> None:
        for child in self._reducing_children():
            child.with_amax_reduction = value

    @property
    def amax_reduction_group(self) -> Any:
        """The process group over which the children reduce their amaxes. Setting it sets all children that can."""
        groups = [child.amax_reduction_group for child in self._reducing_children()]
        if any(group is not groups[0] for group in groups):
            raise RuntimeError(
                "the children of this HybridQuantizer reduce their amaxes over different groups; read "
                "amax_reduction_group of each child"
            )
        return groups[0] if groups else None

    @amax_reduction_group.setter
    def amax_reduction_group(self, group: Any) -> None:
        for child in self._reducing_children():
            child.amax_reduction_group = group

    def _reducing_children(self) -> list[Any]:
        """The children that can reduce amaxes: they have set the attribute."""
        return [child for direction in Direction if "amax_reduction_group" in vars(child := self.child(direction))]

    def reducing(self, group: Any, *, axis: int, segments: Sequence[int] = ()) -> Self:
        new = self.copy()
        for direction in Direction:
            child = new._quantizer_of(direction)
            setattr(new, _name(direction), child.reducing(group, axis=axis, segments=segments))
        return new

    def same_on(self, group: Any) -> Self:
        new = self.copy()
        for direction in Direction:
            setattr(new, _name(direction), new._quantizer_of(direction).same_on(group))
        return new

    def leave_group(self) -> None:
        for direction in Direction:
            child = self.child(direction)
            if isinstance(child, Quantizer):
                child.leave_group()

    def copy(self) -> Self:
        new = super().copy()
        for direction in Direction:
            child = self.child(direction)
            if isinstance(child, Quantizer):
                setattr(new, _name(direction), child.copy())
        return new

    def calibrate(self, tensor: Tensor) -> None:
        for direction in self._wanted():
            self._quantizer_of(direction).calibrate(tensor)

    def is_quantizable(self, inp: Tensor) -> bool:
        return all(self._quantizer_of(direction).is_quantizable(inp) for direction in Direction)

    def supports_only_rowwise_all_gather(self) -> bool:
        row = self._quantizer_of(ROWWISE)
        return row.supports_only_rowwise_all_gather() or isinstance(self.columnwise_quantizer, NVFP4Quantizer)

    def is_requantization_safe(self) -> bool:
        needed = set(self._wanted())
        if self.derives_columns and COLUMNWISE in needed:
            needed.add(ROWWISE)
        return all(self._quantizer_of(direction).is_requantization_safe() for direction in needed)


def _name(direction: Direction) -> str:
    return f"{direction.value}_quantizer"


def _pin(child: Quantizer, direction: Direction) -> None:
    rowwise = direction is ROWWISE
    if child.rowwise_usage is not rowwise or child.columnwise_usage is rowwise:
        child.set_usage(rowwise=rowwise, columnwise=not rowwise)


def _why_not_late(child: Any, direction: Direction) -> str | None:
    """Why columns could have other bytes if they were made later; None if they could not."""
    if isinstance(child, Quantizer) and child.custom:
        return f"is a {type(child).__name__}, a custom quantizer, of which it is not known that it makes planes"
    if direction is COLUMNWISE and (isinstance(child, QuantizerRequest) or child.statistics()):
        return "has a history of amaxes, which the tensors in between would change"
    if direction is COLUMNWISE and getattr(child, "stochastic_rounding", False):
        return "rounds stochastically, with random numbers that are drawn when the tensor is quantized"
    return None


def rounds_stochastically(quantizer: Quantizer) -> bool:
    """Whether a quantizer rounds stochastically in any direction, also in one that is not used."""
    if isinstance(quantizer, HybridQuantizer):
        return any(rounds_stochastically(quantizer._quantizer_of(direction)) for direction in Direction)
    return bool(getattr(quantizer, "stochastic_rounding", False))


def _writes_planes(quantizer: Quantizer) -> bool:
    """Whether kernels write the planes of a quantizer: not those of custom and identity quantizers."""
    return not quantizer.custom and not isinstance(quantizer, IdentityQuantizer)


def _decoded_like(row: QuantizedTensorStorage, tensor: Tensor | QuantizedTensorStorage) -> Tensor:
    return row.dequantize(dtype=tensor.dtype).detach()


def _decoded(plane: Plane, dtype: torch.dtype) -> Tensor:
    """The decoded numbers of a plane."""
    return plane.data.to(dtype) if plane.format.is_identity else kernels.decode(plane, dtype)


def _planes_made_together(matrix: Tensor, row: Quantizer | None, column: Quantizer | None) -> PlanePair:
    """The rowwise plane of one quantizer and the columnwise plane of another, of the same matrix."""
    if row is None or column is None or isinstance(row, IdentityQuantizer) or isinstance(column, IdentityQuantizer):
        # Nothing is encoded together.
        rows = None if row is None else row.make_planes(matrix, rowwise=True, columnwise=False).plane(ROWWISE)
        made = None if column is None else column.make_planes(matrix, rowwise=False, columnwise=True)
        return PlanePair(rows, None if made is None else made.plane(COLUMNWISE))
    layout = row._layout(matrix, True, False).beside(column._layout(matrix, False, True))
    rows, columns = make_planes(matrix.detach(), layout, (row, column))
    return PlanePair(rows, columns.read(COLUMNWISE))  # a buffer for both directions is made as a rowwise plane


def _write_matrix(src: Tensor, jobs: Sequence[Job]) -> None:
    if jobs:
        with torch.no_grad():
            write_planes(src.detach().reshape(jobs[0].planes[0].shape), jobs)
