"""Factories that mix formats, for experiments: ``CustomRecipe(qfactory=mxfp8_fwd_nvfp4_bwd_factory)``.

Each GEMM reads one direction of each operand:

    fprop  input.row, weight.row      dgrad  weight.col, grad_output.row      wgrad  input.col, grad_output.col

With ``rowwise_dequantized`` the columnwise plane is made from the decoded rowwise plane, so that backward uses the
weights and inputs as forward rounded them.
"""

from __future__ import annotations

from ..formats.dtypes import DType
from ..quantizers.base import Quantizer
from ..quantizers.float8 import Float8CurrentScalingQuantizer
from ..quantizers.hybrid import HybridQuantizer
from ..quantizers.identity import IdentityQuantizer
from ..quantizers.nvfp4 import NVFP4Quantizer
from ..quantizers.request import QuantizerRequest
from .custom import quantizer_factory
from .factories import LINEAR, mxfp8_factory, nvfp4_factory, tensor_of
from .params import FP8Format
from .requests import DelayedScalingRequest
from .roles import QuantizerRole


def _original(rowwise: Quantizer, columnwise: Quantizer) -> HybridQuantizer:
    return HybridQuantizer(rowwise_quantizer=rowwise, columnwise_quantizer=columnwise)


def _dequantized(rowwise: Quantizer, columnwise: Quantizer) -> HybridQuantizer:
    return HybridQuantizer(
        rowwise_quantizer=rowwise, columnwise_quantizer=columnwise, columnwise_source="rowwise_dequantized"
    )


def _plain_nvfp4(*, row_scaled: bool = False) -> NVFP4Quantizer:
    """1x16 blocks, no rotation, rounding to nearest."""
    return NVFP4Quantizer(row_scaled_nvfp4=row_scaled)


@quantizer_factory(key=("high_precision_fwd_mxfp8_bwd_factory", 1))
def high_precision_fwd_mxfp8_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """fprop in high precision; dgrad and wgrad in MXFP8."""
    if tensor_of(role, *LINEAR) == "grad_output":
        return mxfp8_factory(role)
    return _original(IdentityQuantizer(), mxfp8_factory(role))


@quantizer_factory(key=("mxfp8_fwd_nvfp4_bwd_factory", 1))
def mxfp8_fwd_nvfp4_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """fprop in MXFP8; dgrad and wgrad in NVFP4. The NVFP4 weight is made from the decoded MXFP8 weight."""
    tensor_type = tensor_of(role, *LINEAR)
    if tensor_type == "input":
        return _original(mxfp8_factory(role), nvfp4_factory(role))
    if tensor_type == "weight":
        return _dequantized(mxfp8_factory(role), _plain_nvfp4())
    return nvfp4_factory(role) if tensor_type == "grad_output" else mxfp8_factory(role)


@quantizer_factory(key=("nvfp4_1d_weight_factory", 1))
def nvfp4_1d_weight_factory(role: QuantizerRole | None) -> Quantizer:
    """NVFP4 with 1x16 blocks for weights instead of tiles; backward uses the weights as forward rounded them."""
    if tensor_of(role, *LINEAR) == "weight":
        return _dequantized(_plain_nvfp4(), _plain_nvfp4())
    return nvfp4_factory(role)


@quantizer_factory(key=("mxfp8_fwd_high_precision_bwd_factory", 1))
def mxfp8_fwd_high_precision_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """fprop in MXFP8; dgrad and wgrad in high precision on the rounded weights and inputs."""
    tensor_type = tensor_of(role, *LINEAR)
    if tensor_type in ("input", "weight"):
        return _dequantized(mxfp8_factory(role), IdentityQuantizer())
    return IdentityQuantizer() if tensor_type == "grad_output" else mxfp8_factory(role)


@quantizer_factory(key=("nvfp4_row_scaled_fwd_mxfp8_bwd_factory", 1))
def nvfp4_row_scaled_fwd_mxfp8_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """Grouped layers: fprop in NVFP4 with an amax per row, dgrad and wgrad in MXFP8. Other layers: MXFP8."""
    tensor_type = tensor_of(role, "grouped_linear")
    if tensor_type in ("input", "weight"):
        return _dequantized(_plain_nvfp4(row_scaled=tensor_type == "input"), mxfp8_factory(role))
    return mxfp8_factory(role)


@quantizer_factory(key=("nvfp4_row_scaled_fwd_high_precision_bwd_factory", 1))
def nvfp4_row_scaled_fwd_high_precision_bwd_factory(role: QuantizerRole | None) -> Quantizer:
    """fprop in NVFP4 with an amax per row; dgrad and wgrad in high precision on the rounded values."""
    tensor_type = tensor_of(role, *LINEAR)
    if tensor_type in ("input", "weight"):
        return _dequantized(_plain_nvfp4(row_scaled=tensor_type == "input"), IdentityQuantizer())
    return IdentityQuantizer() if tensor_type == "grad_output" else _plain_nvfp4()


@quantizer_factory(key=("nvfp4_linear_fp8_dpa_factory", 1))
def nvfp4_linear_fp8_dpa_factory(role: QuantizerRole | None) -> Quantizer | QuantizerRequest:
    """NVFP4 layers and FP8 attention (with ``fp8_dpa=True``); softmax and its gradient with delayed scaling."""
    tensor_type = tensor_of(role, "dpa")
    if tensor_type in ("s", "dp"):
        return DelayedScalingRequest(FP8Format.HYBRID, amax_history_len=1, amax_compute_algo="most_recent")
    # Attention marks its outputs, whose reader it does not know, only by the ending of the name.
    boundary = role.name if role is not None and not role.module_type else ""
    is_attention = role is not None and role.module_type == "dpa"
    if is_attention or boundary.endswith(("dpa_output", "dpa_grad_input")):
        is_backward = tensor_type in ("do", "dqkv") or boundary.endswith("dpa_grad_input")
        return Float8CurrentScalingQuantizer(DType.kFloat8E5M2 if is_backward else DType.kFloat8E4M3)
    return nvfp4_factory(role)
