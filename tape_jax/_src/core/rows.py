"""Rows of logits, for functions that rewrite them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

Array = jax.Array


class AttentionRows(NamedTuple):
    """Describes rows of logits, of some queries and all keys, to functions that rewrite them.

    The ``K`` keys below may leave out later keys that are hidden from all of these queries. Then
    ``K < S``, and a function takes the first ``K`` entries of its arrays per key.

    Attributes:
      queries: indices of the queries, int32 ``[Q]``, counted from the call's first: use them to
        index an array that your function closes over.
      places: of the queries among the keys, ``query_offset`` included, int32 ``[Q]``, or
        ``[B, Q]`` if rows of the batch have their own offsets.
      visible: booleans ``[B|1, Hq|1, Q, K]``.
    """

    queries: Array
    places: Array
    visible: Array


RowFunction = Callable[[Array, AttentionRows], Array]
