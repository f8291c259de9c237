"""What a view of a quantized tensor is when its bytes cannot be viewed: decoded, and read-only.

``w[3]`` or ``w.t()`` decode a copy. Writing to that copy would be lost without a word, so it refuses;
everything else treats it as the plain tensor that it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class DecodedView(Tensor):
    """A decoded copy that does not take writes. Results of operations on it are plain tensors."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], cls) and _writes_first_argument(func):
            raise RuntimeError(
                f"{func.__name__} on a decoded view of a quantized tensor would be lost: the view is a copy. Write to "
                "the tensor itself (w[index] = value, w.copy_(...)), or clone() the view to have a plain tensor."
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
