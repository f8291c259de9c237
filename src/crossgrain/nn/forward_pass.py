"""What is settled at the start of a module's forward."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..recipe import Recipe
from .base import Built


class ForwardPass(NamedTuple):
    """Also for a recomputation in backward.

    ``calibrates``  statistics are taken, nothing is quantized
    ``dtype``       of activations
    """

    recipe: Recipe | None
    built: Built
    calibrates: bool
    dtype: torch.dtype
    is_first_microbatch: bool | None


class TracedPass(NamedTuple):
    """In a graph of `torch.compile`. ``number`` stands for the module and its recipe; None: high precision."""

    number: int | None
    dtype: torch.dtype
