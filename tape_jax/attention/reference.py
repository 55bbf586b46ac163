"""Attention over values and position states, written to be read: the specification.

With ``P`` the softmax over the visible keys of ``scale * <rotate(q_i, e_i), rotate(k_j, e_j)>
+ bias_ij``, the outputs are ``o = P v`` and ``a = P e`` (TAPE, section 3.2). One ``P`` serves
both. Every other backend must agree with this one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tape_jax.attention.request import (
    Request,
    group_heads,
    group_pairs,
    same_segment,
    ungroup_heads,
    visible_positions,
)

Array = jax.Array


def check(request: Request) -> None:
    """This backend can do every legal call."""
    del request


def attend(request: Request) -> tuple[Array, Array | None]:
    """Computes attention with all ``Tq x S`` logits in memory.

    Returns:
      ``o [B, Tq, Hq, Dv]`` and ``a [B, Tq, Hq, De]`` (None if no state is attended), in the
      accumulator type. A query that sees no key gets zeros, and its gradients are zero.
    """
    acc = request.accumulator_dtype
    q, k = request.rotated()
    # Heads before time: XLA's batched products are twice as fast in this order on a CPU.
    q = group_heads(q, request.kv_heads)
    k = k.transpose(0, 2, 1, 3)
    logits = jnp.einsum("bhgqd,bhkd->bhgqk", q, k, preferred_element_type=acc) * request.scale
    weights, total = _softmax_terms(_masked(logits, request))
    weights = weights.astype(request.compute_dtype)
    # Dividing the outputs, not the weights, saves passes over Tq x S in both directions.
    share = jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1), 0)

    def average(values: Array) -> Array:
        values = values.astype(request.compute_dtype).transpose(0, 2, 1, 3)
        values = jnp.broadcast_to(values, (*k.shape[:2], *values.shape[2:]))
        out = jnp.einsum("bhgqk,bhkd->bhgqd", weights, values, preferred_element_type=acc)
        return ungroup_heads(out * share)

    state = request.attended_state()
    return average(request.v), None if state is None else average(state)


def _masked(logits: Array, request: Request) -> Array:
    """Adds the bias to ``[B, Hk, G, Tq, S]`` logits and puts -inf where a key is not visible."""
    i = jnp.arange(request.query_length, dtype=jnp.int32) + request.query_offset
    j = jnp.arange(request.key_length, dtype=jnp.int32)
    bias = request.bias(i, j) if callable(request.bias) else request.bias
    if bias is not None:
        logits = logits + group_pairs(bias, request.kv_heads).astype(logits.dtype)
    rules = [visible_positions(i, j, causal=request.causal, window=request.window)]
    if request.segments is not None:
        rules.append(same_segment(*request.segments))
    if request.mask is not None:
        rules.append(group_pairs(request.mask, request.kv_heads))
    for visible in rules:
        if visible is not None:
            logits = jnp.where(visible, logits, -jnp.inf)
    return logits


def _softmax_terms(logits: Array) -> tuple[Array, Array]:
    """``exp(logits - max)`` and its sum over keys, 0 where all logits are -inf."""
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf))
    top = jnp.where(jnp.isfinite(top), top, 0)
    weights = jnp.exp(logits - top)
    return weights, jnp.sum(weights, axis=-1, keepdims=True)
