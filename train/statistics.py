"""Differences between runs of equal seeds: intervals of Student's t, and Holm's adjustment."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import scipy.stats

from train.checks import require

# Of all tests and intervals, and the chance with which the smallest difference is seen.
LEVEL, CHANCE = 0.05, 0.8
# Values that differ by less are the same, but for rounding.
ALIKE = 1e-12

Name = TypeVar("Name")


class Estimate(NamedTuple):
    """A mean with its interval of Student's t at :data:`LEVEL`.

    Attributes:
      mean, low, high: of the values.
      p: of the mean being zero, two-sided.
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
        """The mean that would have been told from zero with the chance :data:`CHANCE`.

        Args:
          tests: number of those in the family, at the strictest level of which this one stands.
        """
        freedom = self.number - 1
        reach = scipy.stats.t.ppf([1 - LEVEL / tests / 2, CHANCE], freedom).sum()
        return float(reach) * self.spread / math.sqrt(self.number)


def mean(values: Sequence[float]) -> float:
    """The mean of values; NaN or infinite if one of them is, infinite if their sum is too large."""
    with np.errstate(all="ignore"):
        return float(np.mean(values))


def deviation(values: Sequence[float]) -> float:
    """The standard deviation of values, at least two; NaN or infinite as :func:`mean` has it."""
    with np.errstate(all="ignore"):
        return float(np.std(values, ddof=1))


def half_width(values: Sequence[float]) -> float:
    """Half of the interval of Student's t around the mean of values, at least two."""
    spread = statistics.stdev(values) / math.sqrt(len(values))
    return float(scipy.stats.t.ppf(1 - LEVEL / 2, len(values) - 1)) * spread


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of values, at least two."""
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
    """The p-values of a family, adjusted by Holm's method.

    Args:
      p: those that are known.
      size: of the family, if it is larger: the others are taken to be one.
    """
    order = sorted(p, key=p.__getitem__)
    count = max(size, len(order))
    steps = [min(1.0, (count - i) * p[name]) for i, name in enumerate(order)]
    return dict(zip(order, np.maximum.accumulate(steps).tolist(), strict=True))
