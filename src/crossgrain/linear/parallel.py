"""Tensor parallelism of a linear layer: which part of each tensor a rank has, and what ranks send to each other.

    column  W [N/R, K]: a rank has some outputs    x whole, or its rows (sequence parallel)    dy [M, N/R]
    row     W [N, K/R]: a rank has some inputs     x [M, K/R]    y, dy whole, or rows (sequence parallel)

    column  forward: x is gathered (sequence parallel)                backward: dx is summed (and scattered)
    row     forward: y is summed (and scattered: sequence parallel)   backward: dy is gathered (sequence parallel)

Every part is quantized as in the whole tensor: amaxes that parts share are reduced over ranks.
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
    """How more than one rank share a linear layer.

    Attributes:
        mode: "column" if each rank has some outputs, "row" if each rank has some inputs.
        group: the process group.
        size: number of ranks.
        sequence_parallel: each rank has only its share of the rows of x (column) or y (row).
        segments: if the outputs of a column-parallel layer consist of several pieces, each of which is divided among
            the ranks (queries, keys and values; the two halves of a gated MLP): the sizes of this rank's share of each.
    """

    mode: ParallelMode
    group: Any
    size: int
    sequence_parallel: bool
    segments: tuple[int, ...] = ()

    @property
    def gathers_input(self) -> bool:
        """Whether forward gathers x from all ranks."""
        return self.mode == "column" and self.sequence_parallel

    @property
    def gathers_gradient(self) -> bool:
        """Whether backward gathers dy from all ranks."""
        return self.mode == "row" and self.sequence_parallel

    @property
    def sums_output(self) -> bool:
        """Whether y is summed over ranks."""
        return self.mode == "row"

    @property
    def sums_input_gradient(self) -> bool:
        """Whether dx is summed over ranks."""
        return self.mode == "column"

    def quantizer(self, tensor: str, quantizer: Quantizer) -> Quantizer:
        """The quantizer for this rank's part of a tensor.

        Args:
            tensor: "input", "weight" or "grad_output".
            quantizer: the quantizer of the whole tensor.
        """
        rows = 0 if self.sequence_parallel else None
        cut = {"input": rows, "weight": 0, "grad_output": 1}
        if self.mode == "row":
            cut = {"input": 1, "weight": 1, "grad_output": rows}
        axis = cut[tensor]
        if axis is None:
            return quantizer.same_on(self.group)
        segments = self.segments if self.mode == "column" and tensor != "input" else ()
        return quantizer.reducing(self.group, axis=axis, segments=segments)

    def sum(self, x: Tensor, layer: str) -> Tensor:
        """The sum over ranks; with sequence parallelism only this rank's rows of it."""
        return scattered_sum(x, self.group, layer) if self.sequence_parallel else summed(x, self.group)

    def output(
        self, y: Tensor, bias: Tensor | None, x: Sequence[int], dtype: torch.dtype, layer: str
    ) -> tuple[Tensor, tuple[int, ...]]:
        """The output of this rank and its shape. The bias is added once, to the sum over ranks.

        Args:
            y: the product of this rank [M, N].
            bias: the bias, or None.
            x: shape of the input.
            dtype: dtype of the output.
            layer: name of the layer, for messages.
        """
        shape = self.output_shape(x, y.shape[1])
        if self.sums_output:
            y = self.sum(y, layer)
            y = y if bias is None else (y + bias.detach()).to(dtype)
        return y, shape

    def output_shape(self, x: Sequence[int], features: int) -> tuple[int, ...]:
        """Shape of y on this rank for an input of shape ``x``."""
        if not self.sequence_parallel:
            return (*x[:-1], features)
        rows = x[0] * self.size if self.mode == "column" else x[0] // self.size
        return (rows, *x[1:-1], features)

    def check(self, x: Sequence[int], layer: str) -> None:
        """Raise ValueError if rows cannot be divided. All ranks have the same shapes, so all raise, before sending."""
        if not self.sequence_parallel:
            return
        if len(x) < 2:
            raise ValueError(
                f"{layer}: with sequence_parallel the input needs at least two dimensions, got shape {list(x)}"
            )
        if self.mode == "row" and x[0] % self.size:
            raise ValueError(
                f"{layer}: the first dimension of the input {list(x)} cannot be divided evenly among {self.size} "
                "ranks; with sequence_parallel each rank gets an equal share of the rows of the output"
            )


