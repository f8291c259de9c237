"""What is settled at the start of a module's forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch

from ..recipe import Recipe
from .base import Built


class ForwardPass(NamedTuple):
    """Also for a recomputation in backward.

    ``calibrates``  statistics are taken, nothing is quantized
    ``dtype``       of activations
    ``step``        around all that forward quantizes
    """

    recipe: Recipe | None
    built: Built
    calibrates: bool
    dtype: torch.dtype
    is_first_microbatch: bool | None
    step: AbstractContextManager[None]


@contextmanager
def both(outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> Iterator[None]:
    """Two contexts as one."""
    with outer, inner:
        yield


class TracedPass(NamedTuple):
    """In a graph of `torch.compile`. ``number`` stands for the module and its recipe; None: high precision."""

    number: int | None
    dtype: torch.dtype
    step: AbstractContextManager[None] = nullcontext()
