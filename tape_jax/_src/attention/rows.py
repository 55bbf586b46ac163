"""Attention by blocks of queries over all keys, for functions of whole rows of logits.

Each block is computed as in ``reference``, and again in the backward pass. So memory grows
with the number of keys, not of pairs (Rabe and Staats, 2021).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tape_jax._src.attention import reference
from tape_jax._src.attention.request import (
    Request,
    RowFunction,
    scaled_beforehand,
)
from tape_jax._src.attention.visibility import part
from tape_jax._src.core.checks import positive

Array = jax.Array

# Logits in one block, over batch and heads.
BLOCK_LOGITS = 2**20
# Under the causal rule, each of this many parts of the queries leaves out later keys.
PARTS = 4


def check(request: Request) -> None:
    """Accepts every call: this backend can do all legal ones."""
    del request


def attend(request: Request, *, block_q: int | None = None) -> tuple[Array, Array | None]:
    """Computes attention, one block of queries at a time.

    Args:
      request: the call.
      block_q: queries per block; None: chosen by the call's size.

    Returns:
      As :func:`reference.attend`.

    Raises:
      ValueError: if the size of a block is no positive integer.
    """
    block_q = positive("block_q", block_q, optional=True)
    time = request.query_length
    size = min(block_q or _block_length(request), time)
    q, k = request.rotated()
    q, scale = scaled_beforehand(q, request.scale)
    request = dataclasses.replace(
        _wide(request, k), q=q, scale=scale, query_state=None, keys_rotated=True
    )
    visibility = request.visibility
    known = visibility.band.is_causal and isinstance(visibility.query_offset, int)
    parts = PARTS if known else 1
    span = size * -(-time // (size * parts))
    found = [
        _by_blocks(seen_part(request, start, min(span, time - start)), size)
        for start in range(0, time, span)
    ]
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *found)


def _wide(request: Request, k: Array) -> Request:
    """Returns a call with wide arrays for all blocks, in whose types their gradients are summed."""

    def wide(x: Any) -> Any:
        if x is None or callable(x):
            return x
        return x.astype(jnp.promote_types(x.dtype, request.accumulator_dtype))

    return dataclasses.replace(
        request, k=wide(k), v=wide(request.v), state=wide(request.state), bias=wide(request.bias)
    )


def _by_blocks(request: Request, size: int) -> tuple[Array, Array | None]:
    """Attention with all keys of a call, at most ``size`` queries at a time."""
    time = request.query_length
    size = min(size, time)

    @jax.checkpoint
    def block(start: Array) -> Any:
        return reference.attend(_of_queries(request, start, size))

    # The last block ends with the last query, so it may begin within the one before.
    starts = jnp.minimum(jnp.arange(0, time, size, dtype=jnp.int32), time - size)
    blocks = lax.map(block, starts)

    def joined(x: Array) -> Array:
        whole = jnp.moveaxis(x[:-1], 0, 1).reshape(x.shape[1], -1, *x.shape[3:])
        return jnp.concatenate([whole, x[-1][:, whole.shape[1] - time :]], axis=1)

    return jax.tree.map(joined, blocks)


def _block_length(request: Request) -> int:
    row = request.q.shape[0] * request.query_heads * request.key_length
    length = max(BLOCK_LOGITS // row, 8)
    # The tiles of accelerators are powers of two.
    return length if jax.default_backend() == "cpu" else 1 << length.bit_length() - 1


def _of_queries(request: Request, start: int | Array, size: int) -> Request:
    """Return the part of a call that belongs to the ``size`` queries from ``start`` on."""

    def shifted(function: RowFunction | None) -> RowFunction | None:
        if function is None:
            return None
        return lambda logits, rows: function(logits, rows._replace(queries=rows.queries + start))

    bias, decay = request.bias, request.log_decay
    return dataclasses.replace(
        request,
        q=lax.dynamic_slice_in_dim(request.q, start, size, 1),
        bias=bias if bias is None or callable(bias) else part(bias, start, size, 2),
        log_decay=None if decay is None else (part(decay[0], start, size, 1), decay[1]),
        visibility=request.visibility.of_queries(start, size),
        logits_fn=shifted(request.logits_fn),
        weights_fn=shifted(request.weights_fn),
    )


def seen_part(request: Request, start: int, size: int) -> Request:
    """Return the request of some queries, without keys that causality hides from them all."""
    own, seen = _of_queries(request, start, size), request.key_length
    visibility = request.visibility
    if visibility.band.is_causal and isinstance(visibility.query_offset, int):
        seen = min(max(start + size + visibility.query_offset, 1), seen)
    return _first_keys(own, seen)


def _first_keys(request: Request, seen: int) -> Request:
    """Return the call with only its first ``seen`` keys."""

    def cut(x: Array, axis: int) -> Array:
        return x if x.shape[axis] == 1 else lax.slice_in_dim(x, 0, seen, axis=axis)

    bias, decay, state = request.bias, request.log_decay, request.state
    return dataclasses.replace(
        request,
        k=cut(request.k, 1),
        v=cut(request.v, 1),
        state=None if state is None else cut(state, 1),
        bias=bias if bias is None or callable(bias) else cut(bias, 3),
        log_decay=None if decay is None else (decay[0], cut(decay[1], 1)),
        visibility=request.visibility.of_keys(0, seen),
    )
