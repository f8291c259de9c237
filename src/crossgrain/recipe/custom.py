"""`CustomRecipe`: a function of the user makes the quantizer for each tensor."""

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
"""A function of the role. The role is None for an output of a module, if it is not known which module reads it."""

Factory = TypeVar("Factory", bound=Callable[..., Any])


def quantizer_factory(*, key: tuple[str, int]) -> Callable[[Factory], Factory]:
    """Decorator that gives a factory a name and a version: ``@quantizer_factory(key=("my_factory", 1))``.

    Args:
        key: name and version; must be hashable.

    Examples:
        >>> @cg.recipe.quantizer_factory(key=("all_mxfp8", 1))
        ... def factory(role):
        ...     return cg.quantizer_for("mxfp8")
        >>> recipe = cg.recipe.CustomRecipe(factory)
    """
    hash(key)  # raise here if it is not hashable, and not later in a lookup

    def named(factory: Factory) -> Factory:
        factory.qfactory_key = key  # type: ignore[attr-defined]
        return factory

    return named


@dataclass(repr=False)
class CustomRecipe(RecipeFields):
    """A recipe whose quantizers come from a function.

    ``qfactory(role)`` is called once for every tensor that a module quantizes, each time the module builds its
    quantizers. The recipe can be pickled if the function is defined at the top of a module.

    Args:
        qfactory: takes a `QuantizerRole` or None, and returns a quantizer or a request for one
            (`DelayedScalingRequest`). For a tensor that stays in high precision it returns an `IdentityQuantizer`.
        fp8_format: FP8 type of tensors in forward and in backward, for programs that ask the recipe.
        quantization_alignment: `Fp8Padding` pads the rows of groups to a multiple of this.
        qfactory_key: name and version of the factory, by default that of `quantizer_factory`. It does not take part in
            comparisons: recipes with different functions are different.
        fp8_dpa: quantize the operands of the GEMMs of the attention core.
        fp8_mha: also quantize the output of the attention core, and the gradients of Q, K and V.
        backward_override: see `Recipe`.

    Raises:
        TypeError: ``qfactory`` cannot be called.
        ValueError: ``quantization_alignment`` is not positive.

    Examples:
        >>> def factory(role):
        ...     weight = role is not None and role.tensor_type == "weight"
        ...     return cg.quantizer_for("mxfp8" if weight else "mxfp8(e5m2)")
        >>> layer = cg.Linear(32, 32)
        >>> with cg.autocast(recipe=cg.recipe.CustomRecipe(factory)):
        ...     y = layer(torch.randn(32, 32))
    """

    qfactory: QuantizerFactory
    fp8_format: FP8Format = FP8Format.HYBRID
    quantization_alignment: int = 128
    qfactory_key: tuple[str, int] | None = field(default=None, compare=False)

    _kind: ClassVar[str] = "custom"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.qfactory):
            raise TypeError(f"qfactory must be a function of a role, got {self.qfactory!r}")
        if self.quantization_alignment <= 0:
            raise ValueError(f"quantization_alignment must be positive, got {self.quantization_alignment}")
        if self.qfactory_key is None:
            self.qfactory_key = getattr(self.qfactory, "qfactory_key", None)

    def options(self) -> dict[str, Any]:
        return {name: value for name, value in super().options().items() if name != "qfactory_key"}
