"""The functions of Transformer Engine's compiled extension, implemented with crossgrain's own."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ...formats.dtypes import DType, TE_DType_To_Torch
from ...gemm.activations import Activation, activation
from ...gemm.norms import layer_norm, norm_backward, rms_norm
from ...optim.multi_tensor import (
    multi_tensor_adam,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_sgd,
    multi_tensor_unscale_l2norm,
)
from ...quantizers.base import Quantizer
from ...quantizers.grouped_tensor import GroupedTensor, quantized_group
from ...recipe.amax_history import update_history_and_scale
from ...runtime.devices import resolved_device
from ...tensor import QuantizedTensorStorage
from .constants import FP8BwdTensorIdx as FP8BwdTensors
from .constants import FP8FwdTensorIdx as FP8FwdTensors
from .gemm import general_gemm
from .positions import thd_get_partitioned_indices

__all__ = [
    "DType",
    "FP8BwdTensors",
    "FP8FwdTensors",
    "FP8TensorMeta",
    "bgrad_group_quantize",
    "bgrad_quantize",
    "dequantize",
    "fused_amax_and_scale_update_after_reduction",
    "generic_gemm",
    "get_cublasLt_version",
    "group_dequantize",
    "group_quantize",
    "layernorm_bwd",
    "layernorm_fwd",
    "multi_tensor_adam",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
    "quantize",
    "rmsnorm_bwd",
    "rmsnorm_fwd",
    "splits_to_offsets",
    "splits_to_offsets_multi",
    "thd_get_partitioned_indices",
]


class FP8TensorMeta:
    """Scales and histories of delayed scaling."""

    scale: Tensor
    scale_inv: Tensor
    amax_history: Tensor


class Float8BlockScaleTensorFormat(enum.IntEnum):
    """Memory layouts of block scales; here they are always compact."""

    GEMM_READY = 0
    COMPACT = 1


# ---- quantizing ------------------------------------------------------------------------------------


def quantize(tensor: Tensor, quantizer: Quantizer, out: Any = None, noop: Tensor | None = None) -> Any:
    """Quantize into new memory, or into ``out``; nothing is written if ``noop`` is not zero."""
    if out is not None:
        return quantizer.update_quantized(tensor, out, noop_flag=noop)
    return quantizer.quantize(tensor)


def dequantize(tensor: QuantizedTensorStorage, dtype: DType | torch.dtype | None = None) -> Tensor:
    """Decode a quantized tensor, to its nominal dtype or to ``dtype``."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return tensor.dequantize(dtype=dtype)
    return tensor.dequantize(dtype=TE_DType_To_Torch[DType.cast(dtype)])


def bgrad_quantize(tensor: Tensor, quantizer: Quantizer) -> tuple[Tensor, Any]:
    """Return the sum over rows, which is the gradient of a bias, and the quantized tensor."""
    sums = tensor.reshape(-1, tensor.shape[-1]).to(torch.float32).sum(0).to(tensor.dtype)
    return sums, quantizer.quantize(tensor)


def group_quantize(
    tensor: Tensor, quantizer: Quantizer, num_tensors: int, first_dims: Tensor | None = None, **offsets: Any
) -> GroupedTensor:
    """Quantize groups of rows separately into one memory. Offsets are computed from the sizes of the groups."""
    return quantized_group(tensor, quantizer, num_tensors, first_dims)


def group_dequantize(tensor: GroupedTensor, dtype: DType | None = None) -> GroupedTensor:
    """Decode all tensors of a group."""
    return tensor.dequantize(None if dtype is None else TE_DType_To_Torch[DType.cast(dtype)])


def bgrad_group_quantize(
    tensor: Tensor, quantizer: Quantizer, num_tensors: int, first_dims: Tensor | None = None, **offsets: Any
) -> tuple[GroupedTensor, Tensor]:
    """Return what `group_quantize` makes, and the sum of each group over its rows [groups, K]."""
    group = quantized_group(tensor, quantizer, num_tensors, first_dims)
    parts = tensor.split([first for first, _ in group.tensor_shapes])
    return group, torch.stack([part.to(torch.float32).sum(0) for part in parts]).to(tensor.dtype)


def splits_to_offsets(first_dims: Tensor, last_dim: int) -> Tensor:
    """The offsets where groups of ``first_dims`` rows of ``last_dim`` numbers begin, and where the last one ends."""
    ends = torch.cumsum(first_dims.to(torch.int64), 0) * last_dim
    return torch.cat((ends.new_zeros(1), ends))


