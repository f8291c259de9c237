"""How to choose the bytes of a plane: the choices that leave no trace in the format itself.

Two encodings of the same format differ in the bytes they produce, never in how the bytes are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from . import Format


@dataclass(frozen=True)
class Encoding:
    """``format`` plus the rules for choosing scales and codes.

    ``stochastic``      round at random, in proportion (unbiased), instead of to nearest even
    ``power_of_two``    fp32 scales are rounded down to powers of two
    ``epsilon``         fp32 scales: amaxes below this count as this
    ``four_over_six``   NVFP4: try the block scale for a maximum of 6 and of 4, keep the one whose
                        error measure ("MAE" or "MSE") is smaller
    """

    format: Format
    stochastic: bool = False
    power_of_two: bool = False
    epsilon: float = 0.0
    four_over_six: Literal["MAE", "MSE"] | None = None

    @cached_property
    def needs_amax(self) -> bool:
        """Whether the bytes depend on the largest magnitude of the whole input."""
        fmt = self.format
        return fmt.global_amax is not None or (fmt.block is None and not fmt.is_identity)

    def __post_init__(self) -> None:
        if (self.power_of_two or self.epsilon) and self.format.scale_rule != "fp32":
            raise ValueError(f"power_of_two and epsilon are options of fp32 scales; {self.format.name} has none")
        if self.four_over_six is None:
            return
        if self.four_over_six not in ("MAE", "MSE"):
            raise ValueError(f"four_over_six measures the error as 'MAE' or 'MSE', not {self.four_over_six!r}")
        if self.format.scale_rule != "two_level":
            raise ValueError(f"4-over-6 chooses between two-level scales; {self.format.name} has none")
        if self.stochastic or self.format.rotation is not None:
            raise ValueError("4-over-6 compares nearest roundings of unrotated blocks: no SR, no RHT")


@lru_cache(maxsize=256)
def cached_encoding(
    format: Format,
    *,
    stochastic: bool = False,
    power_of_two: bool = False,
    epsilon: float = 0.0,
    four_over_six: Literal["MAE", "MSE"] | None = None,
) -> Encoding:
    """The `Encoding` of these options; quantizers ask for the same few over and over."""
    return Encoding(format, stochastic, power_of_two, epsilon, four_over_six)
