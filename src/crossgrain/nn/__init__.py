"""Modules (linear layers, norms, attention, transformer layers) whose GEMMs run in the formats of a recipe."""

from .attention import (
    DotProductAttention,
    InferenceParams,
    MultiheadAttention,
    RotaryPositionEmbedding,
    apply_rotary_pos_emb,
)
from .base import QuantizedModule, name_layers
from .grouped_linear import Fp8Padding, Fp8Unpadding, GroupedLinear
from .layernorm_linear import LayerNormLinear
from .layernorm_mlp import LayerNormMLP
from .linear import Linear
from .linear_module import can_reconstruct_wgrad_input_from_original
from .norm import LayerNorm, RMSNorm
from .requantize import requantize_
from .transformer import TransformerLayer

__all__ = [
    "DotProductAttention",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "InferenceParams",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "QuantizedModule",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "apply_rotary_pos_emb",
    "can_reconstruct_wgrad_input_from_original",
    "name_layers",
    "requantize_",
]
