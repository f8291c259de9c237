"""Modules whose GEMMs run in the formats of a recipe."""

from .attention import DotProductAttention, InferenceParams, RotaryPositionEmbedding, apply_rotary_pos_emb
from .base import QuantizedModule, name_layers
from .linear import Linear, can_reconstruct_wgrad_input_from_original
from .requantize import requantize_

__all__ = [
    "DotProductAttention",
    "InferenceParams",
    "Linear",
    "QuantizedModule",
    "RotaryPositionEmbedding",
    "apply_rotary_pos_emb",
    "can_reconstruct_wgrad_input_from_original",
    "name_layers",
    "requantize_",
]
