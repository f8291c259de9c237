"""Attention: the core computation, the multi-head layer, rotary positions, and the cache for inference."""

from .dot_product import DotProductAttention
from .kv_cache import InferenceParams
from .masks import check_set_window_size
from .multihead import MultiheadAttention
from .rope import RotaryPositionEmbedding, apply_rotary_pos_emb

__all__ = [
    "DotProductAttention",
    "InferenceParams",
    "MultiheadAttention",
    "RotaryPositionEmbedding",
    "apply_rotary_pos_emb",
    "check_set_window_size",
]
