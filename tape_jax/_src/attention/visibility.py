"""Visibility of keys for all backends: the causal rule, the window, segments and the mask.

:class:`Band` decides by the distance of a key from a query; :class:`Visibility` adds the arrays of
a call.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tape_jax._src.core.checks import refuse
from tape_jax._src.core.padding import pad_to_multiple

Array = jax.Array

# The largest index that a kernel takes: sums of a few fit into 32-bit integers.
MAX_INDEX = 2**29


@dataclasses.dataclass(frozen=True)
class Band:
    """The causal rule and the window, ``is_causal`` and ``local_window_size`` of a call.

    Key ``j`` is visible to query ``i``, offset included, only if ``lowest <= j - i <= highest``.

    Attributes:
      is_causal: whether later keys are hidden.
      window: how many keys before and after its own position a query sees, or None for all.
    """

    is_causal: bool = False
    window: tuple[int, int] | None = None

    @property
    def lowest(self) -> int | None:
        """The smallest distance of a visible key; None: no limit."""
        return None if self.window is None else -self.window[0]

    @property
    def highest(self) -> int | None:
        """The largest distance of a visible key; None: no limit."""
        if self.is_causal:
            return 0
        return None if self.window is None else self.window[1]

    @property
    def hides(self) -> bool:
        """True if there is a causal rule or a window."""
        return self.is_causal or self.window is not None

    def pairs(self, queries: Any, keys: Any) -> Any:
        """Return which keys are visible by position.

        Args:
          queries: indices ``[Q]`` or ``[B, Q]``, offset included, of jax or of numpy.
          keys: indices ``[K]``.

        Returns:
          Booleans ``[Q, K]`` or ``[B, 1, Q, K]``, or None if all are visible.
        """
        i = queries[:, None] if queries.ndim == 1 else queries[:, None, :, None]
        rules = [] if self.highest is None else [keys <= i + self.highest]
        if self.lowest is not None:
            rules.append(keys >= i + self.lowest)
        return functools.reduce(operator.and_, rules) if rules else None


def within(window: tuple[int, int], queries: Array, keys: Array) -> Array:
    """Return which keys lie in the windows of queries, both integers of one type that broadcast.

    They may have any value: differences are unsigned and do not overflow.
    """
    unsigned = jnp.dtype(f"uint{8 * queries.dtype.itemsize}")
    before, behind = (min(size, jnp.iinfo(unsigned).max) for size in window)
    ahead = keys > queries
    distance = jnp.where(ahead, keys - queries, queries - keys).astype(unsigned)
    return distance <= jnp.where(
        ahead, jnp.asarray(behind, unsigned), jnp.asarray(before, unsigned)
    )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("query_offset", "segments", "mask", "counts"),
    meta_fields=("band",),
)
@dataclasses.dataclass(frozen=True)
class Visibility:
    """The visible keys of one call, or of a block of its queries and keys.

    Attributes:
      band: the causal rule and the window.
      query_offset: what is added to a query's index before comparing it with a key's: an int,
        or int32, a scalar or one per row ``[B]``.
      segments: integer ids of queries ``[B|1, Tq]`` and of keys ``[B|1, S]``, or None. They are one
        object if every query has the id of its own key.
      mask: boolean ``[B|1, Hq|1, Tq|1, S|1]``, True where visible, or None.
      counts: integers of queries ``[B|1, Tq]`` and of keys ``[B|1, S]`` that measure the
        window, or None for their indices.
    """

    band: Band = Band()
    query_offset: int | Array = 0
    segments: tuple[Array, Array] | None = None
    mask: Array | None = None
    counts: tuple[Array, Array] | None = None

    @property
    def by_index(self) -> Band:
        """The part of the band that concerns indices: without the window if there are counts."""
        return self.band if self.counts is None else Band(self.band.is_causal)

    def places(self, queries: int) -> Array:
        """Return the places of the queries among the keys, int32 ``[Q]`` or ``[B, Q]``."""
        offset: Any = self.query_offset
        return jnp.arange(queries, dtype=jnp.int32) + (
            offset[:, None] if jnp.ndim(offset) else offset
        )

    def pairs(self, queries: int, keys: int) -> Array | None:
        """Return which of the keys each query sees.

        Args:
          queries, keys: how many there are.

        Returns:
          Booleans that broadcast to ``[B, Hq, Q, K]``, or None if all are visible.
        """
        rules = [self.by_index.pairs(self.places(queries), jnp.arange(keys, dtype=jnp.int32))]
        if self.counts is not None and self.band.window is not None:
            own, others = self.counts
            rules.append(within(self.band.window, own[:, None, :, None], others[:, None, None, :]))
        if self.segments is not None:
            query_ids, key_ids = self.segments
            rules.append(query_ids[:, None, :, None] == key_ids[:, None, None, :])
        given = [rule for rule in (*rules, self.mask) if rule is not None]
        if not given:
            return None
        found = functools.reduce(operator.and_, given)
        return found.reshape((1,) * (4 - found.ndim) + found.shape)

    def of_queries(self, start: int | Array, size: int) -> Visibility:
        """Return the visibility for ``size`` queries from ``start`` on."""
        return self._cut(0, start, size, self.query_offset + start)

    def of_keys(self, start: int | Array, size: int) -> Visibility:
        """Return the visibility for ``size`` keys from ``start`` on."""
        return self._cut(1, start, size, self.query_offset - start)

    def _cut(self, side: int, start: int | Array, size: int, offset: int | Array) -> Visibility:
        """Return the visibility for some of the queries (side 0) or keys (side 1)."""

        def cut(pair: tuple[Array, Array] | None) -> tuple[Array, Array] | None:
            if pair is None:
                return None
            own = part(pair[side], start, size, 1)
            return (pair[0], own) if side else (own, pair[1])

        return dataclasses.replace(
            self,
            query_offset=offset,
            segments=cut(self.segments),
            mask=None if self.mask is None else part(self.mask, start, size, 2 + side),
            counts=cut(self.counts),
        )

    def blocks_meet(self, queries: tuple[int, int], keys: tuple[int, int]) -> Array | None:
        """Return which blocks segments and mask let meet, in any row and head.

        Args:
          queries: size and number of the blocks of queries; arrays are padded to whole blocks.
          keys: likewise.

        Returns:
          Booleans ``[blocks of queries, blocks of keys]``, or None if all may.
        """
        (rows, columns), meet = (queries[1], keys[1]), None
        if self.segments is not None:
            meet = segments_meet(self.segments, queries[0], keys[0]).any(0)
        if self.mask is not None:
            mask = self.mask.any((0, 1))
            sizes = zip((rows, columns), mask.shape, strict=True)
            own, others = (count if length > 1 else 1 for count, length in sizes)
            mask = mask.reshape(own, -1, others, mask.shape[1] // others).any((1, 3))
            mask = jnp.broadcast_to(mask, (rows, columns))
            meet = mask if meet is None else meet & mask
        return meet

    def refuse_for_kernels(self, queries: int, keys: int) -> None:
        """Raise NotImplementedError for counts, and if indices would overflow 32-bit integers."""
        refuse(self.counts is not None, "window_positions= is not in the kernels")
        offset = self.query_offset if isinstance(self.query_offset, int) else 0
        sizes = {
            "queries": queries,
            "keys": keys,
            "query_offset": abs(offset),
            "local_window_size": max(self.band.window or (0,)),
        }
        given = ", ".join(f"{name} = {size}" for name, size in sizes.items())
        refuse(max(sizes.values()) > MAX_INDEX, f"each of these is at most {MAX_INDEX}: {given}")


def visible_blocks(
    band: tuple[int | None, int | None], first: Array, last: Array, size: int, count: int
) -> tuple[Array, Array]:
    """Return the key blocks that queries ``first`` to ``last`` see by position.

    Args:
      band: the smallest and the largest distance of a visible key; None: no limit.
      first, last: int32 of one shape, offset included.
      size: keys in a block.
      count: number of blocks.

    Returns:
      The first visible block and one past the last, both from 0 to ``count``.
    """
    (lowest, highest), begin, end = band, jnp.zeros_like(first), jnp.full_like(last, count)
    if lowest is not None:
        begin = jnp.clip((first + lowest) // size, 0, count)
    if highest is not None:
        end = jnp.clip((last + highest) // size + 1, 0, count)
    return begin, end


def full_blocks(
    band: tuple[int | None, int | None], first: Array, last: Array, size: int, count: int
) -> tuple[Array, Array]:
    """Return the :func:`visible_blocks` that all queries ``first`` to ``last`` see whole."""
    (lowest, highest), begin, end = band, jnp.zeros_like(first), jnp.full_like(last, count)
    if lowest is not None:
        begin = jnp.clip(-(-(last + lowest) // size), 0, count)
    if highest is not None:
        end = jnp.clip((first + highest + 1) // size, 0, count)
    return begin, end


def part(x: Array, start: int | Array, size: int, axis: int) -> Array:
    """Return ``size`` entries of an axis from ``start`` on; an axis of 1 stays as is."""
    return x if x.shape[axis] == 1 else lax.dynamic_slice_in_dim(x, start, size, axis)


def segments_meet(segments: tuple[Array, Array], block_q: int, block_k: int) -> Array:
    """Return whether the ranges of ids of two blocks overlap, ``[B|1, query blocks, key blocks]``.

    Incomplete blocks are padded with their last id.
    """
    (low_q, high_q), (low_k, high_k) = (
        _id_ranges(ids, size) for ids, size in zip(segments, (block_q, block_k), strict=True)
    )
    lowest = jnp.maximum(low_q[..., None], low_k[:, None])
    return lowest <= jnp.minimum(high_q[..., None], high_k[:, None])


def _id_ranges(ids: Array, size: int) -> tuple[Array, Array]:
    """Return the smallest and the largest id of each block, ``[B|1, blocks]``."""
    ids = pad_to_multiple(ids, size, 1, mode="edge")
    ids = ids.reshape(ids.shape[0], -1, size)
    return ids.min(axis=-1), ids.max(axis=-1)
