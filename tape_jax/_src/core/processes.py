"""Communication between several processes."""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import multihost_utils


def broadcast_text(text: str) -> str:
    """Sends the first process's text to all; all must call this, the others with any text."""
    given = np.frombuffer(text.encode() if jax.process_index() == 0 else b"", np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(given))))
    padded = np.zeros(length, np.uint8)
    padded[: len(given)] = given
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))).decode()
