"""Collectives over ranks along the first dimension as operations. Backward is the transposed collective."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...runtime.collectives import gathered_rows, group_size, scattered_sum, summed
from ..computation import Computation
from ..context import OperationContext
from ..handover import plain
from ..op import Gradients


class _Collective(Computation):
    """Base class of collectives. With a single rank they do nothing.

    Args:
        process_group: the ranks that take part; None for all.
    """

    def __init__(self, process_group: Any = None) -> None:
        super().__init__()
        self.process_group = process_group

    @property
    def process_group_size(self) -> int:
        return group_size(self.process_group)

    def _run(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _run_backward(self, dy: Tensor) -> Tensor:
        raise NotImplementedError

    def _computed(self, ctx: OperationContext, input_: Tensor) -> Tensor:
        x = plain(input_)
        return x if self.process_group_size == 1 else self._run(x)

    def _gradients(self, ctx: OperationContext, grad_output: Tensor) -> tuple[Tensor | None, Gradients]:
        dy = plain(grad_output)
        return dy if self.process_group_size == 1 else self._run_backward(dy), []

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the process group, which cannot be pickled."""
        return {**super().__getstate__(), "process_group": None}


class AllGather(_Collective):
    """Gathers the rows of all ranks, in the order of ranks.

    Examples:
        >>> cg.ops.Sequential(cg.ops.GELU(), cg.ops.AllGather())(torch.ones(4, 32)).shape  # with two ranks 8 rows
        torch.Size([4, 32])
    """

    def _run(self, x: Tensor) -> Tensor:
        return gathered_rows(x, self.process_group)

    def _run_backward(self, dy: Tensor) -> Tensor:
        return scattered_sum(dy, self.process_group, self.layer)


class ReduceScatter(_Collective):
    """Sums over the ranks; each rank keeps its part of the rows.

    Examples:
        >>> cg.ops.Sequential(cg.ops.GELU(), cg.ops.ReduceScatter())(torch.ones(4, 32)).shape  # with two ranks 2 rows
        torch.Size([4, 32])
    """

    def _run(self, x: Tensor) -> Tensor:
        return scattered_sum(x, self.process_group, self.layer)

    def _run_backward(self, dy: Tensor) -> Tensor:
        return gathered_rows(dy, self.process_group)


class AllReduce(_Collective):
    """Sums over the ranks. The gradient is the same on all ranks and is passed on unchanged.

    Args:
        process_group: the ranks.
        reduce_in_backward: accepted; as in Transformer Engine, backward never reduces.

    Examples:
        >>> cg.ops.AllReduce()(torch.ones(2))  # with two ranks 2 and 2
        tensor([1., 1.])
    """

    def __init__(self, process_group: Any = None, reduce_in_backward: bool = True) -> None:
        super().__init__(process_group)

    def _run(self, x: Tensor) -> Tensor:
        return summed(x, self.process_group)

    def _run_backward(self, dy: Tensor) -> Tensor:
        return dy
