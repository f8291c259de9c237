"""Intervals and t-tests say what tables of Student's t say, and no more than the values do."""

import math

import pytest

from crossgrain.lab.intervals import estimate, p_above, p_below, p_different


def test_an_interval_is_that_of_students_t():
    found = estimate([1.0, 2.0, 3.0])
    half = 4.302652729911275 / math.sqrt(3)  # the quantile of tables for 2 degrees of freedom; the deviation is 1
    assert found.mean == 2 and found.count == 3
    assert found.high == pytest.approx(2 + half, rel=1e-9) and found.low == pytest.approx(2 - half, rel=1e-9)


def test_one_value_has_no_interval_and_no_significance():
    assert math.isinf(estimate([1.0]).high)
    assert p_above([1e9]) == p_below([-1e9]) == p_different([5.0]) == 1


def test_no_values_are_an_error():
    with pytest.raises(ValueError, match="at least one value"):
        p_above([])
    with pytest.raises(ValueError, match="no values"):
        estimate([])


def test_p_values_are_those_of_tables():
    # t = 2.92 is the quantile 0.95 of 2 degrees of freedom; these values have a mean of 2.92 standard errors
    t = 2.919985580355516
    values = [t / math.sqrt(3) + shift for shift in (-1, 0, 1)]
    assert p_above(values) == pytest.approx(0.05, rel=1e-9)
    assert p_below(values) == pytest.approx(0.95, rel=1e-9)
    assert p_different(values) == pytest.approx(0.1, rel=1e-9)
    assert p_above([value + 7 for value in values], 7) == pytest.approx(0.05, rel=1e-9)


@pytest.mark.parametrize("value, above, below", [(1.0, 0, 1), (-1.0, 1, 0), (0.0, 1, 1)])
def test_equal_values_are_beyond_doubt_unless_they_are_the_bound(value, above, below):
    assert p_above([value] * 3) == above and p_below([value] * 3) == below
    assert p_different([value] * 3) == (1 if value == 0 else 0)


def test_an_interval_and_a_test_agree():
    for shift in (0.9, 1.1):
        values = [4.302652729911275 / math.sqrt(3) * shift + deviation for deviation in (-1, 0, 1)]
        assert (estimate(values).low > 0) == (p_different(values) < 0.05)
