"""The products of half a step of a layer, by a plan that also encodes its operands (see `kernels.step_plan`).

They are those of `product.gemm`, to the last bit, without what Python does for each plane. Plans are for the usual
case: operands on the CPU, which are decoded to fp32 or multiplied from their codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import kernels
from ..kernels import StepPlan
from ..planes import Plane
from ..runtime.settings import settings
from .native import machine
from .operands import GEMMS, check_operands
from .product import finish, fp32_memory, has_fast_bf16, one_factor


def may_be_planned() -> bool:
    """Whether settings leave it to us how GEMMs are computed on the CPU."""
    return (
        settings.gemm_operand_dtype is None
        and not settings.native_gemms
        and not settings.strict
        and not machine.for_cpu
    )


def suits_plan(which: str, a: Plane, b: Plane, dtype: torch.dtype) -> bool:
    """Whether a plan may compute a GEMM with a result in ``dtype``: its operands fit, and `gemm` has no faster way.

    It has one for few rows, and on CPUs with fast bf16 products for results in bf16, if no scale is left to apply.
    """
    (a_name, a_direction), (b_name, b_direction) = GEMMS[which].items()
    try:
        check_operands(which, [(a_name, a_direction, a.format), (b_name, b_direction, b.format)])
    except ValueError:
        return False  # `gemm` says it
    scaled_later = kernels.has_global_scale(a.format) or kernels.has_global_scale(b.format)
    if dtype == torch.bfloat16 and not scaled_later and has_fast_bf16():
        return False
    return a.operand_shape[1] == b.operand_shape[1] and a.operand_shape[0] > kernels.FEW_ROWS


def multiplied_by_plan(
    plan: StepPlan,
    matrices: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    kept: Sequence[Plane],
    given: Sequence[Plane],
    seeds: Sequence[int | None],
    results: Sequence[tuple[int, int, torch.dtype]],
    bias: Tensor | None = None,
    record: Callable[[list[float]], None] | None = None,
) -> list[Tensor] | None:
    """Encode matrices and compute products of their planes.

    Args:
        plan: how.
        matrices: the matrices.
        scales: the scale that is given for each matrix; None if it follows from the matrix.
        kept: new planes, which are written.
        given: planes that exist already.
        seeds: a seed for each matrix; None for one that is not rounded stochastically.
        results: rows, columns and dtype of each product.
        bias: added to the first product.
        record: called before the first product with the amax and the scale of each matrix, one after the other, if
            these have one scale for all numbers.

    Returns:
        The products; None if there is a NaN or an infinity, or `gemm` has to do it for another reason. Planes are then
        not valid.
    """
    with kernels.own_workspaces:
        totals: list[Tensor] = []
        for rows, columns, dtype in results:
            totals.append(fp32_memory("gemm.out", rows, columns, matrices[0], keep=dtype == torch.float32))
        running, made = plan.start(matrices, scales, kept, given, seeds, totals), []
        for number, (total, (_, _, dtype)) in enumerate(zip(totals, results, strict=True)):
            operands = running.product(number)
            if operands is None:
                return None
            added = None if bias is None or number else bias.to(torch.float32)
            # Everything is written with ``out=``, see `product._multiply`.
            if len(operands) == 3:
                left_scale, right_scale, *of_matrices = operands[2].tolist()
                factor = one_factor(left_scale, right_scale, 1.0)
                if factor is None:
                    return None
                if record is not None and number == 0:
                    record(of_matrices)
                torch.mm(*operands[:2], out=total)
                finish(total, factor, total, added, None)
            elif added is None:
                if operands:
                    torch.mm(*operands, out=total)
            elif operands:
                torch.addmm(added, *operands, out=total)
            else:
                torch.add(added, total, out=total)
            made.append(total if dtype == torch.float32 else total.to(dtype))
        return made
