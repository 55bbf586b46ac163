"""Segment ids in the model: tokens of equal ids see each other, and id 0 is padding."""

from __future__ import annotations

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
    """How many earlier tokens of the row have a token's own id, int32 ``[..., T]``."""
    axis = segment_ids.ndim - 1
    order = jnp.argsort(segment_ids, axis=axis, stable=True)
    grouped = jnp.take_along_axis(segment_ids, order, axis=axis)
    index = jnp.broadcast_to(np.arange(segment_ids.shape[-1], dtype=np.int32), grouped.shape)
    begins = jnp.diff(grouped, axis=axis, prepend=grouped[..., :1]) != 0
    place = index - jax.lax.cummax(jnp.where(begins, index, 0), axis=axis)
    return jnp.take_along_axis(place, jnp.argsort(order, axis=axis), axis=axis)
