"""Keep the attributes of quantized parameters while torch converts them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..tensor import QuantizedTensor


@contextmanager
def kept_attributes(module: nn.Module) -> Iterator[None]:
    """Context manager around ``module.to()``, ``module.bfloat16()`` and similar calls.

    For tensor subclasses, torch replaces the contents of a parameter by those of a new one, which has none of the
    attributes that were set on it: marks of sequence and tensor parallelism, preserved initial values, ``main_grad``.
    This restores them.
    """
    parameters: list[Any] = [p for p in module._parameters.values() if isinstance(p, QuantizedTensor)]
    said = [{name: vars(p)[name] for name in vars(p).keys() - vars(p.detach()).keys()} for p in parameters]
    yield
    for parameter, attributes in zip(parameters, said, strict=True):
        for name, value in attributes.items():
            if name not in vars(parameter):
                setattr(parameter, name, value)
