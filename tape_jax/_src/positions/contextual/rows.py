"""Rows of logits, all keys of some queries, for the encodings that rewrite them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tape_jax._src.core.algebra import precise_einsum
from tape_jax._src.core.padding import pad_to_multiple

Array = jax.Array

# Sums along keys are products with triangles of this size: on a CPU a quarter of the time of a
# cumulative sum.
BLOCK = 32


def split(x: Array, size: int, axis: int) -> Array:
    """An axis in chunks, the last one filled up with zeros."""
    x = pad_to_multiple(x, size, axis)
    return x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])


def of_queries(x: Array, rows: Any) -> Array:
    """Takes the queries of ``rows`` from ``x [..., T, heads, D]``: ``[B, Q, heads, D]``."""
    return jnp.take(all_axes(x), rows.queries, axis=1)


def of_keys(x: Array, rows: Any) -> Array:
    """Takes the keys of ``rows`` from ``x [..., S, heads, D]``: ``[B, K, heads, D]``."""
    return all_axes(x)[:, : rows.visible.shape[-1]]


def before(rows: Any) -> Array:
    """Returns which keys before its own token each query sees, ``[B|1, Hq|1, Q, K]``."""
    places = jnp.atleast_2d(rows.places)[:, None, :, None]
    return rows.visible & (jnp.arange(rows.visible.shape[-1], dtype=jnp.int32) < places)


def all_axes(x: Array, axes: int = 3) -> Array:
    """Joins the batch axes before the last ``axes``: ``[..., T, heads, D]`` to ``[B, ...]``."""
    return x.reshape(-1, *x.shape[x.ndim - axes :])


def with_batch(x: Array, batch: tuple[int, ...]) -> Array:
    """``x [..., T]``, whose batch axes may be missing, as ``[B, T]``, or ``[1, T]`` for all."""
    if all(n == 1 for n in x.shape[:-1]):
        return x.reshape(1, -1)
    return jnp.broadcast_to(x, (*batch, x.shape[-1])).reshape(-1, x.shape[-1])


def products(queries: Array, keys: Array, dtype: Any) -> Array:
    """Inner products ``[B, Hq, Q, S]`` of ``[B, Q, Hq, D]`` and ``[B, S, Hk, D]``.

    Query head ``h`` reads the key head ``h // (Hq / Hk)``. Sums are of type ``dtype``.
    """
    batch, count, heads, _ = queries.shape
    queries = queries.reshape(batch, count, keys.shape[2], -1, queries.shape[-1])
    out = jnp.einsum("bqhgd,bshd->bhgqs", queries, keys, preferred_element_type=dtype)
    return out.reshape(batch, heads, count, -1)


def sums_from(x: Array) -> Array:
    """Sums ``x [..., S]`` over each key and all after it."""
    *lead, keys = x.shape
    blocks = pad_to_multiple(x, BLOCK, -1).reshape(*lead, -1, BLOCK)
    within = precise_einsum("...l,lj->...j", blocks, jnp.tri(BLOCK, dtype=x.dtype))
    count = blocks.shape[-2]
    after = precise_einsum("...b,bc->...c", blocks.sum(-1), jnp.tri(count, k=-1, dtype=x.dtype))
    return (within + after[..., None]).reshape(*lead, -1)[..., :keys]


def sums_behind(x: Array) -> Array:
    """Sums ``x [..., S]`` over all keys after each."""
    pads = [(0, 0)] * (x.ndim - 1) + [(0, 1)]
    return sums_from(jnp.pad(x[..., 1:], pads))
