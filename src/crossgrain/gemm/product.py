"""`gemm`: GEMMs of quantized operands. The exact numbers are multiplied with fp32 accumulation, and scaled at the end.

A code times its block scale is exact in fp32 (and nearly always in bf16). The rest of a scale, one number for the whole
tensor (per-tensor FP8, NVFP4) or for each row, multiplies the result, as in hardware. Operands with the same rotation
are multiplied without undoing it, because the product is the same.

This module has the GEMMs of the CPU; those of all other devices are in `on_gpu`. If the CPU multiplies bytes (AVX2),
two NVFP4 operands are multiplied without decoding, in half the time of an fp32 GEMM. All other operands are decoded: to
bf16 if bf16 GEMMs are fast on this CPU and the numbers are exact in bf16, otherwise to fp32. On a CPU without bf16
units a bf16 GEMM is many times slower than an fp32 GEMM.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..formats import IDENTITY, Format
from ..kernels.reference.hadamard import unrotate
from ..planes import ROWWISE, Direction, Plane, matrix_shape
from ..runtime.settings import settings
from ..runtime.strict import refuse_if_strict
from ..runtime.transforms import dispatch_modes, memory_is_out_of_reach
from .native import machine
from .on_gpu import multiplied_on_gpu, refuse_decoding
from .operands import GEMMS, check_operands

_LEAST_NUMBERS = 1 << 16  # a smaller operand is decoded into the caches anyway
_FP32_MAX = torch.finfo(torch.float32).max


class _Operand(NamedTuple):
    """Decoded numbers [rows, summed dimension], and the rest of their scale: one number, or one for each row."""

    values: Tensor
    scale: float | Tensor | None  # None for one


def gemm(
    which: str,
    a: Plane | Tensor,
    b: Plane | Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
    alpha: float = 1.0,
    beta: float = 1.0,
    allow_mixed: bool = False,
) -> Tensor:
    """Compute one of the three GEMMs of a linear layer with x [M, K], W [N, K], dy [M, N].

        fprop(x, W)  = x · Wᵀ    [M, N]    both rowwise
        dgrad(dy, W) = dy · W    [M, K]    dy rowwise, W columnwise
        wgrad(dy, x) = dyᵀ · x   [N, K]    both columnwise

    Args:
        which: "fprop", "dgrad" or "wgrad".
        a: the first operand: a plane of the direction that the GEMM reads, or a plain tensor.
        b: the second operand.
        out_dtype: dtype of the result.
        bias: added to the result in fp32; None for none.
        out: write the result to this tensor, in its dtype.
        accumulate: add the result to ``out`` instead, which is multiplied by ``beta`` first.
        alpha: multiplies the product.
        beta: multiplies ``out`` with ``accumulate``.
        allow_mixed: allow operands with scales of different kinds, or with different rotations. They are decoded.

    Returns:
        The result, or ``out``.

    Raises:
        ValueError: the operands cannot be multiplied, a plane is of the wrong direction, or shapes do not fit.
        RuntimeError: a plane is stale, or the operands must be decoded and ``settings.native_gemms`` is True.
    """
    sides = _SIDES.get(which)
    if sides is None:
        raise ValueError(f"the GEMM must be one of {', '.join(GEMMS)}, got {which!r}")
    left_plane = _operand_plane(which, a, *sides[0])
    right_plane = _operand_plane(which, b, *sides[1])
    planes = (left_plane, right_plane)
    if not allow_mixed and (which, id(left_plane.format), id(right_plane.format)) not in _checked_pairs:
        _check_pair(which, left_plane.format, right_plane.format)
    rows, a_inner = left_plane.shape if sides[0][1] is ROWWISE else left_plane.shape[::-1]
    columns, b_inner = right_plane.shape if sides[1][1] is ROWWISE else right_plane.shape[::-1]
    if a_inner != b_inner:
        _refuse_inner_sizes(which, planes)

    if accumulate and out is None:
        raise ValueError(f"{which}: accumulate=True needs out=..., a tensor to add to")
    if out is not None:
        if tuple(out.shape) != (rows, columns):
            raise ValueError(f"{which}: the result has shape {[rows, columns]}, but out has shape {list(out.shape)}")
        out_dtype = out.dtype
    if bias is not None:
        bias = bias.detach()
    if left_plane.format.element is None and right_plane.format.element is None and _in_double(planes):
        return _multiplied_in_double(planes, out_dtype, bias, out, accumulate, alpha, beta)
    if not left_plane.data.is_cpu or machine.for_cpu:
        return multiplied_on_gpu(which, left_plane, right_plane, out_dtype, bias, out, accumulate, alpha, beta)
    if settings.native_gemms:
        refuse_decoding(which, left_plane, right_plane, "the operands are on the CPU")
    with kernels.own_workspaces:
        return _multiplied_on_cpu(planes, rows, columns, out_dtype, bias, out, accumulate, alpha, beta)


def _multiplied_on_cpu(
    planes: tuple[Plane, Plane],
    rows: int,
    columns: int,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    out: Tensor | None,
    accumulate: bool,
    alpha: float,
    beta: float,
) -> Tensor:
    left_plane, right_plane = planes
    two_levels = left_plane.format.scale_rule == right_plane.format.scale_rule == "two_level"
    from_codes = two_levels and settings.gemm_operand_dtype is None and kernels.can_multiply(*planes)
    few = (
        rows <= kernels.FEW_ROWS
        and right_plane.shape[0] * right_plane.shape[1] >= _LEAST_NUMBERS
        and right_plane.format.element is not None
    )
    few = few and settings.gemm_operand_dtype is None and right_plane.data.is_cpu
    add = beta if accumulate else None
    if not from_codes and not few:
        plain = bias is None and not accumulate and alpha == 1.0
        left, right = _operands(planes, allow_bf16=plain and out_dtype == torch.bfloat16)
        if left.values.dtype == torch.bfloat16:
            return _multiplied_in_bf16(left, right, out)
    if accumulate:
        assert out is not None
        total = out if out_dtype == torch.float32 else out.to(torch.float32)
    elif out is not None and out_dtype == torch.float32:
        total = out
    else:
        total = fp32_memory("gemm.out", rows, columns, left_plane.data, keep=out_dtype == torch.float32)
    given = total is out  # kernels do not write to it: torch checks what it is, and tells autograd
    if few and _multiply_few(planes, total, bias, alpha, add, aside=given):
        pass
    elif from_codes:
        _multiply_codes(planes, total, bias, alpha, add, aside=given)
    else:
        if few:
            left, right = _operands(planes, allow_bf16=False)
        _multiply(left, right, total, bias, alpha, add)
    if out is None:
        return total if out_dtype == torch.float32 else total.to(out_dtype)
    return out if total is out else out.copy_(total)


_SIDES = {which: tuple(operands.items()) for which, operands in GEMMS.items()}

_MOST_PAIRS = 1024
_checked_pairs: dict[tuple[str, int, int], tuple[Format, Format]] = {}
"""Pairs of formats that can be multiplied, by their addresses, which are faster than their hashes. They are kept."""


def _check_pair(which: str, a: Format, b: Format) -> None:
    """Raise if the two operands cannot be multiplied without decoding. Errors are not cached."""
    (a_name, a_direction), (b_name, b_direction) = _SIDES[which]
    try:
        check_operands(which, [(a_name, a_direction, a), (b_name, b_direction, b)])
    except ValueError as error:
        refuse_if_strict("operands of different formats", str(error))
        raise
    if len(_checked_pairs) >= _MOST_PAIRS:
        _checked_pairs.clear()
    _checked_pairs[which, id(a), id(b)] = a, b


def _operand_plane(which: str, operand: Plane | Tensor, name: str, direction: Direction) -> Plane:
    """The plane that a GEMM reads. A plain tensor, or an identity plane, can be read in both directions."""
    if not isinstance(operand, Plane):
        return Plane(IDENTITY, direction, matrix_shape(operand.shape), operand)
    if operand.direction is not direction and not operand.format.is_identity:
        raise ValueError(f"{which} reads {name} {direction.value}, but got its {operand.direction.value} plane")
    if operand.stale:
        operand.check_fresh()
    return operand if operand.direction is direction else operand.read(direction)


def _refuse_inner_sizes(which: str, planes: Sequence[Plane]) -> None:
    inner = [plane.operand_shape[1] for plane in planes]
    shapes = " and ".join(f"{name} {list(plane.shape)}" for name, plane in zip(GEMMS[which], planes, strict=True))
    raise ValueError(
        f"{which}: the shapes of {shapes} do not fit: it sums over {inner[0]} elements of one and {inner[1]} of the "
        "other"
    )


# ---- operands ----------------------------------------------------------------------------------------


def _operands(planes: Sequence[Plane], allow_bf16: bool) -> tuple[_Operand, _Operand]:
    unrotated = planes[0].format.rotation != planes[1].format.rotation
    left, right = _operand(planes[0], "gemm.a", unrotated), _operand(planes[1], "gemm.b", unrotated)
    if allow_bf16 and left.scale is None and right.scale is None and _wants_bf16():
        narrow = [_exact_bf16(operand.values) for operand in (left, right)]
        if narrow[0] is not None and narrow[1] is not None:
            return _Operand(narrow[0], None), _Operand(narrow[1], None)
    return left, right


def _operand(plane: Plane, name: str, unrotated: bool) -> _Operand:
    fmt = plane.format
    if fmt.element is None:
        return _Operand(_plain_operand(plane, name), None)
    memory = kernels.workspace(name, plane.shape[0] * plane.shape[1])
    has_global_scale = fmt.block is None or fmt.global_amax is not None  # `kernels.has_global_scale`, without a call
    values = kernels.decode_operand(kernels.under_scale_one(plane) if has_global_scale else plane, memory)
    if unrotated and fmt.rotation is not None:
        values = unrotate(values, fmt.rotation)
    return _Operand(values, _global_scale(plane) if has_global_scale else None)


def _plain_operand(plane: Plane, name: str) -> Tensor:
    numbers = plane.data.detach().reshape(plane.shape)
    if numbers.dtype != torch.float32:
        memory = fp32_memory(name, *plane.shape, numbers, keep=False)
        numbers = memory.copy_(numbers)
    return numbers if plane.direction is ROWWISE else numbers.t()


def _global_scale(plane: Plane) -> float | Tensor:
    """The scale of the whole plane, or of each row, beside those of its blocks."""
    fmt = plane.format
    if fmt.block is None:
        assert plane.scale is not None
        return _number(plane.scale)
    assert plane.amax is not None and fmt.element is not None
    return _number(plane.amax, 1.0 / (fmt.element.max * fmt.scale_bound))


def _number(values: Tensor, factor: float = 1.0) -> float | Tensor:
    """A Python number; or a float64 tensor of several, or of one that cannot be read here."""
    if values.numel() == 1 and not (dispatch_modes() and memory_is_out_of_reach()):
        return float(values) * factor
    return values.to(torch.float64) * factor


# ---- multiplying -------------------------------------------------------------------------------------


def _multiply(
    left: _Operand, right: _Operand, total: Tensor, bias: Tensor | None, alpha: float, beta: float | None
) -> None:
    """Compute ``total`` = alpha * scales * left · rightᵀ + bias, plus beta * total if there is a beta.

    Everything is written with ``out=`` or in place, because torch.autocast does not change such operations. It would
    round the fp32 operands of others to bf16.
    """
    a, b = left.values, right.values.t()
    if left.scale is None and right.scale is None and alpha == 1.0:
        if beta is not None:
            total.addmm_(a, b, beta=beta)
        elif bias is None:
            torch.mm(a, b, out=total)
        else:
            torch.addmm(bias.to(torch.float32), a, b, out=total)
            return
        if bias is not None:
            total.add_(bias)
        return
    # Not with alpha of addmm: BLAS multiplies an operand by it, whose numbers would then not be exact any more.
    product = _product_memory(total, aside=beta is not None)
    torch.mm(a, b, out=product)
    _scale_and_finish(product, left.scale, right.scale, alpha, total, bias, beta)


def _multiply_few(
    planes: Sequence[Plane], total: Tensor, bias: Tensor | None, alpha: float, beta: float | None, aside: bool
) -> bool:
    """The same as `_multiply`, without decoding the right operand; False if there is no kernel for that."""
    left_plane, right_plane = planes
    if left_plane.format.rotation != right_plane.format.rotation:
        return False
    left = _operand(left_plane, "gemm.a", unrotated=False)
    product = _product_memory(total, aside=aside or beta is not None)
    has_scale = kernels.has_global_scale(right_plane.format)
    if not kernels.multiply_few(
        left.values, kernels.under_scale_one(right_plane) if has_scale else right_plane, product
    ):
        return False
    right_scale = _global_scale(right_plane) if has_scale else None
    _scale_and_finish(product, left.scale, right_scale, alpha, total, bias, beta)
    return True


def _scale_and_finish(
    product: Tensor,
    left_scale: float | Tensor | None,
    right_scale: float | Tensor | None,
    alpha: float,
    total: Tensor,
    bias: Tensor | None,
    beta: float | None,
) -> None:
    """Apply the scales of operands to their product, and compute ``total``."""
    left_scale, right_scale = (1.0 if scale is None else scale for scale in (left_scale, right_scale))
    factor = one_factor(left_scale, right_scale, alpha)
    if factor is None:
        _scale_by_vectors(product, left_scale, right_scale, alpha)
        factor = 1.0
    finish(product, factor, total, bias, beta)


def _multiply_codes(
    planes: Sequence[Plane], total: Tensor, bias: Tensor | None, alpha: float, beta: float | None, aside: bool
) -> None:
    """The same as `_multiply`, without decoding; the product has memory of its own with ``aside``."""
    left, right = planes
    left_scale, right_scale = _global_scale(left), _global_scale(right)
    factor = one_factor(left_scale, right_scale, alpha)
    product = _product_memory(total, aside=aside or beta is not None)
    kernels.multiply(left, right, product, 1.0 if factor is None else factor)
    if factor is None:
        _scale_by_vectors(product, left_scale, right_scale, alpha)
    finish(product, 1.0, total, bias, beta)


def _product_memory(total: Tensor, aside: bool) -> Tensor:
    """Memory for the product: ``total`` itself, or other memory with ``aside``."""
    rows, columns = total.shape
    return fp32_memory("gemm.product", rows, columns, total, keep=False) if aside else total


def finish(product: Tensor, factor: float, total: Tensor, bias: Tensor | None, beta: float | None) -> None:
    """Compute ``total`` = factor * product + bias, plus beta * total if there is a beta."""
    if beta is not None:
        if factor != 1.0:
            product.mul_(factor)  # rounded here: add_(alpha=) would add before it rounds, on CPUs that have an FMA
        total.mul_(beta).add_(product)
        if bias is not None:
            total.add_(bias)
    elif bias is not None:
        torch.add(bias.to(torch.float32), product, alpha=factor, out=total)
    elif factor != 1.0 or product is not total:
        torch.mul(product, factor, out=total)


def one_factor(row_scale: float | Tensor, column_scale: float | Tensor, alpha: float) -> float | None:
    """The whole scale as one number; None if it is not one number, or beyond fp32."""
    if isinstance(row_scale, float) and isinstance(column_scale, float):
        factor = alpha * row_scale * column_scale
        return factor if abs(factor) <= _FP32_MAX else None
    return None


def _scale_by_vectors(product: Tensor, row_scale: float | Tensor, column_scale: float | Tensor, alpha: float) -> None:
    """Multiply rows of the product by the scales of the left operand, and columns by those of the right operand."""
    both_one = _is_single(row_scale) and _is_single(column_scale)
    if not both_one and _is_single(row_scale):
        product.mul_(_fp32(column_scale * row_scale * alpha, product).view(1, -1))
    elif not both_one and _is_single(column_scale):
        product.mul_(_fp32(row_scale * column_scale * alpha, product).view(-1, 1))
    else:  # one after the other, so that 0 stays 0 if the product of the scales is beyond fp32
        product.mul_(_fp32(row_scale * alpha, product).view(-1, 1)).mul_(_fp32(column_scale, product).view(1, -1))


def _is_single(scale: float | Tensor) -> bool:
    return isinstance(scale, float) or scale.numel() == 1


def _fp32(factor: float | Tensor, like: Tensor) -> Tensor:
    return torch.as_tensor(factor, dtype=torch.float32, device=like.device)  # whatever the default device is


def fp32_memory(name: str, rows: int, columns: int, like: Tensor, *, keep: bool) -> Tensor:
    """Memory for an fp32 matrix: new if the caller will ``keep`` it, otherwise a workspace that is reused."""
    count = rows * columns
    memory = None if keep else kernels.workspace(name, count)
    if memory is None:  # with strides, torch allocates faster
        return torch.empty_strided((rows, columns), (columns, 1), dtype=torch.float32, device=like.device)
    return memory.as_strided((rows, columns), (columns, 1))


# ---- bf16 operands -----------------------------------------------------------------------------------


def _wants_bf16() -> bool:
    if settings.gemm_operand_dtype is not None:
        return settings.gemm_operand_dtype == torch.bfloat16
    return has_fast_bf16()


_LIMITS_WITHOUT_AMX = (  # of oneDNN, which ignores names that it does not know
    *("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"),
    *("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512"),
)


@lru_cache
def has_fast_bf16() -> bool:
    """Whether torch's bf16 GEMMs are faster than its fp32 ones on this CPU.

    They are with AMX. With the bf16 instructions of AVX-512 alone they take longer (`python -m benchmarks products`).
    """
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    return limit.upper() not in _LIMITS_WITHOUT_AMX and torch.cpu._is_amx_tile_supported()


def _exact_bf16(values: Tensor) -> Tensor | None:
    """``values`` in bf16 if that is exact, otherwise None. bf16 is the upper half of the bits of fp32."""
    if values.view(torch.int32).bitwise_and(0xFFFF).any():
        return None
    return values.to(torch.bfloat16)


def _multiplied_in_bf16(left: _Operand, right: _Operand, out: Tensor | None) -> Tensor:
    if out is None:
        return torch.mm(left.values, right.values.t())
    return torch.mm(left.values, right.values.t(), out=out)


# ---- double precision --------------------------------------------------------------------------------


def _in_double(planes: Sequence[Plane]) -> bool:
    """Whether to compute in float64: for unquantized float64 operands, as in a gradient check."""
    return any(plane.data.dtype == torch.float64 for plane in planes)


def _multiplied_in_double(
    planes: Sequence[Plane],
    out_dtype: torch.dtype,
    bias: Tensor | None,
    out: Tensor | None,
    accumulate: bool,
    alpha: float,
    beta: float,
) -> Tensor:
    numbers = [plane.data.detach().reshape(plane.shape).to(torch.float64) for plane in planes]
    left, right = (n if p.direction is ROWWISE else n.t() for n, p in zip(numbers, planes, strict=True))
    product = (left @ right.t()).mul_(alpha)
    if bias is not None:
        product.add_(bias)
    if accumulate and out is not None:
        product.add_(out.to(torch.float64), alpha=beta)
    return product.to(out_dtype) if out is None else out.copy_(product)
