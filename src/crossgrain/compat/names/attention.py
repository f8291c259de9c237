"""Table of names: attention."""

from __future__ import annotations

from ..needs_cuda import all_need_cuda
from .entries import Entry, these

_NN = "crossgrain.nn.attention"
_OURS = "crossgrain.compat.adapters.attention"
_ROPE = f"{_NN}.rope"
_UTILS = (
    "AttentionLogging",
    "AttentionParams",
    "FlashAttentionUtils",
    "get_attention_backend",
)
_DPA_SETTINGS = (
    "_dpa_fp8_recipe",
    "_dpa_fp8_format",
    "_dpa_fp8ds_amax_algo",
    "_dpa_fp8ds_amax_histlen",
    "_dpa_fp8ds_reduce_amax",
)
_MHA_SETTINGS = ("_dpa_fp8_recipe", "_dpa_fp8_recipe_dpa", "_dpa_fp8_recipe_mha")
_DPA = "transformer_engine.pytorch.attention.dot_product_attention"

ATTENTION: dict[str, Entry] = {
    "transformer_engine.pytorch.attention": {
        **these(
            _NN,
            "DotProductAttention",
            "InferenceParams",
            "MultiheadAttention",
            "RotaryPositionEmbedding",
            "apply_rotary_pos_emb",
        ),
        **these(_OURS, "_SplitAlongDim"),
    },
    "transformer_engine.pytorch.attention.rope": {
        "*": [_ROPE],
        **these(_OURS, "apply_fused_qkv_rotary_pos_emb"),
    },
    "transformer_engine.pytorch.attention.inference": f"{_NN}.kv_cache",
    "transformer_engine.pytorch.attention.multi_head_attention": {
        "*": [f"{_NN}.multihead"],
        **these(_OURS, *_MHA_SETTINGS),
    },
    _DPA: {
        **these(f"{_NN}.dot_product", "DotProductAttention"),
        **these(_OURS, "_attention_backends"),
    },
    f"{_DPA}.dot_product_attention": {
        **these(f"{_NN}.dot_product", "DotProductAttention"),
        **these(_OURS, "_attention_backends", *_DPA_SETTINGS),
    },
    f"{_DPA}.utils": {
        **these(_OURS, *_UTILS),
        **these(f"{_NN}.masks", "check_set_window_size"),
    },
    f"{_DPA}.context_parallel": these(
        _NN, "generate_positional_ids_for_cp", "get_batch_on_this_cp_rank", "pad_thd_sequences_for_cp"
    ),
    f"{_DPA}.backends": {
        **these(_OURS, "UnfusedDotProductAttention"),
        **all_need_cuda("FlashAttention", "FusedAttention"),
    },
}
