"""Simple operations without parameters: identity, scaling, dropout, reshaping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...quantizers.base import Quantizer
from ..context import OperationContext
from ..handover import handed_on, plain
from ..op import BasicOperation


class Identity(BasicOperation):
    """``y = x``"""

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        **kwargs: Any,
    ) -> Tensor:
        return input_

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        return grad_output, []


class ConstantScale(BasicOperation):
    """``y = x · scale``"""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        **kwargs: Any,
    ) -> Tensor:
        return handed_on(plain(input_) * self.scale, next_op_input_quantizer)

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        return handed_on(plain(grad_output) * self.scale, ctx.grad_input_quantizer), []

    def extra_repr(self) -> str:
        return f"scale={self.scale}"


class Dropout(BasicOperation):
    """In training, sets each element to zero with probability ``p`` and scales the others by 1 / (1 - p)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"{self.layer}: p must be a probability below 1, 0 <= p < 1, got {p}")
        self.dropout_probability = p

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        **kwargs: Any,
    ) -> Tensor:
        ctx.scale = 1.0 / (1.0 - self.dropout_probability)
        ctx.drops = self.training and self.dropout_probability > 0.0
        x = plain(input_)
        if ctx.drops:
            kept = torch.rand(x.shape, device=x.device) >= self.dropout_probability
            ctx.save_for_backward(kept)
            x = x * kept * ctx.scale
        return handed_on(x, next_op_input_quantizer)

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        dy = plain(grad_output)
        if ctx.drops:
            (kept,) = ctx.saved_tensors
            dy = dy * kept * ctx.scale
        return handed_on(dy, ctx.grad_input_quantizer), []

    def extra_repr(self) -> str:
        return f"p={self.dropout_probability}"


class Reshape(BasicOperation):
    """``y = x.reshape(shape)``; one number of ``shape`` may be -1."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self._shape = tuple(shape)

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        **kwargs: Any,
    ) -> Tensor:
        known = math.prod(size for size in self._shape if size != -1)
        if -1 in self._shape and not (known and input_.numel() % known == 0):
            raise ValueError(
                f"{self.layer}: an input of shape {list(input_.shape)} cannot be reshaped to {list(self._shape)}"
            )
        ctx.shape = input_.shape
        return handed_on(plain(input_).reshape(self._shape), next_op_input_quantizer)

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        return handed_on(plain(grad_output).reshape(ctx.shape), ctx.grad_input_quantizer), []

    def extra_repr(self) -> str:
        return f"shape={self._shape}"