def splits_to_offsets_multi(
    split_sizes: Tensor,
    device: torch.device | str,
    strides: Sequence[int],
    include_leading_zero: Sequence[bool],
    dtypes: Sequence[torch.dtype],
    bulk_allocate: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """The sizes as int64, and offsets like `splits_to_offsets` for several row lengths, with or without the first 0."""
    sizes = split_sizes.to(device=resolved_device(device), dtype=torch.int64)
    offsets = [
        splits_to_offsets(sizes, stride)[0 if leading else 1 :].to(dtype)
        for stride, leading, dtype in zip(strides, include_leading_zero, dtypes, strict=True)
    ]
    return sizes, offsets


def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Tensor,
    amax_histories: Sequence[Tensor],
    scales: Sequence[Tensor],
    amax_compute_algo: Literal["max", "most_recent"],
    fp8_dtype: DType,
    margin: float,
) -> None:
    """Do one step of delayed scaling for all histories. Their newest rows are in one buffer."""
    largest = DType.cast(fp8_dtype).element.max
    start = 0
    for history, scale in zip(amax_histories, scales, strict=True):
        end = start + scale.numel()
        reduced = amax_reduction_buffer[start:end] if amax_reduction_buffer.numel() else None
        update_history_and_scale(
            history, scale, largest, margin=int(margin), algorithm=amax_compute_algo, reduced_amax=reduced
        )
        start = end


# ---- products, norms, activations -------------------------------------------------------------------


def generic_gemm(
    A: Any,
    transa: bool,
    B: Any,
    transb: bool,
    D: Tensor | None,
    quantizer: Any,
    output_dtype: DType | None,
    bias: Tensor | None,
    bias_type: DType | None,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor | None = None,
    workspace_size: int = 0,
    accumulate: bool = False,
    use_split_accumulator: bool = False,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Any]:
    """Like `general_gemm`, but with transposition flags instead of a layout."""
    return list(
        general_gemm(
            A,
            B,
            out_dtype=None if output_dtype is None else TE_DType_To_Torch[DType.cast(output_dtype)],
            quantization_params=quantizer,
            gelu=gelu,
            gelu_in=gelu_in,
            accumulate=accumulate,
            layout=("T" if transa else "N") + ("T" if transb else "N"),
            out=D,
            bias=bias,
            grad=grad,
            ub=comm_overlap,
            ub_type=comm_type,
            extra_output=extra_output,
            bulk_overlap=bulk_overlap,
            alpha=alpha,
            beta=beta,
        )
    )


def layernorm_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Quantizer | None,
    otype: DType,
    sm_margin: int = 0,
    zero_centered_gamma: bool = False,
) -> tuple[Any, Tensor | None, Tensor]:
    """Return the result, quantized if there is a quantizer, and the mean and the reciprocal deviation [rows]."""
    made = layer_norm(input, weight, bias, eps, zero_centered_gamma)
    assert made.mean is not None
    return _delivered(made.y, ln_out, quantizer, otype), made.mean.flatten(), made.rstd.flatten()


def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Quantizer | None,
    otype: DType,
    sm_margin: int = 0,
    zero_centered_gamma: bool = False,
) -> tuple[Any, None, Tensor]:
    """Return the result, quantized if there is a quantizer, None, and the reciprocal deviation [rows]."""
    made = rms_norm(input, weight, eps, zero_centered_gamma)
    return _delivered(made.y, ln_out, quantizer, otype), None, made.rstd.flatten()


def layernorm_bwd(
    dz: Tensor,
    x: Tensor,
    mu: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int = 0,
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, weight and bias."""
    by_row = (*x.shape[:-1], 1)
    return norm_backward(dz, x, gamma, mu.view(by_row), rsigma.view(by_row), zero_centered_gamma)


def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int = 0, zero_centered_gamma: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the gradients of input and weight."""
    return norm_backward(dz, x, gamma, None, rsigma.view(*x.shape[:-1], 1), zero_centered_gamma)[:2]


def _delivered(y: Tensor, out: Any, quantizer: Quantizer | None, dtype: DType) -> Any:
    if quantizer is not None:
        return quantize(y, quantizer, out)
    y = y.to(TE_DType_To_Torch[DType.cast(dtype)])
    return y if out is None else out.copy_(y)


def _pair(name: str) -> tuple[Any, Any]:
    """Functions for an activation and its gradient; they quantize the result if a quantizer is given."""

    def forward(input: Tensor, quantizer: Quantizer | None = None, *options: float) -> Any:
        y = _function(name, options).forward(input)
        return y if quantizer is None else quantizer.quantize(y)

    def backward(grad: Tensor, fwd_input: Tensor, quantizer: Quantizer | None = None, *options: float) -> Any:
        dx = _function(name, options).backward(grad, fwd_input)
        return dx if quantizer is None else quantizer.quantize(dx)

    return forward, backward


def _function(name: str, options: Sequence[float]) -> Activation:
    return activation(name, **dict(zip(("limit", "alpha", "glu_linear_offset"), options, strict=False)))


gelu, dgelu = _pair("gelu")
geglu, dgeglu = _pair("geglu")
glu, dglu = _pair("glu")
qgelu, dqgelu = _pair("qgelu")
qgeglu, dqgeglu = _pair("qgeglu")
relu, drelu = _pair("relu")
reglu, dreglu = _pair("reglu")
srelu, dsrelu = _pair("srelu")
sreglu, dsreglu = _pair("sreglu")
silu, dsilu = _pair("silu")
swiglu, dswiglu = _pair("swiglu")
clamped_swiglu, clamped_dswiglu = _pair("clamped_swiglu")


def get_cublasLt_version() -> int:
    """A version number that has every format, since cuBLAS is not used here."""
    return 130100
