"""Operations for branches, such as residual connections: add an extra input, or make an extra output."""

from __future__ import annotations

from torch import Tensor

from ...quantizers.base import Quantizer
from ..context import OperationContext
from ..handover import handed_on, plain
from ..op import BackwardResult, BasicOperation, ForwardResult, Kwargs


class AddExtraInput(BasicOperation):
    """``y = x + extra``, where ``extra`` is an extra input of the sequence.

    Args:
        in_place: write y to the memory of the extra input.
    """

    num_extra_inputs = 1

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place

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
        ((extra,),) = basic_op_extra_inputs
        return handed_on(self.added(plain(input_), extra), next_op_input_quantizer), [()]

    def added(self, x: Tensor, extra: Tensor) -> Tensor:
        """Return ``x + extra``; with ``in_place``, in the dtype and memory of ``extra``."""
        return extra.detach().add_(x) if self.in_place else x + plain(extra)

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[Tensor | None, ...]],
    ) -> BackwardResult:
        dy = plain(grad_output)
        return handed_on(dy, basic_op_ctxs[0].grad_input_quantizer), [()], [(dy,)]


class MakeExtraOutput(BasicOperation):
    """Passes x on, and also returns it as an extra output of the sequence.

    Args:
        in_place: in backward, add the two gradients in the memory of the extra output's gradient.
    """

    num_extra_outputs = 1

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place

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
        return handed_on(input_, next_op_input_quantizer), [(input_,)]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[Tensor | None, ...]],
    ) -> BackwardResult:
        ((extra,),) = basic_op_grad_extra_outputs
        dx = self.summed(plain(grad_output), extra)
        return handed_on(dx, basic_op_ctxs[0].grad_input_quantizer), [()], [()]

    def summed(self, dy: Tensor, extra: Tensor | None) -> Tensor:
        """Return the gradient of x: the sum of both gradients."""
        if extra is None:
            return dy
        extra = plain(extra)
        # Inside the sequence it may be someone else's gradient, too; and a gradient may be an expanded number.
        own_memory = self.in_place and not self._extra_output_channels and extra.is_contiguous()
        return extra.add_(dy) if own_memory else dy + extra
