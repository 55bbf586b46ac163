"""Pads arrays to sizes that a computation needs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


def round_up(n: int, size: int) -> int:
    """Rounds up to a multiple of ``size``."""
    return -(-n // size) * size


def pad_to(x: Array, size: int, axis: int, **options: Any) -> Array:
    """Pads the end of ``axis`` to ``size`` entries: with zeros, or by ``options`` of ``jnp.pad``.

    ``size`` must not be below what the axis has.
    """
    missing = size - x.shape[axis]
    pads = [(0, missing if n == axis % x.ndim else 0) for n in range(x.ndim)]
    return jnp.pad(x, pads, **options) if missing else x


def pad_to_multiple(x: Array, size: int, axis: int, **options: Any) -> Array:
    """Pads ``axis`` by :func:`pad_to` until its size is a multiple of ``size``."""
    return pad_to(x, round_up(x.shape[axis], size), axis, **options)
