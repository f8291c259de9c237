"""Fused backward passes of neighbouring operations: a gradient is modified in place and quantized only once.

Each fusion rounds where the single operations do, so results are the same, bit for bit.
"""

from __future__ import annotations

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
    """Base class: two basic operations. The gradient of the second one is modified in place, and handed on once."""

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[Tensor | None, ...]],
    ) -> BackwardResult:
        dx, *grads = self._gradients(basic_op_ctxs[1], grad_output, basic_op_grad_extra_outputs[0])
        return handed_on(dx, basic_op_ctxs[0].grad_input_quantizer), grads, [(), ()]

    def _gradients(
        self, ctx: OperationContext, dy: Tensor, branch_grads: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, Gradients, Gradients]:
        """Return the gradient of the input, and of the parameters of both operations.

        Args:
            ctx: context of the second operation.
            dy: gradient of its output.
            branch_grads: gradients of the extra outputs of the first operation.
        """
        raise NotImplementedError


class BackwardActivationBias(_BackwardPair):
    """[Bias, activation]: computes the gradient of the activation, sums it for the bias and quantizes it for a GEMM."""

    def _gradients(
        self, ctx: OperationContext, dy: Tensor, branch_grads: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, Gradients, Gradients]:
        bias, activation = self.basic_ops
        assert isinstance(bias, Bias) and isinstance(activation, ActivationOperation)
        dx = activation.activation_backward(ctx, dy)
        return dx, [bias.bias_gradient(dx)], []


class BackwardAddRMSNorm(_BackwardPair):
    """[MakeExtraOutput, RMSNorm]: adds the gradient of the branch to the gradient of the norm."""

    def _gradients(
        self, ctx: OperationContext, dy: Tensor, branch_grads: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, Gradients, Gradients]:
        branch, norm = self.basic_ops
        assert isinstance(branch, MakeExtraOutput) and isinstance(norm, RMSNorm)
        dx, grads = norm.norm_backward(ctx, dy)
        return _with_branch(branch, dx, branch_grads), [], grads


class BackwardLinearAdd(_BackwardPair):
    """[MakeExtraOutput, BasicLinear]: adds the gradient of the branch to the result of dgrad."""

    def _gradients(
        self, ctx: OperationContext, dy: Tensor, branch_grads: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, Gradients, Gradients]:
        branch, linear = self.basic_ops
        assert isinstance(branch, MakeExtraOutput)
        dx, dw = _gemm_gradients(linear, ctx, dy)
        return _with_branch(branch, dx, branch_grads), [], [dw]


class BackwardLinearScale(_BackwardPair):
    """[ConstantScale, BasicLinear]: scales the result of dgrad in place."""

    def _gradients(
        self, ctx: OperationContext, dy: Tensor, branch_grads: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, Gradients, Gradients]:
        scale, linear = self.basic_ops
        assert isinstance(scale, ConstantScale)
        dx, dw = _gemm_gradients(linear, ctx, dy)
        return dx.mul_(scale.scale), [], [dw]


def _gemm_gradients(linear: BasicOperation, ctx: OperationContext, dy: Tensor) -> tuple[Tensor, Tensor | None]:
    assert isinstance(linear, BasicLinear)
    dx, dw = linear.gemm_backward(ctx, dy)
    assert dx is not None  # the operation before needs it
    return dx, dw


def _with_branch(branch: MakeExtraOutput, dx: Tensor, grads: tuple[Tensor | None, ...]) -> Tensor:
    """Return dx plus the gradient of the branch. Nobody else uses the memory of dx, so it may be changed."""
    (extra,) = grads
    if extra is None or branch.in_place or extra.dtype != dx.dtype:
        return branch.summed(dx, extra)
    return dx.add_(plain(extra))


def fuse_backward_activation_bias(ops: list[FusibleOperation], *, recipe: Recipe | None) -> list[FusibleOperation]:
    """Fuse only with a recipe, because the fusion saves memory only if gradients are quantized."""
    return ops if recipe is None else _fused(ops, Bias, ActivationOperation, BackwardActivationBias)


def fuse_backward_add_rmsnorm(ops: list[FusibleOperation], *, recipe: Recipe | None) -> list[FusibleOperation]:
    return _fused(ops, MakeExtraOutput, RMSNorm, BackwardAddRMSNorm)


def fuse_backward_linear_add(ops: list[FusibleOperation], *, recipe: Recipe | None) -> list[FusibleOperation]:
    return _fused(ops, MakeExtraOutput, BasicLinear, BackwardLinearAdd)


def fuse_backward_linear_scale(ops: list[FusibleOperation], *, recipe: Recipe | None) -> list[FusibleOperation]:
    return _fused(ops, ConstantScale, BasicLinear, BackwardLinearScale)


def _fused(
    ops: list[FusibleOperation],
    first: type[BasicOperation],
    second: type[BasicOperation],
    fused: type[FusedOperation],
) -> list[FusibleOperation]:
    def replacement(window: list[FusibleOperation]) -> FusedOperation | None:
        a, b = window
        if not (isinstance(a, first) and isinstance(b, second)):
            return None
        return fused([a, b])

    return fuse_windows(ops, 2, replacement)
