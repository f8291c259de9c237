"""Operations for branches, such as residual connections: add an extra input, or make an extra output."""

from __future__ import annotations

from torch import Tensor

from ..computation import ComputationWithExtras
from ..context import OperationContext
from ..handover import plain
from ..op import Gradients, Kwargs


class _InPlace(ComputationWithExtras):
    """Base class of operations that may write to the memory of a tensor of the branch."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place


class AddExtraInput(_InPlace):
    """``y = x + extra``, where ``extra`` is an extra input of the sequence.

    Args:
        in_place: write y to the memory of the extra input.

    Examples:
        >>> cg.ops.AddExtraInput()(torch.ones(2), torch.ones(2))
        tensor([2., 2.])
    """

    num_extra_inputs = 1

    def _computed(
        self, ctx: OperationContext, input_: Tensor, extra_inputs: tuple[Tensor, ...], kwargs: Kwargs
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        (extra,) = extra_inputs
        return self.added(plain(input_), extra), ()

    def added(self, x: Tensor, extra: Tensor) -> Tensor:
        """Return ``x + extra``; with ``in_place``, in the dtype and memory of ``extra``."""
        return extra.detach().add_(x) if self.in_place else x + plain(extra)

    def _gradients(
        self, ctx: OperationContext, grad_output: Tensor, grad_extra_outputs: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, Gradients, Gradients]:
        dy = plain(grad_output)
        return dy, (), (dy,)


class MakeExtraOutput(_InPlace):
    """Passes x on, and also returns it as an extra output of the sequence.

    Args:
        in_place: in backward, add the two gradients in the memory of the extra output's gradient.

    Examples:
        >>> x, extra = cg.ops.MakeExtraOutput()(torch.ones(2))
        >>> torch.equal(x, extra)
        True
    """

    num_extra_outputs = 1

    def _computed(
        self, ctx: OperationContext, input_: Tensor, extra_inputs: tuple[Tensor, ...], kwargs: Kwargs
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return input_, (input_,)

    def _gradients(
        self, ctx: OperationContext, grad_output: Tensor, grad_extra_outputs: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, Gradients, Gradients]:
        (extra,) = grad_extra_outputs
        return self.summed(plain(grad_output), extra), (), ()

    def summed(self, dy: Tensor, extra: Tensor | None) -> Tensor:
        """Return the gradient of x: the sum of both gradients."""
        if extra is None:
            return dy
        extra = plain(extra)
        # Inside the sequence it may be someone else's gradient, too; and a gradient may be an expanded number.
        own_memory = self.in_place and not self._extra_output_channels and extra.is_contiguous()
        return extra.add_(dy) if own_memory else dy + extra
