"""Table of names: `debug`. Its features need the package nvdlfw_inspect, which is imported when one of them is read."""

from __future__ import annotations

from .entries import Entry, these

_STATE = "crossgrain.compat.adapters.debug_state"
_LOGGING = "crossgrain.compat.debug.log_features"
_CHANGING = "crossgrain.compat.debug.changing_features"
_FEATURES = "transformer_engine.debug.features"

DEBUG: dict[str, Entry] = {
    "transformer_engine.debug": these(_STATE, "set_weight_tensor_tp_group_reduce"),
    "transformer_engine.debug.pytorch": {},
    "transformer_engine.debug.pytorch.debug_state": _STATE,
    _FEATURES: {},
    f"{_FEATURES}.api": these(
        "crossgrain.compat.debug.api", "TEConfigAPIMapper", "TEDefaultFeatures", "TransformerEngineAPI"
    ),
    f"{_FEATURES}.log_tensor_stats": these(_LOGGING, "LogTensorStats"),
    f"{_FEATURES}.log_fp8_tensor_stats": these(_LOGGING, "LogFp8TensorStats"),
    f"{_FEATURES}.log_nvfp4_tensor_stats": these(_LOGGING, "LogNvfp4TensorStats"),
    f"{_FEATURES}.fake_quant": {
        **these(_CHANGING, "FakeQuant"),
        **these("crossgrain.compat.debug.fake_quant", "fake_quantize"),
    },
    f"{_FEATURES}.per_tensor_scaling": {
        **these(_CHANGING, "PerTensorScaling"),
        **these("crossgrain.compat.debug.fake_quant", "per_tensor_cast"),
    },
    f"{_FEATURES}.disable_quantization_gemm": these(_CHANGING, "DisableQuantizationGEMM"),
    f"{_FEATURES}.disable_quantization_layer": these(_CHANGING, "DisableQuantizationLayer"),
    f"{_FEATURES}.disable_fp8_gemm": these(_CHANGING, "DisableFP8GEMM"),
    f"{_FEATURES}.disable_fp8_layer": these(_CHANGING, "DisableFP8Layer"),
    f"{_FEATURES}.utils": {
        **these("crossgrain.compat.debug.steps", "next_enabled_iter"),
        **these("crossgrain.compat.debug.reduction", "get_reduction_params"),
    },
    f"{_FEATURES}.utils.stats_buffer": these("crossgrain.compat.debug.buffers", "STATS_BUFFERS", "StatsBuffers"),
}
