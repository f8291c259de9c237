"""What a quantized parameter was made from, for whoever makes master weights.

The value is known to the parameter, as methods that frameworks look for, and to the marks that note writes to its
planes, which all tensors over the same buffers share: so a copy of its bytes, or of a part of them, knows its part of
the value. That is how FSDP2 makes shards.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .holder import Cuts
from .sharding import local_part
from .tensor import QuantizedTensor


class InitValue:
    """A CPU copy that can be let go, when the parameter was last written at the time, and where it was cut from."""

    def __init__(self, parameter: Tensor, value: Tensor) -> None:
        self._value: Tensor | None = value.detach().to("cpu", copy=True)
        # Marks know the value, which must not keep them alive: a parameter that is replaced lets its value go at once.
        self._writes = [(weakref.ref(mark), number) for mark, number in _writes(parameter)]
        self._cuts: Cuts = getattr(parameter, "_cuts", ())

    def get(self) -> Tensor | None:
        return self._value

    def clear(self) -> None:
        self._value = None

    def of_part(self, part: QuantizedTensor) -> Tensor | None:
        """The value of a part of the parameter, over the same buffers; None if these were written since.

        Each has marks of its own for planes that it does not hold.
        """
        size, then = len(self._cuts), {id(mark()): number for mark, number in self._writes}
        last = max(then.values(), default=0)
        written = any(number > then.get(id(mark), last) for mark, number in _writes(part))
        if self._value is None or part._cuts[:size] != self._cuts or written:
            return None
        value = self._value
        for dim, start, stop in part._cuts[size:]:
            value = value.narrow(dim, start, stop - start)
        return value if value.shape == part.shape else None

    def _is_last_write(self, parameter: Tensor) -> bool:
        now = _writes(parameter)
        return len(now) == len(self._writes) and all(
            mark is then() and number == before
            for (mark, number), (then, before) in zip(now, self._writes, strict=True)
        )

    def is_of(self, parameter: QuantizedTensor) -> bool:
        """Whether ``parameter`` still stands for the value.

        It was not written since, or it was and the value would give the same numbers. What all ranks received from
        one stands for no value here, also on the rank that sent it: masters would begin differently.
        """
        if self._value is None:
            return False
        if self._is_last_write(parameter):
            return True
        before = max((number for _, number in self._writes), default=0)
        if any(mark.received > before for mark, _ in _writes(parameter)):
            return False
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
    _note(parameter, kept)


def _note(parameter: Tensor, kept: InitValue) -> None:
    for mark, _ in _writes(parameter):
        mark.init_value = kept


def hand_on_init_value(source: QuantizedTensor, copy: QuantizedTensor) -> None:
    """To a copy of the bytes of all planes, if ``source`` has a value, or is a part of a tensor that has one."""
    kept = _noted(source)
    value = None if kept is None or copy.get_usages() != source.get_usages() else kept.of_part(source)
    if value is not None:
        _note(copy, InitValue(copy, value))


def renew_preserved_values(parameters: Mapping[str, Any], loaded: Mapping[str, Any], prefix: str = "") -> None:
    """After a load: parameters that keep their initial values keep the high precision that was loaded instead."""
    for name, parameter in parameters.items():
        value, kept = loaded.get(prefix + name), _kept(parameter)
        if kept is None or kept.get() is None or not isinstance(value, Tensor) or isinstance(value, QuantizedTensor):
            continue
        if value.shape == parameter.shape:
            keep_high_precision_init_val(parameter, value)


def preserved_value(parameter: Any) -> Tensor | None:
    """The preserved initial value, if there is one and ``parameter`` still stands for it.

    Of a sharded parameter: of what this rank has.
    """
    own = local_part(parameter)
    kept = _kept(own)
    if kept is not None and kept.is_of(own):
        return kept.get()
    noted = _noted(own)
    return None if noted is None else noted.of_part(own)


def _kept(parameter: Any) -> InitValue | None:
    kept = getattr(getattr(parameter, "get_high_precision_init_val", None), "__self__", None)
    return kept if isinstance(kept, InitValue) else None


def _noted(parameter: Tensor) -> InitValue | None:
    return next((mark.init_value for mark, _ in _writes(parameter)), None)


def clear_preserved_value(parameter: Tensor) -> None:
    """Let the preserved initial value go, if there is one."""
    own = local_part(parameter)
    for kept in (getattr(own, "clear_high_precision_init_val", None), getattr(_noted(own), "clear", None)):
        if kept is not None:
            kept()
