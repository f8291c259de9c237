"""Modules whose GEMMs run in the formats of a recipe."""

from .base import QuantizedModule, name_layers
from .grouped_linear import Fp8Padding, Fp8Unpadding, GroupedLinear
from .layernorm_linear import LayerNormLinear
from .layernorm_mlp import LayerNormMLP
from .linear import Linear
from .linear_module import can_reconstruct_wgrad_input_from_original
from .norm import LayerNorm, RMSNorm
from .requantize import requantize_

__all__ = [
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "QuantizedModule",
    "RMSNorm",
    "can_reconstruct_wgrad_input_from_original",
    "name_layers",
    "requantize_",
]
