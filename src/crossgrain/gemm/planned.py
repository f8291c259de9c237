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
from .product import fp32_memory, has_fast_bf16


def may_be_planned() -> bool:
    """Whether GEMMs on the CPU are computed as plans do it; settings and CPUs can ask for something else."""
    return (
        settings.gemm_operand_dtype is None
        and not settings.native_gemms
        and not settings.strict
        and not machine.for_cpu
        and not has_fast_bf16()
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
            if added is None:
                if operands:
                    torch.mm(*operands, out=total)
            elif operands:
                torch.addmm(added, *operands, out=total)
            else:
                torch.add(added, total, out=total)
            made.append(total if dtype == torch.float32 else total.to(dtype))
        return made
