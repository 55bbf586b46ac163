"""Differences between runs of equal seeds: intervals of Student's t, and Holm's adjustment."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import scipy.optimize
import scipy.stats

from train.checks import require

# The level of all tests and intervals, and the chance to detect the smallest difference.
LEVEL, CHANCE = 0.05, 0.8
# Values that differ by less are equal except for rounding.
ALIKE = 1e-12

Name = TypeVar("Name")


class Estimate(NamedTuple):
    """A mean with its interval of Student's t at :data:`LEVEL`.

    Attributes:
      mean, low, high: of the values.
      p: two-sided p-value of a zero mean.
      spread: standard deviation of the values.
      number: of values.
    """

    mean: float
    low: float
    high: float
    p: float
    spread: float
    number: int

    def __str__(self) -> str:
        digits = 3 if abs(self.mean) < 10 else 2 if abs(self.mean) < 100 else 1
        return f"{self.mean:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"

    def smallest(self, tests: int = 1) -> float:
        """Returns the smallest mean told from zero with the chance :data:`CHANCE`.

        Args:
          tests: number of tests in the family; this one stands at their strictest level.
        """
        return _reach(self.number, tests) * self.spread / math.sqrt(self.number)


@functools.cache
def _reach(number: int, tests: int) -> float:
    """Returns the mean, in standard errors, that a t test tells from zero with :data:`CHANCE`."""
    freedom = number - 1
    critical = scipy.stats.t.ppf(1 - LEVEL / tests / 2, freedom)

    def lacks(mean: float) -> float:
        return CHANCE - scipy.stats.nct.sf(critical, freedom, mean)

    return float(scipy.optimize.brentq(lacks, 0, 10 * critical))


def mean(values: Sequence[float]) -> float:
    """The mean of values; NaN or infinite if one of them is, infinite if their sum is too large."""
    with np.errstate(all="ignore"):
        return float(np.mean(values))


def deviation(values: Sequence[float]) -> float:
    """Returns the standard deviation of at least two values; NaN or infinite as in :func:`mean`."""
    with np.errstate(all="ignore"):
        return float(np.std(values, ddof=1))


def half_width(values: Sequence[float]) -> float:
    """Returns half of Student's t interval around the mean of at least two values."""
    spread = statistics.stdev(values) / math.sqrt(len(values))
    return float(scipy.stats.t.ppf(1 - LEVEL / 2, len(values) - 1)) * spread


def estimate(values: Sequence[float]) -> Estimate:
    """Estimates the mean of at least two values."""
    require(len(values) >= 2, f"an interval needs at least two values; got {len(values)}")
    mean, spread = statistics.fmean(values), statistics.stdev(values)
    if spread < ALIKE:
        return Estimate(mean, mean, mean, float(abs(mean) < ALIKE), 0.0, len(values))
    half, p = half_width(values), float(scipy.stats.ttest_1samp(values, 0).pvalue)
    return Estimate(mean, mean - half, mean + half, p, spread, len(values))


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> Estimate:
    """Estimates by how much the first exceeds the second, from their values by seed.

    Raises:
      ValueError: the seeds differ.
    """
    require(
        first.keys() == second.keys(),
        f"seeds must be equal to be compared; got {sorted(first)} and {sorted(second)}",
    )
    return estimate([first[seed] - second[seed] for seed in first])


def holm(p: Mapping[Name, float], size: int = 0) -> dict[Name, float]:
    """Returns the p-values of a family, adjusted by Holm's method.

    Args:
      p: the known p-values.
      size: the family's size, if it is larger: the others are taken as one.
    """
    order = sorted(p, key=p.__getitem__)
    count = max(size, len(order))
    steps = [min(1.0, (count - i) * p[name]) for i, name in enumerate(order)]
    return dict(zip(order, np.maximum.accumulate(steps).tolist(), strict=True))
