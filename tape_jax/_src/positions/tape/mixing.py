"""Products over the heads of position states: the factors of TAPE's update.

They act only on the heads axis, never on what the symmetry group acts on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tape_jax._src.core.algebra import at_least_float32, complex_multiply, precise_einsum
from tape_jax._src.core.sharding import Axes, Sharding

Array = jax.Array
# Multiplies a matrix over heads with states.
Product = Callable[[Array, Array], Array]

# Name by which a policy of ``jax.checkpoint`` finds sums over devices.
SUM_OVER_DEVICES = "tape_sum_over_devices"

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "identity": lambda x: x,
}


def scaled_mix(mix: Array, alpha: float | Array) -> Array:
    """``mix [H_q]`` or ``[H_kv, H_q]`` times ``alpha``, a scalar or ``[H_kv]``."""
    if mix.ndim == 2:
        return mix * by_rows(alpha)
    if jnp.ndim(alpha):
        alpha = jnp.repeat(alpha, mix.shape[0] // jnp.size(alpha))
    return mix * alpha


def by_rows(alpha: float | Array) -> float | Array:
    """``alpha``, a scalar or ``[H]``, to be multiplied with ``[..., H, *]``."""
    return jnp.expand_dims(alpha, -1) if jnp.ndim(alpha) else alpha


def precise_product(matrix: Array, e: Array) -> Array:
    """``matrix @ e`` with unrounded operands; one matrix for all, or with all axes of ``e``."""
    spec = "hk,...kn->...hn" if matrix.ndim == 2 else "...hk,...kn->...hn"
    return precise_einsum(spec, matrix, e)


def sum_of_products(matrix: Array, e: Array) -> Array:
    """``matrix @ e`` of small matrices without a matrix unit, which a TPU has to feed by tiles.

    For a product of 12 heads its compiler makes padded copies of both operands; it fuses this.
    """
    wide = at_least_float32(e.dtype)
    products = matrix.astype(wide)[..., None] * e.astype(wide)[..., None, :, :]
    return products.sum(-2).astype(e.dtype)


def mix_attended(
    a: Array,
    mix: Array,
    heads: int,
    sharding: Sharding | None = None,
    product: Product = precise_product,
) -> Array:
    """``Mix(a)``: attended states ``[..., H_q, N]`` to ``[..., H_kv, N]``.

    ``mix [H_q]`` scales each query head and sums inside its group; ``mix [H_kv, H_q]`` is a matrix.
    """
    if mix.ndim == 2:
        return _sum_over_heads(mix, (None, "heads"), a, sharding, product)
    *lead, queries, n = a.shape
    scaled = (a * mix[:, None]).reshape(*lead, heads, queries // heads, n)
    return scaled.sum(-2)


def displacement(z: Array, w: Array, u: Array, *, tensor: bool) -> Array:
    """``z conj(w) u`` of rotary states ``[..., D]``, ``Z W^T U`` of ``[..., M, L, R]``."""
    if tensor:
        return precise_einsum("...lr,...kr,...ks->...ls", z, w, u)
    real, imaginary = jnp.split(w, 2, axis=-1)
    return complex_multiply(complex_multiply(z, jnp.concatenate([real, -imaginary], -1)), u)


def mixing_matrix(
    x: Array,
    params: dict[str, Array],
    alpha: float | Array = 1.0,
    activation: str = "silu",
    *,
    dtype: Any = jnp.float32,
) -> Array:
    """``alpha G(x)``, a heads x heads matrix per token: ``[..., T, H, H]``.

    ``alpha`` is a scalar or has one number for each row ``[H]``.
    """
    gate = ACTIVATIONS[activation](x @ params["wx"].astype(x.dtype)).astype(dtype)
    down, up = params["down"].astype(dtype), params["up"].astype(dtype)
    return outer_matrix(gate, down * by_rows(alpha), up)


def outer_matrix(gate: Array, down: Array, up: Array) -> Array:
    """``down diag(gate) up`` for each token: ``[..., T, H, H]``."""
    outer = down.T[:, :, None] * up[:, None, :]
    return jnp.einsum("...p,phk->...hk", gate, outer)


def mix_heads(
    matrix: Array, e: Array, sharding: Sharding | None = None, product: Product = precise_product
) -> Array:
    """Applies per-token matrices ``[..., H, H]`` to states ``[..., H | 1, N]``."""
    if e.shape[-2] == 1:
        return matrix.sum(-1)[..., None] * e
    axes = ("batch", "sequence", None, "kv_heads")
    return _sum_over_heads(matrix, axes, e, sharding, product)


def _sum_over_heads(
    matrix: Array, axes: Axes, states: Array, sharding: Sharding | None, product: Product
) -> Array:
    """``matrix @ states``, for states ``[B, T, H, N]`` split by heads or not.

    Each device has the columns of the matrix, with logical ``axes``, for its own states. Their
    product is a part of every head's sum: one reduce-scatter adds the parts up. Backwards one
    all-gather of the gradient is enough, and no device keeps the states of all heads, as it would
    if the product gathered them.
    """
    kind = axes[-1]
    split = () if sharding is None else sharding.mesh_axes("kv_heads")
    alone = sharding is None or sharding.shards("kv_heads") == 1
    if sharding is None or alone or states.ndim != 4:
        return product(matrix, states)
    if kind is None or sharding.mesh_axes(kind) != split:
        return product(matrix, states)

    def part(matrix: Array, states: Array) -> Array:
        return jax.lax.psum_scatter(product(matrix, states), split, scatter_dimension=2, tiled=True)

    states_spec = sharding.spec(("batch", "sequence", kind, None), states.shape, "position states")
    out_shape = jax.eval_shape(product, matrix, states).shape
    scattered = jax.shard_map(
        part,
        mesh=sharding.inner,
        in_specs=(sharding.spec(axes, matrix.shape, "a mixing matrix"), states_spec),
        out_specs=sharding.spec(("batch", "sequence", "kv_heads", None), out_shape, "states"),
        check_vma=False,
    )(matrix, states)
    return checkpoint_name(scattered, SUM_OVER_DEVICES)
