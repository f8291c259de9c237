"""Quantizers chosen by a function of the tensor's role."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from ..quantizer import Quantizer
from ..request import QuantizerRequest
from .base import RecipeFields
from .params import Format
from .roles import QuantizerRole

QuantizerFactory = Callable[[QuantizerRole | None], Quantizer | QuantizerRequest]
"""None is the role of a tensor at a module's boundary whose consumer is unknown."""


@dataclass(repr=False)
class CustomRecipe(RecipeFields):
    """``qfactory(role)`` is called once per slot each time a module builds its quantizers.

    Return an `IdentityQuantizer` for a slot that stays as it is, never None. A recipe can be pickled if
    its factory is a function at module level. ``quantization_alignment`` is what padding rounds up to.
    """

    qfactory: QuantizerFactory
    fp8_format: Format = Format.HYBRID
    quantization_alignment: int = 128

    _kind: ClassVar[str] = "custom"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.qfactory):
            raise TypeError(f"qfactory is a function of a role, not {self.qfactory!r}")
        if self.quantization_alignment <= 0:
            raise ValueError(f"quantization_alignment is greater than 0, not {self.quantization_alignment}")
