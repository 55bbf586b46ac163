"""How sure a mean is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import scipy.stats


def half_width(values: Sequence[float], level: float = 0.95) -> float:
    """How far the interval of Student's t reaches to either side of the mean of values.

    Args:
      values: at least two.
      level: of confidence.
    """
    spread = statistics.stdev(values) / math.sqrt(len(values))
    return float(scipy.stats.t.ppf((1 + level) / 2, len(values) - 1)) * spread
