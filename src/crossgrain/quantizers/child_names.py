"""The buffers of a hybrid's children, under the names that they have in tensors of one format."""

from __future__ import annotations

from typing import Any

import torch

from ..planes import COLUMNWISE, ROWWISE, Direction
from ..tensor.holder import copied_epochs

_CODES = ("_data", "_rowwise_data", "_transpose", "_columnwise_data")


class _OfChild:
    """An attribute that is read from the child of one direction. A hybrid has it if that child has it."""

    def __init__(self, direction: Direction) -> None:
        self._direction = direction

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, tensor: Any, owner: type | None = None) -> Any:
        return self if tensor is None else getattr(self._child(tensor), self._name)

    def __set__(self, tensor: Any, value: Any) -> None:
        child = self._child(tensor)
        if not hasattr(child, self._name):
            raise AttributeError(f"the {self._direction.value} {type(child).__name__} has no {self._name}")
        written = self._name in _CODES and value is not None and not _same(value, getattr(child, self._name))
        setattr(child, self._name, value)
        if written:
            self._note_write(tensor, child)

    def _note_write(self, tensor: Any, child: Any) -> None:
        """Record a write of one child: the other child becomes stale, or this one is no longer behind it."""
        children, behind = tensor._children(), tensor._is_stale(self._direction)
        number = children[self._direction.other]._last_write() if behind else None
        child._epochs = copied_epochs(child._epochs)  # in new memory
        child._mark_written(number)

    def _child(self, tensor: Any) -> Any:
        child = tensor._children().get(self._direction)
        if child is None:
            raise AttributeError(
                f"this {type(tensor).__name__} has no {self._direction.value} plane, and therefore no {self._name}"
            )
        return child


def _same(new: Any, old: Any) -> bool:
    """Whether a buffer holds the same bytes, as when it was only moved into a larger one."""
    if old is None or new.shape != old.shape:
        return False
    freed = any(each.numel() and not each.untyped_storage().nbytes() for each in (new, old))  # by a sharding wrapper
    return not freed and torch.equal(new, old)


class ChildNames:
    """Base class with the attributes of tensors of one format: rowwise names refer to the rowwise child, and so on.

    ``_data`` and ``_scale_inv``, which per-tensor FP8 has for both directions, are those of the rowwise child. Setting
    codes counts as a write of that direction alone, unless they are the same bytes.
    """

    _data = _OfChild(ROWWISE)
    _scale_inv = _OfChild(ROWWISE)
    _rowwise_data = _OfChild(ROWWISE)
    _rowwise_scale_inv = _OfChild(ROWWISE)
    _amax_rowwise = _OfChild(ROWWISE)
    _fp8_dtype = _OfChild(ROWWISE)
    _fp4_dtype = _OfChild(ROWWISE)

    _transpose = _OfChild(COLUMNWISE)
    _transpose_invalid = _OfChild(COLUMNWISE)
    _create_transpose = _OfChild(COLUMNWISE)
    _columnwise_data = _OfChild(COLUMNWISE)
    _columnwise_scale_inv = _OfChild(COLUMNWISE)
    _amax_columnwise = _OfChild(COLUMNWISE)
    _create_columnwise = _OfChild(COLUMNWISE)
