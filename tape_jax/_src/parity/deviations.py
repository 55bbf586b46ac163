"""Recorded files, and how far a computed quantity is from a recorded one."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

TOLERANCE = {"float32": 3e-5, "float64": 1e-9}


def read_arrays(path: str | Path) -> dict[str, np.ndarray]:
    """The arrays of a file, and of its sibling (``X.npz`` and ``X_grad.npz``).

    Raises:
      ValueError: if a file cannot be read, or both have an array with different values.
    """
    path = Path(path)
    stem = path.stem.removesuffix("_grad")
    arrays: dict[str, np.ndarray] = {}
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if path.suffix != ".npz":
        raise ValueError(f"{path}: the name of a recorded file ends in .npz")
    for file in (path.with_name(f"{stem}.npz"), path.with_name(f"{stem}_grad.npz")):
        if not file.is_file():
            continue
        try:
            with np.load(file, allow_pickle=False) as archive:
                found = {name: archive[name] for name in archive.files}
        except Exception as error:
            raise ValueError(f"{file}: not a readable npz archive ({error})") from error
        for name in arrays.keys() & found.keys():
            one, other = arrays[name], found[name]
            if (one.shape, one.tobytes()) != (other.shape, other.tobytes()):
                raise ValueError(f"{file}: {name} has other values than in {stem}.npz")
        arrays |= found
    return arrays


@dataclasses.dataclass(frozen=True)
class Deviation:
    """The largest error of one quantity.

    Attributes:
      quantity: what was compared.
      precision: ``float32`` or ``float64``.
      error: the largest absolute difference, scaled as :func:`scaled_error` says; NaN counts as
        infinite.
      worst: the array in which it occurs.
      tolerance: the bound.
    """

    quantity: str
    precision: str
    error: float
    worst: str
    tolerance: float

    @property
    def ok(self) -> bool:
        """True if the error is within the tolerance."""
        return self.error <= self.tolerance

    def __str__(self) -> str:
        where = "" if self.worst == self.quantity else f" in {self.worst}"
        return (
            f"{self.precision}  {self.quantity}: {self.error:.2e}{where} "
            f"(tolerance {self.tolerance:.0e}) {'ok' if self.ok else 'FAILED'}"
        )


def deviation(quantity: str, precision: str, actual: Any, expected: np.ndarray) -> Deviation:
    """The deviation of one array."""
    error = scaled_error(actual, expected)
    return Deviation(quantity, precision, error, quantity, TOLERANCE[precision])


def scaled_error(actual: Any, expected: np.ndarray) -> float:
    """Largest absolute difference, divided by the largest expected value where that exceeds 1."""
    actual = np.asarray(actual, np.float64)
    expected = np.asarray(expected, np.float64)
    if actual.shape != expected.shape:
        raise ValueError(f"shapes differ: got {actual.shape}, recorded {expected.shape}")
    if not expected.size:
        return 0.0
    error = np.abs(actual - expected).max() / max(1.0, np.abs(expected).max())
    return float(error) if np.isfinite(error) else math.inf
