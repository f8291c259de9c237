"""`ScaledCall`: the arguments of one call of torch's ``scaled_mm``, and the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm


class ScaledCall(NamedTuple):
    """The product ``a · b`` of quantized matrices, as `torch.nn.functional.scaled_mm` takes it.

    Attributes:
        a: codes [rows, summed dimension], row-major.
        b: codes [summed dimension, columns], column-major.
        scale_a: scales of ``a``: those of its blocks, then that of the tensor.
        recipe_a: what each of them scales.
        swizzle_a: how each of them is stored; empty for types that are never swizzled.
        scale_b: scales of ``b``.
        recipe_b: what each of them scales.
        swizzle_b: how each of them is stored.
        bias: added to each row, in the dtype of the result; None for none.
        output_dtype: dtype of the result.
    """

    a: Tensor
    b: Tensor
    scale_a: list[Tensor]
    recipe_a: list[ScalingType]
    swizzle_a: list[SwizzleType]
    scale_b: list[Tensor]
    recipe_b: list[ScalingType]
    swizzle_b: list[SwizzleType]
    bias: Tensor | None
    output_dtype: torch.dtype


def run(
    call: ScaledCall,
    new_interface: Callable[..., Tensor] = scaled_mm,
    old_interface: Callable[..., Tensor] = torch._scaled_mm,
) -> Tensor:
    """Call torch. Sums are accumulated in the full precision that the hardware has."""
    if needs_old_interface(call):
        return old_interface(
            call.a, call.b, call.scale_a[0], call.scale_b[0], bias=call.bias, out_dtype=call.output_dtype
        )
    return new_interface(
        call.a,
        call.b,
        call.scale_a,
        call.recipe_a,
        call.scale_b,
        call.recipe_b,
        call.swizzle_a,
        call.swizzle_b,
        bias=call.bias,
        output_dtype=call.output_dtype,
    )


def needs_old_interface(call: ScaledCall) -> bool:
    """Whether only `torch._scaled_mm` takes a call: MXFP8 with E5M2, which ``scaled_mm`` of torch 2.13 refuses.

    The old interface finds the recipe by itself, from the dtype and the size of the scales.
    """
    with_e5m2 = torch.float8_e5m2 in (call.a.dtype, call.b.dtype)
    return with_e5m2 and call.recipe_a == [ScalingType.BlockWise1x32]
