"""Matrix products with Transformer Engine's arguments. The layout chooses which GEMM of a linear layer is computed.

layout   GEMM    A        B                 result
TN       fprop   weight   input             B · Aᵀ
NN       dgrad   weight   output gradient   B · A
NT       wgrad   input    output gradient   Bᵀ · A
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...gemm import gemm
from ...gemm.activations import activation
from ...gemm.operands import GEMMS
from ...planes import Direction, Plane
from ...quantizers.float8 import Float8CurrentScalingQuantizer, Float8Quantizer
from ...quantizers.float8_block import Float8BlockQuantizer
from ...quantizers.grouped_tensor import GroupedTensor
from ...quantizers.hybrid_tensor import HybridQuantizedTensorStorage
from ...quantizers.identity import IdentityTensorStorage
from ...quantizers.mxfp8 import MXFP8Quantizer
from ...quantizers.nvfp4 import NVFP4Quantizer
from ...tensor import QuantizedTensorStorage
from ..needs_cuda import NeedsCudaError
from .tensor_utils import is_custom

__all__ = ["general_gemm", "general_grouped_gemm", "general_grouped_gemm_for_grouped_tensor"]

Operand = QuantizedTensorStorage | Tensor
Results = tuple[Any, Tensor | None, Tensor | None, Tensor | None]

_GEMM_OF = {"TN": "fprop", "NN": "dgrad", "NT": "wgrad"}
_NATIVE = (
    Float8Quantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    Float8BlockQuantizer,
    NVFP4Quantizer,
)


def general_gemm(
    A: Operand,
    B: Operand,
    out_dtype: torch.dtype | None = None,
    quantization_params: Any = None,
    gelu: bool = False,
    gelu_in: Tensor | None = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: Any = None,
    bias: Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
    ub: Any = None,
    ub_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    workspace: Tensor | None = None,
) -> Results:
    """Multiply A and B.

    Args:
        A: first operand, plain or quantized.
        B: second operand, plain or quantized.
        out_dtype: dtype of the result; by default that of ``out`` or of A.
        quantization_params: quantizer for the result.
        gelu: apply gelu to the result, and return its input as well; with ``grad``, multiply the result by the
            derivative of gelu at ``gelu_in``.
        gelu_in: input of gelu in forward; needed with ``gelu`` and ``grad``.
        alpha: factor of the product.
        beta: factor of what is in ``out``; only with ``accumulate``.
        accumulate: add the product to ``out``.
        layout: "TN", "NN" or "NT", see above.
        out: tensor to write the result to.
        bias: added to the result; with ``grad``, its gradient is returned instead, the sum of B over rows.
        use_split_accumulator: ignored.
        grad: the product belongs to a backward pass.
        ub: overlap with communication; not supported.
        ub_type: not supported.
        extra_output: not supported.
        bulk_overlap: not supported.
        workspace: ignored.

    Returns:
        ``(out, bias gradient, input of gelu, extra output)``; what does not apply is None.
    """
    if ub is not None or ub_type is not None or extra_output is not None or bulk_overlap:
        raise NeedsCudaError(
            "general_gemm: overlap with communication (ub, ub_type, extra_output, bulk_overlap) needs CUDA"
        )
    _validate_native_gemm_output_quantizer(quantization_params)
    _check_arguments(out_dtype, out, quantization_params, gelu, accumulate, beta)
    forward_bias = None if grad else bias
    shape = _result_shape(A, B, layout)
    quantized_out = isinstance(out, QuantizedTensorStorage)
    plain = quantization_params is None and not gelu and not quantized_out
    dtype = out_dtype or (out.dtype if out is not None else _dtype_of(A, B))
    made = _product(
        layout,
        A,
        B,
        dtype if plain else torch.float32,
        bias=forward_bias,
        out=out.view(-1, out.shape[-1]) if plain and out is not None else None,
        accumulate=accumulate,
        alpha=alpha,
        beta=1.0 if beta is None else beta,
    )
    result: Any = made.view(shape)
    before_gelu: Tensor | None = None
    if gelu and grad:
        if gelu_in is None:
            raise ValueError("general_gemm: gelu=True with grad=True needs gelu_in, which is missing")
        result = activation("gelu").backward(result, gelu_in.view(shape).to(torch.float32))
    elif gelu:
        before_gelu = result.to(dtype)
        result = activation("gelu").forward(result)
    if quantized_out:
        quantizer = quantization_params or out._get_quantizer()
        result = quantizer.update_quantized(result.to(dtype).view(out.shape), out)
    elif quantization_params is not None:
        result = quantization_params.quantize(result.to(dtype))
    elif not plain:
        result = result.to(dtype)
        if out is not None:
            result = out.copy_(result.view(out.shape))
    elif out is not None:
        result = out
    bias_gradient = None
    if grad and bias is not None:
        rows = _plain(B)
        bias_gradient = rows.reshape(-1, rows.shape[-1]).to(torch.float32).sum(0).to(bias.dtype)
    return result, bias_gradient, before_gelu, None


def general_grouped_gemm(
    A: Sequence[Operand],
    B: Sequence[Operand],
    out: Sequence[Tensor],
    quantization_params: Sequence[Any] | None,
    out_dtype: torch.dtype,
    layout: str = "TN",
    m_splits: Sequence[int] | None = None,
    gelu: bool = False,
    grad: bool = False,
    accumulate: bool = False,
    bias: Sequence[Tensor] | None = None,
    use_bias: bool = False,
    use_split_accumulator: bool = False,
    D_dtype: Any = None,
    single_output: bool = False,
    workspaces: Any = None,
) -> tuple[Any, list[Tensor | None], list[Tensor | None]]:
    """Call `general_gemm` for each group.

    Args:
        m_splits: rows of each group; needed with ``single_output``.
        single_output: write all results one after the other to ``out[0]``, in parts of ``m_splits`` rows.

    Returns:
        ``(out, bias gradients, inputs of gelu)``.
    """
    outputs: Sequence[Tensor] = out
    if single_output:
        if m_splits is None:
            raise ValueError("general_grouped_gemm: single_output=True needs m_splits, the rows of each group")
        outputs = out[0].split(list(m_splits))
    quantizers = quantization_params or [None] * len(A)
    biases: Sequence[Tensor | None] = bias or [None] * len(A)
    results = [
        general_gemm(
            a,
            b,
            out_dtype=out_dtype,
            quantization_params=quantizer,
            gelu=gelu,
            accumulate=accumulate,
            layout=layout,
            out=None if quantizer is not None else target,
            bias=group_bias if use_bias else None,
            grad=grad,
        )
        for a, b, target, quantizer, group_bias in zip(A, B, outputs, quantizers, biases, strict=True)
    ]
    made = [result[0] for result in results]
    return (out[0] if single_output else made), [result[1] for result in results], [result[2] for result in results]


def general_grouped_gemm_for_grouped_tensor(
    A: GroupedTensor | Sequence[Operand],
    B: GroupedTensor,
    out: GroupedTensor | Sequence[Tensor],
    *,
    layout: str = "TN",
    accumulate: bool = False,
    use_split_accumulator: bool = False,
    bias: GroupedTensor | None = None,
    bias_scale: Tensor | None = None,
    grad: bool = False,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
) -> GroupedTensor | Sequence[Tensor]:
    """Call `general_gemm` for each tensor of a group, write the results to ``out`` and return it.

    Args:
        alpha: factors of the products, one for each group.
        beta: factors of what is in ``out``, one for each group; only with ``accumulate``.
    """
    if grad or bias_scale is not None:
        raise NotImplementedError("general_grouped_gemm_for_grouped_tensor does not support grad=True or bias_scale")
    if beta is not None and not accumulate:
        raise ValueError(
            "general_grouped_gemm_for_grouped_tensor: beta needs accumulate=True, because it scales what is in out"
        )
    targets, biases = _members(out), [None] * len(_members(out)) if bias is None else _members(bias)
    for g, (a, b, target, added) in enumerate(zip(_members(A), _members(B), targets, biases, strict=True)):
        general_gemm(
            a,
            b,
            out_dtype=target.dtype,
            alpha=1.0 if alpha is None else alpha[g].item(),
            beta=None if beta is None else beta[g].item(),
            accumulate=accumulate,
            layout=layout,
            out=target,
            bias=None if added is None else added.reshape(-1),
        )
    return out


def _members(group: GroupedTensor | Sequence[Any]) -> list[Any]:
    return group.split_into_quantized_tensors() if isinstance(group, GroupedTensor) else list(group)


def _unwrap_tensor(tensor: Any, usage: str) -> Any:
    """The tensor that a GEMM multiplies: the child of a hybrid, the values of an identity, or ``tensor`` itself."""
    if usage not in ("rowwise", "columnwise"):
        raise ValueError(f"usage of a GEMM operand must be rowwise or columnwise, got {usage!r}")
    if tensor is None:
        raise RuntimeError(f"an operand of this GEMM has no {usage} data")
    if isinstance(tensor, HybridQuantizedTensorStorage):
        return _unwrap_tensor(getattr(tensor, f"{usage}_sub_storage"), usage)
    if isinstance(tensor, IdentityTensorStorage):
        return tensor.dequantize()
    if not isinstance(tensor, QuantizedTensorStorage) or is_custom(tensor):
        return tensor
    return tensor if isinstance(tensor._get_quantizer(), _NATIVE) else tensor.dequantize()


def _validate_native_gemm_output_quantizer(quantization_params: Any) -> None:
    if quantization_params is not None and not isinstance(quantization_params, _NATIVE):
        names = ", ".join(cls.__name__ for cls in _NATIVE)
        raise NotImplementedError(
            f"a GEMM can quantize its output with one of {names}, but not with {type(quantization_params).__name__}: "
            "quantize the result afterwards"
        )


def _check_arguments(
    out_dtype: Any, out: Any, quantizer: Any, gelu: bool, accumulate: bool, beta: float | None
) -> None:
    """Raise for combinations of arguments that are not supported."""
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"general_gemm: out_dtype must be a torch.dtype, got a {type(out_dtype).__name__}")
    quantized_out = isinstance(out, QuantizedTensorStorage)
    if quantizer is not None and out is not None and not quantized_out:
        raise ValueError("general_gemm: a quantized result cannot be written to an out that is not quantized")
    if accumulate and (gelu or quantizer is not None or quantized_out):
        raise ValueError(
            "general_gemm: accumulate=True works only without gelu and without a quantizer: such a result can be added "
            "to out"
        )
    if beta and not accumulate:
        raise ValueError(f"general_gemm: beta is {beta}, but it is only used with accumulate=True")


def _product(layout: str, A: Operand, B: Operand, dtype: torch.dtype, **options: Any) -> Tensor:
    which = _GEMM_OF.get(layout)
    if which is None:
        raise ValueError(f"the layout of a GEMM must be one of {', '.join(_GEMM_OF)}, got {layout!r}")
    left, right = GEMMS[which].values()  # of B, and of A
    try:
        return gemm(which, _read(B, left), _read(A, right), out_dtype=dtype, **options)
    except ValueError as error:
        raise RuntimeError(f"GEMM {layout}: {error}") from error


def _read(operand: Operand, direction: Direction) -> Plane | Tensor:
    unwrapped = _unwrap_tensor(operand, direction.value)
    if not isinstance(unwrapped, QuantizedTensorStorage):
        plain: Tensor = unwrapped
        return plain.reshape(-1, plain.shape[-1])
    plane = unwrapped.plane(direction)
    if plane is None:
        raise RuntimeError(f"{type(operand).__name__} of shape {list(operand.shape)} has no {direction.value} data")
    return plane


def _result_shape(A: Operand, B: Operand, layout: str) -> tuple[int, ...]:
    if layout == "NT":
        return B.shape[-1], A.shape[-1]
    columns = math.prod(A.shape[:-1]) if layout == "TN" else A.shape[-1]
    return (*B.shape[:-1], columns)


def _plain(operand: Operand) -> Tensor:
    return operand.dequantize() if isinstance(operand, QuantizedTensorStorage) else operand


def _dtype_of(A: Operand, B: Operand) -> torch.dtype:
    """The nominal dtype of the first operand."""
    first: Any = A
    return first._dtype if isinstance(first, QuantizedTensorStorage) else first.dtype
