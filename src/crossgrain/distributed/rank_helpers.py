"""Collectives and helpers for tensor and sequence parallelism, with the names of Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..linear.gather_activations import gather_quantized_rows
from ..linear.parallel import mark_sequence_parallel, sequence_parallel_parameters, set_tensor_model_parallel_attributes
from ..quantizers.base import Quantizer
from ..runtime.collectives import gathered_rows, group_rank, group_size, scattered_sum
from ..runtime.failures import communicate
from ..tensor import QuantizedTensorStorage
from ..tensor.sharding import local_part

__all__ = [
    "allreduce",
    "gather_along_first_dim",
    "get_distributed_rank",
    "get_distributed_world_size",
    "mark_sequence_parallel",
    "reduce_scatter_along_first_dim",
    "reduce_sequence_parallel_gradients",
    "set_tensor_model_parallel_attributes",
]


def get_distributed_world_size(group: Any = None) -> int:
    """The number of ranks of ``group``; 1 if torch.distributed is not initialized.

    Examples:
        >>> cg.distributed.get_distributed_world_size()  # without torchrun
        1
    """
    return group_size(group)


def get_distributed_rank(group: Any = None) -> int:
    """The index of this process in ``group``; 0 if torch.distributed is not initialized.

    Examples:
        >>> cg.distributed.get_distributed_rank()  # without torchrun
        0
    """
    return group_rank(group)


class Done:
    """Handle of a collective that is complete already; `wait` returns at once."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _handle(async_op: bool) -> Done | None:
    return Done() if async_op else None


def gather_along_first_dim(
    inp: Any,
    process_group: Any,
    async_op: bool = False,
    quantizer: Quantizer | None = None,
    output_tensor: Tensor | None = None,
    external_coalescing: bool = False,
) -> tuple[Any, Done | None]:
    """Gather the rows of all ranks, in the order of ranks.

    With a quantizer, the result is, bit for bit, what quantizing the gathered rows gives. Quantized bytes travel if the
    format allows it, otherwise the unquantized rows.

    Args:
        inp: the rows of this rank; a quantized tensor is dequantized first.
        process_group: the group of ranks.
        async_op: return a handle as well; the gather is complete when this function returns all the same.
        quantizer: quantize the gathered rows.
        output_tensor: write the rows here; not possible with a quantizer.
        external_coalescing: not supported; must be False.

    Returns:
        The gathered tensor, and a handle or None.

    Examples:
        >>> rows, quantizer = torch.randn(32, 32), cg.quantizer_for("mxfp8")
        >>> gathered, _ = cg.distributed.gather_along_first_dim(rows, None, quantizer=quantizer)
        >>> gathered.shape  # with two ranks 64 rows
        torch.Size([32, 32])
    """
    if external_coalescing:
        raise NotImplementedError(
            "gather_along_first_dim does not support external_coalescing=True: it is complete when it returns"
        )
    ranks = group_size(process_group)
    if isinstance(inp, QuantizedTensorStorage):
        inp = inp.dequantize()
    if quantizer is None:
        rows = inp if ranks == 1 else gathered_rows(inp, process_group)
        return (rows if output_tensor is None else output_tensor.copy_(rows)), _handle(async_op)
    if output_tensor is not None:
        raise NotImplementedError(
            "gather_along_first_dim cannot write to output_tensor with a quantizer; it returns a new quantized tensor"
        )
    if ranks == 1:
        return quantizer.quantize(inp), _handle(async_op)
    if inp.dim() != 2:
        raise ValueError(
            f"gather_along_first_dim with a quantizer needs a matrix, got a tensor of shape {list(inp.shape)}"
        )
    return gather_quantized_rows(inp.detach(), quantizer, process_group), _handle(async_op)


def reduce_scatter_along_first_dim(
    inp: Tensor, tp_group: Any, async_op: bool = False, output: Tensor | None = None
) -> tuple[Tensor, Done | None]:
    """Sum ``inp`` over the ranks, and return this rank's part of the rows of the sum, and a handle or None.

    Args:
        inp: a tensor whose first dimension is divisible by the number of ranks.
        tp_group: the group of ranks.
        async_op: return a handle as well; the operation is complete when this function returns all the same.
        output: write the result here.

    Examples:
        >>> rows, handle = cg.distributed.reduce_scatter_along_first_dim(torch.ones(4, 2), None)
        >>> rows.shape  # with two ranks 2 rows
        torch.Size([4, 2])
    """
    result = inp if group_size(tp_group) == 1 else scattered_sum(inp, tp_group, "reduce_scatter_along_first_dim")
    return (result if output is None else output.copy_(result)), _handle(async_op)


def allreduce(inp: Tensor, tp_group: Any = None, async_op: bool = False) -> tuple[Tensor, Done | None]:
    """Sum ``inp`` over the ranks, in place, and return it, and a handle or None.

    With ``async_op`` a handle is returned, but the operation is complete when this function returns.

    Examples:
        >>> total, handle = cg.distributed.allreduce(torch.ones(2))
        >>> total  # with two ranks 2 and 2
        tensor([1., 1.])
    """
    if group_size(tp_group) > 1:
        communicate(dist.all_reduce, inp, group=tp_group)
    return inp, _handle(async_op)


def reduce_sequence_parallel_gradients(model: nn.Module, group: Any = None) -> None:
    """Sum the gradients of parameters that every rank has in full but uses on different rows or heads.

    Call it once after backward, before the optimizer step. Such parameters are marked ``sequence_parallel=True``: those
    of norms, and biases after a row-parallel layer. ``grad`` and ``main_grad`` are summed, if present. FSDP2 replaces
    parameters and loses the marks; the parameters of crossgrain's modules, and those passed to
    `mark_sequence_parallel`, are found all the same.

    Args:
        model: the model.
        group: the group of tensor parallelism.

    Raises:
        RuntimeError: layers are sequence parallel, but FSDP2 has removed all marks.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.LayerNorm(32), cg.Linear(32, 32))
        >>> cg.distributed.mark_sequence_parallel(model[0])
        >>> model(torch.randn(8, 32)).sum().backward()
        >>> cg.distributed.reduce_sequence_parallel_gradients(model)  # after backward, before optimizer.step()
    """
    marked = sequence_parallel_parameters(model)
    if not marked and _lost_marks(model):
        raise RuntimeError(
            "reduce_sequence_parallel_gradients: the model has sequence-parallel layers, but no parameter is marked, "
            "because fully_shard has replaced the parameters. Use crossgrain.distributed.mark_sequence_parallel(norm) "
            "for norms of your own"
        )
    if group_size(group) == 1:
        return
    for parameter in marked:
        for gradient in (parameter.grad, getattr(parameter, "main_grad", None)):
            if gradient is not None:
                dist.all_reduce(local_part(gradient), group=group)


def _lost_marks(model: nn.Module) -> bool:
    """Whether a sharded model has sequence-parallel layers, so that there should be marks."""
    modules = list(model.modules())
    shared = any(getattr(module, "sequence_parallel", False) is True for module in modules)
    return shared and any(isinstance(module, FSDPModule) for module in modules)
