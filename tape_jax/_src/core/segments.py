"""Segment ids in the model: tokens of equal ids see each other, and id 0 is padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

PADDING = 0


def without_padding(x: Array, segment_ids: Array | None, *, axes: int = 1) -> Array:
    """``x [..., T]``, or ``[..., T, n]`` for ``axes = n > 1``, with zeros where padding stood.

    Without segment ids nothing is padding.
    """
    if segment_ids is None:
        return x
    padding = segment_ids == PADDING
    return jnp.where(padding[..., None] if axes > 1 else padding, 0, x)


def places(segment_ids: Array) -> Array:
    """Counts each token's earlier tokens of the same id in the row, int32 ``[..., T]``."""

    return side_by_side(steps_since_change, segment_ids)


def of_first(segment_ids: Array, x: Array) -> Array:
    """Takes ``x [..., T]`` at each segment's first token, batch axes full."""

    def first(ids: Array, x: Array) -> Array:
        index = jnp.arange(x.shape[-1]) - steps_since_change(ids)
        return jnp.take_along_axis(x, index, axis=-1)

    shape = jnp.broadcast_shapes(segment_ids.shape, x.shape)
    return side_by_side(first, *(jnp.broadcast_to(y, shape) for y in (segment_ids, x)))


def side_by_side(function: Callable[..., Array], segment_ids: Array, *arrays: Array) -> Array:
    """``function(ids, *arrays)`` of rows in which each segment's tokens stand side by side.

    Args:
      function: of arrays ``[..., T, ...]``; so is its result, which is put back into the given
        order.
      segment_ids: ``[..., T]``.
      *arrays: ``[..., T, ...]``.
    """
    order, back = order_by_segment(segment_ids)
    return reordered(function(*(reordered(x, order) for x in (segment_ids, *arrays))), back)


def order_by_segment(segment_ids: Array) -> tuple[Array, Array]:
    """Returns an order with each segment's tokens side by side, padding last, and its inverse.

    Args:
      segment_ids: ``[..., T]``.

    Returns:
      Two permutations of the indices, ``[..., T]``.
    """
    order = jnp.lexsort((segment_ids, segment_ids == PADDING))
    return order, jnp.argsort(order)


def in_pieces(segment_ids: Array) -> Array:
    """Whether other tokens or padding split a segment, boolean ``[...]``."""
    parted = steps_since_change(segment_ids) != places(segment_ids)
    return (parted & (segment_ids != PADDING)).any(-1)


def reordered(x: Array, order: Array) -> Array:
    """Puts the tokens of ``x [..., T, ...]`` into an order, a row's permutation ``[..., T]``."""

    # Each token once, so that the gradient is no sum and depends on no order of adding.
    def take(x: Array, order: Array) -> Array:
        return jnp.asarray(x).at[order].get(unique_indices=True, mode="promise_in_bounds")

    for _ in range(order.ndim - 1):
        take = jax.vmap(take)
    return take(x, order)


def running(function: Callable[[Array, Array], Array], begins: Array, x: Array, axis: int) -> Array:
    """Accumulates an associative ``function`` along ``axis``, restarting where ``begins`` is true.

    Args:
      function: of two arrays, such as their sum.
      begins: booleans that broadcast to ``x``.
      x: any shape.
      axis: of time.
    """

    def join(a: Sequence[Array], b: Sequence[Array]) -> tuple[Array, Array]:
        return a[0] | b[0], jnp.where(b[0], b[1], function(a[1], b[1]))

    return jax.lax.associative_scan(join, (begins, x), axis=axis)[1]


def steps_since(begins: Array) -> Array:
    """Counts the steps since ``begins [..., T]`` was last true, or since the first step; int32."""
    index = jnp.broadcast_to(np.arange(begins.shape[-1], dtype=np.int32), begins.shape)
    return index - jax.lax.cummax(jnp.where(begins, index, 0), axis=begins.ndim - 1)


def steps_since_change(ids: Array) -> Array:
    """Counts the steps since ``ids [..., T]`` last changed, or since the first step; int32."""
    return steps_since(jnp.diff(ids, axis=ids.ndim - 1, prepend=ids[..., :1]) != 0)
