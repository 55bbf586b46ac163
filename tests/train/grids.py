"""Grids of sums, for the tests of everything that shows one."""

import numpy as np

from train.evaluation.grids import Grid
from train.tasks.arithmetic import Addition


def sum_grid(rows, columns, correct, counts, shared, trained) -> Grid:
    """A grid of operand lengths ``rows`` and ``columns``, trained with up to ``trained`` digits."""
    lengths = np.maximum.outer(rows, columns)
    wording = Addition(trained).wording
    return Grid(rows, columns, lengths, correct, counts, shared, trained, wording)
