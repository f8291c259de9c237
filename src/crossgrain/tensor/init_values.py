"""Preserved initial values of quantized parameters, from which optimizers make master weights.

The parameter has methods to read the value, which frameworks look for. The records of writes to its planes refer to the
value as well, and all tensors with the same buffers share these records. So a copy of its bytes, or of a slice of them,
finds its part of the value: FSDP2 makes shards in this way.
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
    """A copy of an initial value on the CPU, and the number of the parameter's last write when the copy was made."""

    def __init__(self, parameter: Tensor, value: Tensor) -> None:
        self._value: Tensor | None = value.detach().to("cpu", copy=True)
        # Weak references, because the marks refer to the value: a parameter that is replaced frees its value at once.
        self._writes = [(weakref.ref(mark), number) for mark, number in _writes(parameter)]
        self._cuts: Cuts = getattr(parameter, "_cuts", ())

    def get(self) -> Tensor | None:
        """The value; None after `clear`."""
        return self._value

    def clear(self) -> None:
        """Free the value."""
        self._value = None

    def of_part(self, part: QuantizedTensor) -> Tensor | None:
        """The value of a slice of the parameter; None if its buffers were written since.

        The slice and the parameter each have their own marks for planes that they do not have.
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
        """Whether ``parameter`` still holds the value.

        That is so if it was not written since, or if quantizing the value gives the same numbers. After a broadcast it
        is not so on any rank, also not on the one that sent: ranks would start with different masters.
        """
        if self._value is None:
            return False
        if self._is_last_write(parameter):
            return True
        before = max((number for _, number in self._writes), default=0)
        if any(mark.received > before for mark, _ in _writes(parameter)):
            return False
        with torch.no_grad():
            # With a copy of the quantizer: that of the parameter may keep a history, which this must not change.
            again = copy.deepcopy(parameter.detach()).copy_(self._value.to(parameter.device))
            return torch.equal(again.dequantize(), parameter.detach().dequantize())


def _writes(parameter: Tensor) -> list[tuple[Any, int]]:
    """For each plane, the mark of its writes, which all aliases share, and the number of the last write."""
    if not isinstance(parameter, QuantizedTensor):
        return []
    return [(epoch, epoch.number) for epoch in parameter._write_marks()]


def keep_high_precision_init_val(parameter: Tensor, value: Tensor) -> None:
    """Preserve an initial value: adds ``get_high_precision_init_val()`` and ``clear_high_precision_init_val()``."""
    kept = InitValue(parameter, value)
    parameter.get_high_precision_init_val = kept.get  # type: ignore[attr-defined]
    parameter.clear_high_precision_init_val = kept.clear  # type: ignore[attr-defined]
    _note(parameter, kept)


def _note(parameter: Tensor, kept: InitValue) -> None:
    for mark, _ in _writes(parameter):
        mark.init_value = kept


def hand_on_init_value(source: QuantizedTensor, copy: QuantizedTensor) -> None:
    """Preserve the value also for a copy of all bytes, if ``source`` or the tensor that it is a slice of has one."""
    kept = _noted(source)
    value = None if kept is None or copy.get_usages() != source.get_usages() else kept.of_part(source)
    if value is not None:
        _note(copy, InitValue(copy, value))


def renew_preserved_values(parameters: Mapping[str, Any], loaded: Mapping[str, Any], prefix: str = "") -> None:
    """After loading a checkpoint, preserve the loaded numbers in high precision instead of the initial values."""
    for name, parameter in parameters.items():
        value, kept = loaded.get(prefix + name), _kept(parameter)
        if kept is None or kept.get() is None or not isinstance(value, Tensor) or isinstance(value, QuantizedTensor):
            continue
        if value.shape == parameter.shape:
            keep_high_precision_init_val(parameter, value)


def preserved_value(parameter: Any) -> Tensor | None:
    """The preserved initial value; None if there is none, or if ``parameter`` was changed since.

    For a sharded parameter it is the value of the part that this rank has.
    """
    own = local_part(parameter)
    noted = _noted(own)
    value = None if noted is None else noted.of_part(own)
    if value is not None:  # nothing has to be compared
        return value
    kept = _kept(own)
    return kept.get() if kept is not None and kept.is_of(own) else None


def _kept(parameter: Any) -> InitValue | None:
    kept = getattr(getattr(parameter, "get_high_precision_init_val", None), "__self__", None)
    return kept if isinstance(kept, InitValue) else None


def _noted(parameter: Tensor) -> InitValue | None:
    return next((mark.init_value for mark, _ in _writes(parameter)), None)


def clear_preserved_value(parameter: Tensor) -> None:
    """Free the preserved initial value, if there is one."""
    own = local_part(parameter)
    for kept in (getattr(own, "clear_high_precision_init_val", None), getattr(_noted(own), "clear", None)):
        if kept is not None:
            kept()
