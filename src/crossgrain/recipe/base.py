"""What every recipe is: what a user asks for, before any module exists."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

BackwardOverride = Literal["high_precision", "dequantized"] | None


def backward_override_from_environment() -> BackwardOverride:
    """The default of ``backward_override``, read when a recipe is made."""
    return os.environ.get("NVTE_BACKWARD_OVERRIDE") or None  # type: ignore[return-value]


def flag_from_environment(name: str) -> bool:
    """Whether an environment variable is "1" now."""
    return os.environ.get(name, "0") == "1"


def require(condition: bool, message: str) -> None:
    """Refuse a recipe. Not an ``assert`` statement: ``python -O`` must not accept what cannot run."""
    if not condition:
        raise AssertionError(message)


class Recipe:
    """Base of all recipes.

    ``backward_override``  "high_precision": backward GEMMs use the unquantized operands;
                           "dequantized": they use what the saved operands decode to
    ``allow_mixed``        both operands of a GEMM may be of different scaling families, and are decoded
    """

    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None
    allow_mixed: ClassVar[bool] = False

    _kind: ClassVar[str] = ""

    # How often an option was set: a module that has seen this number need not compare all options again.
    changes: ClassVar[int] = 0

    @classmethod
    def delayed(cls) -> bool:
        return cls._kind == "delayed"

    @classmethod
    def float8_current_scaling(cls) -> bool:
        return cls._kind == "float8_current_scaling"

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        return cls.delayed() or cls.float8_current_scaling()

    @classmethod
    def float8_block_scaling(cls) -> bool:
        return cls._kind == "float8_block_scaling"

    @classmethod
    def mxfp8(cls) -> bool:
        return cls._kind == "mxfp8"

    @classmethod
    def nvfp4(cls) -> bool:
        return cls._kind == "nvfp4"

    @classmethod
    def custom(cls) -> bool:
        """Whether quantizers come from a ``qfactory(role)``."""
        return cls._kind == "custom"

    def may_keep_histories(self) -> bool:
        """Whether a tensor may be scaled by what earlier steps have seen."""
        return self.delayed() or self.custom()

    def options(self) -> dict[str, Any]:
        """Everything that can be set, by name: what makes two recipes of a class the same."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_") and name != "changes"}

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        self.__dict__["changes"] = self.changes + 1
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

    def __post_init__(self) -> None:
        require(
            self.backward_override in (None, "high_precision", "dequantized"),
            "backward_override (NVTE_BACKWARD_OVERRIDE) is None, 'high_precision' or 'dequantized', not "
            f"{self.backward_override!r}",
        )
