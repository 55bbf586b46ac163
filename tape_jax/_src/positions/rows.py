"""Rows of logits, all keys of some queries, for the encodings that rewrite them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


def of_queries(x: Array, rows: Any) -> Array:
    """Of ``x [..., T, heads, D]``, of all new tokens, those of some rows, ``[B, Q, heads, D]``."""
    return jnp.take(all_axes(x), rows.queries, axis=1)


def of_keys(x: Array, rows: Any) -> Array:
    """Of ``x [..., S, heads, D]``, of all keys, those that rows have, ``[B, K, heads, D]``."""
    return all_axes(x)[:, : rows.visible.shape[-1]]


def all_axes(x: Array) -> Array:
    """``[..., T, heads, D]`` with its batch axes as one, ``[B, T, heads, D]``."""
    return x.reshape(-1, *x.shape[-3:])


def products(queries: Array, keys: Array, dtype: Any) -> Array:
    """Inner products ``[B, Hq, Q, S]`` of ``[B, Q, Hq, D]`` and ``[B, S, Hk, D]``.

    Query head ``h`` reads the key head ``h // (Hq / Hk)``. Sums are of type ``dtype``.
    """
    batch, count, heads, _ = queries.shape
    queries = queries.reshape(batch, count, keys.shape[2], -1, queries.shape[-1])
    out = jnp.einsum("bqhgd,bshd->bhgqs", queries, keys, preferred_element_type=dtype)
    return out.reshape(batch, heads, count, -1)


def sums_from(x: Array) -> Array:
    """Of ``x [..., S]`` the sum over each key and all behind it."""
    return lax.cumsum(x, axis=x.ndim - 1, reverse=True)


def sums_behind(x: Array) -> Array:
    """Of ``x [..., S]`` the sum over all keys behind each."""
    pads = [(0, 0)] * (x.ndim - 1) + [(0, 1)]
    return sums_from(jnp.pad(x[..., 1:], pads))
