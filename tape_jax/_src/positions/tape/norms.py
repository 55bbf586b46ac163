"""Norms of position states, which keep their equivariance."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tape_jax._src.core.algebra import at_least_float32, precise_einsum

Array = jax.Array

NORMS = ("none", "rms", "unit")
# Squared norms below this are treated as zero by the norms of states, whose scale is 1.
TINY = 1e-12
NEWTON_SCHULZ_STEPS = 24


def normalize(e: Array, norm: str, magnitude: float = 1.0, *, tensor: bool = False) -> Array:
    """Bounds a state without breaking its equivariance; the start state is left as it is.

    ``rms`` divides by ``sqrt(mean_m |E_m|_F^2 / min(L, R))``; ``unit`` replaces each block by its
    polar factor. Zero states stay zero. Computed in at least float32; the type of ``e`` is kept.
    """
    if norm == "none":
        return e
    wide = e.astype(at_least_float32(e.dtype))
    if norm == "unit":
        unit = polar_factor(wide) if tensor else _unit_complex(wide)
        return (magnitude * unit).astype(e.dtype)
    if tensor:
        square = jnp.square(wide).sum((-2, -1), keepdims=True).mean(-3, keepdims=True)
        square = square / min(e.shape[-2:])
    else:
        square = 2 * jnp.square(wide).mean(-1, keepdims=True)
    return (wide * (magnitude * jax.lax.rsqrt(jnp.maximum(square, TINY)))).astype(e.dtype)


def _unit_complex(e: Array) -> Array:
    half = e.shape[-1] // 2
    square = jnp.square(e[..., :half]) + jnp.square(e[..., half:])
    scale = jax.lax.rsqrt(jnp.maximum(square, TINY))
    return e * jnp.concatenate([scale, scale], axis=-1)


def polar_factor(e: Array) -> Array:
    """Orthogonal polar factor ``U V^T`` of every ``L x R`` block ``U S V^T``.

    In closed form for 2 x 2 blocks, by Newton-Schulz iteration otherwise; never through the
    gradient of a singular value decomposition, which is undefined at a rotation.
    """
    square = jnp.square(e).sum((-2, -1), keepdims=True)
    if e.shape[-2:] == (2, 2):
        a, b, c, d = e[..., 0, 0], e[..., 0, 1], e[..., 1, 0], e[..., 1, 1]
        det = (a * d - b * c)[..., None, None]
        cofactor = jnp.stack([jnp.stack([d, -c], -1), jnp.stack([-b, a], -1)], -2)
        scale = jax.lax.rsqrt(jnp.maximum(square + 2 * jnp.abs(det), TINY))
        return (e + jnp.sign(det) * cofactor) * scale
    x = e * jax.lax.rsqrt(jnp.maximum(square, TINY))
    wide = e.shape[-2] <= e.shape[-1]

    def step(_, x: Array) -> Array:
        if wide:
            gram = precise_einsum("...lr,...kr->...lk", x, x)
            return 1.5 * x - 0.5 * precise_einsum("...lk,...kr->...lr", gram, x)
        gram = precise_einsum("...lr,...ls->...rs", x, x)
        return 1.5 * x - 0.5 * precise_einsum("...lr,...rs->...ls", x, gram)

    return jax.lax.fori_loop(0, NEWTON_SCHULZ_STEPS, step, x)
