"""Student's t distribution against printed tables and closed forms."""

import math

import pytest

from crossgrain.lab.student import t_cdf, t_quantile


@pytest.mark.parametrize(
    "probability, freedom, expected",
    [(0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 7, 2.365), (0.95, 30, 1.697), (0.9995, 5, 6.869), (0.5, 3, 0.0)],
)
def test_quantiles_are_those_of_printed_tables(probability, freedom, expected):
    assert t_quantile(probability, freedom) == pytest.approx(expected, abs=5e-4)  # tables have three decimals
    assert t_quantile(1 - probability, freedom) == pytest.approx(-expected, abs=5e-4)


@pytest.mark.parametrize("t", [-30.0, -1.5, -0.1, 0.0, 0.3, 2.0, 100.0])
def test_probabilities_are_those_of_the_closed_forms(t):
    assert t_cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-12)
    assert t_cdf(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), abs=1e-12)


def test_a_quantile_is_the_inverse_of_the_probability():
    for freedom in (1, 2.5, 10, 200):
        for probability in (0.001, 0.3, 0.9, 0.9999):
            assert t_cdf(t_quantile(probability, freedom), freedom) == pytest.approx(probability, abs=1e-10)


def test_ends_and_mistakes():
    assert t_cdf(math.inf, 3) == 1 and t_cdf(-math.inf, 3) == 0
    for wrong in (0, 1, -0.5, 2):
        with pytest.raises(ValueError, match="between 0 and 1"):
            t_quantile(wrong, 3)
