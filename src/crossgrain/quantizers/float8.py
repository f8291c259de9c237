"""Per-tensor FP8: 8-bit codes with one fp32 scale, from earlier steps (delayed scaling) or from the tensor (current).

Both directions have the same scale, so the columnwise codes are the rowwise codes: the same buffer if GEMMs can read
both layouts, otherwise a transposed copy (`is_non_tn_fp8_gemm_supported`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .. import kernels
from ..formats import Format, fp8_format
from ..formats.dtypes import DType
from ..formats.dtypes import fp8_dtype as as_fp8_dtype
from ..formats.encoding import Encoding, cached_encoding
from ..kernels import GroupedTarget, Target
from ..planes import COLUMNWISE, ROWWISE, Direction, Plane, matrix_shape
from ..runtime.devices import resolved_device
from ..runtime.host_and_device import number_on
from ..runtime.settings import is_non_tn_fp8_gemm_supported
from ..runtime.strict import strict_error
from ..tensor import PlaneBuffers, QuantizedTensor
from ..tensor.fields import FP8Storage
from .base import Quantizer


class Float8TensorStorage(FP8Storage):
    """The planes of a per-tensor FP8 tensor: ``_data`` [M, K], ``_transpose`` [K, M] or None, ``_scale_inv`` [1].

    Examples:
        >>> quantizer = cg.quantizer_for("fp8")
        >>> quantizer.internal = True  # planes without a torch.Tensor around them
        >>> type(quantizer(torch.ones(128, 128)))
        <class 'crossgrain.quantizers.float8.Float8TensorStorage'>
    """

    _buffer_names = ("_data", "_transpose", "_scale_inv")
    _plane_buffers: ClassVar = {
        ROWWISE: PlaneBuffers("_data", "_scale_inv"),
        COLUMNWISE: PlaneBuffers("_transpose", "_scale_inv"),
    }
    _shares_scale = True

    _data: Tensor | None
    _transpose: Tensor | None
    _scale_inv: Tensor | None

    def _init_fields(
        self,
        data: Tensor | None,
        fp8_scale_inv: Tensor | None,
        fp8_dtype: DType,
        fake_dtype: torch.dtype | None = None,
        data_transpose: Tensor | None = None,
        quantizer: Quantizer | None = None,
        *,
        shape: Sequence[int] | None = None,
        formats: Mapping[Direction, Format] | None = None,
    ) -> None:
        if formats is None:
            formats = dict.fromkeys(Direction, fp8_format(DType.cast(fp8_dtype).element))
        self._init_common(formats, quantizer, fake_dtype, shape, (data, data_transpose, fp8_scale_inv))

    @property
    def _transpose_invalid(self) -> bool:
        return self._transpose is None

    @_transpose_invalid.setter
    def _transpose_invalid(self, invalid: bool) -> None:
        if invalid:
            self._transpose = None  # bytes that are not valid are freed

    def get_metadata(self) -> dict[str, Any]:
        metadata = {
            "data": self._data,
            "fp8_scale_inv": self._scale_inv,
            "fp8_dtype": self._fp8_dtype,
            "data_transpose": self._transpose,
            "quantizer": self._quantizer,
            "fake_dtype": self._dtype,
            "formats": self._formats,
        }
        return self._lending(metadata)

    # One buffer may be used for both directions. The methods below handle that.

    def plane(self, direction: Direction) -> Plane | None:
        own = super().plane(direction)
        if own is not None or direction is ROWWISE or not is_non_tn_fp8_gemm_supported():
            return own
        row = super().plane(ROWWISE)
        return row and row.read(COLUMNWISE)

    def planes(self) -> list[Plane]:
        """The planes with buffers of their own."""
        own = (super(Float8TensorStorage, self).plane(direction) for direction in Direction)
        return [plane for plane in own if plane is not None]

    def _set_plane(self, direction: Direction, plane: Plane | None) -> None:
        if plane is None:
            setattr(self, self._plane_buffers[direction].data, None)  # the scale may still serve the other
            return
        name = "_transpose" if plane.transposed else "_data"
        setattr(self, name, plane.data)
        if self._scale_inv is None:  # one scale for both: an alias that shares it must see it change
            self._scale_inv = plane.scale

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        if not is_non_tn_fp8_gemm_supported():
            super().update_usage(rowwise_usage, columnwise_usage)
            return
        asked = (rowwise_usage, columnwise_usage)
        kept = [have if usage is None else usage for usage, have in zip(asked, self.get_usages().values(), strict=True)]
        if any(asked) and self._data is None:
            super().update_usage(rowwise_usage=True)
        if self._data is not None:
            self._transpose = None
        if not any(kept):
            self._data = self._transpose = None

    def _strict_synthesises(self, direction: Direction) -> bool:
        return direction is COLUMNWISE

    def _create_transpose(self) -> None:
        """Make the transposed copy from the rowwise codes."""
        if self._data is None:
            raise RuntimeError(f"{type(self).__name__} has no rowwise codes to make the transposed copy from")
        self._adopt_plane(self._transposed_copy())

    def _transposed_copy(self) -> Plane:
        row = super().plane(ROWWISE)
        assert row is not None
        return kernels.transposed_plane(row, self._plane_tensor_shape(), transposed=True)

    def remove_caches(self) -> None:
        """Free the transposed copy."""
        if self._data is not None:
            self._transpose = None

    def _reset_caches(self) -> None:
        self.remove_caches()

    def _viewed(self, shape: Sequence[int]) -> Self:
        """A view. Rowwise codes can have any shape; with a transposed copy the last dimension must stay."""
        if self._transpose is not None or self._data is None or len(shape) == 1:
            return super()._viewed(shape)
        return self._rewrap(shape=shape, matrix=matrix_shape(shape), buffers={"_data": self._data.view(tuple(shape))})

    def _check_viewable(self, shape: torch.Size) -> None:
        if self._data is None and shape[-1] != self._matrix[1]:
            raise NotImplementedError(
                f"{type(self).__name__}: cannot view {list(self._shape)} as {list(shape)}: it has only a transposed "
                f"columnwise plane, so its last dimension must stay {self._matrix[1]}"
            )
        super()._check_viewable(shape)

    def _build_default_quantizer(self) -> Quantizer:
        return Float8CurrentScalingQuantizer(self._fp8_dtype, self.device)


class Float8Tensor(QuantizedTensor, Float8TensorStorage):
    """An FP8 tensor with one scale.

    Examples:
        >>> q = cg.quantize(torch.ones(128, 128), "fp8")
        >>> isinstance(q, cg.Float8Tensor)
        True
        >>> q.shape, q.dtype
        (torch.Size([128, 128]), torch.float32)
    """


_HOOKS = ("_observe", "_observe_all", "_observes", "record", "_given", "gives_scales", "scale_for_step")
"""How amaxes are observed and scales are given. A user may replace any of them."""


def _has_its_number(statistic: object) -> bool:
    """Whether an amax or a scale, which a user may set to anything, is a tensor, with its number in its memory."""
    plain = isinstance(statistic, Tensor) and not isinstance(statistic, FakeTensor)
    return plain and statistic.layout is torch.strided and not statistic.is_neg()  # type: ignore[attr-defined]


class _PerTensorQuantizer(Quantizer):
    """Base class of the quantizers for delayed and current scaling."""

    _tensor_class = Float8Tensor
    dtype: DType

    _observes = True
    _known_hooks: ClassVar[list[Any]]  # those of crossgrain's own class

    @classmethod
    def _hooks(cls) -> list[Any]:
        found = [getattr(cls, name) for name in _HOOKS]
        return [getattr(hook, "__func__", hook) for hook in found]  # a class method is a new object each time

    def _records_numbers(self) -> bool:
        known = self._hooks() == self._known_hooks and self.__dict__.keys().isdisjoint(_HOOKS)
        return known and _has_its_number(self.amax) and _has_its_number(self.scale)  # type: ignore[attr-defined]

    def _planes_to_make(self, rowwise: bool, columnwise: bool) -> list[Direction]:
        directions = super()._planes_to_make(rowwise, columnwise)
        return [ROWWISE] if directions and is_non_tn_fp8_gemm_supported() else directions

    def _refuse_in_strict_mode(self, tensor: Tensor, directions: Sequence[Direction]) -> None:
        if ROWWISE not in directions:
            raise strict_error(
                "columns of FP8 alone",
                f"{type(self).__name__} cannot make a columnwise plane alone while columnwise planes are transposed "
                "copies (settings.non_tn_fp8_gemm)",
            )

    def supports_only_rowwise_all_gather(self) -> bool:
        return True

    def get_columnwise_shape(self, rowwise_data_shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the transposed copy: the last dimension moves to the front."""
        return (rowwise_data_shape[-1], *rowwise_data_shape[:-1]) if rowwise_data_shape else ()

    def create_tensor_from_data(
        self,
        data: Tensor,
        fake_dtype: torch.dtype = torch.float32,
        requires_grad: bool = False,
        internal: bool = False,
    ) -> Float8TensorStorage:
        """Make a tensor from existing codes that were made with the scale of this quantizer.

        Args:
            data: the codes, of an 8-bit dtype.
            fake_dtype: nominal dtype: what `dequantize` returns.
            requires_grad: whether the tensor requires gradients.
            internal: return a storage instead of a tensor.
        """
        scale = self.scale  # type: ignore[attr-defined]
        metadata = {
            "data": data.view(torch.uint8),
            "fp8_scale_inv": 1.0 / scale,
            "fp8_dtype": self.dtype,
            "quantizer": self,
        }
        if internal:
            return Float8TensorStorage(fake_dtype=fake_dtype, **metadata)
        return Float8Tensor(data.shape, fake_dtype, requires_grad=requires_grad, **metadata)


