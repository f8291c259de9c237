"""Fused backward passes of neighbouring operations: a gradient is rounded once, at the end, and quantized once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...recipe import Recipe
from ..basic.activation import ActivationOperation
from ..basic.bias import Bias
from ..basic.extra import MakeExtraOutput
from ..basic.linear import BasicLinear
from ..basic.normalization import RMSNorm
from ..basic.simple import ConstantScale
from ..context import OperationContext
from ..fusions import fuse_windows
from ..handover import handed_on, plain
from ..op import BackwardResult, BasicOperation, FusedOperation, FusibleOperation, Gradients


class _BackwardPair(FusedOperation):
    """Base class: two basic operations, whose gradient is handed on once."""

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[Tensor | None, ...]],
    ) -> BackwardResult:
        dx, *grads = self._gradients(basic_op_ctxs, grad_output, basic_op_grad_extra_outputs[0])
        handed = None if dx is None else handed_on(dx, basic_op_ctxs[0].grad_input_quantizer)
        return handed, grads, [(), ()]

    def _gradients(
        self, ctxs: list[OperationContext], dy: Tensor, branch_grads: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, Gradients, Gradients]:
        """Return the gradient of the input, and of the parameters of both operations.

        Args:
            ctxs: contexts of both operations.
            dy: gradient of the output of the second one.
            branch_grads: gradients of the extra outputs of the first operation.
        """
        raise NotImplementedError


class BackwardActivationBias(_BackwardPair):
    """[Bias, activation]: computes the gradient of the activation, sums it for the bias and quantizes it for a GEMM."""

    def _gradients(
        self, ctxs: list[OperationContext], dy: Tensor, branch_grads: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, Gradients, Gradients]:
        bias, activation = self.basic_ops
        assert isinstance(bias, Bias) and isinstance(activation, ActivationOperation)
        dx = activation.activation_backward(ctxs[1], dy)
        return dx, [bias.bias_gradient(dx)], []


class BackwardAddRMSNorm(_BackwardPair):
    """[MakeExtraOutput, RMSNorm]: adds the gradients of branch and norm before they are rounded."""

    def _gradients(
        self, ctxs: list[OperationContext], dy: Tensor, branch_grads: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, Gradients, Gradients]:
        _, norm = self.basic_ops
        assert isinstance(norm, RMSNorm)
        (extra,) = branch_grads
        dx, grads = norm.norm_backward(ctxs[1], dy, None if extra is None else plain(extra))
        return dx, [], grads


class BackwardLinearAdd(_BackwardPair):
    """[MakeExtraOutput, BasicLinear]: adds the gradient of the branch to dgrad before it rounds."""

    def _gradients(
        self, ctxs: list[OperationContext], dy: Tensor, branch_grads: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, Gradients, Gradients]:
        branch, linear = self.basic_ops
        assert isinstance(branch, MakeExtraOutput) and isinstance(linear, BasicLinear)
        (extra,) = branch_grads
        dx, dw = linear.gemm_backward(ctxs[1], dy, wide=extra is not None)
        assert dx is not None  # the operation before needs it
        return dx if extra is None else branch.summed(dx, extra).to(extra.dtype), [], [dw]


class BackwardLinearScale(_BackwardPair):
    """[BasicLinear, ConstantScale]: both GEMMs scale their results before they round them."""

    def _gradients(
        self, ctxs: list[OperationContext], dy: Tensor, branch_grads: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, Gradients, Gradients]:
        linear, scale = self.basic_ops
        assert isinstance(linear, BasicLinear) and isinstance(scale, ConstantScale)
        dx, dw = linear.gemm_backward(ctxs[0], dy, scale=scale.scale)
        return dx, [dw], []


def fuse_backward_activation_bias(ops: list[FusibleOperation], *, recipe: Recipe | None) -> list[FusibleOperation]:
    """Fuse only with a recipe, because the fusion saves memory only if gradients are quantized."""
    return ops if recipe is None else _fused(ops, Bias, ActivationOperation, BackwardActivationBias)


def fuse_backward_add_rmsnorm(ops: list[FusibleOperation], *, recipe: Recipe | None) -> list[FusibleOperation]:
    return _fused(ops, MakeExtraOutput, RMSNorm, BackwardAddRMSNorm, lambda branch, _: not branch.in_place)


def fuse_backward_linear_add(ops: list[FusibleOperation], *, recipe: Recipe | None) -> list[FusibleOperation]:
    def fits(branch: MakeExtraOutput, linear: BasicLinear) -> bool:
        return branch.in_place and _sums_no_gradient(linear)

    return _fused(ops, MakeExtraOutput, BasicLinear, BackwardLinearAdd, fits)


def fuse_backward_linear_scale(ops: list[FusibleOperation], *, recipe: Recipe | None) -> list[FusibleOperation]:
    return _fused(ops, BasicLinear, ConstantScale, BackwardLinearScale, lambda linear, _: _sums_no_gradient(linear))


def _sums_no_gradient(linear: BasicLinear) -> bool:
    """Whether dgrad is complete after its GEMM: no sum over ranks comes between it and the next operation."""
    return linear.tensor_parallel_mode != "column"


def _fused(
    ops: list[FusibleOperation],
    first: type[BasicOperation],
    second: type[BasicOperation],
    fused: type[FusedOperation],
    fits: Callable[[Any, Any], bool] = lambda first, second: True,
) -> list[FusibleOperation]:
    def replacement(window: list[FusibleOperation]) -> FusedOperation | None:
        a, b = window
        if not (isinstance(a, first) and isinstance(b, second) and fits(a, b)):
            return None
        return fused([a, b])

    return fuse_windows(ops, 2, replacement)
