"""The buffers of a hybrid's children under the names that tensors of one format have for them."""

from __future__ import annotations

from typing import Any

from ..plane import COLUMNWISE, ROWWISE, Direction


class _OfChild:
    """An attribute of the child of one direction; a hybrid has it if that child has it."""

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
        setattr(child, self._name, value)

    def _child(self, tensor: Any) -> Any:
        child = tensor._children().get(self._direction)
        if child is None:
            raise AttributeError(f"{type(tensor).__name__} has no {self._direction.value} data, so no {self._name}")
        return child


class ChildNames:
    """Rowwise names are those of the rowwise child, columnwise names of the columnwise one.

    ``_data`` and ``_scale_inv``, which per-tensor FP8 has for both directions, are of the rowwise child.
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
