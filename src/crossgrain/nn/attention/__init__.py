"""Attention: the core computation, the multi-head layer, rotary positions, and the cache for inference."""

from .chunks import generate_positional_ids_for_cp, get_batch_on_this_cp_rank, pad_thd_sequences_for_cp
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
    "generate_positional_ids_for_cp",
    "get_batch_on_this_cp_rank",
    "pad_thd_sequences_for_cp",
]
