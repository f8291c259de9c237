"""Quantized copies of weights that microbatches of one step share.

The cache belongs to one module and is emptied by it whenever its parameters are moved, loaded or
quantized by another recipe; a copy serves only the parameters it was made from. Between those, the
caller says when a copy is made again: with ``is_first_microbatch=True``, after each optimizer step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..planes import COLUMNWISE, ROWWISE
from ..tensor import QuantizedTensorStorage


class _Entry(NamedTuple):
    copy: QuantizedTensorStorage
    made_from: list[weakref.ref[Tensor]]

    def serves(self, parameters: Sequence[Tensor], columnwise: bool) -> bool:
        if len(parameters) != len(self.made_from):
            return False
        if any(ref() is not parameter for ref, parameter in zip(self.made_from, parameters, strict=True)):
            return False
        return self.copy.plane(ROWWISE) is not None and not (columnwise and self.copy.plane(COLUMNWISE) is None)


class WeightCache:
    """Copies by the name of the weight."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def get(
        self,
        name: str,
        parameters: Sequence[Tensor],
        *,
        refresh: bool,
        columnwise: bool,
        make: Callable[[bool], QuantizedTensorStorage],
    ) -> QuantizedTensorStorage:
        """The copy; made by ``make(columnwise)`` if it is to be refreshed, lacks a direction or is of other parameters.

        A validation that refreshes a copy leaves it as training needs it, with the directions it had.
        """
        entry = self._entries.get(name)
        if refresh or entry is None or not entry.serves(parameters, columnwise):
            columnwise = columnwise or (entry is not None and entry.copy.plane(COLUMNWISE) is not None)
            with torch.inference_mode(False), torch.no_grad():  # a copy made for inference may be used for training
                copy = make(columnwise)
            entry = self._entries[name] = _Entry(copy, [weakref.ref(parameter) for parameter in parameters])
        return entry.copy

    def copies(self) -> dict[str, QuantizedTensorStorage]:
        return {name: entry.copy for name, entry in self._entries.items()}

    def clear(self) -> None:
        self._entries.clear()
