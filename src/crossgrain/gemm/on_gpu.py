"""GEMMs on GPUs, and on all other devices than the CPU. The host reads nothing, so it never waits for the device.

Codes are multiplied natively where torch and the hardware can (`native.rules`). Everywhere else both operands are
decoded: to bf16 if the format fits into bf16, and otherwise to fp32 without TF32. Sums are in fp32, and everything
after them is one pass, `kernels.epilogue`. If native GEMMs can do without it, they write the result themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import kernels
from ..kernels.reference.hadamard import unrotate
from ..planes import Plane
from ..runtime.settings import settings
from .full_precision import full_fp32
from .native import Gpu, Route, machine, needs_epilogue, route, scaled_call
from .operands import GEMMS

_WRITTEN = (torch.bfloat16, torch.float16, torch.float32)  # by epilogues


def multiplied_on_gpu(
    which: str,
    a: Plane,
    b: Plane,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    out: Tensor | None,
    accumulate: bool,
    alpha: float,
    beta: float,
) -> Tensor:
    """The result of `gemm`, whose arguments have been checked.

    Raises:
        RuntimeError: ``settings.native_gemms`` is True, and codes cannot be multiplied natively.
    """
    gpu = machine.gpu_of(a.data.device)
    way = route(a, b, gpu)
    if settings.native_gemms and not way.is_native:
        refuse_decoding(which, a, b, way.reason)
    if way.is_native and needs_epilogue(a.format, out_dtype, bias, accumulate=accumulate, alpha=alpha) is None:
        result = machine.run(scaled_call(a, b, out_dtype, bias, alpha))
        return result if out is None else out.copy_(result)
    if not accumulate and bias is None and alpha == 1.0 and _rounds_once(a, b, out_dtype, way):
        result = _room(a, b, out_dtype) if out is None else out
        return torch.mm(kernels.decode_bf16(a), kernels.decode_bf16(b).t(), out=result)
    if out is None:
        out = _room(a, b, out_dtype)
    written = out if out.dtype in _WRITTEN else out.to(torch.float32)
    _multiply(a, b, way, gpu, written, bias, alpha, beta if accumulate else None)
    return out if written is out else out.copy_(written)


def refuse_decoding(which: str, a: Plane, b: Plane, reason: str | None) -> None:
    """Raise RuntimeError, because settings.native_gemms does not allow to decode. Without codes, nothing is decoded."""
    if (a.format.is_identity and b.format.is_identity) or 0 in (*a.shape, *b.shape):
        return
    sides = " by ".join(
        f"{tensor} {plane.direction.value} ({plane.format.name} {list(plane.shape)})"
        for tensor, plane in zip(GEMMS[which], (a, b), strict=True)
    )
    raise RuntimeError(
        f"{which} multiplies {sides}, which cannot be done natively: {reason}. Change the format or the shape, or set "
        "settings.native_gemms to None to decode such operands"
    )


def _multiply(
    a: Plane,
    b: Plane,
    way: Route,
    gpu: Gpu | None,
    out: Tensor,
    bias: Tensor | None,
    alpha: float,
    beta: float | None,
) -> None:
    """Multiply in fp32, and let the epilogue write ``out``."""
    row_scale, column_scale = kernels.global_scale(a), kernels.global_scale(b)
    if way.is_native:
        if row_scale is not None:  # then scaled_mm applies both scales, and alpha
            product = machine.run(scaled_call(a, b, torch.float32, alpha=alpha))
            row_scale, column_scale, alpha = None, None, 1.0
        else:
            product = machine.run(scaled_call(a, b, torch.float32))
    else:
        in_place = beta is None and out.dtype == torch.float32
        product = _decoded_product(a, b, way, gpu, out if in_place else _room(a, b, torch.float32))
    kernels.epilogue(product, out, row_scale, column_scale, alpha, bias, beta)


def _decoded_product(a: Plane, b: Plane, way: Route, gpu: Gpu | None, product: Tensor) -> Tensor:
    """The fp32 product of both operands under global scales of one.

    Everything is written with ``out=``, because torch.autocast does not change such operations.
    """
    if way.operands == "bf16":
        left, right = kernels.decode_bf16(a), kernels.decode_bf16(b)
        if product.device.type != "cpu" and gpu is not None and gpu.has_kernels:
            # An fp32 result also keeps partial sums in fp32, whatever the flags about reduced precision are.
            return torch.mm(left, right.t(), out_dtype=torch.float32, out=product)
        return torch.mm(left.to(torch.float32), right.to(torch.float32).t(), out=product)
    unrotated = a.format.rotation != b.format.rotation
    left, right = _fp32_operand(a, unrotated), _fp32_operand(b, unrotated)
    with full_fp32():
        return torch.mm(left, right.t(), out=product)


def _fp32_operand(plane: Plane, unrotated: bool) -> Tensor:
    values = kernels.decode_operand(kernels.under_scale_one(plane))
    rotation = plane.format.rotation
    return unrotate(values, rotation) if unrotated and rotation is not None else values


def _rounds_once(a: Plane, b: Plane, out_dtype: torch.dtype, way: Route) -> bool:
    """Whether a bf16 GEMM with a bf16 result gives what the epilogue gives: unscaled sums, rounded once.

    Unless torch is told not to, it lets partial sums be rounded to bf16.
    """
    if way.operands != "bf16" or out_dtype != torch.bfloat16 or a.data.device.type == "cpu":
        return False
    scaled = kernels.has_global_scale(a.format) or kernels.has_global_scale(b.format)
    return not scaled and not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


def _room(a: Plane, b: Plane, dtype: torch.dtype) -> Tensor:
    return torch.empty(a.operand_shape[0], b.operand_shape[0], dtype=dtype, device=a.data.device)
