"""Quantizers chosen by a function of the tensor's role."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from ..quantizers.base import Quantizer
from ..quantizers.request import QuantizerRequest
from .base import RecipeFields
from .params import FP8Format
from .roles import QuantizerRole

QuantizerFactory = Callable[[QuantizerRole | None], Quantizer | QuantizerRequest]
"""None is the role of a tensor at a module's boundary whose consumer is unknown."""

Factory = TypeVar("Factory", bound=Callable[..., Any])


def quantizer_factory(*, key: tuple[str, int]) -> Callable[[Factory], Factory]:
    """Names what a factory does, and in which version: ``@quantizer_factory(key=("my_factory", 1))``."""
    hash(key)  # something else fails here, and not where it is looked up

    def named(factory: Factory) -> Factory:
        factory.qfactory_key = key  # type: ignore[attr-defined]
        return factory

    return named


@dataclass(repr=False)
class CustomRecipe(RecipeFields):
    """``qfactory(role)`` is called once per slot each time a module builds its quantizers.

    Return an `IdentityQuantizer` for a slot that stays as it is, never None. A recipe can be pickled if
    its factory is a function at module level. ``quantization_alignment`` is what padding rounds up to.
    ``qfactory_key`` names the factory to whoever asks, by default as `quantizer_factory` did; recipes with different
    functions are different, whatever their keys.
    """

    qfactory: QuantizerFactory
    fp8_format: FP8Format = FP8Format.HYBRID
    quantization_alignment: int = 128
    qfactory_key: tuple[str, int] | None = field(default=None, compare=False)

    _kind: ClassVar[str] = "custom"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.qfactory):
            raise TypeError(f"qfactory is a function of a role, not {self.qfactory!r}")
        if self.quantization_alignment <= 0:
            raise ValueError(f"quantization_alignment must be positive, not {self.quantization_alignment}")
        if self.qfactory_key is None:
            self.qfactory_key = getattr(self.qfactory, "qfactory_key", None)

    def options(self) -> dict[str, Any]:
        return {name: value for name, value in super().options().items() if name != "qfactory_key"}
