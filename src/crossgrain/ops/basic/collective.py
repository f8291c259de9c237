"""Collectives along the first dimension, each with its transpose as backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...quantizer import Quantizer
from ..context import OperationContext
from ..handover import handed_on, plain
from ..op import BasicOperation


class _Collective(BasicOperation):
    """``process_group``: the ranks that take part, by default all; alone, a rank keeps its tensor."""

    def __init__(self, process_group: Any = None) -> None:
        super().__init__()
        self.process_group = process_group

    @property
    def process_group_size(self) -> int:
        return dist.get_world_size(self.process_group) if dist.is_initialized() else 1

    def _run(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _run_backward(self, dy: Tensor) -> Tensor:
        raise NotImplementedError

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Tensor,
        *,
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        **kwargs: Any,
    ) -> Tensor:
        x = plain(input_)
        return handed_on(x if self.process_group_size == 1 else self._run(x), next_op_input_quantizer)

    def op_backward(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        dy = plain(grad_output)
        return handed_on(dy if self.process_group_size == 1 else self._run_backward(dy), ctx.grad_input_quantizer), []

    def __getstate__(self) -> dict[str, Any]:
        """Process groups do not travel."""
        return {**super().__getstate__(), "process_group": None}

    # ---- along the first dimension -------------------------------------------------------------

    def _gathered(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0] * self.process_group_size, *x.shape[1:])
        dist.all_gather_into_tensor(out, x.detach().contiguous(), group=self.process_group)
        return out

    def _summed(self, x: Tensor) -> Tensor:
        out = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=self.process_group)
        return out

    def _scattered(self, x: Tensor) -> Tensor:
        ranks = self.process_group_size
        if x.shape[0] % ranks:
            raise ValueError(f"{self.layer}: {x.shape[0]} rows cannot be divided evenly among {ranks} ranks")
        out = x.new_empty(x.shape[0] // ranks, *x.shape[1:])
        dist.reduce_scatter_tensor(out, x.detach().contiguous(), group=self.process_group)
        return out


class AllGather(_Collective):
    """The rows of all ranks, one after the other."""

    def _run(self, x: Tensor) -> Tensor:
        return self._gathered(x)

    def _run_backward(self, dy: Tensor) -> Tensor:
        return self._scattered(dy)


class ReduceScatter(_Collective):
    """The sum over ranks, of which each keeps its share of the rows."""

    def _run(self, x: Tensor) -> Tensor:
        return self._scattered(x)

    def _run_backward(self, dy: Tensor) -> Tensor:
        return self._gathered(dy)


class AllReduce(_Collective):
    """The sum over ranks. Its gradient is the same on all of them and is passed on."""

    def _run(self, x: Tensor) -> Tensor:
        return self._summed(x)

    def _run_backward(self, dy: Tensor) -> Tensor:
        return dy
