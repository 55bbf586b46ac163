"""Intervals and adjusted p-values."""

import numpy as np
import pytest
import scipy.stats

from train.statistics import difference, estimate, holm


def test_estimate():
    # Student's (1908) additional hours of sleep: 1.58 +- 1.23 / sqrt(10), t = 4.062, p = 0.0028.
    hours = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
    found = estimate(hours)
    np.testing.assert_allclose(found[:4], (1.58, 0.700, 2.460, 0.00283), rtol=2e-3)
    assert found.number == 10
    interval = scipy.stats.ttest_1samp(hours, 0).confidence_interval(0.95)
    np.testing.assert_allclose((found.low, found.high), interval, rtol=1e-12)


@pytest.mark.parametrize(("value", "p"), [(0.0, 1.0), (2.0, 0.0), (-1.0, 0.0)])
def test_without_spread(value, p):
    found = estimate([value] * 5)
    assert (found.low, found.high, found.p, found.smallest(4)) == (value, value, p, 0)


def test_difference():
    first, second = {2: 3.0, 3: 5.0, 4: 4.0}, {4: 1.0, 3: 1.0, 2: 1.0}
    assert difference(first, second) == estimate([2.0, 4.0, 3.0])
    with pytest.raises(ValueError, match=r"seeds must be equal.*\[2, 3, 4\] and \[2, 3\]"):
        difference(first, {2: 1.0, 3: 1.0})
    with pytest.raises(ValueError, match="at least two values; got 1"):
        estimate([1.0])


def test_the_smallest_difference_is_seen_with_its_chance():
    """Differences of that size, with that spread, are told from zero eight times in ten."""
    rng = np.random.default_rng(0)
    known = estimate([-1.0, 1.0, -1.0, 1.0, 0.0])
    for tests in (1, 4, 8):
        values = rng.normal(known.smallest(tests), known.spread, (40_000, 5))
        power = np.mean(scipy.stats.ttest_1samp(values, 0, axis=1).pvalue < 0.05 / tests)
        assert abs(power - 0.8) < 0.01


def test_holm():
    # Holm's own rule: the smallest times all, the next times one less, never decreasing.
    found = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert found == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({"a": 0.5, "b": 0.9}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}
    # As if the others were one, which is what they are adjusted with at worst.
    part = holm({"a": 0.01, "d": 0.005}, 4)
    assert part == pytest.approx({"d": 0.02, "a": 0.03})
    assert holm({"a": 0.01}, 4)["a"] >= holm({"a": 0.01, "b": 0.0, "c": 0.001, "d": 0.5})["a"]
