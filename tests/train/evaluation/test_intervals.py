"""How far intervals of means reach."""

import numpy as np
import pytest
import scipy.stats

from train.evaluation.intervals import half_width


@pytest.mark.parametrize("level", [0.95, 0.8])
def test_it_is_the_interval_of_the_t_test(level):
    values = [1.5, 2.25, 0.5, 4.0]
    low, high = scipy.stats.ttest_1samp(values, 0).confidence_interval(level)
    reach = half_width(values, level)
    np.testing.assert_allclose([np.mean(values) - reach, np.mean(values) + reach], [low, high])
