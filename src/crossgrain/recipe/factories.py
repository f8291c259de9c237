"""Factories that do the same as the recipe classes, as starting points for `CustomRecipe(qfactory=...)`."""

from __future__ import annotations

from ..formats.dtypes import DType
from ..quantizers.float8 import Float8CurrentScalingQuantizer
from ..quantizers.float8_block import Float8BlockQuantizer
from ..quantizers.identity import IdentityQuantizer
from ..quantizers.mxfp8 import MXFP8Quantizer
from ..quantizers.nvfp4 import NVFP4Quantizer
from .custom import quantizer_factory
from .params import FP8Format
from .requests import DelayedScalingRequest
from .roles import QuantizerRole

LINEAR = ("linear", "grouped_linear")


def tensor_of(role: QuantizerRole | None, *module_types: str) -> str:
    """The tensor type of a role, if its module is of one of these types; otherwise ""."""
    return role.tensor_type if role is not None and role.module_type in module_types else ""


@quantizer_factory(key=("high_precision_factory", 1))
def high_precision_factory(role: QuantizerRole | None) -> IdentityQuantizer:
    """Quantize nothing."""
    return IdentityQuantizer()


@quantizer_factory(key=("delayed_scaling_factory", 1))
def delayed_scaling_factory(role: QuantizerRole | None) -> DelayedScalingRequest:
    """FP8 with delayed scaling for all tensors: E4M3 in forward, E5M2 in backward."""
    return DelayedScalingRequest(fp8_format=FP8Format.HYBRID)


@quantizer_factory(key=("current_scaling_factory", 1))
def current_scaling_factory(role: QuantizerRole | None) -> Float8CurrentScalingQuantizer:
    """FP8 with current scaling: E5M2 for output gradients, E4M3 for all other tensors."""
    is_gradient = role is not None and role.tensor_type == "grad_output"
    return Float8CurrentScalingQuantizer(DType.kFloat8E5M2 if is_gradient else DType.kFloat8E4M3)


@quantizer_factory(key=("float8_block_scaling_factory", 1))
def float8_block_scaling_factory(role: QuantizerRole | None) -> Float8BlockQuantizer:
    """FP8 E4M3 with power-of-two scales: 128x128 blocks for weights, 1x128 blocks for all other tensors."""
    dim = 2 if tensor_of(role, *LINEAR) == "weight" else 1
    return Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=dim)


@quantizer_factory(key=("mxfp8_factory", 1))
def mxfp8_factory(role: QuantizerRole | None) -> MXFP8Quantizer:
    """MXFP8 E4M3 for all tensors."""
    return MXFP8Quantizer(DType.kFloat8E4M3)


@quantizer_factory(key=("nvfp4_factory", 1))
def nvfp4_factory(role: QuantizerRole | None) -> NVFP4Quantizer:
    """NVFP4: 16x16 tiles for weights, rotation for other tensors, stochastic rounding for output gradients."""
    tensor_type = tensor_of(role, *LINEAR)
    if tensor_type == "weight":
        return NVFP4Quantizer(with_2d_quantization=True)
    return NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, stochastic_rounding=tensor_type == "grad_output")
