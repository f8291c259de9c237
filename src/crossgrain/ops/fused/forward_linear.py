"""Fused forward passes of a linear operation and those after it: they modify the result of the GEMM in place.

Each fusion rounds where the single operations do, so results are the same, bit for bit.
"""

from __future__ import annotations

from torch import Tensor

from ...quantizers.base import Quantizer
from ...recipe import Recipe
from ..basic.activation import ActivationOperation
from ..basic.bias import Bias
from ..basic.extra import AddExtraInput
from ..basic.linear import BasicLinear
from ..basic.simple import ConstantScale
from ..context import OperationContext
from ..fusions import fuse_windows
from ..handover import handed_on
from ..op import BasicOperation, ForwardResult, FusedOperation, FusibleOperation, Kwargs


class _ForwardLinear(FusedOperation):
    """Base class: a `BasicLinear` and the operations after it, which modify its result in place."""

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Tensor,
        *,
        basic_op_extra_inputs: list[tuple[Tensor, ...]],
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        basic_op_kwargs: list[Kwargs],
    ) -> ForwardResult:
        linear = self.basic_ops[0]
        assert isinstance(linear, BasicLinear)
        y = linear.gemm_forward(basic_op_ctxs[0], input_)
        rest = zip(self.basic_ops[1:], basic_op_ctxs[1:], basic_op_extra_inputs[1:], strict=True)
        for op, ctx, extras in rest:
            y = _continued(op, ctx, y, extras)
        return handed_on(y, next_op_input_quantizer), [()] * len(self.basic_ops)


def _continued(op: BasicOperation, ctx: OperationContext, y: Tensor, extras: tuple[Tensor, ...]) -> Tensor:
    """Apply ``op`` to y. Nobody else uses the memory of y, so it may be changed."""
    if isinstance(op, Bias):
        return y if op.added_by_gemm else y.add_(op.bias.detach().to(y.dtype))
    if isinstance(op, ConstantScale):
        return y.mul_(op.scale)
    if isinstance(op, AddExtraInput):
        return op.added(y, extras[0])
    if isinstance(op, ActivationOperation):
        return op.activation_forward(ctx, y)
    raise TypeError(f"{type(op).__name__} cannot be fused with a linear operation")


class ForwardLinearBiasActivation(_ForwardLinear):
    """[BasicLinear, Bias] or [BasicLinear, Bias, activation]."""


class ForwardLinearBiasAdd(_ForwardLinear):
    """[BasicLinear, AddExtraInput] or [BasicLinear, Bias, AddExtraInput], adding in place to the extra input."""


class ForwardLinearScaleAdd(_ForwardLinear):
    """[BasicLinear, ConstantScale, AddExtraInput], adding in place to the extra input."""


def fuse_forward_linear_bias_activation(
    ops: list[FusibleOperation], *, recipe: Recipe | None
) -> list[FusibleOperation]:
    for kinds in ((BasicLinear, Bias, ActivationOperation), (BasicLinear, Bias)):
        ops = _fused(ops, kinds, ForwardLinearBiasActivation)
    return ops


def fuse_forward_linear_bias_add(ops: list[FusibleOperation], *, recipe: Recipe | None) -> list[FusibleOperation]:
    for kinds in ((BasicLinear, Bias, AddExtraInput), (BasicLinear, AddExtraInput)):
        ops = _fused(ops, kinds, ForwardLinearBiasAdd)
    return ops


def fuse_forward_linear_scale_add(ops: list[FusibleOperation], *, recipe: Recipe | None) -> list[FusibleOperation]:
    return _fused(ops, (BasicLinear, ConstantScale, AddExtraInput), ForwardLinearScaleAdd)


def _fused(
    ops: list[FusibleOperation], kinds: tuple[type[BasicOperation], ...], fused: type[FusedOperation]
) -> list[FusibleOperation]:
    def replacement(window: list[FusibleOperation]) -> FusedOperation | None:
        fits = all(isinstance(op, kind) for op, kind in zip(window, kinds, strict=True))
        last = window[-1]
        if not fits or (isinstance(last, AddExtraInput) and not last.in_place):
            return None
        return fused([op for op in window if isinstance(op, BasicOperation)])

    return fuse_windows(ops, len(kinds), replacement)
