"""Table of names: the top of the tree, and what is directly below `pytorch`."""

from __future__ import annotations

from ..needs_cuda import all_need_cuda
from .entries import Entry, these
from .extension import MULTI_TENSOR_ON_A_GPU

_PERMUTATION = "crossgrain.nn.moe.permutation"
_ROUTER = "crossgrain.nn.moe.router"

TOP: dict[str, Entry] = {
    "transformer_engine": these("crossgrain.compat.version", __version__="VERSION"),
    "transformer_engine.common": {},
    "transformer_engine.common.recipe": {
        "*": ["crossgrain.recipe"],
        **these("crossgrain.recipe", Format="FP8Format"),
    },
    "transformer_engine.pytorch": {
        "*": ["crossgrain"],
        **these("crossgrain.compat.adapters.contexts", "autocast", "fp8_autocast", "fp8_model_init"),
        **these("crossgrain.compat.adapters.utils", "get_cudnn_version", "is_bf16_available"),
        **these("crossgrain.compat.adapters.modules", "UserBufferQuantizationMode"),
        **these("crossgrain.nn.cross_entropy", "parallel_cross_entropy"),
        **these("crossgrain.compat.adapters.activations", "interleave_glu_tensor", "deinterleave_glu_tensor"),
        **these(
            _PERMUTATION,
            "moe_permute",
            "moe_permute_with_probs",
            "moe_permute_and_pad_with_probs",
            "moe_unpermute",
            "moe_sort_chunks_by_index",
            "moe_sort_chunks_by_index_with_probs",
        ),
        **all_need_cuda(
            "initialize_ub",
            "destroy_ub",
            "make_graphed_callables",
            "onnx_export",
            "newton_schulz",
            "CusolverMpCtx",
            "FusedMLAQUpProjRopeQuant",
        ),
    },
    "transformer_engine.pytorch.constants": "crossgrain.compat.adapters.constants",
    "transformer_engine.pytorch.utils": "crossgrain.compat.adapters.utils",
    "transformer_engine.pytorch.optimizers": {"*": ["crossgrain.compat.optimizers"], **MULTI_TENSOR_ON_A_GPU},
    "transformer_engine.pytorch.optimizers.fused_adam": {
        "*": ["crossgrain.optim.fused_adam"],
        **these("crossgrain.compat.optimizers", "FusedAdam"),
    },
    "transformer_engine.pytorch.optimizers.fused_sgd": {
        "*": ["crossgrain.optim.fused_sgd"],
        **these("crossgrain.compat.optimizers", "FusedSGD"),
    },
    "transformer_engine.pytorch.optimizers.multi_tensor_apply": "crossgrain.optim.multi_tensor",
    "transformer_engine.pytorch.permutation": _PERMUTATION,
    "transformer_engine.pytorch.router": _ROUTER,
    "transformer_engine.pytorch.cross_entropy": "crossgrain.nn.cross_entropy",
    "transformer_engine.pytorch.graph": {
        **these("crossgrain.compat.adapters.capture", "is_graph_capturing"),
        **all_need_cuda(
            "make_graphed_callables",
            "save_fp8_tensors",
            "restore_fp8_tensors",
            "set_capture_start",
            "set_capture_end",
            "graph_pool_handle",
        ),
    },
    "transformer_engine.pytorch.export": {
        **these("crossgrain.compat.adapters.capture", "is_in_onnx_export_mode", "assert_warmed_up"),
        **all_need_cuda("onnx_export", "te_translation_table"),
    },
    "transformer_engine.pytorch.ep": all_need_cuda(
        "ep_initialize", "ep_finalize", "ep_prepare", "ep_dispatch", "ep_combine"
    ),
    "transformer_engine.pytorch.triton": {},
    "transformer_engine.pytorch.newton_schulz": all_need_cuda("newton_schulz", "CusolverMpCtx"),
    "transformer_engine.pytorch.jit": these("crossgrain.compat.adapters.capture", "no_torch_dynamo"),
    "transformer_engine.pytorch._extra_state": "crossgrain.recipe.pickled_state",
}
