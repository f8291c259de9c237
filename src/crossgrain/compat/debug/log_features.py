"""Features that log statistics of tensors, in high precision (``LogTensorStats``) and quantized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nvdlfw_inspect.registry import api_method
from torch import Tensor

from ...formats import E4M3, E5M2
from ...formats.dtypes import DType, dtype_of_element
from ...planes import Direction, Plane, matrix_shape
from ...quantizers.base import Quantizer
from ...quantizers.float8 import Float8CurrentScalingQuantizer, Float8Quantizer
from ...quantizers.float8_block import Float8BlockQuantizer
from ...quantizers.identity import IdentityQuantizer
from ...quantizers.mxfp8 import MXFP8Quantizer
from ...tensor import QuantizedTensorStorage
from . import session
from .api import TEConfigAPIMapper
from .buffers import STATS_BUFFERS
from .fake_quant import plane_of
from .quantizers import child_of
from .reduction import ranks_of
from .stat_names import PlaneStat, fp8_stat, nvfp4_stat, tensor_stat
from .statistics import Parts, Statistic, parts_of_plane, parts_of_tensor, statistic_of_plane, statistic_of_tensor
from .steps import enabled_now


class _LogsStatistics(TEConfigAPIMapper):
    """Base class of features that log statistics: in which steps, and how microbatches and ranks are merged."""

    @api_method
    def inspect_tensor_enabled(
        self, config: Mapping[str, Any], layer_name: str, tensor_name: str, iteration: int
    ) -> tuple[bool, int | None]:
        """Whether statistics are logged in an iteration, and when next."""
        return enabled_now(config, iteration)

    @api_method
    def inspect_tensor(
        self,
        config: Mapping[str, Any],
        layer_name: str,
        tensor_name: str,
        iteration: int,
        tp_group: Any,
        tensor: Tensor | None,
        rowwise_quantized_tensor: Any = None,
        columnwise_quantized_tensor: Any = None,
        quantizer: Quantizer | None = None,
        tp_size: int | None = None,
    ) -> None:
        """Add the statistics of a tensor to those that ``debug_api.step()`` logs.

        A weight is the same in all microbatches of a step, so that only the first counts.
        """
        key = (layer_name, tensor_name, type(self).__name__)
        if tensor_name == "weight" and STATS_BUFFERS.has(key):
            return
        operands = dict(zip(Direction, (rowwise_quantized_tensor, columnwise_quantized_tensor), strict=True))
        if tensor is None:
            decoded = [each.dequantize() for each in operands.values() if isinstance(each, QuantizedTensorStorage)]
            tensor = decoded[0]
        statistics, parts = self.statistics(config["stats"], layer_name, tensor_name, tensor, operands, quantizer)
        STATS_BUFFERS.feed(key, statistics, parts, iteration, ranks_of(tensor_name, tp_group, tp_size))

    def statistics(
        self,
        stats: Sequence[Any],
        layer: str,
        name: str,
        tensor: Tensor,
        operands: Mapping[Direction, Any],
        quantizer: Quantizer | None,
    ) -> tuple[list[Statistic], Parts]:
        """The statistics to log, and their parts for a tensor."""
        raise NotImplementedError


class LogTensorStats(_LogsStatistics):
    """Logs statistics of tensors in high precision.

    Settings: ``tensors`` or ``tensors_struct`` (activation, weight, gradient, output, wgrad, dgrad), ``stats`` (min,
    max, mean, std, l1_norm, l2_norm, cur_amax, dynamic_range, max_blockwise_dynamic_range), ``freq``, ``start_step``,
    ``end_step``, ``start_end_list``.
    """

    def statistics(
        self,
        stats: Sequence[Any],
        layer: str,
        name: str,
        tensor: Tensor,
        operands: Mapping[Direction, Any],
        quantizer: Quantizer | None,
    ) -> tuple[list[Statistic], Parts]:
        wanted = [tensor_stat(each, name) for each in stats]
        return [statistic_of_tensor(each) for each in wanted], parts_of_tensor(tensor, wanted)


class _LogsPlanes(_LogsStatistics):
    """Base class of features that log statistics of quantized tensors."""

    def parsed(self, given: Any) -> PlaneStat:
        """The statistic that a configuration names."""
        raise NotImplementedError

    def why_not(self, plane: Plane) -> str | None:
        """Why the feature is not for a plane that training has made; None if it is."""
        raise NotImplementedError

    def statistics(
        self,
        stats: Sequence[Any],
        layer: str,
        name: str,
        tensor: Tensor,
        operands: Mapping[Direction, Any],
        quantizer: Quantizer | None,
    ) -> tuple[list[Statistic], Parts]:
        wanted: dict[tuple[str, Direction], list[PlaneStat]] = {}
        for stat in map(self.parsed, stats):
            wanted.setdefault((stat.recipe, stat.direction), []).append(stat)
        found: list[Statistic] = []
        parts = Parts()
        for (recipe, direction), same in wanted.items():
            own = _Operand(operands[direction], direction, quantizer)
            plane = self._plane(recipe, own, tensor)
            usable = [stat for stat in same if not isinstance(plane, str) and self._has(stat, recipe or own.recipe)]
            for stat in [stat for stat in same if stat not in usable]:
                reason = plane if isinstance(plane, str) else "only fp8_delayed_scaling has overflows%"
                what = f"{type(self).__name__} of layer {layer!r}: {stat.name} of {name} is not logged"
                session.warn_once(f"{what}: {reason}")
            if usable and not isinstance(plane, str):
                parts |= parts_of_plane(tensor, plane, usable)
                found += [statistic_of_plane(stat) for stat in usable]
        return found, parts

    @staticmethod
    def _has(stat: PlaneStat, recipe: str) -> bool:
        return stat.kind != "overflows%" or recipe == "fp8_delayed_scaling"

    def _plane(self, recipe: str, own: _Operand, tensor: Tensor) -> Plane | str:
        """The plane to look at: that of training, if it is in the format of the recipe; else one made for it.

        Returns:
            The plane, or why there is none.
        """
        if recipe and (own.plane is None or own.recipe != recipe):
            return _plane_by_recipe(recipe, own, tensor)
        if own.plane is None:
            return own.reason
        return self.why_not(own.plane) or own.plane


class LogFp8TensorStats(_LogsPlanes):
    """Logs statistics of tensors that are quantized to 8 bits.

    Settings: ``tensors`` or ``tensors_struct`` (activation, weight, gradient), ``stats``, and steps as for
    `LogTensorStats`. A statistic is ``[<recipe>_]<statistic>[_columnwise]``: underflows%, overflows%, scale_inv_min,
    scale_inv_max or mse, of what training has made, or of the format of another recipe (fp8_current_scaling, mxfp8,
    fp8_block_scaling).
    """

    def parsed(self, given: Any) -> PlaneStat:
        return fp8_stat(given)

    def why_not(self, plane: Plane) -> str | None:
        if not plane.format.name.startswith("nvfp4"):
            return None
        return f"its {plane.direction.value} plane is {plane.format.name}: use LogNvfp4TensorStats"


class LogNvfp4TensorStats(_LogsPlanes):
    """Logs statistics of tensors that are quantized to NVFP4.

    Settings as for `LogFp8TensorStats`; the statistics are underflows% and mse, also with the suffix ``_columnwise``.
    """

    def parsed(self, given: Any) -> PlaneStat:
        return nvfp4_stat(given)

    def why_not(self, plane: Plane) -> str | None:
        if plane.format.name.startswith("nvfp4"):
            return None
        return f"its {plane.direction.value} plane is {plane.format.name}, not NVFP4: use LogFp8TensorStats"


class _Operand:
    """A tensor as a GEMM reads it in one direction.

    Attributes:
        plane: its plane; None if it is in high precision, or not known.
        reason: why it is not.
        recipe: the recipe that quantizes so; empty for others than those of 8 bits.
        dtype: the FP8 type that the recipe uses here.
    """

    def __init__(self, given: Any, direction: Direction, quantizer: Quantizer | None) -> None:
        quantized = isinstance(given, QuantizedTensorStorage)
        child = child_of(given._get_quantizer() if quantized else quantizer, direction)
        plane = given.plane(direction) if quantized else None
        in_high_precision = isinstance(given, Tensor) or child is None or isinstance(child, IdentityQuantizer)
        self.direction = direction
        self.plane = None if plane is None or plane.format.is_identity else plane
        self.reason = f"its {direction.value} operand is in high precision: use LogTensorStats"
        if not in_high_precision:
            self.reason = f"no GEMM has read its {direction.value} plane, or the rows of this rank are no whole blocks"
        self.recipe = next((name for name, cls in _QUANTIZERS.items() if isinstance(child, cls)), "")
        element = None if self.plane is None else self.plane.format.element
        self.dtype = dtype_of_element(element) if element in (E4M3, E5M2) else DType.kFloat8E4M3


_QUANTIZERS: dict[str, type[Quantizer]] = {
    "fp8_delayed_scaling": Float8Quantizer,
    "fp8_current_scaling": Float8CurrentScalingQuantizer,
    "mxfp8": MXFP8Quantizer,
    "fp8_block_scaling": Float8BlockQuantizer,
}


def _plane_by_recipe(recipe: str, own: _Operand, tensor: Tensor) -> Plane | str:
    """What another recipe would have made."""
    made: Quantizer
    if recipe == "fp8_delayed_scaling":
        return "its scale would follow from earlier steps, which only training with this recipe has"
    if recipe == "fp8_current_scaling":
        made = Float8CurrentScalingQuantizer(own.dtype, tensor.device)
    elif recipe == "mxfp8":
        made = MXFP8Quantizer(own.dtype)
    else:
        made = Float8BlockQuantizer(own.dtype, rowwise=True, columnwise=True)
    return plane_of(tensor.detach().reshape(matrix_shape(tensor.shape)), made, own.direction)
