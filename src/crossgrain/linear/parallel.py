"""Tensor parallelism of a linear layer: which part of each tensor a rank has, and what travels between ranks.

    column  W [N/R, K]: a rank has some outputs    x whole, or its rows (sequence parallel)    dy [M, N/R]
    row     W [N, K/R]: a rank has some inputs     x [M, K/R]    y, dy whole, or rows (sequence parallel)

    column  forward: x is gathered, if a rank has rows      backward: dx is summed, and scattered, if so
    row     forward: y is summed, and scattered, if so      backward: dy is gathered, if a rank has rows

Every part is quantized as in the whole: amaxes that parts share are those of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..quantizers.base import Quantizer
from ..runtime.collectives import group_size, scattered_sum, summed

ParallelMode = Literal["row", "column"]


@dataclass(frozen=True)
class TensorParallel:
    """Of one linear layer, over ``size`` > 1 ranks.

    ``sequence_parallel``  x (column) or y (row) has on each rank its share of the rows
    """

    mode: ParallelMode
    group: Any
    size: int
    sequence_parallel: bool

    @property
    def gathers_input(self) -> bool:
        return self.mode == "column" and self.sequence_parallel

    @property
    def gathers_gradient(self) -> bool:
        return self.mode == "row" and self.sequence_parallel

    @property
    def sums_output(self) -> bool:
        return self.mode == "row"

    @property
    def sums_input_gradient(self) -> bool:
        return self.mode == "column"

    def quantizer(self, tensor: str, quantizer: Quantizer) -> Quantizer:
        """For this rank's part of ``tensor``: "input", "weight" or "grad_output"."""
        rows = 0 if self.sequence_parallel else None
        cut = {"input": rows, "weight": 0, "grad_output": 1}
        if self.mode == "row":
            cut = {"input": 1, "weight": 1, "grad_output": rows}
        axis = cut[tensor]
        return quantizer if axis is None else quantizer.reducing(self.group, axis=axis)

    def sum(self, x: Tensor, layer: str) -> Tensor:
        """Over ranks; this rank's rows of it if the rest of the model is sequence parallel."""
        return scattered_sum(x, self.group, layer) if self.sequence_parallel else summed(x, self.group)

    def output(
        self, y: Tensor, bias: Tensor | None, x: Sequence[int], dtype: torch.dtype, layer: str
    ) -> tuple[Tensor, tuple[int, ...]]:
        """The layer's output on this rank, from its product ``y`` [M, N], and its shape for an input of shape ``x``.

        A bias is added once, to the sum over ranks.
        """
        shape = self.output_shape(x, y.shape[1])
        if self.sums_output:
            y = self.sum(y, layer)
            y = y if bias is None else (y + bias.detach()).to(dtype)
        return y, shape

    def output_shape(self, x: Sequence[int], features: int) -> tuple[int, ...]:
        """Of y on this rank, for its x."""
        if not self.sequence_parallel:
            return (*x[:-1], features)
        rows = x[0] * self.size if self.mode == "column" else x[0] // self.size
        return (rows, *x[1:-1], features)

    def check(self, x: Sequence[int], layer: str) -> None:
        """Raise before anything is sent; ranks have the same shapes, so all of them do."""
        if not self.sequence_parallel:
            return
        if len(x) < 2:
            raise ValueError(f"{layer}: the input {list(x)} has no rows for {self.size} ranks to share")
        if self.mode == "row" and x[0] % self.size:
            raise ValueError(
                f"{layer}: the first dimension of the input {list(x)} cannot be divided evenly among {self.size} "
                "ranks, and with sequence_parallel each of them gets its share of the output"
            )


def resolved_group(layer: str, group: Any, size: int) -> tuple[Any, int]:
    """Group and size: a group knows its size, and a size without group waits for `set_tensor_parallel_group`."""
    if group is not None:
        ranks = group_size(group)
        if size not in (1, ranks):
            raise ValueError(f"{layer}: tp_size={size}, but tp_group has {ranks} ranks")
        return group, ranks
    if size < 1:
        raise ValueError(f"{layer}: tp_size is at least 1, not {size}")
    return None, size


def shared_by(
    layer: str, mode: ParallelMode | None, group: Any, size: int, sequence_parallel: bool
) -> TensorParallel | None:
    """How ranks share a layer; None if one of them has it all."""
    if mode is None or size == 1:
        return None
    if group is None:
        raise RuntimeError(
            f"{layer} was made for tp_size={size} ranks and has no group of them: call set_tensor_parallel_group"
        )
    return TensorParallel(mode, group, size, sequence_parallel)


def local(parameter: Any) -> Any:
    """What this rank has of a parameter that is a DTensor; others are as they are."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def share(layer: str, what: str, size: int, ranks: int) -> int:
    """``size / ranks``, which has to be whole."""
    if size % ranks:
        raise ValueError(f"{layer}: {what}={size} cannot be divided evenly among tp_size={ranks} ranks")
    return size // ranks


def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Note on a parameter which part it is: whether of a whole, and along which dimension that was cut."""
    found: Any = tensor
    found.tensor_model_parallel, found.partition_dim, found.partition_stride = is_parallel, dim, stride


_SUMMED = "_sequence_parallel_names"  # on a module: by the name of a parameter, whether its gradient is part of a sum


def mark_sequence_parallel(module: nn.Module, *names: str, marked: bool = True) -> None:
    """Note that gradients of these parameters of ``module``, by default all of its own, are a rank's part of a sum.

    Frameworks look at the mark of the parameter; the module knows it too, for FSDP2 replaces parameters.
    """
    noted = vars(module).setdefault(_SUMMED, {})
    for name in names or [name for name, _ in module.named_parameters(recurse=False)]:
        parameter: Any = getattr(module, name)
        parameter.sequence_parallel = noted[name] = marked


def sequence_parallel_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those that are marked, or that FSDP2 has put in the place of such; each once."""
    found: dict[int, nn.Parameter] = {}
    for module in model.modules():
        noted = vars(module).get(_SUMMED, {})
        for name, parameter in module.named_parameters(recurse=False):
            if getattr(parameter, "sequence_parallel", noted.get(name, False)):
                found[id(parameter)] = parameter
    return list(found.values())
