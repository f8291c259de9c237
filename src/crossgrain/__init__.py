"""crossgrain: low-precision training in which every tensor has its own format in each direction."""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

import torch as _torch

from . import files, formats, ops, optim, recipe
from .convert import ConvertReport, OwnForward, ScheduledConversion, convert, unconvert
from .export import ExportReport, export, load_exported
from .formats import Format, get_format, register_format
from .formats.dtypes import DType, TE_DType, TE_DType_To_Torch
from .formats.encoding import Encoding
from .formats.written import from_fields as _from_fields
from .kernels import get_backend, set_backend, swizzle_scales, unswizzle_scales
from .nn import (
    DotProductAttention,
    Fp8Padding,
    Fp8Unpadding,
    GroupedLinear,
    InferenceParams,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MultiheadAttention,
    RMSNorm,
    RotaryPositionEmbedding,
    TransformerLayer,
    apply_rotary_pos_emb,
    name_layers,
    requantize_,
)
from .nn.activation_checkpoint import checkpoint, in_fp8_activation_recompute_phase, is_fp8_activation_recompute_enabled
from .offload import (
    ManualOffloadSynchronizer,
    OffloadError,
    get_cpu_offload_context,
    mark_not_offload,
    offload,
)
from .planes import COLUMNWISE, ROWWISE, Direction, Plane
from .quantizers.any_format import FormatQuantizer, FormatTensor, FormatTensorStorage
from .quantizers.base import Quantizer, make_quantizer
from .quantizers.float8 import Float8CurrentScalingQuantizer, Float8Quantizer, Float8Tensor, Float8TensorStorage
from .quantizers.float8_block import Float8BlockQuantizer, Float8BlockwiseQTensor, Float8BlockwiseQTensorStorage
from .quantizers.hybrid import HybridQuantizedTensor, HybridQuantizedTensorStorage, HybridQuantizer
from .quantizers.identity import IdentityQuantizer, IdentityTensor, IdentityTensorStorage
from .quantizers.mxfp8 import MXFP8Quantizer, MXFP8Tensor, MXFP8TensorStorage
from .quantizers.nonfinite import NonfiniteError
from .quantizers.nvfp4 import NVFP4Quantizer, NVFP4Tensor, NVFP4TensorStorage
from .quantizers.request import QuantizerRequest
from .recipe import (
    DelayedScalingRequest,
    GemmRecipe,
    QuantizerRole,
    RecipeSchedule,
    autocast,
    fp8_autocast,
    fp8_model_init,
    get_default_recipe,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    quantized_model_init,
)
from .recipe.projections import LayerAdapter, Projection, register_layer
from .recipe.quantize import quantize, quantizer_for
from .runtime.random_numbers import CudaRNGStatesTracker, draws_by_layer
from .runtime.settings import get_device_compute_capability, is_non_tn_fp8_gemm_supported, settings
from .runtime.version import PACKAGE_VERSION as _PACKAGE_VERSION
from .tensor import (
    QuantizedTensor,
    QuantizedTensorStorage,
    prepare_for_saving,
    restore_from_func_ctx,
    restore_from_saved,
)
from .tensor.pickling import make_tensor

if _TYPE_CHECKING:
    from .planning import plan


__version__ = _PACKAGE_VERSION

__all__ = [
    "COLUMNWISE",
    "ROWWISE",
    "ConvertReport",
    "CudaRNGStatesTracker",
    "DType",
    "DelayedScalingRequest",
    "Direction",
    "DotProductAttention",
    "Encoding",
    "ExportReport",
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "Format",
    "FormatQuantizer",
    "FormatTensor",
    "FormatTensorStorage",
    "Fp8Padding",
    "Fp8Unpadding",
    "GemmRecipe",
    "GroupedLinear",
    "HybridQuantizedTensor",
    "HybridQuantizedTensorStorage",
    "HybridQuantizer",
    "IdentityQuantizer",
    "IdentityTensor",
    "IdentityTensorStorage",
    "InferenceParams",
    "LayerAdapter",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "ManualOffloadSynchronizer",
    "MultiheadAttention",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "NonfiniteError",
    "OffloadError",
    "OwnForward",
    "Plane",
    "Projection",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "QuantizerRequest",
    "QuantizerRole",
    "RMSNorm",
    "RecipeSchedule",
    "RotaryPositionEmbedding",
    "ScheduledConversion",
    "TE_DType",
    "TE_DType_To_Torch",
    "TransformerLayer",
    "apply_rotary_pos_emb",
    "autocast",
    "checkpoint",
    "convert",
    "draws_by_layer",
    "export",
    "files",
    "formats",
    "fp8_autocast",
    "fp8_model_init",
    "get_backend",
    "get_cpu_offload_context",
    "get_default_recipe",
    "get_device_compute_capability",
    "get_format",
    "in_fp8_activation_recompute_phase",
    "is_fp8_activation_recompute_enabled",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_non_tn_fp8_gemm_supported",
    "is_nvfp4_available",
    "load_exported",
    "mark_not_offload",
    "name_layers",
    "offload",
    "ops",
    "optim",
    "plan",
    "prepare_for_saving",
    "quantize",
    "quantized_model_init",
    "quantizer_for",
    "recipe",
    "register_format",
    "register_layer",
    "requantize_",
    "restore_from_func_ctx",
    "restore_from_saved",
    "set_backend",
    "settings",
    "swizzle_scales",
    "unconvert",
    "unswizzle_scales",
]

# What torch.load(weights_only=True) may rebuild: data classes and functions that check their input.
_torch.serialization.add_safe_globals(
    [
        DType,
        Direction,
        Float8BlockQuantizer,
        Float8BlockwiseQTensor,
        Float8CurrentScalingQuantizer,
        Float8Quantizer,
        Float8Tensor,
        Format,
        FormatQuantizer,
        FormatTensor,
        HybridQuantizedTensor,
        HybridQuantizer,
        IdentityQuantizer,
        IdentityTensor,
        MXFP8Quantizer,
        MXFP8Tensor,
        NVFP4Quantizer,
        NVFP4Tensor,
        formats.ScaleLayout,
        formats.Element,
        _from_fields,
        make_quantizer,
        make_tensor,
    ]
)

# Imported when they are first used: they bring FSDP2 along, which takes longer to import than the rest of crossgrain.
_LATE_ROOMS = ("compat", "distributed", "gpt", "lab", "planning")


def __getattr__(name: str) -> _Any:
    if name in _LATE_ROOMS:
        return _importlib.import_module(f"{__name__}.{name}")
    if name == "plan":
        return _importlib.import_module(f"{__name__}.planning").plan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE_ROOMS, "plan"})
