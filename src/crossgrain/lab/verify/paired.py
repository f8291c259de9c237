"""Statistics of paired runs: the gap with its interval, tests against a tolerance, and whether the gap grows.

Two runs are a pair if they have the same seed: the same start and the same data. What is tested is the difference of a
pair, and seeds are what is counted. Steps of one run are not independent of each other: they are averaged, not counted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..intervals import Estimate, estimate, p_above, p_below, p_different
from ..student import t_quantile

NOT_ABOVE = "not above the tolerance"
ABOVE = "above the tolerance"
NOT_RESOLVED = "not resolved"
DIVERGED = "diverged"

ALPHA = 0.05  # of every test
_POWER = 0.8  # with which the number of seeds that is proposed would resolve the gap
_MOST_SEEDS = 1000
_SETTLING = 0.25  # share of the steps, at the begin, in which a gap may rise to its level without growing later

Differences = Mapping[int, Sequence[float]]  # by seed, point by point


@dataclass(frozen=True)
class Paired:
    """What paired runs show about the difference of two recipes.

    Attributes:
        by_seed: the gap of each seed: the mean of its last differences.
        gap: mean over seeds, with the interval of Student's t.
        p_value: of the two-sided t-test that there is no gap. 1 with a single seed, or if all gaps are exactly 0.
        growth: slope of the differences, per step, without the first quarter of the steps; None with too few points.
        tolerance: the largest gap that would be accepted, or None.
        p_not_above: of the one-sided test that the gap is at least the tolerance; small says that it is not.
        p_above: of the one-sided test that the gap is at most the tolerance; small says that it is above.
        p_not_below: of the one-sided test that the gap is at most minus the tolerance.
        verdict: `NOT_ABOVE`, `ABOVE` or `NOT_RESOLVED`; None without a tolerance.
        seeds_to_resolve: if not resolved, how many seeds would probably (80 %) do it, if mean and spread stay as they
            are; None if it is resolved, if one seed shows no spread, or if it would take more than 1000.
    """

    by_seed: dict[int, float]
    gap: Estimate
    p_value: float
    growth: Estimate | None
    tolerance: float | None = None
    p_not_above: float = math.nan
    p_above: float = math.nan
    p_not_below: float = math.nan
    verdict: str | None = None
    seeds_to_resolve: int | None = None

    @property
    def significant(self) -> bool:
        """Whether the gap differs from 0 at a level of 5 %."""
        return self.p_value < ALPHA

    @property
    def equivalent(self) -> bool:
        """Whether both one-sided tests say that the gap lies between minus and plus the tolerance."""
        return self.p_not_above < ALPHA and self.p_not_below < ALPHA

    @property
    def grows(self) -> bool:
        """Whether the whole interval of the slope is above 0."""
        return self.growth is not None and self.growth.low > 0


def paired(
    differences: Differences, *, last: int, positions: Sequence[int] | None = None, tolerance: float | None = None
) -> Paired:
    """Test the differences of paired runs.

    Args:
        differences: for each seed, the loss of one recipe minus that of the other, point by point.
        last: how many points, from the end, the gap is the mean of.
        positions: steps at which the points lie; 1, 2, 3, ... by default.
        tolerance: the largest gap that would be accepted.

    Raises:
        ValueError: there are no seeds, or their points differ in number.
    """
    lengths = {len(points) for points in differences.values()}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError("paired runs need at least one seed, and the same number of points, at least one, for each")
    by_seed = {seed: statistics.fmean(points[-last:]) for seed, points in differences.items()}
    gaps = list(by_seed.values())
    common = {
        "by_seed": by_seed,
        "gap": estimate(gaps),
        "p_value": p_different(gaps),
        "growth": _growth(differences, positions or range(1, lengths.pop() + 1)),
    }
    if tolerance is None:
        return Paired(**common)  # type: ignore[arg-type]
    p_not, p = p_below(gaps, tolerance), p_above(gaps, tolerance)
    verdict = NOT_ABOVE if p_not < ALPHA else ABOVE if p < ALPHA else NOT_RESOLVED
    return Paired(
        **common,  # type: ignore[arg-type]
        tolerance=tolerance,
        p_not_above=p_not,
        p_above=p,
        p_not_below=p_above(gaps, -tolerance),
        verdict=verdict,
        seeds_to_resolve=_seeds_to_resolve(gaps, tolerance) if verdict == NOT_RESOLVED else None,
    )


def by_step(differences: Differences, smooth: int = 1) -> list[Estimate]:
    """The mean difference at each point, with its interval over seeds.

    Args:
        differences: for each seed, the differences point by point.
        smooth: each point is the mean of this many neighbours, fewer at both ends. Smoothing is done within each seed,
            so that intervals are those of the smoothed points.
    """
    smoothed = [_smoothed(points, smooth) for points in differences.values()]
    return [estimate(values) for values in zip(*smoothed, strict=True)]


def _smoothed(points: Sequence[float], width: int) -> list[float]:
    before, after = (width - 1) // 2, width // 2
    return [statistics.fmean(points[max(0, i - before) : i + after + 1]) for i in range(len(points))]


def _growth(differences: Differences, positions: Sequence[int]) -> Estimate | None:
    first = math.floor(_SETTLING * len(positions))
    if len(positions) - first < 2:
        return None
    kept = positions[first:]
    return estimate([statistics.linear_regression(kept, points[first:]).slope for points in differences.values()])


def _seeds_to_resolve(gaps: Sequence[float], tolerance: float) -> int | None:
    distance = abs(statistics.fmean(gaps) - tolerance)
    if len(gaps) < 2 or distance == 0:
        return None
    spread = statistics.stdev(gaps)
    normal = statistics.NormalDist()
    fewest = ((normal.inv_cdf(1 - ALPHA) + normal.inv_cdf(_POWER)) * spread / distance) ** 2  # Student's t needs more
    for count in range(max(len(gaps) + 1, math.ceil(min(fewest, _MOST_SEEDS))), _MOST_SEEDS):
        needed = t_quantile(1 - ALPHA, count - 1) + t_quantile(_POWER, count - 1)
        if needed * spread / math.sqrt(count) <= distance:
            return count
    return None