class Float8Quantizer(_PerTensorQuantizer):
    """Quantizes to FP8 with delayed scaling: uses a given scale, and records the largest amax.

    The state of a recipe computes the scale. It shares both tensors with the quantizer and its copies.

    Args:
        scale: the scale to multiply with, a float32 tensor with one number.
        amax: a float32 tensor with one number, which is raised to the amax of each tensor that is quantized.
        fp8_dtype: FP8 type of the codes.
        rowwise: make rowwise planes.
        columnwise: make columnwise planes.

    Examples:
        >>> quantizer = cg.Float8Quantizer(torch.tensor([64.0]), torch.zeros(1), cg.DType.kFloat8E4M3)
        >>> q = quantizer(torch.tensor([[1.0, -2.0], [3.0, 6.0]]))
        >>> quantizer.amax
        tensor([6.])
        >>> q.dequantize()
        tensor([[ 1., -2.],
                [ 3.,  6.]])
    """

    def __init__(
        self, scale: Tensor, amax: Tensor, fp8_dtype: DType, *, rowwise: bool = True, columnwise: bool = True
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.scale = scale
        self.amax = amax
        self.dtype = as_fp8_dtype(fp8_dtype)

    def _encoding(self, direction: Direction) -> Encoding:
        return cached_encoding(fp8_format(self.dtype.element))

    def _given(self) -> tuple[Tensor | None, Tensor | None]:
        return None, None if self.scale is None else self.scale.float()

    def scale_for_step(self) -> Tensor | None:
        return self.scale

    @classmethod
    def _observe_all(cls, quantizers: Sequence[Any], targets: Sequence[Target] | Sequence[GroupedTarget]) -> None:
        """Keep the largest amax of all tensors that are quantized in a step."""
        for target in targets[:1]:
            assert target.amax is not None
            torch._foreach_maximum_([each.amax.view(1) for each in quantizers], torch.split(target.amax, 1))

    def _records_numbers(self) -> bool:
        # A plan reads scales before amaxes are recorded, so no amax may be in the memory of a scale. An amax of a
        # narrower dtype might not hold the number.
        return (
            super()._records_numbers()
            and self.amax.is_cpu
            and self.amax.dtype == torch.float32
            and self.amax.data_ptr() != self.scale.data_ptr()
        )

    def record(self, amax: float, scale: float) -> None:
        self.amax.view(1).clamp_(min=amax)

    def statistics(self) -> list[Tensor]:
        return [self.scale, self.amax]

    def reducing(self, group: Any, *, axis: int, segments: Sequence[int] = ()) -> Self:
        """Return this quantizer: the recipe reduces histories at the end of a step."""
        return self

    def calibrate(self, tensor: Tensor) -> None:
        seen = kernels.amax(tensor).view(self.amax.shape)
        self.amax.copy_(torch.maximum(self.amax, seen))


class Float8CurrentScalingQuantizer(_PerTensorQuantizer):
    """Quantizes to FP8 with current scaling: the scale is computed from the amax of the tensor.

    Args:
        fp8_dtype: FP8 type of the codes.
        device: where ``scale`` and ``amax`` are.
        rowwise: make rowwise planes.
        columnwise: make columnwise planes.
        use_existing_amax: compute the scale from ``amax`` instead of from the tensor.
        with_amax_reduction: use the largest amax over the ranks of ``amax_reduction_group``.
        amax_reduction_group: the process group; None for all ranks.
        force_pow_2_scales: scales are powers of two.
        amax_epsilon: smallest amax that is used to compute a scale.
        scale: a float32 tensor with one number, in which the last scale is stored.
        amax: a float32 tensor with one number, in which the last amax is stored.

    Examples:
        >>> quantizer = cg.Float8CurrentScalingQuantizer(cg.DType.kFloat8E4M3)
        >>> q = quantizer(torch.tensor([[1.0, -2.0], [3.0, 7.0]]))
        >>> q.dequantize()
        tensor([[ 1., -2.],
                [ 3.,  7.]])
    """

    _value_fields = (
        "dtype",
        "with_amax_reduction",
        "use_existing_amax",
        "force_pow_2_scales",
        "amax_epsilon",
    )

    def __init__(
        self,
        fp8_dtype: DType,
        device: torch.device | str | None = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        use_existing_amax: bool = False,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = as_fp8_dtype(fp8_dtype)
        device = resolved_device(device)
        with torch.inference_mode(False):  # a quantizer made for inference may be used for training
            self.scale = torch.ones(1, dtype=torch.float32, device=device) if scale is None else scale
            self.amax = torch.zeros(1, dtype=torch.float32, device=device) if amax is None else amax
        self.use_existing_amax = use_existing_amax
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group
        self.force_pow_2_scales = force_pow_2_scales
        self.amax_epsilon = amax_epsilon

    def _encoding(self, direction: Direction) -> Encoding:
        fmt = fp8_format(self.dtype.element)
        return cached_encoding(fmt, power_of_two=self.force_pow_2_scales, epsilon=self.amax_epsilon)

    @property
    def gives_scales(self) -> bool:  # type: ignore[override]
        return self.use_existing_amax

    def _given(self) -> tuple[Tensor | None, Tensor | None]:
        return self.amax.view(1) if self.use_existing_amax else None, None

    @classmethod
    def _observe_all(cls, quantizers: Sequence[Any], targets: Sequence[Target] | Sequence[GroupedTarget]) -> None:
        for target in targets[:1]:
            assert target.amax is not None
            device = target.amax.device
            for each in quantizers:
                if each.scale.device != device:  # made by a recipe, which does not know the device
                    each._move_statistics(device)
            if not quantizers[0].use_existing_amax:
                torch._foreach_copy_([each.amax.view(1) for each in quantizers], torch.split(target.amax, 1))
            scales = torch.split(kernels.tensor_scale(target), 1)
            torch._foreach_copy_([each.scale.view(1) for each in quantizers], scales)

    def record(self, amax: float, scale: float) -> None:
        if not self.scale.is_cpu:
            self._move_statistics(torch.device("cpu"))
        self.amax.view(1).fill_(amax)
        self.scale.view(1).fill_(scale)

    def _move_statistics(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            if (
                self.scale.device.type == "meta"
            ):  # the default device, when a recipe made this: there are no numbers yet
                self.scale = torch.ones(1, dtype=torch.float32, device=device)
                self.amax = torch.zeros(1, dtype=torch.float32, device=device)
            else:
                self.scale, self.amax = number_on(self.scale, device), number_on(self.amax, device)

    def is_requantization_safe(self) -> bool:
        return True


for _quantizer in (Float8Quantizer, Float8CurrentScalingQuantizer):  # at the end, because classes are complete only now
    _quantizer._known_hooks = _quantizer._hooks()
