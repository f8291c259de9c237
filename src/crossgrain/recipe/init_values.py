"""What a quantized parameter was made from, for whoever makes master weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..tensor import QuantizedTensor


class InitValue:
    """A CPU copy that can be let go, and when the parameter was last written at the time."""

    def __init__(self, parameter: Tensor, value: Tensor) -> None:
        self._value: Tensor | None = value.detach().to("cpu", copy=True)
        self._writes = _writes(parameter)

    def get(self) -> Tensor | None:
        return self._value

    def clear(self) -> None:
        self._value = None

    def is_of(self, parameter: QuantizedTensor) -> bool:
        """Whether ``parameter`` still stands for the value.

        It was not written since, or it was and the value would give the same numbers.
        """
        if self._value is None:
            return False
        now = _writes(parameter)
        if len(now) == len(self._writes) and all(
            mark is then and number == before for (mark, number), (then, before) in zip(now, self._writes, strict=True)
        ):
            return True
        with torch.no_grad():
            # With a quantizer of its own: that of the parameter may keep a history, which this is no part of.
            again = copy.deepcopy(parameter.detach()).copy_(self._value.to(parameter.device))
            return torch.equal(again.dequantize(), parameter.detach().dequantize())


def _writes(parameter: Tensor) -> list[tuple[Any, int]]:
    """When each plane was last written: the mark, which all aliases share, and its number now."""
    if not isinstance(parameter, QuantizedTensor):
        return []
    return [(epoch, epoch.number) for epoch in parameter._write_marks()]


def keep_high_precision_init_val(parameter: Tensor, value: Tensor) -> None:
    """Give ``parameter`` the methods ``get_high_precision_init_val`` and ``clear_high_precision_init_val``."""
    kept = InitValue(parameter, value)
    parameter.get_high_precision_init_val = kept.get  # type: ignore[attr-defined]
    parameter.clear_high_precision_init_val = kept.clear  # type: ignore[attr-defined]


def renew_preserved_values(parameters: Mapping[str, Any], loaded: Mapping[str, Any], prefix: str = "") -> None:
    """After a load: parameters that keep their initial values keep the high precision that was loaded instead."""
    for name, parameter in parameters.items():
        value, kept = loaded.get(prefix + name), _kept(parameter)
        if kept is None or kept.get() is None or not isinstance(value, Tensor) or isinstance(value, QuantizedTensor):
            continue
        if value.shape == parameter.shape:
            keep_high_precision_init_val(parameter, value)


def preserved_value(parameter: QuantizedTensor) -> Tensor | None:
    """The preserved initial value, if there is one and ``parameter`` still stands for it."""
    kept = _kept(parameter)
    return kept.get() if kept is not None and kept.is_of(parameter) else None


def _kept(parameter: Any) -> InitValue | None:
    kept = getattr(getattr(parameter, "get_high_precision_init_val", None), "__self__", None)
    return kept if isinstance(kept, InitValue) else None


def clear_preserved_value(parameter: Tensor) -> None:
    """Let the preserved initial value go, if there is one."""
    clear = getattr(parameter, "clear_high_precision_init_val", None)
    if clear is not None:
        clear()
