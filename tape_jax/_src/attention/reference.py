"""The readable reference for attention over values and position states.

With ``P`` the softmax over the visible keys of ``scale * <rotate(q_i, e_i), rotate(k_j, e_j)>
+ bias_ij + F_i - F_j``, ``F`` the log decay, the outputs are ``o = P v`` and ``a = P e`` (TAPE,
section 3.2). One ``P`` serves both. A softcap bounds the first term. Every
other backend must agree with this one.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tape_jax._src.attention.request import (
    AttentionRows,
    Request,
    RowFunction,
    decays,
    from_rows,
    hide,
    pairs_to_rows,
    to_rows,
)
from tape_jax._src.core import algebra

Array = jax.Array

# The name by which remat policies keep the products with values.
PRODUCT = "tape_attention_product"


def check(request: Request) -> None:
    """Accepts every call: this backend can do all legal ones."""
    del request


def attend(request: Request) -> tuple[Array, Array | None]:
    """Computes attention with all logits in memory at once.

    Returns:
      ``o [B, Tq, Hq, Dv]`` and ``a [B, Tq, Hq, De]`` (None if no state is attended), in the
      accumulator type. A query that sees no key gets zeros, and its gradients are zero.
    """
    product = functools.partial(jnp.einsum, preferred_element_type=request.accumulator_dtype)
    q, k = request.rotated()
    # Heads before time: XLA's batched products are twice as fast in this order on a CPU.
    q = to_rows(q, request.kv_heads, request.query_length)
    k = k.transpose(0, 2, 1, 3)
    logits = algebra.capped(product("bhrd,bhkd->bhrk", q, k) * request.scale, request.softcap)
    visible = request.visibility.pairs(request.query_length, request.key_length)
    rows = _rows(request, visible) if request.needs_rows else None
    logits = _by_rows(request.logits_fn, logits, rows, request)
    logits = _masked(logits, visible, request)
    if request.weights_fn is None:
        weights, total = _softmax(logits)
    else:
        weights = _by_rows(request.weights_fn, logits, rows, request)
        total = jnp.ones((), logits.dtype)
    weights = weights.astype(request.compute_dtype)

    def average(values: Array) -> Array:
        values = values.transpose(0, 2, 1, 3)
        values = jnp.broadcast_to(values, (*k.shape[:2], *values.shape[2:]))
        # Dividing here, not the weights, saves passes over all pairs in both directions.
        out = checkpoint_name(product("bhrk,bhkd->bhrd", weights, values), PRODUCT) / total
        return from_rows(out, request.query_heads, request.query_length)

    state = request.attended_state()
    o = average(request.v.astype(request.compute_dtype))
    return o, None if state is None else average(state)


def _softmax(logits: Array) -> tuple[Array, Array]:
    """Return the softmax over the last axis as numerators and sums ``[..., 1]``."""
    # The start value of the maximum keeps rows without a visible key finite: their weights are 0.
    lowest = jnp.finfo(logits.dtype).min
    top = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True, initial=lowest))
    weights = jnp.exp(logits - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights, jnp.where(total > 0, total, 1)


def _by_rows(
    function: RowFunction | None, logits: Array, rows: AttentionRows | None, request: Request
) -> Array:
    """Apply ``function`` to logits ``[B, Hk, G * Tq, S]``, reshaped to ``[B, Hq, Tq, S]``."""
    if function is None or rows is None:
        return logits
    pairs = (request.query_heads, request.query_length, request.key_length)
    return function(logits.reshape(-1, *pairs), rows).reshape(logits.shape)


def _rows(request: Request, visible: Array | None) -> AttentionRows:
    """Return all rows of the call."""
    every = jnp.ones((1, 1, request.query_length, request.key_length), bool)
    return AttentionRows(
        jnp.arange(request.query_length, dtype=jnp.int32),
        request.visibility.places(request.query_length),
        every if visible is None else every & visible,
    )


def _masked(logits: Array, visible: Array | None, request: Request) -> Array:
    """Add bias and decay to logits ``[B, Hk, G * Tq, S]``; hide keys with -inf."""
    by_rows = functools.partial(
        pairs_to_rows,
        kv_heads=request.kv_heads,
        groups=request.groups,
        block=request.query_length,
    )
    bias = request.bias
    if callable(bias):
        keys = jnp.arange(request.key_length, dtype=jnp.int32)
        bias = bias(request.visibility.places(request.query_length), keys)
    if bias is not None:
        logits = logits + by_rows(bias).astype(logits.dtype)
    if request.log_decay is not None:
        queries, keys = request.log_decay
        if request.weights_fn is None:
            # Adding to a whole row has no gradient; computing it would give noise.
            queries = lax.stop_gradient(queries)
        decay = decays(queries, keys)
        logits = logits + by_rows(decay).astype(logits.dtype)
    return hide(logits, None if visible is None else by_rows(visible))
