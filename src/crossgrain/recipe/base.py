"""What every recipe is: what a user asks for, before any module exists."""

from __future__ import annotations

import os
from typing import Any, ClassVar, Literal

BackwardOverride = Literal["high_precision", "dequantized"] | None


def backward_override_from_environment() -> BackwardOverride:
    """The default of ``backward_override``, read when a recipe is made."""
    return os.environ.get("NVTE_BACKWARD_OVERRIDE") or None  # type: ignore[return-value]


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

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name != "_cached_repr":
            self.__dict__.pop("_cached_repr", None)
