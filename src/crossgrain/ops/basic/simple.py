"""Simple operations without parameters: identity, scaling, dropout, reshaping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..computation import Computation
from ..context import OperationContext
from ..handover import plain
from ..op import BasicOperation, Gradients


class Identity(BasicOperation):
    """``y = x``

    Examples:
        >>> cg.ops.Identity()(torch.ones(2))
        tensor([1., 1.])
    """

    def op_forward(self, ctx: OperationContext, input_: Tensor, **kwargs: Any) -> Tensor:
        return input_

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Gradients]:
        return grad_output, []


class ConstantScale(Computation):
    """``y = x · scale``

    Examples:
        >>> cg.ops.ConstantScale(0.5)(torch.ones(2))
        tensor([0.5000, 0.5000])
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def _computed(self, ctx: OperationContext, input_: Tensor) -> Tensor:
        return plain(input_) * self.scale

    def _gradients(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Gradients]:
        return plain(grad_output) * self.scale, []

    def extra_repr(self) -> str:
        return f"scale={self.scale}"


class Dropout(Computation):
    """In training, sets each element to zero with probability ``p`` and scales the others by 1 / (1 - p).

    Examples:
        >>> cg.ops.Dropout(0.5).eval()(torch.ones(2))
        tensor([1., 1.])
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"{self.layer}: p must be a probability below 1, 0 <= p < 1, got {p}")
        self.dropout_probability = p

    def _computed(self, ctx: OperationContext, input_: Tensor) -> Tensor:
        ctx.scale = 1.0 / (1.0 - self.dropout_probability)
        ctx.drops = self.training and self.dropout_probability > 0.0
        x = plain(input_)
        if ctx.drops:
            kept = torch.rand(x.shape, device=x.device) >= self.dropout_probability
            ctx.save_for_backward(kept)
            x = x * kept * ctx.scale
        return x

    def _gradients(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Gradients]:
        dy = plain(grad_output)
        if ctx.drops:
            (kept,) = ctx.saved_tensors
            dy = dy * kept * ctx.scale
        return dy, []

    def extra_repr(self) -> str:
        return f"p={self.dropout_probability}"


class Reshape(Computation):
    """``y = x.reshape(shape)``; one number of ``shape`` may be -1.

    Examples:
        >>> cg.ops.Reshape((-1, 2))(torch.ones(4)).shape
        torch.Size([2, 2])
    """

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self._shape = tuple(shape)

    def _computed(self, ctx: OperationContext, input_: Tensor) -> Tensor:
        known = math.prod(size for size in self._shape if size != -1)
        if -1 in self._shape and not (known and input_.numel() % known == 0):
            raise ValueError(
                f"{self.layer}: an input of shape {list(input_.shape)} cannot be reshaped to {list(self._shape)}"
            )
        ctx.shape = input_.shape
        return plain(input_).reshape(self._shape)

    def _gradients(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Gradients]:
        return plain(grad_output).reshape(ctx.shape), []

    def extra_repr(self) -> str:
        return f"shape={self._shape}"
