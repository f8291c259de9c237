"""Features that change numbers: ``FakeQuant``, ``PerTensorScaling``, and GEMMs or layers in high precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from nvdlfw_inspect.registry import api_method
from torch import Tensor

from ...formats import IDENTITY, Format
from ...gemm.operands import GEMMS
from ...planes import ROWWISE, Direction
from ...quantizers.base import Quantizer
from ...quantizers.float8 import Float8Quantizer, Float8Tensor
from .api import TEConfigAPIMapper
from .fake_quant import fake_quantize, per_tensor_cast
from .quantizers import child_of
from .tensors import OPERANDS


def _direction(tensor_name: str, gemm: str) -> Direction:
    return GEMMS[gemm].get(OPERANDS.get(tensor_name, ""), ROWWISE)


class FakeQuant(TEConfigAPIMapper):
    """Quantizes and decodes tensors, and runs the GEMM in high precision.

    Settings: ``gemms`` or ``gemms_struct``, ``tensors`` or ``tensors_struct``, ``quant_format`` (FP8E4M3, FP8E5M2,
    MXFP8E4M3, MXFP8E5M2, or the name of a format of crossgrain), ``margin`` (per-tensor formats only).
    """

    @api_method
    def fp8_gemm_enabled(
        self, config: Mapping[str, Any], layer_name: str, gemm: str, iteration: int
    ) -> tuple[bool, int | None]:
        """GEMMs of this feature run in high precision."""
        return False, iteration + 1

    @api_method
    def modify_tensor_enabled(
        self, config: Mapping[str, Any], layer_name: str, tensor_name: str, gemm: str, iteration: int
    ) -> tuple[bool, int | None]:
        """All tensors of this feature are modified."""
        return True, iteration + 1

    @api_method
    def modify_tensor(
        self,
        config: Mapping[str, Any],
        layer_name: str,
        gemm: str,
        tensor_name: str,
        tensor: Tensor,
        iteration: int,
        default_quantizer: Quantizer | None,
        out: Any = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor | None:
        """Quantize and decode a tensor."""
        direction = _direction(tensor_name, gemm)
        parent = child_of(default_quantizer, direction)
        try:
            made = fake_quantize(
                tensor,
                config.get("quant_format", ""),
                direction,
                margin=config.get("margin", 0),
                nonfinite=None if parent is None else parent.nonfinite,
            )
        except ValueError as error:
            raise ValueError(f"layer {layer_name!r}: FakeQuant of {tensor_name} in {gemm}: {error}") from error
        if out is not None:
            out.copy_(made)
            return None
        return made if dtype is None else made.to(dtype)

    @api_method
    def check_modify_tensor(self, config: Mapping[str, Any], layer_name: str) -> Format:
        """Decoded numbers are multiplied in high precision."""
        return IDENTITY


class PerTensorScaling(TEConfigAPIMapper):
    """Scales tensors of delayed scaling by their own amax, as current scaling does.

    Settings: ``gemms`` or ``gemms_struct``, ``tensors`` or ``tensors_struct``, ``margin``.
    """

    @api_method
    def modify_tensor_enabled(
        self, config: Mapping[str, Any], layer_name: str, tensor_name: str, gemm: str, iteration: int
    ) -> tuple[bool, int | None]:
        """All tensors of this feature are modified."""
        return True, iteration + 1

    @api_method
    def modify_tensor(
        self,
        config: Mapping[str, Any],
        layer_name: str,
        gemm: str,
        tensor_name: str,
        tensor: Tensor,
        iteration: int,
        default_quantizer: Quantizer | None,
        out: Any = None,
        dtype: torch.dtype | None = None,
    ) -> Float8Tensor | None:
        """Quantize a tensor with current scaling."""
        parent = _delayed_scaling(layer_name, gemm, tensor_name, default_quantizer)
        made = per_tensor_cast(tensor, parent.dtype, margin=config.get("margin", 0), nonfinite=parent.nonfinite)
        if out is not None:
            out.copy_(made)
            return None
        return made

    @api_method
    def check_modify_tensor(
        self,
        config: Mapping[str, Any],
        layer_name: str,
        gemm: str,
        tensor_name: str,
        default_quantizer: Quantizer | None,
    ) -> Format:
        """The format of the operand: that of the recipe.

        Raises:
            ValueError: the recipe does not quantize it with delayed scaling.
        """
        parent = _delayed_scaling(layer_name, gemm, tensor_name, default_quantizer)
        return parent.encoding(_direction(tensor_name, gemm)).format


def _delayed_scaling(layer: str, gemm: str, tensor: str, quantizer: Quantizer | None) -> Float8Quantizer:
    """The quantizer of delayed scaling that a recipe has for an operand.

    Raises:
        ValueError: it has another one.
    """
    parent = child_of(quantizer, _direction(tensor, gemm))
    if isinstance(parent, Float8Quantizer):
        return parent
    has = "high precision" if parent is None else type(parent).__name__
    raise ValueError(
        f"layer {layer!r}: PerTensorScaling of {tensor} in {gemm} needs FP8 with delayed scaling, but the recipe has "
        f"{has}: use DelayedScaling, or leave out this tensor and GEMM"
    )


class DisableQuantizationGEMM(TEConfigAPIMapper):
    """Runs GEMMs in high precision. Settings: ``gemms``."""

    @api_method
    def fp8_gemm_enabled(
        self, config: Mapping[str, Any], layer_name: str, gemm: str, iteration: int
    ) -> tuple[bool, int | None]:
        """GEMMs of this feature run in high precision."""
        return False, iteration + 1


class DisableQuantizationLayer:
    """Runs all GEMMs of a layer in high precision. It has no settings."""

    @api_method
    def fp8_gemm_enabled(
        self, config: Mapping[str, Any], layer_name: str, gemm: str, iteration: int
    ) -> tuple[bool, int | None]:
        """All GEMMs of the layer run in high precision."""
        return False, iteration + 1

    def parse_config_and_api(self, config: Mapping[str, Any], **kwargs: Any) -> tuple[bool, None]:
        """The feature is for all GEMMs."""
        return bool(config["enabled"]), None


class DisableFP8GEMM(DisableQuantizationGEMM):
    """The old name of `DisableQuantizationGEMM`."""


class DisableFP8Layer(DisableQuantizationLayer):
    """The old name of `DisableQuantizationLayer`."""


class DisableFp8Gemm(DisableQuantizationGEMM):
    """The oldest name of `DisableQuantizationGEMM`."""


class DisableFp8Layer(DisableQuantizationLayer):
    """The oldest name of `DisableQuantizationLayer`."""
