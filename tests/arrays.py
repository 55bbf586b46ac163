"""Arrays to compute with."""

import numpy as np


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal numbers in float64."""
    return np.random.default_rng(seed).standard_normal(shape)