def resolved_group(layer: str, group: Any, size: int) -> tuple[Any, int]:
    """Check a group and a number of ranks, and return both. Without a group, it is set by `set_tensor_parallel_group`.

    Raises:
        ValueError: the size is not that of the group, or less than 1.
    """
    if group is not None:
        ranks = group_size(group)
        if size not in (1, ranks):
            raise ValueError(f"{layer}: tp_size={size}, but tp_group has {ranks} ranks")
        return group, ranks
    if size < 1:
        raise ValueError(f"{layer}: tp_size must be at least 1, got {size}")
    return None, size


def shared_by(
    layer: str,
    mode: ParallelMode | None,
    group: Any,
    size: int,
    sequence_parallel: bool,
    segments: Sequence[int] = (),
) -> TensorParallel | None:
    """How ranks share a layer; None if each rank has the whole layer.

    Raises:
        RuntimeError: the process group has not been set.
    """
    if mode is None or size == 1:
        return None
    if group is None:
        raise RuntimeError(
            f"{layer} was created for tp_size={size} ranks, but has no process group: call set_tensor_parallel_group "
            "first"
        )
    return TensorParallel(mode, group, size, sequence_parallel, tuple(segments))


def local(parameter: Any) -> Any:
    """The part of a DTensor that this rank has. Other parameters are returned as they are."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def share(layer: str, what: str, size: int, ranks: int) -> int:
    """``size / ranks``.

    Raises:
        ValueError: it is not a whole number.
    """
    if size % ranks:
        raise ValueError(f"{layer}: {what}={size} cannot be divided evenly among tp_size={ranks} ranks")
    return size // ranks


def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Set the attributes by which Megatron knows a part of a parameter.

    Args:
        tensor: the parameter.
        is_parallel: whether it is a part of a larger parameter.
        dim: the dimension along which that was divided.
        stride: stride of the partition.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(32, 32))
        >>> cg.distributed.set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=0, stride=1)
        >>> weight.partition_dim
        0
    """
    found: Any = tensor
    found.tensor_model_parallel, found.partition_dim, found.partition_stride = is_parallel, dim, stride


_SUMMED = "_sequence_parallel_names"  # attribute of a module: for parameters by name, whether they are marked


def mark_sequence_parallel(module: nn.Module, *names: str, marked: bool = True) -> None:
    """Mark parameters whose gradients on this rank are only a part of a sum over ranks.

    Frameworks look at the attribute ``sequence_parallel`` of the parameter. The module also records it, because FSDP2
    replaces parameters.

    Args:
        module: the module.
        *names: names of its parameters; by default all of them.
        marked: False removes the mark.

    Examples:
        >>> norm = torch.nn.LayerNorm(32)
        >>> cg.distributed.mark_sequence_parallel(norm)
        >>> norm.weight.sequence_parallel
        True
    """
    noted = vars(module).setdefault(_SUMMED, {})
    for name in names or [name for name, _ in module.named_parameters(recurse=False)]:
        parameter: Any = getattr(module, name)
        parameter.sequence_parallel = noted[name] = marked


def sequence_parallel_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The marked parameters of a model, or those by which FSDP2 has replaced them; each once."""
    found: dict[int, nn.Parameter] = {}
    for module in model.modules():
        noted = vars(module).get(_SUMMED, {})
        for name, parameter in module.named_parameters(recurse=False):
            if getattr(parameter, "sequence_parallel", noted.get(name, False)):
                found[id(parameter)] = parameter
    return list(found.values())
