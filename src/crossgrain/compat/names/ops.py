"""Table of names: fusible operations."""

from __future__ import annotations

from ..needs_cuda import all_need_cuda
from .entries import Entry, these

_OPS = "crossgrain.ops"
_BASIC = f"{_OPS}.basic"
_AT = "transformer_engine.pytorch.ops"

_BASIC_MODULES = {
    "activation": f"{_BASIC}.activation",
    "add_extra_input": f"{_BASIC}.extra",
    "all_gather": f"{_BASIC}.collective",
    "all_reduce": f"{_BASIC}.collective",
    "basic_linear": f"{_BASIC}.linear",
    "bias": f"{_BASIC}.bias",
    "constant_scale": f"{_BASIC}.simple",
    "dropout": f"{_BASIC}.simple",
    "grouped_linear": f"{_BASIC}.grouped_linear",
    "identity": f"{_BASIC}.simple",
    "l2normalization": f"{_BASIC}.normalization",
    "layer_norm": f"{_BASIC}.normalization",
    "make_extra_output": f"{_BASIC}.extra",
    "quantize": f"{_BASIC}.quantize",
    "reduce_scatter": f"{_BASIC}.collective",
    "reshape": f"{_BASIC}.simple",
    "rmsnorm": f"{_BASIC}.normalization",
    "swiglu": f"{_BASIC}.activation",
}
_FUSED_MODULES = {
    "backward_activation_bias": f"{_OPS}.fused.backward",
    "backward_add_rmsnorm": f"{_OPS}.fused.backward",
    "backward_linear_add": f"{_OPS}.fused.backward",
    "backward_linear_scale": f"{_OPS}.fused.backward",
    "forward_linear_bias_activation": f"{_OPS}.fused.forward_linear",
    "forward_linear_bias_add": f"{_OPS}.fused.forward_linear",
    "forward_linear_scale_add": f"{_OPS}.fused.forward_linear",
}

OPS: dict[str, Entry] = {
    _AT: {"*": [_OPS]},
    f"{_AT}._common": {
        **these(f"{_OPS}.handover", maybe_dequantize="plain"),
        **these(
            "crossgrain.compat.adapters.ops",
            "is_quantized_tensor",
            "_cudnn_frontend_supports_grouped_gemm_srelu",
            "_cudnn_frontend_version_supported",
        ),
    },
    f"{_AT}.basic": {"*": [_BASIC]},
    **{f"{_AT}.basic.{name}": module for name, module in _BASIC_MODULES.items()},
    f"{_AT}.fused": {
        "*": [f"{_OPS}.fused"],
        **all_need_cuda("UserbuffersBackwardLinear", "UserbuffersForwardLinear"),
        **dict.fromkeys(
            ("ForwardGroupedMLP_CuTeGEMMSwiGLU_MXFP8", "BackwardGroupedMLP_CuTeGEMMDSwiGLU_MXFP8"),
            "crossgrain.compat.adapters.ops:GroupedMLPOfCuTe",
        ),
    },
    **{f"{_AT}.fused.{name}": module for name, module in _FUSED_MODULES.items()},
    f"{_AT}.fuser": f"{_OPS}.fuser",
    f"{_AT}.linear": f"{_OPS}.linear",
    f"{_AT}.op": {"*": [f"{_OPS}.op"], **these(f"{_OPS}.context", "OperationContext")},
    f"{_AT}.sequential": f"{_OPS}.sequential",
}
