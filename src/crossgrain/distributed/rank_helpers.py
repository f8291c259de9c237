"""Functions for models that ranks share, under the names that the field knows."""

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
    """How many ranks there are; one where nothing is distributed."""
    return group_size(group)


def get_distributed_rank(group: Any = None) -> int:
    """This rank's place in the group."""
    return group_rank(group)


class Done:
    """Handle of a collective that was done when it returned."""

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
    """The rows of all ranks; and with ``async_op`` a handle, although it is done.

    With a ``quantizer``: what that makes of them, bit for bit. Planes travel where they may, else the numbers.
    """
    if external_coalescing:
        raise NotImplementedError("gather_along_first_dim is done when it returns: leave external_coalescing off")
    ranks = group_size(process_group)
    if isinstance(inp, QuantizedTensorStorage):
        inp = inp.dequantize()
    if quantizer is None:
        rows = inp if ranks == 1 else gathered_rows(inp, process_group)
        return (rows if output_tensor is None else output_tensor.copy_(rows)), _handle(async_op)
    if output_tensor is not None:
        raise NotImplementedError("gather_along_first_dim makes quantized tensors itself; leave output_tensor out")
    if ranks == 1:
        return quantizer.quantize(inp), _handle(async_op)
    if inp.dim() != 2:
        raise ValueError(f"gather_along_first_dim quantizes matrices, not a tensor of shape {list(inp.shape)}")
    return gather_quantized_rows(inp.detach(), quantizer, process_group), _handle(async_op)


def reduce_scatter_along_first_dim(
    inp: Tensor, tp_group: Any, async_op: bool = False, output: Tensor | None = None
) -> tuple[Tensor, Done | None]:
    """This rank's share of the rows of the sum over ranks; and with ``async_op`` a handle, although it is done."""
    result = inp if group_size(tp_group) == 1 else scattered_sum(inp, tp_group, "reduce_scatter_along_first_dim")
    return (result if output is None else output.copy_(result)), _handle(async_op)


def allreduce(inp: Tensor, tp_group: Any = None, async_op: bool = False) -> tuple[Tensor, Done | None]:
    """The sum over ranks, written to ``inp``; and with ``async_op`` a handle, although it is done."""
    if group_size(tp_group) > 1:
        communicate(dist.all_reduce, inp, group=tp_group)
    return inp, _handle(async_op)


def reduce_sequence_parallel_gradients(model: nn.Module, group: Any = None) -> None:
    """Add up gradients of which every rank has a part. To be called after backward, once, before the optimizer.

    These are the gradients of parameters that all ranks have and use for other rows or heads, marked
    ``sequence_parallel=True``: of norms, and of biases after a row-parallel layer. Both ``grad`` and ``main_grad``
    are summed, if there are any. FSDP2 replaces parameters by others without marks; those of crossgrain's modules, and
    of `mark_sequence_parallel`, are known all the same. ``group`` is that of tensor parallelism.
    """
    marked = sequence_parallel_parameters(model)
    if not marked and _lost_marks(model):
        raise RuntimeError(
            "reduce_sequence_parallel_gradients: layers share rows, and no parameter is marked, since fully_shard has "
            "replaced those that were; use crossgrain.distributed.mark_sequence_parallel(norm) for norms of your own"
        )
    if group_size(group) == 1:
        return
    for parameter in marked:
        for gradient in (parameter.grad, getattr(parameter, "main_grad", None)):
            if gradient is not None:
                dist.all_reduce(local_part(gradient), group=group)


def _lost_marks(model: nn.Module) -> bool:
    """Whether layers share rows that FSDP2 shards, so that there should be marks."""
    modules = list(model.modules())
    shared = any(getattr(module, "sequence_parallel", False) is True for module in modules)
    return shared and any(isinstance(module, FSDPModule) for module in modules)
