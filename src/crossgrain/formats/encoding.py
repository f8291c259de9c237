"""`Encoding`: how the bytes of a plane are chosen: a format, and options that a reader does not need to know.

Two encodings of the same format may give different bytes, but the bytes are read in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, get_args

from . import Format

RandomSource = Literal["hash", "philox"]


@dataclass(frozen=True)
class Encoding:
    """A format, and options for choosing scales and codes.

    Args:
        format: the format.
        stochastic: round stochastically, without bias, instead of to the nearest number.
        power_of_two: for fp32 scales: round them down to powers of two.
        epsilon: for fp32 scales: smallest amax that is used to compute a scale.
        four_over_six: for NVFP4: try two scales for each block, which map its largest number to 6 and to 4, and use the
            one with the smaller error: mean absolute error ("MAE") or mean squared error ("MSE"). None for 6 only.
        random: where the random bits of stochastic rounding come from: a fast "hash" of seed and position, or "philox",
            the generator of GPUs, counted as Transformer Engine counts.

    Raises:
        ValueError: an option does not fit the format, or excludes another.

    Examples:
        >>> encoding = cg.Encoding(cg.get_format("mxfp4"), stochastic=True)
        >>> encoding.format.name, encoding.stochastic
        ('mxfp4', True)
    """

    format: Format
    stochastic: bool = False
    power_of_two: bool = False
    epsilon: float = 0.0
    four_over_six: Literal["MAE", "MSE"] | None = None
    random: RandomSource = "hash"

    @cached_property
    def needs_amax(self) -> bool:
        """Whether the bytes depend on the amax of the whole input."""
        fmt = self.format
        return fmt.global_amax is not None or (fmt.block is None and not fmt.is_identity)

    def __post_init__(self) -> None:
        if (self.power_of_two or self.epsilon) and self.format.scale_rule != "fp32":
            raise ValueError(
                f"power_of_two and epsilon are options of fp32 scales, which {self.format.name} does not have"
            )
        check_random_source(self.random, self.stochastic)
        if self.four_over_six is None:
            return
        if self.four_over_six not in ("MAE", "MSE"):
            raise ValueError(f"four_over_six must be 'MAE' or 'MSE', got {self.four_over_six!r}")
        if self.format.scale_rule != "two_level":
            raise ValueError(f"4-over-6 needs two-level scales, which {self.format.name} does not have")
        if self.stochastic or self.format.rotation is not None:
            raise ValueError("4-over-6 cannot be combined with stochastic rounding or a Hadamard rotation")


def check_random_source(source: RandomSource, stochastic: bool) -> None:
    """Raise ValueError if there is no such source of random bits, or if it is chosen without stochastic rounding."""
    if source not in get_args(RandomSource):
        raise ValueError(f"the random source must be 'hash' or 'philox', got {source!r}")
    if source != "hash" and not stochastic:
        raise ValueError(f"the random source {source!r} is an option of stochastic rounding, which is off: turn it on")


@lru_cache(maxsize=256)
def cached_encoding(
    format: Format,
    *,
    stochastic: bool = False,
    power_of_two: bool = False,
    epsilon: float = 0.0,
    four_over_six: Literal["MAE", "MSE"] | None = None,
    random: RandomSource = "hash",
) -> Encoding:
    """An `Encoding` with these options, from a cache: quantizers need the same few many times."""
    return Encoding(format, stochastic, power_of_two, epsilon, four_over_six, random)
