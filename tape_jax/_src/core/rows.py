"""Rows of logits, as functions that rewrite them are given them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

Array = jax.Array


class AttentionRows(NamedTuple):
    """Rows of logits, of some queries and all keys, as functions that rewrite them see them.

    Where ``K`` stands below, keys that are hidden from all of these queries, because they are
    later, may be left out: then ``K < S``, and of what is per key a function takes the first ``K``.

    Attributes:
      queries: which queries, int32 ``[Q]``, counted from the first of the call: by it a function
        takes their part of an array that it closes over.
      places: of the queries among the keys, ``query_offset`` included, int32 ``[Q]``, or
        ``[B, Q]`` where rows of the batch have offsets of their own.
      visible: booleans ``[B|1, Hq|1, Q, K]``.
    """

    queries: Array
    places: Array
    visible: Array


RowFunction = Callable[[Array, AttentionRows], Array]
