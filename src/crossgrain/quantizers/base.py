"""`Quantizer`: the base class of all quantizers.

A quantizer has options, and usages: the directions in which it quantizes. The module of each format says how the bytes
of each direction are chosen, and which classes hold the result. Measuring, reducing, encoding, checking and allocating
are here, for all formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from ..formats.dtypes import HIGH_PRECISION
from ..formats.encoding import Encoding
from ..kernels import GroupedTarget, Target
from ..planes import (
    COLUMNWISE,
    ROWWISE,
    Direction,
    Plane,
    PlanePair,
    PlaneSource,
    empty_plane,
    scale_shape,
    shape_problem,
)
from ..runtime.devices import resolved_device
from ..runtime.settings import settings
from ..runtime.transforms import refuse_transforms
from ..tensor.autograd import QuantizeFunction
from ..tensor.storage import QuantizedTensorStorage
from ..tensor.tensor import QuantizedTensor
from .amax_reduction import AmaxReduction
from .data_free import DataFree
from .nonfinite import Policy
from .noop_flag import is_set, undone_if_set
from .subject import NO_SUBJECT, Subject
from .writing import Job, Layout, as_matrix, make_planes, plane_spec, write_planes

AnyTarget = TypeVar("AnyTarget", Target, GroupedTarget)

_NO_OPTIONS = frozenset(("rowwise_usage", "columnwise_usage", "internal", "optimize_for_gemm", "nonfinite", "subject"))
_OF_ITS_LAYER = frozenset(("_memo", "nonfinite", "subject"))  # not saved: a layer gives them to its quantizers again
_UNKNOWN: Any = object()
_MOST_LAYOUTS = 256  # a quantizer caches what it computed for so many shapes, so that many shapes do not fill memory


class Quantizer(AmaxReduction, DataFree):
    """Base class of quantizers, which make quantized tensors of one format.

    Args:
        rowwise: make rowwise planes.
        columnwise: make columnwise planes.

    Attributes:
        rowwise_usage: make rowwise planes. Change it with `set_usage`.
        columnwise_usage: make columnwise planes. Change it with `set_usage`.
        internal: return a storage (planes without a torch.Tensor around them) instead of a tensor.
        optimize_for_gemm: the result is only used in GEMMs. It has no effect here.
        with_amax_reduction: use the largest amax over the ranks of ``amax_reduction_group``.
        amax_reduction_group: a process group, or a tuple of groups over each of which amaxes are reduced. None for all
            ranks.
        amax_reduction_axis: the axis along which ranks divide a tensor (0: rows, 1: columns). None if they share
            all its amaxes.
        part: which part of a tensor the ranks of a group quantize with the random numbers of the whole; see `Part`.
        nonfinite: what to do about NaNs and infinities (see `quantizers.nonfinite`); None for what `settings` say.
        subject: which tensor of which layer the quantizer is for; empty if no layer has made it.

    Examples:
        >>> quantizer = cg.quantizer_for("mxfp8")
        >>> isinstance(quantizer, cg.Quantizer)
        True
        >>> quantizer.set_usage(columnwise=False)
        >>> quantizer(torch.ones(32, 32)).plane(cg.COLUMNWISE) is None
        True
    """

    _tensor_class: ClassVar[type[QuantizedTensor]]
    _value_fields: ClassVar[tuple[str, ...] | None] = None  # options that == compares; None: only identity counts
    _compatible_recipe: ClassVar[type[Any]]  # set by `recipe.compatibility`, which knows the recipes
    custom: ClassVar[bool] = False
    _observes: ClassVar[bool] = False  # whether `_observe_all` has anything to do
    gives_scales: bool = False  # whether `_given` may return something
    nonfinite: Policy | None = "saturate"
    subject: Subject = NO_SUBJECT
    derives_columns: bool = False  # columnwise planes are made from decoded rowwise planes, not from the input
    makes_columns_late: bool = False  # and only when they are read

    makes_planes: ClassVar[bool]  # False for quantizers of users, whose `quantize_impl` may return something else
    _known_make_planes: ClassVar[Any]  # `make_planes` as crossgrain has it; None if a user has defined another one

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        hooks = (cls.quantize, cls.quantize_impl, cls.make_quantized)
        own = all(hook.__module__.startswith(f"{__package__}.") for hook in hooks)
        cls.makes_planes = own and not cls.custom
        cls._known_make_planes = cls.make_planes if cls.make_planes.__module__.startswith(f"{__package__}.") else None
        order = [vars(each) for each in cls.__mro__]
        gives, says = (next(i for i, own in enumerate(order) if name in own) for name in ("_given", "gives_scales"))
        if gives < says:  # what is said belongs to another `_given`
            cls.gives_scales = True

    _memo: dict[Any, Any]
    rowwise_usage: bool
    columnwise_usage: bool
    internal: bool
    optimize_for_gemm: bool

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self._memo = {}
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise
        self.internal = False
        self.optimize_for_gemm = False

    # What follows from the options is cached in `_memo` and dropped when an option changes. Copies share the cache
    # until one of them changes an option: that one then gets a new cache.

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in ("quantize", "quantize_impl"):  # of this object alone: it may do anything
            object.__setattr__(self, "makes_planes", False)
        if name not in _NO_OPTIONS:
            object.__setattr__(self, "_memo", {})

    def encoding(self, direction: Direction) -> Encoding:
        """How the bytes of one direction are chosen: the format, the rounding and so on."""
        memo = self._memo  # another thread may change an option meanwhile, which makes a new one
        found: Encoding | None = memo.get(direction)
        if found is None:
            found = memo[direction] = self._encoding(direction)
        return found

    # ---- what a format provides ----------------------------------------------------------------

    def _encoding(self, direction: Direction) -> Encoding:
        """The encoding of one direction for the current options."""
        raise NotImplementedError

    def _stores_transposed(self, direction: Direction) -> bool:
        return direction is COLUMNWISE and self.encoding(direction).format.transposes

    def _directions_to_make(self) -> list[Direction]:
        """The planes to allocate for the current usages."""
        return self._planes_to_make(self.rowwise_usage, self.columnwise_usage)

    def _planes_to_make(self, rowwise: bool, columnwise: bool) -> list[Direction]:
        """The planes to make for these directions. One plane may be enough for both."""
        return [direction for direction, wanted in ((ROWWISE, rowwise), (COLUMNWISE, columnwise)) if wanted]

    def directions_served(self, planes: Sequence[Plane]) -> list[tuple[Direction, ...]]:
        """The directions in which each of the planes of a tensor is read, for the current usages."""
        directions = [plane.direction for plane in planes]
        whole = len(self._planes_to_make(True, True)) == 1
        asked = Quantizer._planes_to_make(self, self.rowwise_usage, self.columnwise_usage) if whole else directions
        return _served(directions, asked)

    def _targets(self, planes: Iterable[Plane]) -> list[Target]:
        """The targets that kernels fill."""
        amax, scale = self._given()
        return [Target(plane, self.encoding(plane.direction), amax, scale) for plane in planes]

    def _given(self) -> tuple[Tensor | None, Tensor | None]:
        """An amax and a scale to use instead of those of the input; None where the input decides."""
        return None, None

    def _move_statistics(self, device: torch.device) -> None:
        """Move what the quantizer keeps of its inputs to a device. Most quantizers keep nothing."""

    def _observe(self, targets: Sequence[Target]) -> None:
        self._observe_all([self], targets)

    @classmethod
    def _observe_all(cls, quantizers: Sequence[Any], targets: Sequence[Target] | Sequence[GroupedTarget]) -> None:
        """Called with the measured amaxes: one for each of ``quantizers``."""

    def _refuse_in_strict_mode(self, tensor: Tensor, directions: Sequence[Direction]) -> None:
        """Raise if Transformer Engine refuses an input that crossgrain can quantize."""

    # ---- quantizing ----------------------------------------------------------------------------

    def quantize(
        self, tensor: Tensor, *, out: QuantizedTensorStorage | None = None, dtype: torch.dtype | None = None
    ) -> Any:
        """Quantize a tensor in the directions of the current usages.

        The gradient of a tensor passes through unchanged. A storage has no gradient.

        Args:
            tensor: a float32, bfloat16 or float16 tensor, or a quantized tensor, which is decoded first.
            out: write to the planes of this tensor instead (see `update_quantized`).
            dtype: nominal dtype of the result: what `dequantize` returns. By default that of ``tensor``.

        Returns:
            A quantized tensor; a storage if ``internal``; ``out`` if it is given.

        Raises:
            TypeError: ``tensor`` is not a tensor of one of these dtypes.
            ValueError: the shape cannot be quantized in this format, or no usage is set.
        """
        refuse_transforms(type(self).__name__)
        if out is not None:
            return self.update_quantized(tensor, out)
        if torch.is_grad_enabled() and not self.internal and getattr(tensor, "requires_grad", False):
            return QuantizeFunction.apply(tensor, self, dtype)
        return self.make_quantized(tensor, dtype)

    def __call__(self, tensor: Tensor, *, out: QuantizedTensorStorage | None = None) -> Any:
        """The same as `quantize`."""
        return self.quantize(tensor, out=out)

    def plain_quantizers(self) -> list[Any]:
        """The quantizers of one format that this one consists of: itself, or the two children of a hybrid."""
        return [self]

    def multi_quantize(self, list_of_tensors: Sequence[Tensor]) -> list[Any]:
        """Quantize several tensors."""
        return [self.quantize(tensor) for tensor in list_of_tensors]

    def make_quantized(self, tensor: Tensor, dtype: torch.dtype | None) -> Any:
        """`quantize` without autograd."""
        result = self.quantize_impl(tensor)
        if dtype is not None and dtype != result.dtype:
            if dtype not in HIGH_PRECISION:
                raise TypeError(
                    f"{type(self).__name__}: the nominal dtype of a quantized tensor must be float32, bfloat16 or "
                    f"float16, got {dtype}"
                )
            result = result._rewrap(dtype=dtype)
        if result._quantizer is not None:
            result._quantizer.leave_group()
        return result

    def quantize_impl(self, tensor: Tensor) -> Any:
        """Quantize without autograd. Custom quantizers override this method."""
        tensor = self._as_plain(tensor)
        planes = make_planes(as_matrix(tensor), self._layout_by_usages(tensor), (self,))
        return self._holding(planes, tensor.shape, tensor.dtype)

    def make_planes(self, matrix: Tensor, *, rowwise: bool, columnwise: bool) -> PlaneSource:
        """Quantize a matrix to planes, without a tensor around them and without autograd.

        Args:
            matrix: the matrix [M, K].
            rowwise: make a rowwise plane. The usages of the quantizer do not matter.
            columnwise: make a columnwise plane.

        Returns:
            The planes. A quantizer of a user may return something else that has planes.
        """
        if not self.makes_planes:
            return self._planes_of_storage(matrix, rowwise, columnwise)
        planes = make_planes(matrix.detach(), self._layout(matrix, rowwise, columnwise), (self,))
        if len(planes) == 2:
            return PlanePair(*planes)
        (plane,) = planes
        if rowwise and columnwise:  # one buffer serves both
            return PlanePair(plane, plane.read(COLUMNWISE))
        return PlanePair(plane, None) if rowwise else PlanePair(None, plane.read(COLUMNWISE))

    def layout_for_step(self, shape: tuple[int, int]) -> Layout | None:
        """Both planes of a matrix, for a plan of a whole layer; None if `make_planes` does more than to write them.

        Amaxes that are given or agreed on with ranks, and planes of users, are not for such plans. A given scale is:
        `scale_for_step` returns it.
        """
        return self._layout_for_step(shape, None)

    def _layout_for_step(self, shape: tuple[int, int], only: Direction | None) -> Layout | None:
        """`layout_for_step` for both directions, or for one. Computed once for each shape."""
        if not self._makes_known_planes():
            return None
        has_hooks = type(self)._observes or self.gives_scales
        if has_hooks and (only is not None or not self._records_numbers()):
            return None
        key = "step", only, shape, settings.non_tn_fp8_gemm, settings.compute_capability
        memo = self._memo  # see `encoding`
        found: Layout | None = memo.get(key, _UNKNOWN)
        if found is not _UNKNOWN:
            return found
        layout = None
        if self._only_writes():
            layout = self._layout_for(shape, only is not COLUMNWISE, only is not ROWWISE)
            wanted = [ROWWISE, COLUMNWISE] if only is None else [only]
            if [way for serves in layout.serves for way in serves] != wanted:
                layout = None
        if len(memo) >= _MOST_LAYOUTS:
            memo.clear()
        memo[key] = layout
        return layout

    def _makes_known_planes(self) -> bool:
        """Whether `make_planes` is crossgrain's own. A user may replace it at any time, in a class or in an object."""
        cls = type(self)
        return cls.make_planes is cls._known_make_planes and "make_planes" not in self.__dict__

    def _only_writes(self) -> bool:
        """Whether `make_planes` writes planes and does nothing else. All that it depends on are options."""
        gives_more = self.gives_scales and self.scale_for_step() is None
        more = self.with_amax_reduction or self.part is not None or gives_more
        return self.makes_planes and not more

    def scale_for_step(self) -> Tensor | None:
        """The scale by which the planes of `layout_for_step` are multiplied; None if it follows from the matrix."""
        return None

    def _records_numbers(self) -> bool:
        """Whether `record` and `scale_for_step` do what `_observe` and `_given` do. A user may replace any of them."""
        return False

    def record(self, amax: float, scale: float) -> None:
        """Record what others have measured for this quantizer: an amax, and the scale that was used."""
        raise NotImplementedError(f"{type(self).__name__} records no numbers")

    def _planes_of_storage(self, matrix: Tensor, rowwise: bool, columnwise: bool) -> PlaneSource:
        """The result of a user's quantizer."""
        made: PlaneSource = self.storing(rowwise=rowwise, columnwise=columnwise).quantize(matrix)
        return made

    def _check_matrix(self, matrix: Tensor, *, rowwise: bool, columnwise: bool) -> None:
        """Raise what `make_planes` would raise."""
        self._layout(matrix, rowwise, columnwise)

    def _layout(self, tensor: Tensor, rowwise: bool, columnwise: bool) -> Layout:
        """The planes to make for a tensor, which is checked."""
        layout = self._layout_for(tensor.shape, rowwise, columnwise)
        if tensor.dtype not in HIGH_PRECISION:
            self._as_plain(tensor)
        if settings.strict:
            self._refuse_in_strict_mode(tensor, [spec.direction for spec in layout.specs])
        return layout

    def _layout_by_usages(self, tensor: Tensor) -> Layout:
        return self._layout(tensor, self.rowwise_usage, self.columnwise_usage)

    def _layout_for(self, shape: Sequence[int], rowwise: bool, columnwise: bool) -> Layout:
        """The planes to make for tensors of ``shape``, which is checked. Computed once for each shape."""
        shape = tuple(shape)
        key = (shape, rowwise, columnwise, settings.strict, settings.non_tn_fp8_gemm, settings.compute_capability)
        memo = self._memo  # see `encoding`
        layout: Layout | None = memo.get(key)
        if layout is not None:
            return layout
        directions = self._planes_to_make(rowwise, columnwise)
        self._check_shape(shape, directions)
        asked = Quantizer._planes_to_make(self, rowwise, columnwise)
        specs = [
            plane_spec(self.encoding(d), d, self._stores_transposed(d), shape, serves)
            for d, serves in zip(directions, _served(directions, asked), strict=True)
        ]
        if len(memo) >= _MOST_LAYOUTS:
            memo.clear()
        layout = memo[key] = Layout([(type(self), specs)])
        return layout

    def update_quantized(self, src: Tensor, dst: Any, *, noop_flag: Tensor | None = None) -> Any:
        """Quantize a tensor into an existing quantized tensor, in place.

        All planes that ``dst`` has are written; the usages of the quantizer do not matter.

        Args:
            src: the new values.
            dst: the tensor or storage to write to.
            noop_flag: a float32 tensor with one number; if it is not zero, nothing is written.

        Returns:
            ``dst``.

        Raises:
            ValueError: ``dst`` is of another class, shape, device or format.
            RuntimeError: ``dst`` has no planes.
        """
        if not isinstance(dst, self._tensor_class._storage_class()):
            raise ValueError(
                f"{type(self).__name__} can only write to a {self._tensor_class.__name__}, got a {type(dst).__name__}"
            )
        if noop_flag is not None and is_set(noop_flag):
            return dst
        planes = dst.planes()
        if not planes:
            raise RuntimeError(f"this {type(dst).__name__} of shape {list(dst.shape)} has no planes to write to")
        src = self._checked(src, [plane.direction for plane in planes], dst._plane_tensor_shape())
        if src.shape != dst.shape or src.device != dst.device:
            raise ValueError(
                f"{type(self).__name__}: cannot write a tensor of shape {list(src.shape)} on {src.device} to a "
                f"{type(dst).__name__} of shape {list(dst.shape)} on {dst.device}"
            )
        with nullcontext() if noop_flag is None else undone_if_set(noop_flag, dst, self):
            self.encode_planes(src, dst, planes)
        return dst

    def encode_planes(self, src: Tensor, dst: QuantizedTensorStorage, planes: Sequence[Plane]) -> None:
        """Write ``src`` to some planes of ``dst``. All of them are checked before anything is written."""
        for plane in planes:
            self._check_fits(plane, dst)
        self._write(src, dst, self._in_own_formats(planes))
        dst._mark_written()
        self._note_formats(dst, planes)

    def _in_own_formats(self, planes: Sequence[Plane]) -> list[Plane]:
        return [replace(plane, format=self.encoding(plane.direction).format) for plane in planes]

    def _note_formats(self, dst: QuantizedTensorStorage, planes: Sequence[Plane]) -> None:
        """Record that planes are now in the formats of this quantizer, also for aliases, which read the same bytes."""
        dst._formats.update({plane.direction: self.encoding(plane.direction).format for plane in planes})

    def _write(self, src: Tensor, dst: QuantizedTensorStorage, planes: Sequence[Plane]) -> None:
        """Measure, reduce and encode. Planes are in the formats of this quantizer."""
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            write_planes(src.detach().reshape(dst._matrix), [Job(self, planes)])

    def check_writable(self, dst: QuantizedTensorStorage) -> None:
        """Raise ValueError if `update_quantized` cannot write to every plane of ``dst``."""
        for plane in dst.planes():
            self._check_fits(plane, dst)

    def _check_fits(self, plane: Plane, dst: QuantizedTensorStorage) -> None:
        fmt = self.encoding(plane.direction).format
        if plane.scale_across(dst._cut_axes) is not None:
            dst._refuse_slice_write(plane)
        if fmt == plane.format:
            return
        shape = dst._plane_tensor_shape()
        like = empty_plane(fmt, plane.direction, shape, device=torch.device("meta"), transposed=plane.transposed)
        buffers = ((like.data, plane.data), (like.scale, plane.scale), (like.amax, plane.amax))
        fits = all(
            (wanted is None) == (have is None) and (wanted is None or have is None or wanted.shape == have.shape)
            for wanted, have in buffers
        )
        # A slice cannot get a new format: its scales have no padding, and the rest of its tensor keeps the old one.
        if dst._cut_axes or not fits:
            raise ValueError(
                f"{type(self).__name__}: the {plane.direction.value} plane of this {type(dst).__name__} of shape "
                f"{list(dst._shape)} is in the format {plane.format.name} and cannot be rewritten as {fmt.name}"
            )

    def get_scale_shape(self, shape: Sequence[int], columnwise: bool) -> tuple[int, ...]:
        """Shape of the scale buffer of one direction, including padding."""
        direction = COLUMNWISE if columnwise else ROWWISE
        return scale_shape(self.encoding(direction).format, direction, shape, self._stores_transposed(direction))

    def calibrate(self, tensor: Tensor) -> None:
        """Record the amax of a tensor without quantizing it. Quantizers that keep no statistics do nothing."""

    def statistics(self) -> list[Tensor]:
        """The tensors with amaxes and scales of earlier steps, from which the next scales follow; written in place."""
        return []

    # ---- checks --------------------------------------------------------------------------------

    def is_quantizable(self, inp: Tensor) -> bool:
        """Whether the shape divides into whole blocks in both directions."""
        return not any(self._block_problem(direction, inp.shape) for direction in Direction)

    def _block_problem(self, direction: Direction, shape: Sequence[int]) -> str | None:
        return shape_problem(replace(self.encoding(direction).format, ragged=False), direction, shape)

    def _checked(self, tensor: Any, directions: Sequence[Direction], shape: Sequence[int] | None = None) -> Tensor:
        """Return ``tensor`` as a plain tensor, checked that it can be quantized in ``directions``."""
        tensor = self._as_plain(tensor)
        assert isinstance(tensor, Tensor)
        self._check_shape(tensor.shape if shape is None else shape, directions)
        if settings.strict:
            self._refuse_in_strict_mode(tensor, directions)
        return tensor

    def _as_plain(self, tensor: Tensor | QuantizedTensorStorage) -> Tensor:
        if isinstance(tensor, QuantizedTensorStorage):
            tensor = tensor.dequantize()
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{type(self).__name__} can only quantize tensors, got {type(tensor).__name__}")
        if tensor.dtype not in HIGH_PRECISION:
            raise TypeError(
                f"{type(self).__name__} can only quantize float32, bfloat16 and float16 tensors, got {tensor.dtype}"
            )
        return tensor

    def _check_shape(self, shape: Sequence[int], directions: Sequence[Direction]) -> None:
        if not directions:
            raise ValueError(
                f"{type(self).__name__}: neither rowwise nor columnwise usage is set, so there is nothing to make. "
                "Call set_usage(rowwise=True), columnwise=True or both"
            )
        for direction in directions:
            fmt = self.encoding(direction).format
            problem = shape_problem(fmt, direction, shape)
            if problem is None and settings.strict and not fmt.ragged:
                problem = self._block_problem(ROWWISE, shape) or self._block_problem(COLUMNWISE, shape)
            if problem:
                raise ValueError(
                    f"{type(self).__name__}: cannot quantize a tensor of shape {list(shape)} {direction.value} as "
                    f"{fmt.name}: {problem}"
                )

    # ---- allocation ----------------------------------------------------------------------------

    def make_empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> Any:
        """Make a quantized tensor with uninitialised planes, for the current usages.

        Args:
            shape: shape of the tensor.
            dtype: nominal dtype: what `dequantize` returns.
            device: the device.
            requires_grad: whether the tensor requires gradients.
            pin_memory: allocate buffers in pinned memory.

        Raises:
            NotImplementedError: a custom quantizer does not override this method.
            TypeError: ``dtype`` is not float32, bfloat16 or float16.
            ValueError: the shape cannot be quantized in this format, or a storage is asked to require gradients.
        """
        name = type(self).__name__
        if self.custom:
            raise NotImplementedError(f"{name} is a custom quantizer and does not implement make_empty")
        if requires_grad and self.internal:
            raise ValueError(f"{name}: requires_grad=True cannot be used with internal=True: a storage has no gradient")
        if dtype not in HIGH_PRECISION:
            raise TypeError(
                f"{name}: the nominal dtype of a quantized tensor must be float32, bfloat16 or float16, got {dtype}"
            )
        device = resolved_device(device)
        self._check_shape(shape, self._directions_to_make())
        made = self._made(shape, dtype, device, pin_memory=pin_memory)
        return made.requires_grad_(True) if requires_grad else made

    def _made(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, pin_memory: bool = False) -> Any:
        """A storage or tensor for the current usages, with uninitialised planes."""
        made = self._blank(shape, dtype, device)
        for spec in self._layout_for(shape, self.rowwise_usage, self.columnwise_usage).specs:
            options: Any = {"device": device, "transposed": spec.transposed, "pin_memory": pin_memory}
            made._set_plane(spec.direction, empty_plane(spec.encoding.format, spec.direction, shape, **options))
        return made

    def _blank(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
        """A storage or tensor without planes."""
        cls: Any = self._tensor_class
        if self.internal:
            cls = cls._storage_class()
            made = object.__new__(cls)
        else:
            made = cls._wrapper(shape, dtype, device)
        formats = {ROWWISE: self.encoding(ROWWISE).format, COLUMNWISE: self.encoding(COLUMNWISE).format}
        made._init_common(formats, self, dtype, shape, [None] * len(cls._buffer_names))
        return made

    def _holding(self, planes: Sequence[Plane], shape: Sequence[int], dtype: torch.dtype) -> Any:
        """A storage or tensor with existing planes in the formats of this quantizer."""
        made = self._blank(shape, dtype, planes[0].data.device)
        for plane in planes:
            made._set_plane(plane.direction, plane)
        made._quantizer.leave_group()
        return made

    # ---- usages and properties -----------------------------------------------------------------

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Choose in which directions to quantize. None leaves a direction as it is."""
        if rowwise is not None:
            self.rowwise_usage = rowwise
        if columnwise is not None:
            self.columnwise_usage = columnwise

    def get_usages(self) -> dict[str, bool]:
        """In which directions the quantizer quantizes: ``{"rowwise": ..., "columnwise": ...}``."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def copy(self) -> Self:
        """A shallow copy with its own usages."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def storing(self, *, rowwise: bool, columnwise: bool) -> Self:
        """A copy that makes storages with these directions."""
        new = self.copy()
        new.__dict__.update(rowwise_usage=rowwise, columnwise_usage=columnwise, internal=True)
        return new

    def supports_only_rowwise_all_gather(self) -> bool:
        """Whether only rowwise planes of this quantizer can be gathered from ranks."""
        return False

    def is_requantization_safe(self) -> bool:
        """Whether quantizing the same input again gives the same bytes."""
        return False

    def _get_compatible_recipe(self) -> type[Any]:
        """The recipe class that can use weights of this quantizer."""
        return self._compatible_recipe

    def __eq__(self, other: object) -> bool:
        if self._value_fields is None or type(other) is not type(self):
            return self is other
        return self._value() == other._value()

    def __hash__(self) -> int:
        return object.__hash__(self) if self._value_fields is None else hash((type(self), self._value()))

    def _value(self) -> tuple[Any, ...]:
        fields = ("rowwise_usage", "columnwise_usage", "internal", "optimize_for_gemm", *(self._value_fields or ()))
        return tuple(getattr(self, name) for name in fields)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in _OF_ITS_LAYER}
        if state.get("amax_reduction_group") is not None:  # process groups cannot be pickled
            state["amax_reduction_group"] = None
            state["with_amax_reduction"] = False  # otherwise group None would mean all ranks
            state["amax_reduction_axis"] = None
        state.pop("part", None)
        return state

    def __reduce__(self) -> tuple[Any, ...]:
        return make_quantizer, (type(self), self.__getstate__())

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items() if not name.startswith("_"))
        return f"{type(self).__name__}({shown})"


def _served(made: Sequence[Direction], asked: Sequence[Direction]) -> list[tuple[Direction, ...]]:
    """The directions that each plane serves: a single one serves all that were asked for."""
    return [tuple(asked) or (made[0],)] if len(made) == 1 else [(direction,) for direction in made]


def make_quantizer(cls: type[Quantizer], state: dict[str, Any]) -> Quantizer:
    """Rebuild a pickled quantizer.

    Raises:
        TypeError: ``cls`` is not a quantizer class.
    """
    if not (isinstance(cls, type) and issubclass(cls, Quantizer)):
        raise TypeError(f"{cls!r} is not a quantizer class")
    quantizer = cls.__new__(cls)
    quantizer.__dict__.update(state, _memo={})
    return quantizer
