"""The products of half a step of a layer, by a plan that also encodes its operands (see `kernels.step_plan`).

They are those of `product.gemm`, to the last bit, without what Python does for each plane. Plans are for the usual
case: operands on the CPU, which are decoded to fp32 or multiplied from their codes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import kernels
from ..kernels import StepPlan
from ..planes import Plane
from ..runtime.settings import settings
from .native import machine
from .operands import GEMMS, check_operands
from .product import finish, fp32_memory, has_fast_bf16, one_factor


def may_be_planned(*results: torch.dtype) -> bool:
    """Whether GEMMs with these results are computed on the CPU as plans do it.

    Settings can ask for something else. On a CPU where bf16 is fast, `gemm` multiplies bf16 operands for bf16 results.
    """
    return (
        settings.gemm_operand_dtype is None
        and not settings.native_gemms
        and not settings.strict
        and not machine.for_cpu
        and not (torch.bfloat16 in results and has_fast_bf16())
    )


def suits_plan(which: str, a: Plane, b: Plane) -> bool:
    """Whether a plan may compute a GEMM: its operands fit, and there are more rows than `gemm` has another way for."""
    (a_name, a_direction), (b_name, b_direction) = GEMMS[which].items()
    try:
        check_operands(which, [(a_name, a_direction, a.format), (b_name, b_direction, b.format)])
    except ValueError:
        return False  # `gemm` says it
    return a.operand_shape[1] == b.operand_shape[1] and a.operand_shape[0] > kernels.FEW_ROWS


def multiplied_by_plan(
    plan: StepPlan,
    matrices: Sequence[Tensor],
    kept: Sequence[Plane],
    given: Sequence[Plane],
    seeds: Sequence[int | None],
    results: Sequence[tuple[int, int, torch.dtype]],
    bias: Tensor | None = None,
    noted: list[float] | None = None,
) -> list[Tensor] | None:
    """Encode matrices and compute products of their planes.

    Args:
        plan: how.
        matrices: the matrices.
        kept: new planes, which are written.
        given: planes that exist already.
        seeds: a seed for each matrix; None for one that is not rounded stochastically.
        results: rows, columns and dtype of each product.
        bias: added to the first product.
        noted: a list that gets the amax and the scale of each matrix, if these have one scale for all numbers.

    Returns:
        The products; None if there is a NaN or an infinity, or `gemm` has to do it for another reason. Planes are then
        not valid.
    """
    with kernels.own_workspaces:
        totals: list[Tensor] = []
        for rows, columns, dtype in results:
            totals.append(fp32_memory("gemm.out", rows, columns, matrices[0], keep=dtype == torch.float32))
        running, made = plan.start(matrices, kept, given, seeds, totals), []
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
                if noted is not None and number == 0:
                    noted += of_matrices
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
