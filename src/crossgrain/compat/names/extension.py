"""Table of names: the compiled extension, and the functions around it."""

from __future__ import annotations

from ..needs_cuda import all_need_cuda
from .entries import Entry, these

_EXTENSION = "crossgrain.compat.adapters.extension"
_GEMM = "crossgrain.compat.adapters.gemm"

_SPLIT = these("crossgrain.linear.split_quantize", "split_quantize")
MULTI_TENSOR_ON_A_GPU = all_need_cuda(
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_adam_fp8",
    "multi_tensor_adam_param_remainder",
    "multi_tensor_compute_scale_and_scale_inv",
)
_ON_A_GPU = MULTI_TENSOR_ON_A_GPU | all_need_cuda(
    "CommOverlap",
    "CommOverlapHelper",
    "CommOverlapP2P",
    "bulk_overlap_ag_with_external_gemm",
    "fused_attn_bwd",
    "fused_attn_fwd",
    "nvshmem_finalize",
    "swizzle_scales_for_gemm_",
    "ubuf_built_with_mpi",
)

EXTENSION: dict[str, Entry] = {
    "transformer_engine_torch": {"*": [_EXTENSION], **_SPLIT, **_ON_A_GPU},
    "transformer_engine.pytorch.cpp_extensions": {
        **these(_GEMM, "general_gemm", "general_grouped_gemm", "general_grouped_gemm_for_grouped_tensor"),
        "*": [_EXTENSION],
        **_SPLIT,
        **_ON_A_GPU,
    },
    "transformer_engine.pytorch.cpp_extensions.gemm": _GEMM,
    "transformer_engine.pytorch.cpp_extensions.fused_attn": {
        **these("crossgrain.compat.adapters.attention", "FusedAttnBackend"),
        **all_need_cuda("fused_attn_bwd", "fused_attn_fwd"),
    },
}
