"""Base classes of crossgrain's own operations, which compute in high precision.

They hand what an operation returns on to its neighbours, quantized if these can use that (`handover`). Operations of
users may do without them and override the methods of `BasicOperation`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..quantizers.base import Quantizer
from .context import OperationContext
from .handover import handed_on
from .op import BackwardResult, BasicOperation, ForwardResult, Gradients, Kwargs


class Computation(BasicOperation):
    """An operation without extra inputs and outputs. Its input and its output gradient may be quantized."""

    def _computed(self, ctx: OperationContext, input_: Tensor) -> Tensor:
        """Return the output, and save in ``ctx`` what backward needs."""
        raise NotImplementedError

    def _gradients(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Gradients]:
        """Return the gradients of the input and of the parameters."""
        raise NotImplementedError

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        **kwargs: Any,
    ) -> Tensor:
        return handed_on(self._computed(ctx, input_), next_op_input_quantizer)

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Gradients]:
        dx, grads = self._gradients(ctx, grad_output)
        return None if dx is None else handed_on(dx, ctx.grad_input_quantizer), grads


class ComputationWithExtras(BasicOperation):
    """An operation with extra inputs or outputs."""

    def _computed(
        self, ctx: OperationContext, input_: Tensor, extra_inputs: tuple[Tensor, ...], kwargs: Kwargs
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the output and the extra outputs, and save in ``ctx`` what backward needs."""
        raise NotImplementedError

    def _gradients(
        self, ctx: OperationContext, grad_output: Tensor, grad_extra_outputs: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, Gradients, Gradients]:
        """Return the gradients of the input, of the parameters and of the extra inputs."""
        raise NotImplementedError

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
        (ctx,), (extra_inputs,), (kwargs,) = basic_op_ctxs, basic_op_extra_inputs, basic_op_kwargs
        y, extra_outputs = self._computed(ctx, input_, extra_inputs, kwargs)
        return handed_on(y, next_op_input_quantizer), [extra_outputs]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[Tensor | None, ...]],
    ) -> BackwardResult:
        (ctx,), (grad_extra_outputs,) = basic_op_ctxs, basic_op_grad_extra_outputs
        dx, of_parameters, of_extra_inputs = self._gradients(ctx, grad_output, grad_extra_outputs)
        handed = None if dx is None else handed_on(dx, ctx.grad_input_quantizer)
        return handed, [of_parameters], [of_extra_inputs]
