"""`DecodedView`: a piece of a quantized tensor whose bytes cannot be viewed. It is decoded and read-only.

``w[3]``, ``w[::2]``, ``w.t()`` and pieces that cut through blocks return a decoded copy. A write to that copy would not
change the tensor, so it raises; views of it are read-only as well. All other operations treat it as a plain tensor.
Code that takes the memory itself (``untyped_storage()``, ``data_ptr()``) gets that of the copy, and cannot be watched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


class DecodedView(Tensor):
    """A decoded copy that cannot be written to. Results of operations on it are plain tensors."""

    _why: str = ""  # why the bytes cannot be viewed

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        for view in _written(func, args, kwargs):
            raise RuntimeError(_lost(func.__name__ if func != _SET_DATA else "an assignment to data", view))
        if func == Tensor.__dlpack__ and not kwargs.get("copy"):  # memory that others may write to
            raise BufferError(_lost("a write to memory that is shared by DLPack", args[0]))
        with torch._C.DisableTorchFunctionSubclass():
            views = [value for value in tree_leaves((args, kwargs)) if isinstance(value, cls)]
            versions = [_version(view) for view in views]
            result = func(*args, **kwargs)
            for view, version in zip(views, versions, strict=True):
                if _version(view) != version:  # a write that the name does not tell: relu(view, inplace=True)
                    raise RuntimeError(_lost(func.__name__, view))
            if func in (Tensor.numpy, Tensor.__array__):
                result.flags.writeable = False
            return tree_map(lambda value: _told_apart(value, views), result)

    def set_(self, *args: Any, **kwargs: Any) -> Self:  # torch does not ask `__torch_function__` about it
        """Raise RuntimeError: other memory would not be that of the tensor."""
        raise RuntimeError(_lost("set_", self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle it as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)


def decoded_view(value: Any, why: str) -> Any:
    """``value`` as a `DecodedView`, if it is a tensor."""
    if not isinstance(value, Tensor):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        view = value.as_subclass(DecodedView)
    view._why = why
    return view


def _lost(name: str, view: DecodedView) -> str:
    return (
        f"{name} on a decoded view of a quantized tensor would be lost, because the view is a copy"
        f"{': ' + view._why if view._why else ''}. Write to the tensor itself (w[index] = value, w.copy_(...)), or "
        "clone() the view to get a plain tensor."
    )


def _version(view: Tensor) -> int:
    return 0 if view.is_inference() else view._version


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[DecodedView]:
    """The decoded views that ``func`` writes to: its first argument, tensors of a list that is, or ``out``."""
    name = getattr(func, "__name__", "")
    writes = name == "__setitem__" or func == _SET_DATA or (name.endswith("_") and not name.endswith("__"))
    first = args[:1] if writes else ()
    for value in tree_leaves((list(first), kwargs.get("out"))):
        if isinstance(value, DecodedView):
            yield value


def _told_apart(value: Any, views: Sequence[DecodedView]) -> Any:
    """A result as a decoded view if it has the memory of one, otherwise as a plain tensor."""
    if not isinstance(value, Tensor):
        return value
    for view in views:
        if value is view:
            return value
        if value.layout == view.layout == torch.strided and _same_memory(value, view):
            return decoded_view(value, view._why)
    return value.as_subclass(Tensor) if isinstance(value, DecodedView) else value


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.device == b.device and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0
