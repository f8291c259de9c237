"""`WeightCache`: quantized copies of weights, which all microbatches of a step use.

The cache belongs to one module, which clears it when its parameters are moved or loaded, or when the recipe changes. A
copy is used only for the parameters that it was made from. Otherwise the caller says when to make a new copy: with
``is_first_microbatch=True``, after each optimizer step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..planes import COLUMNWISE, ROWWISE
from ..runtime.logs import warn
from ..runtime.transforms import new_tensors_are_fake
from ..tensor import QuantizedTensorStorage
from .unchanged_weights import UnchangedWeights


class _Entry(NamedTuple):
    copy: QuantizedTensorStorage
    made_from: list[weakref.ref[Tensor]]
    versions: list[int]  # how often the parameters had been written to

    def serves(self, parameters: Sequence[Tensor], columnwise: bool) -> bool:
        if len(parameters) != len(self.made_from):
            return False
        if any(ref() is not parameter for ref, parameter in zip(self.made_from, parameters, strict=True)):
            return False
        return self.copy.plane(ROWWISE) is not None and not (columnwise and self.copy.plane(COLUMNWISE) is None)

    def check_current(self, name: str, parameters: Sequence[Tensor]) -> None:
        """Warn if a parameter was written to after the copy was made."""
        if _versions(parameters) != self.versions:
            warn(
                __name__,
                f"{name} was changed after its quantized copy was made, but is_first_microbatch=False says to use the "
                "copy: this pass computes with the old numbers. Pass is_first_microbatch=True in the first call after "
                "each optimizer step, or None to quantize the weight in every call.",
            )


def _versions(parameters: Sequence[Tensor]) -> list[int]:
    return [0 if parameter.is_inference() else parameter._version for parameter in parameters]


class WeightCache:
    """Quantized copies, by the name of the weight.

    Attributes:
        unchanged: copies for calls that say nothing about microbatches, in inference and of frozen weights.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self.unchanged = UnchangedWeights()

    def get(
        self,
        name: str,
        parameters: Sequence[Tensor],
        *,
        layer: str,
        refresh: bool,
        columnwise: bool,
        make: Callable[[bool], QuantizedTensorStorage],
    ) -> QuantizedTensorStorage:
        """Return the copy of a weight, and make it if necessary.

        It is made again if ``refresh`` is set, if it does not have a direction, or if it is of other parameters. A new
        copy has the directions that the old one had, so that a validation does not remove what training needs.

        Args:
            name: name of the weight.
            parameters: the parameters of which the weight consists.
            layer: name of the layer, for messages.
            refresh: make the copy again.
            columnwise: whether the columnwise plane is needed.
            make: makes the copy; its argument says whether to make the columnwise plane.
        """
        entry = self._entries.get(name)
        if refresh or entry is None or not entry.serves(parameters, columnwise):
            columnwise = columnwise or (entry is not None and entry.copy.plane(COLUMNWISE) is not None)
            with torch.inference_mode(False), torch.no_grad():  # a copy made for inference may be used for training
                copy = make(columnwise)
            if new_tensors_are_fake():
                return copy  # not kept: the weight may have numbers
            made_from = [weakref.ref(parameter) for parameter in parameters]
            entry = self._entries[name] = _Entry(copy, made_from, _versions(parameters))
        else:
            entry.check_current(f"{layer}: {name}", parameters)
        return entry.copy

    def copies(self) -> dict[str, QuantizedTensorStorage]:
        """All copies by name."""
        return {name: entry.copy for name, entry in self._entries.items()}

    def clear(self) -> None:
        """Remove all copies."""
        self._entries.clear()
        self.unchanged.clear()
