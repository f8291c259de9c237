"""Table of names: quantized tensors, their storages and quantizers."""

from __future__ import annotations

from .entries import Entry, these

_MODULE_OF = {
    "float8": "crossgrain.quantizers.float8",
    "mxfp8": "crossgrain.quantizers.mxfp8",
    "float8_blockwise": "crossgrain.quantizers.float8_block",
    "nvfp4": "crossgrain.quantizers.nvfp4",
    "hybrid": "crossgrain.quantizers.hybrid",
    "identity": "crossgrain.quantizers.identity",
}

_BASES: dict[str, object] = {
    **these("crossgrain.quantizers.base", "Quantizer"),
    **these(
        "crossgrain.tensor",
        "QuantizedTensor",
        "QuantizedTensorStorage",
        "prepare_for_saving",
        "restore_from_saved",
        "restore_from_func_ctx",
    ),
}

_GROUPED = these("crossgrain.quantizers.grouped_tensor", "GroupedTensor", GroupedTensorStorage="GroupedTensor")

_AT = "transformer_engine.pytorch.tensor"

TENSORS: dict[str, Entry] = {
    "transformer_engine.pytorch.quantized_tensor": {
        **_BASES,
        **these("crossgrain.tensor.autograd", _QuantizeFunc="QuantizeFunction", _DequantizeFunc="DequantizeFunction"),
    },
    _AT: {"*": ["crossgrain"], **_BASES},
    f"{_AT}.utils": {
        "*": ["crossgrain.optim.weight_update"],
        **these("crossgrain.compat.adapters.tensor_utils", "is_custom", "clear_columnwise_cache"),
    },
    f"{_AT}._quantization_helpers": {
        **these("crossgrain.tensor.autograd", _QuantizeFunc="QuantizeFunction"),
        **these("crossgrain.compat.adapters.tensor_utils", "_IdentityFunc"),
    },
    f"{_AT}.storage": {"*": ["crossgrain"]},
    f"{_AT}.grouped_tensor": _GROUPED,
    f"{_AT}.storage.grouped_tensor_storage": f"{_AT}.grouped_tensor",
    "transformer_engine.pytorch.float8_tensor": _MODULE_OF["float8"],
    **{f"{_AT}.{kind}_tensor": module for kind, module in _MODULE_OF.items()},
    **{f"{_AT}.storage.{kind}_tensor_storage": module for kind, module in _MODULE_OF.items()},
}
