"""Attention by a few blocks of queries, each over all its keys at once, for CPUs.

XLA runs loop bodies and small products on one core there, however many there are. So the
blocks are large and not in a loop, and independent blocks run side by side. Under the causal rule a
block gets only the keys up to its last query. The backward pass recomputes each block's logits from
the inputs and the saved outputs.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from tape_jax._src.attention import reference, rows
from tape_jax._src.attention.request import Request, refuse
from tape_jax._src.core.checks import positive

Array = jax.Array

# The most blocks, the fewest queries per block; logits per block, over batch and heads.
MOST_BLOCKS, LEAST_QUERIES = 4, 128
MOST_LOGITS = 2**22


def check(request: Request) -> None:
    """Raises NotImplementedError if another implementation needs less memory or time."""
    refuse(
        request.visibility.band.window is not None,
        "it computes what a window hides; 'chunked' leaves that out",
    )
    size = block_size(request)
    logits = request.q.shape[0] * request.query_heads * request.key_length * size
    refuse(
        logits > MOST_LOGITS,
        f"a block of {size} queries would have {logits} logits, more than {MOST_LOGITS}",
    )


def block_size(request: Request) -> int:
    """The number of queries in a block."""
    time = request.query_length
    return min(max(LEAST_QUERIES, -(-time // MOST_BLOCKS)), time)


def attend(request: Request, *, block_q: int | None = None) -> tuple[Array, Array | None]:
    """Computes attention, one block of queries after another.

    Args:
      request: the call.
      block_q: queries per block; None: chosen by the call's length.

    Returns:
      As :func:`reference.attend`.

    Raises:
      ValueError: if the size of a block is no positive integer.
    """
    block_q = positive("block_q", block_q, optional=True)
    q, k = request.rotated()
    v, width = request.values(), request.v.shape[-1]
    # CPUs have no products of shorter types, and gradients of keys are sums over blocks.
    q, k, v = (x.astype(request.accumulator_dtype) for x in (q, k, v))
    decay = request.log_decay
    linear = request.scale and request.softcap is None and not request.needs_rows
    if decay is not None and linear:
        q, k = _with_decay(request, q, k)
        decay = jax.lax.stop_gradient(decay)
    if decay is not None:
        decay = (_in_memory(decay[0]), _in_memory(decay[1]))
    request = dataclasses.replace(
        request, q=q, k=k, v=v, state=None, query_state=None, log_decay=decay
    )
    time, size = request.query_length, block_q or block_size(request)
    ends = [min(start + size, time) for start in range(0, time, size)]
    parts = [_block(request, start, end) for start, end in zip([0, *ends], ends, strict=False)]
    out = jnp.concatenate(parts, axis=1)
    return out[..., :width], None if out.shape[-1] == width else out[..., width:]


def _with_decay(request: Request, q: Array, k: Array) -> tuple[Array, Array]:
    """Adds columns to queries and keys, whose products are 0 and carry the decay's gradient.

    The decay's gradient is a sum over queries. With these columns, the product for the keys'
    gradient also gives this one, without another pass over all pairs. Adding to whole rows has
    no gradient.
    """
    assert request.log_decay is not None
    decay, groups = request.log_decay[1], request.groups
    nothing = (jax.lax.stop_gradient(decay) - decay) / request.scale
    nothing = jnp.broadcast_to(nothing, (*k.shape[:2], request.query_heads))
    ones = jnp.tile(jnp.eye(groups, dtype=q.dtype), (request.kv_heads, 1))
    return (
        jnp.concatenate([q, jnp.broadcast_to(ones, (*q.shape[:-1], groups))], axis=-1),
        jnp.concatenate([k, nothing.reshape(*k.shape[:-1], groups).astype(k.dtype)], axis=-1),
    )


def _in_memory(decay: Array) -> Array:
    """Copies ``decay`` by a product, which XLA does not repeat for each pair like a sum's end.

    Heads with non-finite numbers become NaN.
    """
    finite = jnp.isfinite(decay)
    same = jnp.eye(decay.shape[-1], dtype=decay.dtype)
    copied = jnp.matmul(jnp.where(finite, decay, 0), same, precision=jax.lax.Precision.HIGHEST)
    return jnp.where(finite.all(-2, keepdims=True), copied, jnp.nan)


def _block(request: Request, start: int, end: int) -> Array:
    """Compute attention over values for queries ``start`` to ``end``."""
    # Cut inside, so that the backward passes of all blocks share the kept arrays.
    policy = jax.checkpoint_policies.save_only_these_names(reference.PRODUCT)

    @functools.partial(jax.checkpoint, policy=policy)
    def attend(q: Array, k: Array, v: Array) -> Array:
        whole = dataclasses.replace(request, q=q, k=k, v=v)
        return reference.attend(rows.seen_part(whole, start, end - start))[0]

    return attend(request.q, request.k, request.v)
