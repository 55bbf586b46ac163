"""Holds data out of training by a hash of the data itself and nothing else.

Every seed, length and model therefore shares the held-out part. The hash is part of a task's
definition: with another, existing models would be asked about their training data. There is exactly
one for each kind of data: rows of symbols (millions are drawn), keys of passkeys, and documents.
"""

from __future__ import annotations

import hashlib
import zlib

import numpy as np

ONE_IN = 10


def symbols(rows: np.ndarray) -> np.ndarray:
    """Returns whether each of B questions, symbols [A, B, W], is in the held-out tenth: bool [B].

    Neither the order of the A rows nor zeros at the end of a row matter.
    """
    return _mix(_fingerprints(rows).sum(axis=0, dtype=np.uint64)) % np.uint64(ONE_IN) == 0


def key(number: int) -> bool:
    """Returns whether a number hidden in a text is in the held-out tenth."""
    return zlib.crc32(str(number).encode()) % ONE_IN == 0


def document(name: bytes | np.ndarray, share: float) -> bool:
    """Returns whether the document of this name is in the held-out ``share``."""
    content = name if isinstance(name, bytes) else name.data
    number = int.from_bytes(hashlib.sha256(content).digest()[:8], "big")
    return number < share * 2**64


def _mix(x: np.ndarray) -> np.ndarray:
    """A bijection of uint64 in which each bit depends on all (the finaliser of SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _fingerprints(rows: np.ndarray) -> np.ndarray:
    """Returns a hash of each row [..., W]: uint64 [...]."""
    place = np.arange(1, rows.shape[-1] + 1, dtype=np.uint64)
    factors = _mix(place * np.uint64(0x9E3779B97F4A7C15))
    return _mix(rows.astype(np.uint64) @ factors + np.uint64(1))
