"""Table of names: modules, and the functions beside them."""

from __future__ import annotations

from ..needs_cuda import all_need_cuda
from .entries import TEX, Entry, these

_OURS = "crossgrain.compat.adapters.modules"

MODULES: dict[str, Entry] = {
    "transformer_engine.pytorch.module": {
        "*": ["crossgrain.nn"],
        **these(_OURS, "is_module_grouped_tensor_path_supported", "UserBufferQuantizationMode"),
        **all_need_cuda("initialize_ub", "destroy_ub"),
    },
    "transformer_engine.pytorch.module.base": {
        **these(
            _OURS,
            "TransformerEngineBaseModule",
            "UserBufferQuantizationMode",
            "get_dummy_wgrad",
            "get_workspace",
            "quantize_weight",
        ),
        **TEX,
        **all_need_cuda("initialize_ub", "destroy_ub", "get_ub", "fill_userbuffers_buffer_for_all_gather"),
    },
    "transformer_engine.pytorch.module._common": {
        **these("crossgrain.nn.linear_module", "can_reconstruct_wgrad_input_from_original"),
        **these(_OURS, "noop_cat"),
    },
    "transformer_engine.pytorch.module._split_quantization": {
        **these(
            "crossgrain.compat.adapters.split_quantization",
            "_split_quantize",
            _split_quantize_hybrid="split_rows_hybrid",
            _split_quantize_non_hybrid="split_rows",
        ),
        **these("crossgrain.quantizers.groups_alike", "validate_grouped_quantizer_list"),
        **TEX,
    },
    "transformer_engine.pytorch.module.linear": {"*": ["crossgrain.nn.linear"], **TEX},
    "transformer_engine.pytorch.module.layernorm_linear": {"*": ["crossgrain.nn.layernorm_linear"], **TEX},
    "transformer_engine.pytorch.module.layernorm_mlp": {"*": ["crossgrain.nn.layernorm_mlp"], **TEX},
    "transformer_engine.pytorch.module.grouped_linear": {"*": ["crossgrain.nn.grouped_linear"], **TEX},
    "transformer_engine.pytorch.module.fp8_padding": these("crossgrain.nn.grouped_linear", "Fp8Padding"),
    "transformer_engine.pytorch.module.fp8_unpadding": these("crossgrain.nn.grouped_linear", "Fp8Unpadding"),
    "transformer_engine.pytorch.module.layernorm": these("crossgrain.nn.norm", "LayerNorm"),
    "transformer_engine.pytorch.module.rmsnorm": these("crossgrain.nn.norm", "RMSNorm"),
    "transformer_engine.pytorch.transformer": "crossgrain.nn.transformer",
}
