"""Quantized copies of weights that microbatches of one step share.

The cache belongs to one module and is emptied by it whenever its parameters are moved, loaded or
quantized by another recipe. Between those, the caller says when a copy is made again: with
``is_first_microbatch=True``, after each optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..plane import COLUMNWISE, ROWWISE
from ..tensor import QuantizedTensorStorage


class WeightCache:
    """Copies by the name of the parameter."""

    def __init__(self) -> None:
        self.by_name: dict[str, QuantizedTensorStorage] = {}

    def get(
        self, name: str, *, refresh: bool, columnwise: bool, shape: tuple[int, int], make: Callable[[], Any]
    ) -> QuantizedTensorStorage:
        """The copy; made by ``make()`` if it is to be refreshed, or lacks a direction, or is of another size."""
        copy = self.by_name.get(name)
        if refresh or copy is None or not _serves(copy, columnwise, shape):
            copy = self.by_name[name] = make()
        return copy

    def clear(self) -> None:
        self.by_name.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightCache:
        """A copied module makes its own."""
        return WeightCache()

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightCache, ()


def _serves(copy: QuantizedTensorStorage, columnwise: bool, shape: tuple[int, int]) -> bool:
    if tuple(copy.shape) != shape or copy.plane(ROWWISE) is None:
        return False
    return not columnwise or copy.plane(COLUMNWISE) is not None
