"""What others have said about a quantized parameter, kept while torch converts it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..tensor import QuantizedTensor


@contextmanager
def kept_attributes(module: nn.Module) -> Iterator[None]:
    """While ``module.to()``, ``bfloat16()`` and the like are at work on its own parameters.

    torch exchanges a parameter of a tensor subclass with a new one, which has none of the attributes that were set on
    it: marks of sequence and tensor parallelism, preserved initial values, places for gradients.
    """
    parameters: list[Any] = [p for p in module._parameters.values() if isinstance(p, QuantizedTensor)]
    said = [{name: vars(p)[name] for name in vars(p).keys() - vars(p.detach()).keys()} for p in parameters]
    yield
    for parameter, attributes in zip(parameters, said, strict=True):
        for name, value in attributes.items():
            if name not in vars(parameter):
                setattr(parameter, name, value)
