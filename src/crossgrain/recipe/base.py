"""`Recipe`: the base class of all recipes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from ..quantizers.nonfinite import Policy, check_policy

BackwardOverride = Literal["high_precision", "dequantized"] | None


def backward_override_from_environment() -> BackwardOverride:
    """The default of ``backward_override``: NVTE_BACKWARD_OVERRIDE at the time when the recipe is created."""
    return os.environ.get("NVTE_BACKWARD_OVERRIDE") or None  # type: ignore[return-value]


def flag_from_environment(name: str) -> bool:
    """Whether an environment variable has the value "1" now."""
    return os.environ.get(name, "0") == "1"


def require(condition: bool, message: str) -> None:
    """Raise AssertionError if a condition does not hold.

    Not an ``assert`` statement: ``python -O`` would remove it and accept recipes that cannot run.
    """
    if not condition:
        raise AssertionError(message)


class Recipe:
    """Base class of all recipes.

    Attributes:
        fp8_dpa: quantize the operands of the GEMMs of the attention core.
        fp8_mha: also quantize the output of the attention core, and the gradients of Q, K and V.
        backward_override: None, or how backward GEMMs run in high precision: "high_precision" uses the operands as
            they were before quantization, "dequantized" uses the decoded quantized operands.
        allow_mixed: allow the two operands of a GEMM to have scales of different kinds. Such operands are decoded
            before they are multiplied.
        nonfinite: what layers do about NaNs and infinities: "propagate", "raise" or "saturate" (see
            `quantizers.nonfinite`). None for what `settings` say.

    Examples:
        >>> isinstance(cg.recipe.MXFP8BlockScaling(), cg.recipe.Recipe), cg.recipe.MXFP8BlockScaling().mxfp8()
        (True, True)
    """

    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None
    nonfinite: Policy | None = None
    allow_mixed: ClassVar[bool] = False
    immutable: ClassVar[bool] = False  # whether options can never change, so that nobody has to compare them

    _kind: ClassVar[str] = ""

    @classmethod
    def delayed(cls) -> bool:
        """Whether this is FP8 with delayed scaling."""
        return cls._kind == "delayed"

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Whether this is FP8 with current scaling."""
        return cls._kind == "float8_current_scaling"

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Whether this is FP8 with one scale per tensor, delayed or current."""
        return cls.delayed() or cls.float8_current_scaling()

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Whether this is FP8 with scales of blocks."""
        return cls._kind == "float8_block_scaling"

    @classmethod
    def mxfp8(cls) -> bool:
        """Whether this is MXFP8."""
        return cls._kind == "mxfp8"

    @classmethod
    def nvfp4(cls) -> bool:
        """Whether this is NVFP4."""
        return cls._kind == "nvfp4"

    @classmethod
    def custom(cls) -> bool:
        """Whether a function ``qfactory(role)`` makes the quantizers."""
        return cls._kind == "custom"

    def nonfinite_of(self, name: str, module_type: str) -> Policy | None:
        """The policy about NaNs and infinities of a layer; None for what `settings` say."""
        return self.nonfinite

    def for_attention(self) -> Recipe:
        """The recipe of attention cores: this one, or what `set_attention` has set."""
        own: Recipe | None = self.__dict__.get("_attention")
        return self if own is None else own

    def set_attention(self, recipe: Recipe) -> None:
        """Give attention cores another recipe. It takes no part in comparisons: no other layer sees it."""
        self._attention = recipe

    def may_keep_histories(self) -> bool:
        """Whether a scale may depend on amaxes of earlier steps."""
        return self.delayed() or self.custom()

    def options(self) -> dict[str, Any]:
        """All options by name. Two recipes of a class with equal options are the same."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name != "_cached_repr":
            self.__dict__.pop("_cached_repr", None)

    def __repr__(self) -> str:
        cached = self.__dict__.get("_cached_repr")
        if cached is None:
            options = ", ".join(f"{name}={value!r}" for name, value in self.options().items())
            cached = self.__dict__["_cached_repr"] = f"{type(self).__name__}({options})"
        return cached


@dataclass(repr=False, kw_only=True)
class RecipeFields(Recipe):
    """The fields that all recipe classes have."""

    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = field(default_factory=backward_override_from_environment)
    nonfinite: Policy | None = None

    def __post_init__(self) -> None:
        check_policy(self.nonfinite, "nonfinite")
        require(
            self.backward_override in (None, "high_precision", "dequantized"),
            "backward_override (or NVTE_BACKWARD_OVERRIDE) must be None, 'high_precision' or 'dequantized', got "
            f"{self.backward_override!r}",
        )
