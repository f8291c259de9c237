"""`Bias`: the operation ``y = x + b``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...gemm.activations import compute_dtype
from ...linear.parallel import share
from ...runtime.collectives import group_size
from ..computation import Computation
from ..context import OperationContext
from ..handover import plain
from ..op import Gradients
from .parameters import resolved_device


class Bias(Computation):
    """``y = x + b`` for x [..., size], b [size].

    Args:
        size: number of features of the whole tensor.
        device: device of the parameter.
        dtype: dtype of the parameter.
        tensor_parallel: divide the features among the ranks of ``tensor_parallel_group``; this rank has its part.
        tensor_parallel_group: the process group; None for all ranks.

    Examples:
        >>> cg.ops.Bias(4)(torch.zeros(2, 4)).shape
        torch.Size([2, 4])
    """

    added_by_gemm = False  # by the linear operation right before it (`BasicLinear.take_bias`)

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: Any = None,
    ) -> None:
        super().__init__()
        ranks = group_size(tensor_parallel_group) if tensor_parallel else 1
        size = self.size = share(self.layer, "size", size, ranks)
        self.bias = nn.Parameter(torch.zeros(size, dtype=dtype, device=resolved_device(device)))

    def reset_parameters(self) -> None:
        """Set the bias to zero. A bias on the meta device gets memory on the default device."""
        if self.bias.is_meta:
            self.bias = nn.Parameter(torch.zeros(self.size, dtype=self.bias.dtype))
        nn.init.zeros_(self.bias)

    def pre_first_fuser_forward(self) -> None:
        if self.bias.is_meta:
            self.reset_parameters()

    def _computed(self, ctx: OperationContext, input_: Tensor) -> Tensor:
        x = plain(input_)
        if not self.added_by_gemm:
            x = x + self.bias.detach().to(x.dtype)
        return x

    def _gradients(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Gradients]:
        dy = plain(grad_output)
        return dy, [self.bias_gradient(dy)]

    def bias_gradient(self, dy: Tensor) -> Tensor | None:
        if not self.bias.requires_grad:
            return None
        return dy.reshape(-1, self.size).sum(0, dtype=compute_dtype(dy)).to(self.bias.dtype)

    def extra_repr(self) -> str:
        return f"size={self.size}"
