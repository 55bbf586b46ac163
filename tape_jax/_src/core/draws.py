"""Random inputs for numerical checks.

They are drawn by numpy from the key, so that they do not depend on ``jax_enable_x64``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax._src.core.checks import not_negative, positive, require, require_x64, typed

Array = jax.Array
Tree = Any


def generator_of(key: Array | None) -> np.random.Generator:
    """Return a numpy generator seeded by a key of either style; None: fixed."""
    return np.random.default_rng(0 if key is None else np.asarray(jax.random.key_data(key)).ravel())


@typed
def random_permutation(key: Array | None, n: int) -> np.ndarray:
    """Draws a permutation ``[n]`` of ``0 .. n - 1`` that moves something.

    Raises:
      ValueError: if ``n < 2``, which has none.
    """
    if n < 2:
        raise ValueError(f"a permutation that moves something needs n >= 2; got {n}")
    permutation = generator_of(key).permutation(n)
    return np.roll(permutation, int(np.all(permutation == np.arange(n))))


@typed
def random_orthogonal(
    key: Array | None, r: int, *, reflection: bool | None = None, dtype: Any = None
) -> Array:
    """Draws an element ``[r, r]`` of O(r) uniformly.

    Args:
      key: random key; None: a fixed one.
      r: its size.
      reflection: True: determinant -1; False: +1; None: either.
      dtype: its type; None: jax's default float.

    Raises:
      ValueError: if ``r`` is not positive; for a 64-bit type while those are disabled.
    """
    r = positive("r", r)
    require_x64(dtype=dtype)
    q, triangle = np.linalg.qr(generator_of(key).standard_normal((r, r)))
    q = q * np.sign(np.diag(triangle))
    if reflection is not None and (np.linalg.det(q) < 0) != reflection:
        q[:, 0] = -q[:, 0]
    return jnp.asarray(q, dtype)


@typed
def random_phases(key: Array | None, n: int, *, dtype: Any = None) -> Array:
    """Draws ``[n]`` phases in radians, uniform in ``[-pi, pi)``.

    Raises:
      ValueError: if ``n`` is negative; for a 64-bit type while those are disabled.
    """
    n = not_negative("n", n)
    require_x64(dtype=dtype)
    return jnp.asarray(generator_of(key).uniform(-np.pi, np.pi, n), dtype)


@typed
def random_state(
    key: Array | None,
    shape: Sequence[int],
    *,
    l: int | None = None,
    r: int | None = None,
    dtype: Any = None,
) -> Array:
    """Draws a state of standard normal numbers: no rotation, like states after training.

    Args:
      key: random key; None: a fixed one.
      shape: ``[..., T, H, D]``, the shape of the keys that it belongs to.
      l: rows of a block, for the tensor form; None: the rotary form.
      r: columns of a block; None: ``l``.
      dtype: its type; None: jax's default float.

    Returns:
      ``[..., T, H, D]``, in tensor form ``[..., T, H, D / l, l, r]``.

    Raises:
      ValueError: if ``l`` does not divide ``D``, or ``D`` is odd in rotary form; if ``shape`` has
        no axis, or ``l`` or ``r`` is not positive; for a 64-bit type while those are disabled.
    """
    l, r = positive("l", l, optional=True), positive("r", r, optional=True)
    require_x64(dtype=dtype)
    require(len(shape) > 0, f"shape must be that of keys, [..., T, H, D]; got {shape}")
    *lead, dim = (not_negative("each of shape", n) for n in shape)
    if l is None and (r is not None or dim % 2):
        raise ValueError(f"the rotary form has an even D and no r; got shape {shape}, r={r}")
    if l is not None and dim % l:
        raise ValueError(f"l={l} does not divide the head dimension of shape {tuple(shape)}")
    full = (*lead, dim) if l is None else (*lead, dim // l, l, l if r is None else r)
    return jnp.asarray(generator_of(key).standard_normal(full), dtype)


@typed
def random_params(key: Array | None, params: Tree, *, std: float = 0.2) -> Tree:
    """Adds normal noise of standard deviation ``std`` to every float array of ``params``."""
    generator = generator_of(key)

    def moved(x: Array) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return x + jnp.asarray(std * generator.standard_normal(x.shape), x.dtype)

    return jax.tree.map(moved, params)
