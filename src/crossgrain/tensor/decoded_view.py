"""`DecodedView`: a view of a quantized tensor whose bytes cannot be viewed. It is decoded and read-only.

``w[3]`` and ``w.t()`` return a decoded copy. A write to that copy would not change the tensor, so it raises. All other
operations treat it as a plain tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class DecodedView(Tensor):
    """A decoded copy that cannot be written to. Results of operations on it are plain tensors."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], cls) and _writes_first_argument(func):
            raise RuntimeError(
                f"{func.__name__} on a decoded view of a quantized tensor would be lost, because the view is a copy. "
                "Write to the tensor itself (w[index] = value, w.copy_(...)), or clone() the view to get a plain "
                "tensor."
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        return _plain(result)


def _writes_first_argument(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _plain(result: Any) -> Any:
    if isinstance(result, (tuple, list)):
        return type(result)(_plain(value) for value in result) if type(result) in (tuple, list) else result
    return result.as_subclass(Tensor) if isinstance(result, DecodedView) else result
