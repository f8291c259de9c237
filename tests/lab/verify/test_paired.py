"""The statistics of paired runs: errors of the first kind are as rare as they say, and growth is what grows."""

import math
import random

import pytest

from crossgrain.lab.verify import ABOVE, NOT_ABOVE, NOT_RESOLVED, paired
from crossgrain.lab.verify.paired import by_step


def constant(*gaps, points=8):
    """Differences that do not change over steps."""
    return {seed: [gap] * points for seed, gap in enumerate(gaps)}


def simulated(rng, mean, spread=1.0, seeds=3):
    return {seed: [rng.gauss(mean, spread)] for seed in range(seeds)}


def test_the_gap_is_the_mean_of_the_last_points_by_seed():
    found = paired({0: [9, 1, 3], 1: [9, 3, 5]}, last=2)
    assert found.by_seed == {0: 2, 1: 4} and found.gap.mean == 3 and found.gap.count == 2


def test_steps_are_not_counted_as_if_they_were_seeds():
    few, many = (paired(constant(1.0, 2.0, points=points), last=points) for points in (2, 2000))
    assert few.gap == many.gap


def test_exactly_no_difference_is_not_significant_and_does_not_grow():
    found = paired(constant(0.0, 0.0, 0.0), last=4, tolerance=1e-9)
    assert (found.gap.mean, found.gap.low, found.gap.high, found.p_value) == (0, 0, 0, 1)
    assert not found.significant and not found.grows and found.verdict == NOT_ABOVE


@pytest.mark.parametrize(
    "gaps, verdict", [((0.1, 0.2, 0.15), NOT_ABOVE), ((2.0, 2.1, 2.2), ABOVE), ((0.0, 1.0, 2.0), NOT_RESOLVED)]
)
def test_verdicts(gaps, verdict):
    found = paired(constant(*gaps), last=1, tolerance=1.0)
    assert found.verdict == verdict
    assert (found.seeds_to_resolve is not None) == (verdict == NOT_RESOLVED and found.gap.mean != 1.0)


def test_a_gap_far_below_is_not_above_but_not_equivalent():
    found = paired(constant(-5.0, -5.1, -5.2), last=1, tolerance=1.0)
    assert found.verdict == NOT_ABOVE and not found.equivalent
    assert paired(constant(0.1, 0.0, 0.05), last=1, tolerance=1.0).equivalent


def test_one_seed_resolves_nothing():
    found = paired(constant(100.0), last=1, tolerance=1.0)
    assert found.verdict == NOT_RESOLVED and not found.significant and found.seeds_to_resolve is None


def test_without_a_tolerance_there_is_no_verdict():
    assert paired(constant(1.0, 2.0), last=1).verdict is None


def test_errors_of_the_first_kind_are_five_in_a_hundred():
    """Where there is no gap, or a gap just as large as the tolerance: 2000 trials, so the rate is within 0.05 ± 0.015
    (three standard deviations) for all of them."""
    rng, trials = random.Random(0), 2000
    none = [paired(simulated(rng, 0.0), last=1) for _ in range(trials)]
    at_tolerance = [paired(simulated(rng, 2.0), last=1, tolerance=2.0) for _ in range(trials)]
    rates = [
        sum(found.significant for found in none),
        sum(found.verdict == NOT_ABOVE for found in at_tolerance),
        sum(found.verdict == ABOVE for found in at_tolerance),
    ]
    assert all(abs(rate / trials - 0.05) < 0.015 for rate in rates), rates


def test_intervals_contain_the_truth_in_95_of_100_cases():
    rng, trials = random.Random(1), 2000
    found = [paired(simulated(rng, 1.0), last=1).gap for _ in range(trials)]
    assert abs(sum(gap.low <= 1.0 <= gap.high for gap in found) / trials - 0.95) < 0.015


def test_the_proposed_number_of_seeds_resolves_the_gap_in_most_cases():
    rng = random.Random(2)
    found = paired({0: [0.0], 1: [1.0], 2: [-1.0]}, last=1, tolerance=1.0)  # mean 0, spread 1
    count = found.seeds_to_resolve
    assert 6 <= count <= 9  # tables of power say 8 for a distance of one deviation
    resolved = [
        paired(simulated(rng, 0.0, seeds=count), last=1, tolerance=1.0).verdict == NOT_ABOVE for _ in range(500)
    ]
    assert 0.72 < sum(resolved) / 500 < 0.9  # 0.8, and the binomial deviation is 0.018


# ---- growth ----------------------------------------------------------------------------------------------------------


def sloped(rng, slope, noise=0.1, seeds=3, points=60, level=1.0):
    return {
        seed: [level + slope * step + rng.gauss(0, noise) for step in range(1, points + 1)] for seed in range(seeds)
    }


def test_growth_is_the_slope_per_step():
    exact = {seed: [0.5 * step + seed for step in range(20)] for seed in range(3)}
    found = paired(exact, last=10)
    assert found.growth.mean == pytest.approx(0.5) and found.grows
    wider = paired(exact, last=10, positions=range(0, 200, 10))
    assert wider.growth.mean == pytest.approx(0.05)


def test_a_level_does_not_grow_and_a_slope_does():
    rng = random.Random(3)
    assert paired(sloped(rng, 0.05), last=30).grows
    flagged = sum(paired(sloped(rng, 0.0), last=30).grows for _ in range(400))
    assert flagged / 400 < 0.05  # one-sided at 2.5 %; the binomial deviation is 0.008


def test_rising_to_a_level_in_the_first_quarter_is_not_growth():
    rng = random.Random(4)
    rising = {seed: [min(1.0, step / 15) + rng.gauss(0, 0.01) for step in range(60)] for seed in range(3)}
    assert not paired(rising, last=30).grows


def test_a_falling_gap_does_not_grow():
    assert not paired(sloped(random.Random(5), -0.05), last=30).grows


def test_one_point_has_no_growth():
    assert paired({0: [1.0], 1: [2.0]}, last=1).growth is None


# ---- by step ---------------------------------------------------------------------------------------------------------


def test_points_have_intervals_over_seeds():
    found = by_step({0: [1.0, 2.0], 1: [3.0, 2.0]})
    assert [point.mean for point in found] == [2, 2]
    assert found[0].half_width > 0 and found[1].half_width == 0


def test_smoothing_averages_neighbours_and_fewer_at_the_ends():
    found = by_step({0: [0.0, 3.0, 6.0, 0.0]}, smooth=3)
    assert [point.mean for point in found] == [1.5, 3, 3, 3]
    assert math.isinf(found[0].half_width)


@pytest.mark.parametrize("differences", [{}, {0: []}, {0: [1.0], 1: [1.0, 2.0]}])
def test_pairs_need_seeds_and_equal_numbers_of_points(differences):
    with pytest.raises(ValueError, match="same number of points"):
        paired(differences, last=1)
