"""Convolutions that are products of matrices: 1x1, and patches that do not overlap (kernel = stride).

Every output position multiplies the weight [out, in * kernel] by one patch of the input, as a linear layer does. Other
convolutions share inputs between positions and are left as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..recipe.projections import LayerAdapter, Multiply, Projection, register_layer


class PatchConvolution(LayerAdapter):
    """``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d``."""

    def projections(self, module: nn.Module) -> Sequence[Projection]:
        return [Projection("", "weight", None if module.bias is None else "bias")]

    def why_not(self, module: Any) -> str | None:
        ones = all(size == 1 for size in module.kernel_size)
        patches = module.kernel_size == module.stride
        if module.groups != 1:
            return f"a convolution with groups={module.groups} is not one product of matrices"
        if not (ones or patches) or any(step != 1 for step in module.dilation):
            return "a convolution whose windows overlap or have gaps is not a product of matrices"
        if module.padding not in ("valid", (0,) * len(module.kernel_size)):
            return "a convolution with padding is not converted"
        return None

    def forward(self, module: Any, multiply: Multiply, input: Tensor) -> Tensor:
        """Compute the convolution of ``input`` [batch, in, *sizes] or [in, *sizes]."""
        spatial = len(module.kernel_size)
        if input.dim() not in (spatial + 1, spatial + 2):
            raise ValueError(
                f"{module.layer}: the input must have {spatial + 1} or {spatial + 2} dimensions, got "
                f"{list(input.shape)}"
            )
        batched = input.dim() == spatial + 2
        x = input if batched else input.unsqueeze(0)
        counts = [
            (size - k) // step + 1 for size, k, step in zip(x.shape[2:], module.kernel_size, module.stride, strict=True)
        ]
        if min(counts) < 1:
            raise ValueError(
                f"{module.layer}: the input {list(input.shape)} is smaller than the kernel {list(module.kernel_size)}"
            )
        patches = _patches(x, module.kernel_size, module.stride, counts)
        y = multiply("", patches).movedim(-1, 1)
        return y if batched else y.squeeze(0)


def _patches(x: Tensor, kernel: Sequence[int], stride: Sequence[int], counts: Sequence[int]) -> Tensor:
    """The patches of x [batch, in, *sizes] as [batch, *counts, in * kernel]."""
    for dim, (k, step, count) in enumerate(zip(kernel, stride, counts, strict=True)):
        x = x.unfold(2 + dim, k, step).narrow(2 + dim, 0, count)  # adds the window as a last dimension
    spatial = len(kernel)
    # [batch, in, *counts, *kernel] to [batch, *counts, in, *kernel]
    return x.movedim(1, 1 + spatial).flatten(1 + spatial)


for _cls in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    register_layer(_cls, PatchConvolution())
