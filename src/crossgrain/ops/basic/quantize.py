"""`Quantize`: an operation that quantizes a tensor, or its gradient, in the format of the recipe."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...nn.module_interface import Mode
from ...quantizers.base import Quantizer
from ...tensor import QuantizedTensor
from ..context import OperationContext
from ..op import BasicOperation, Gradients


class Quantize(BasicOperation):
    """Quantizes its input in the format of the recipe. Without a recipe it does nothing.

    Args:
        forward: quantize the tensor.
        backward: quantize the gradient.

    Examples:
        >>> block = cg.ops.Sequential(cg.ops.Quantize(), cg.ops.Linear(32, 32))
        >>> with cg.autocast(recipe="mxfp8"):
        ...     y = block(torch.randn(32, 32))
    """

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self._quantizes: dict[Mode, bool] = {"forward": forward, "backward": backward}

    def num_quantizers(self, mode: Mode) -> int:
        return int(self._quantizes[mode])

    def op_forward(self, ctx: OperationContext, input_: Tensor, **kwargs: Any) -> Tensor:
        quantizer = self.get_input_quantizer()
        ctx.quantizer = self.get_grad_output_quantizer()
        return _quantized(input_, quantizer)

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Gradients]:
        return _quantized(grad_output, ctx.quantizer), []


def _quantized(tensor: Tensor, quantizer: Quantizer | None) -> Tensor:
    if quantizer is None or isinstance(tensor, QuantizedTensor):
        return tensor
    made: Tensor = quantizer(tensor.detach())
    return made
