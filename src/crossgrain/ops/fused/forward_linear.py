"""Fused forward passes of a linear operation and those after it: the GEMM does their work before it rounds.

The GEMM adds the bias, scales, and adds to an extra input in fp32. The result is rounded once, at the end.
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
    """Base class: a `BasicLinear` and the operations after it."""

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
        linear, *middle = self.basic_ops
        last = self.basic_ops[-1]
        assert isinstance(linear, BasicLinear)
        bias = next((op for op in middle if isinstance(op, Bias)), None)
        scale = next((op.scale for op in middle if isinstance(op, ConstantScale)), 1.0)
        wide = isinstance(last, AddExtraInput)
        y = linear.gemm_forward(basic_op_ctxs[0], input_, bias=bias, scale=scale, wide=wide)
        if isinstance(last, AddExtraInput):
            y = last.added(y, basic_op_extra_inputs[-1][0])
        elif isinstance(last, ActivationOperation):
            y = last.activation_forward(basic_op_ctxs[-1], y)
        return handed_on(y, next_op_input_quantizer), [()] * len(self.basic_ops)


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
        if not fits or not _may_add(window[0], window[-1]):
            return None
        return fused([op for op in window if isinstance(op, BasicOperation)])

    return fuse_windows(ops, len(kinds), replacement)


def _may_add(linear: FusibleOperation, last: FusibleOperation) -> bool:
    """Whether ``last`` adds in place, if it adds at all, to a product that needs no sum over ranks first."""
    assert isinstance(linear, BasicLinear)
    return not isinstance(last, AddExtraInput) or (last.in_place and linear.tensor_parallel_mode != "row")
