"""What a format does at a site, as the search counts it: in nats, and as a rank for what is not priced in nats."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ...gemm.operands import GEMMS
from ...recipe.format_spec import FormatSpec
from ..intervals import Estimate
from ..sensitivity.result import Effect, Sensitivity

BACKWARD = ("dgrad", "wgrad")
NOTHING = Estimate(0.0, 0.0, 0.0, 0)

# Over n steps, the square of the sum of biases grows n times as fast as that of noise. So a squared bias counts as so
# many times a noise of its size when backward sites and formats are ordered. Nothing else depends on this number.
STEPS_OF_BIAS = 100


def is_measured(effect: Effect | None, gemm: str) -> bool:
    """Whether an effect has the finite numbers that a search needs."""
    if effect is None:
        return False
    needed = [effect.loss] if gemm == "fprop" else [effect.noise, effect.bias]
    return all(value is not None and math.isfinite(value.mean) for value in needed)


def nats(s: Sensitivity, effect: Effect, gemm: str) -> Estimate:
    """The effect in nats per token: the loss of fprop, and the noise of backward GEMMs that are calibrated."""
    if gemm == "fprop":
        return effect.loss or NOTHING
    if gemm not in s.calibration or effect.noise is None:
        return NOTHING
    factor, noise = s.calibration[gemm], effect.noise
    low, high = (0.0 if factor == 0 else factor * end for end in (noise.low, noise.high))
    return Estimate(factor * noise.mean, low, high, noise.count)


def rank(effect: Effect, gemm: str) -> float:
    """How bad a format is for the gradient, in shares of a batch's variance: noise, and bias many times."""
    if gemm == "fprop":
        return 0.0
    bias = 0.0 if effect.bias is None else max(0.0, effect.bias.mean)  # its estimate may be below 0
    return (0.0 if effect.noise is None else effect.noise.mean) + STEPS_OF_BIAS * bias


def added(estimates: Iterable[Estimate]) -> Estimate:
    """The sum of independent estimates: squares of their half widths are added."""
    found = list(estimates)
    mean = math.fsum(each.mean for each in found)
    half = math.sqrt(math.fsum(each.half_width**2 for each in found))
    return Estimate(mean, mean - half, mean + half, min((each.count for each in found if each.count), default=0))


def difference(first: Estimate, second: Estimate) -> Estimate:
    """The first estimate minus the second, as if they were independent."""
    return added([first, Estimate(-second.mean, -second.high, -second.low, second.count)])


def is_exact(specs: Iterable[FormatSpec]) -> bool:
    """Whether operands with these formats are not rounded."""
    return all(spec == FormatSpec("hp") for spec in specs)


def check_calibration(s: Sensitivity) -> None:
    """Raise ValueError if nats per unit of noise are not numbers of at least 0, or for another GEMM."""
    for gemm, factor in s.calibration.items():
        if gemm not in BACKWARD or not (factor >= 0 and math.isfinite(factor)):
            raise ValueError(
                f"the calibration of {gemm!r} must be nats per unit of noise for {' or '.join(BACKWARD)}, got {factor}"
            )


def gemms_without_price(s: Sensitivity) -> list[str]:
    """The backward GEMMs that are not calibrated."""
    return [gemm for gemm in GEMMS if gemm in BACKWARD and gemm not in s.calibration]
