"""Run linear layers of a module as groups: each has its own rows of one input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ..linear import probe
from ..linear.grouped_function import Groups, grouped_linear
from ..linear.grouped_input import hollow_rows
from ..tensor import QuantizedTensor
from .forward_pass import ForwardPass
from .linear_module import LinearModule


def grouped_call(
    module: LinearModule,
    x: Tensor,
    groups: Groups,
    this: ForwardPass,
    *,
    indices: Sequence[int] | None = None,
    parameter: Tensor | None = None,
) -> Tensor:
    """Compute y [..., N] of x [..., K], whose rows are sorted by group.

    Args:
        module: the module that the layers belong to.
        x: the input, plain or quantized.
        groups: sizes, weights and biases; its ``calls`` are filled in here.
        this: the forward pass of the module.
        indices: the linear layer of the module that each group is; by default 0, 1, 2, ...
        parameter: the parameter that all weights are parts of; by default the packed weight, or each weight is one.
    """
    if isinstance(x, QuantizedTensor) and (this.recipe is None or this.calibrates):
        x = x.dequantize()
    rows = hollow_rows(x) if isinstance(x, QuantizedTensor) else x.detach().reshape(-1, x.shape[-1])
    indices = range(len(groups.sizes)) if indices is None else indices
    parameter = groups.packed_weight if parameter is None else parameter
    groups.calls = [
        replace(
            module._linear_call(index, part, weight, this, [weight if parameter is None else parameter]), parallel=None
        )
        for index, part, weight in zip(indices, rows.split(groups.sizes), groups.weights, strict=True)
    ]
    if probe.attach is not None:
        for index, weight, call in zip(indices, groups.weights, groups.calls, strict=True):
            probe.attach(module, index, weight, call)
    return grouped_linear(x, groups)
