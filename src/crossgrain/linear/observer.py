"""See the operands of linear layers, x, W and dy, when their backward pass begins.

Modules, operations, grouped layers and converted models all come through `linear.function`, so an observer there sees
all of them. Nothing is kept for it: x and W are what forward has saved for backward anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from .. import kernels
from ..planes import Plane
from .saved_planes import Operand


class BackwardOperands(NamedTuple):
    """The operands of one layer. Of a grouped layer, each group comes by itself under the same name.

    Attributes:
        layer: name of the layer, as recipes know it.
        x: the input [M, K] as it was saved: in high precision, or as a plane; None if wgrad does not run.
        weight: the weight [N, K] in the same way, in high precision a view of its parameter; None if it is not known.
        dy: the gradient of the output [M, N].
    """

    layer: str
    x: Operand | None
    weight: Operand | None
    dy: Tensor

    def matrices(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """x, W and dy in float32 (float64 stays), as matrices; planes are decoded. None if one is not known."""
        if self.x is None or self.weight is None:
            return None
        return _matrix(self.x), _matrix(self.weight), _matrix(self.dy)


def shown(operand: Operand | None) -> Operand | None:
    """An operand as observers get it: a plane in high precision is the tensor that it holds."""
    return operand.data if isinstance(operand, Plane) and operand.format.is_identity else operand


def _matrix(operand: Operand) -> Tensor:
    if isinstance(operand, Plane):
        return kernels.decode(operand, torch.float32)
    matrix = operand.detach().reshape(-1, operand.shape[-1])
    return matrix if matrix.dtype == torch.float64 else matrix.float()


Observer = Callable[[BackwardOperands], None]
observers: tuple[Observer, ...] = ()  # for all threads: backward may run in threads of autograd


@contextmanager
def observe_backward(observer: Observer) -> Iterator[None]:
    """Context manager: ``observer`` is called for each linear layer whose backward pass runs, before its GEMMs."""
    global observers
    observers = (*observers, observer)
    try:
        yield
    finally:
        observers = tuple(each for each in observers if each is not observer)
