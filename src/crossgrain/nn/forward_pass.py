"""What is determined once at the start of a module's forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch

from ..recipe import Recipe
from .module_interface import Built


class ForwardPass(NamedTuple):
    """The settings of one forward pass; a recomputation in backward uses the same.

    Attributes:
        recipe: the recipe; None for high precision.
        built: quantizers of the recipe.
        calibrates: tensors are only measured, not quantized.
        dtype: dtype of activations.
        is_first_microbatch: see `Linear.forward`.
        step: the context around all that forward quantizes.
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
    """A forward pass in a graph of `torch.compile`. ``number`` refers to the module; None for high precision."""

    number: int | None
    dtype: torch.dtype
    step: AbstractContextManager[None] = nullcontext()
