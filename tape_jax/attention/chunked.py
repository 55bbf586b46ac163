"""Attention by online softmax over blocks, in plain JAX: O(T) memory in both directions.

Queries and keys are cut into blocks. For each block of queries a loop runs over the blocks of keys
that the causal rule and the window let it see, keeping a running maximum, a running sum and the
weighted values ``[v | e]`` (Milakov and Gimelshein, 2018; Rabe and Staats, 2021). The backward pass
keeps the inputs, the output and the log-sum-exp of each row, and computes each block's
probabilities again (FlashAttention; Dao et al., 2022).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tape_jax.attention.bias import ArrayBias, BlockBias, FunctionBias
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
    """Raises NotImplementedError for calls with a mask, which is as large as the logits."""
    if request.mask is not None:
        raise NotImplementedError("mask= is as large as the logits; only 'reference' takes it")


def attend(
    request: Request, *, block_q: int | None = None, block_k: int | None = None
) -> tuple[Array, Array | None]:
    """Computes attention block by block.

    Args:
      request: the call.
      block_q: queries in a block; None: chosen by the size of the call.
      block_k: keys in a block; None: likewise.

    Returns:
      ``o [B, Tq, Hq, Dv]`` and ``a [B, Tq, Hq, De]`` (None if no state is attended), in the
      accumulator type.

    Raises:
      NotImplementedError: if the call has a mask.
    """
    check(request)
    default_q, default_k = default_blocks(request)
    blocks = _Blocks(
        query_length=request.query_length,
        key_length=request.key_length,
        block_q=min(block_q or default_q, request.query_length),
        block_k=min(block_k or default_k, request.key_length),
        causal=request.causal,
        window=request.window,
        scale=request.scale,
    )
    q, k = request.rotated()
    offset = jnp.asarray(request.query_offset, jnp.int32)
    bias, source = _block_bias(request, blocks, offset)
    arrays = _Arrays(
        q=_pad(group_heads(q, request.kv_heads), blocks.block_q, axis=3),
        k=_pad(k.transpose(0, 2, 1, 3), blocks.block_k, axis=2),
        values=_pad(_values(request), blocks.block_k, axis=2),
        bias=source,
        segments=_padded_segments(request, blocks),
        offset=offset,
    )
    out = _attend(blocks, bias, arrays)
    out = ungroup_heads(out[:, :, :, : request.query_length])
    width = request.v.shape[-1]
    return out[..., :width], None if out.shape[-1] == width else out[..., width:]


def default_blocks(request: Request) -> tuple[int, int]:
    """Queries and keys in a block."""
    del request
    return 256, 256


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """What is known about the blocks at compile time.

    Indices of blocks are ``i`` for queries and ``j`` for keys.
    """

    query_length: int
    key_length: int
    block_q: int
    block_k: int
    causal: bool
    window: int | None
    scale: float

    @property
    def query_blocks(self) -> int:
        return -(-self.query_length // self.block_q)

    @property
    def key_blocks(self) -> int:
        return -(-self.key_length // self.block_k)

    def query_index(self, i: Array, offset: Array) -> Array:
        """Indices of the queries of block ``i``, offset included."""
        return i * self.block_q + jnp.arange(self.block_q, dtype=jnp.int32) + offset

    def key_index(self, j: Array) -> Array:
        """Indices of the keys of block ``j``."""
        return j * self.block_k + jnp.arange(self.block_k, dtype=jnp.int32)

    def visible_keys(self, i: Array, offset: Array) -> tuple[Array | int, Array | int]:
        """First key block that any query of block ``i`` sees by position, and one past the last."""
        first = i * self.block_q + offset
        last = jnp.minimum((i + 1) * self.block_q, self.query_length) - 1 + offset
        begin, end = jnp.int32(0), jnp.int32(self.key_blocks)
        if self.causal:
            end = jnp.minimum(end, last // self.block_k + 1)
        if self.window is not None:
            begin = jnp.maximum(begin, (first - self.window + 1) // self.block_k)
        if self.window is not None and not self.causal:
            end = jnp.minimum(end, (last + self.window - 1) // self.block_k + 1)
        return begin, end


class _Arrays(NamedTuple):
    """Inputs in heads-first order, padded to whole blocks (``Tq'``, ``S'``).

    Attributes:
      q: rotated queries ``[B, Hk, G, Tq', D']``.
      k: rotated keys ``[B, Hk, S', D']``.
      values: ``[v | e]``, ``[B, Hk, S', Dv + De]``.
      bias: the source of the bias.
      segments: ids ``[B|1, Tq']`` and ``[B|1, S']``, or None.
      offset: scalar int32 added to query indices.
    """

    q: Array
    k: Array
    values: Array
    bias: Any
    segments: tuple[Array, Array] | None
    offset: Array


def _values(request: Request) -> Array:
    """``[v | e]``, ``[B, Hk, S, Dv + De]`` in the compute type."""
    parts = [request.v.astype(request.compute_dtype)]
    state = request.attended_state()
    if state is not None:
        parts.append(jnp.broadcast_to(state, (*request.v.shape[:-1], state.shape[-1])))
    return jnp.concatenate(parts, axis=-1).transpose(0, 2, 1, 3)


def _block_bias(request: Request, blocks: _Blocks, offset: Array) -> tuple[BlockBias | None, Any]:
    """The bias and its source."""
    bias = request.bias
    if bias is None:
        return None, None
    if callable(bias):
        return FunctionBias.trace(
            bias,
            offset,
            query_length=blocks.query_length,
            key_length=blocks.key_length,
            block_q=blocks.block_q,
            block_k=blocks.block_k,
        )
    for axis, size in ((2, blocks.block_q), (3, blocks.block_k)):
        if bias.shape[axis] > 1:
            bias = _pad(bias, size, axis=axis)
    return ArrayBias(blocks.block_q, blocks.block_k), bias


def _padded_segments(request: Request, blocks: _Blocks) -> tuple[Array, Array] | None:
    """Segment ids; padding repeats the last id, so that a block's range of ids does not grow."""
    if request.segments is None:
        return None
    queries, keys = request.segments
    return _pad(queries, blocks.block_q, axis=1, mode="edge"), _pad(
        keys, blocks.block_k, axis=1, mode="edge"
    )


def _pad(x: Array, size: int, *, axis: int, mode: str = "constant") -> Array:
    """Pads ``axis`` to a multiple of ``size``."""
    missing = -x.shape[axis] % size
    if not missing:
        return x
    return jnp.pad(x, [(0, missing if n == axis else 0) for n in range(x.ndim)], mode=mode)


def _take(x: Array, index: Array, size: int, axis: int) -> Array:
    """Block ``index`` along ``axis``."""
    return lax.dynamic_slice_in_dim(x, index * size, size, axis)


def _add_at(x: Array, part: Array, index: Array, axis: int) -> Array:
    """Adds ``part`` to block ``index`` along ``axis``."""
    size = part.shape[axis]
    part = part + _take(x, index, size, axis)
    return lax.dynamic_update_slice_in_dim(x, part, index * size, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(blocks: _Blocks, bias: BlockBias | None, arrays: _Arrays) -> Array:
    """Attention over ``values``: ``[B, Hk, G, Tq', Dv + De]`` in the accumulator type."""
    return _forward(blocks, bias, arrays)[0]


def _logits(blocks: _Blocks, bias: BlockBias | None, arrays: _Arrays, i: Array, j: Array) -> Array:
    """Masked logits of one block, ``[B, Hk, G, block_q, block_k]``."""
    q = _take(arrays.q, i, blocks.block_q, 3)
    k = _take(arrays.k, j, blocks.block_k, 2)
    acc = jnp.promote_types(q.dtype, jnp.float32)
    logits = jnp.einsum("bhgqd,bhkd->bhgqk", q, k, preferred_element_type=acc) * blocks.scale
    if bias is not None:
        added = bias.block(arrays.bias, i, j)
        logits = logits + group_pairs(added, arrays.k.shape[1]).astype(acc)
    key_index = blocks.key_index(j)
    rules = [
        visible_positions(
            blocks.query_index(i, arrays.offset),
            key_index,
            causal=blocks.causal,
            window=blocks.window,
        )
    ]
    if blocks.key_length % blocks.block_k:
        rules.append(key_index < blocks.key_length)
    if arrays.segments is not None:
        queries, keys = arrays.segments
        rules.append(
            same_segment(_take(queries, i, blocks.block_q, 1), _take(keys, j, blocks.block_k, 1))
        )
    for visible in rules:
        if visible is not None:
            logits = jnp.where(visible, logits, -jnp.inf)
    return logits


def _segments_meet(blocks: _Blocks, arrays: _Arrays) -> Array | None:
    """``[query blocks, key blocks]``: whether the blocks' ranges of segment ids overlap."""
    if arrays.segments is None:
        return None
    queries = arrays.segments[0].reshape(-1, blocks.query_blocks, blocks.block_q)
    keys = arrays.segments[1].reshape(-1, blocks.key_blocks, blocks.block_k)
    lowest = jnp.maximum(queries.min((0, 2))[:, None], keys.min((0, 2)))
    highest = jnp.minimum(queries.max((0, 2))[:, None], keys.max((0, 2)))
    return lowest <= highest


def _forward(
    blocks: _Blocks, bias: BlockBias | None, arrays: _Arrays
) -> tuple[Array, tuple[_Arrays, Array, Array]]:
    """Output, and what the backward pass needs."""
    acc = jnp.promote_types(arrays.q.dtype, jnp.float32)
    b, heads, groups, _, _ = arrays.q.shape
    rows = (b, heads, groups, blocks.block_q)
    meet = _segments_meet(blocks, arrays)

    def visit(i, j, carry):
        top, total, out = carry
        logits = _logits(blocks, bias, arrays, i, j)
        values = _take(arrays.values, j, blocks.block_k, 2)
        new_top = jnp.maximum(top, jnp.max(logits, axis=-1, keepdims=True))
        weights = jnp.exp(logits - new_top)
        shrink = jnp.exp(top - new_top)
        total = total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
        part = jnp.einsum(
            "bhgqk,bhkd->bhgqd", weights.astype(values.dtype), values, preferred_element_type=acc
        )
        return new_top, total, out * shrink + part

    def query_block(i):
        def step(j, carry):
            if meet is None:
                return visit(i, j, carry)
            return lax.cond(meet[i, j], lambda c: visit(i, j, c), lambda c: c, carry)

        # The lowest finite number, not -inf: a row that sees no key then needs no special case.
        start = (
            jnp.full((*rows, 1), jnp.finfo(acc).min, acc),
            jnp.zeros((*rows, 1), acc),
            jnp.zeros((*rows, arrays.values.shape[-1]), acc),
        )
        top, total, out = lax.fori_loop(*blocks.visible_keys(i, arrays.offset), step, start)
        total = jnp.where(total > 0, total, 1)
        return out / total, top + jnp.log(total)

    out, log_sum = lax.map(query_block, jnp.arange(blocks.query_blocks, dtype=jnp.int32))
    out, log_sum = _join(out), _join(log_sum)
    return out, (arrays, out, log_sum)


def _join(x: Array) -> Array:
    """``[blocks, B, Hk, G, block_q, D]`` to ``[B, Hk, G, Tq', D]``."""
    x = jnp.moveaxis(x, 0, 3)
    return x.reshape(*x.shape[:3], -1, x.shape[-1])


def _backward(
    blocks: _Blocks,
    bias: BlockBias | None,
    saved: tuple[_Arrays, Array, Array],
    out_gradient: Array,
) -> tuple[_Arrays]:
    """Cotangents of the inputs."""
    arrays, out, log_sum = saved
    acc = out.dtype
    compute = arrays.q.dtype
    delta = jnp.sum(out_gradient * out, axis=-1, keepdims=True)
    out_gradient = out_gradient.astype(compute)
    meet = _segments_meet(blocks, arrays)

    def visit(i, j):
        """What block (i, j) adds to the gradients of q, k, values and the bias."""
        q, k = _take(arrays.q, i, blocks.block_q, 3), _take(arrays.k, j, blocks.block_k, 2)
        values = _take(arrays.values, j, blocks.block_k, 2)
        d_out = _take(out_gradient, i, blocks.block_q, 3)
        weights = jnp.exp(
            _logits(blocks, bias, arrays, i, j) - _take(log_sum, i, blocks.block_q, 3)
        )
        d_weights = jnp.einsum("bhgqd,bhkd->bhgqk", d_out, values, preferred_element_type=acc)
        d_logits = weights * (d_weights - _take(delta, i, blocks.block_q, 3))
        d_bias = None
        if bias is not None:
            pairs = d_logits.reshape(d_logits.shape[0], -1, *d_logits.shape[3:])
            d_bias = bias.block_gradient(arrays.bias, i, j, pairs)
        weights, d_logits = weights.astype(compute), d_logits.astype(compute)
        product = functools.partial(jnp.einsum, preferred_element_type=acc)
        # Keys' gradients are kept as [.., D, S']: no block of weights is ever transposed.
        return (
            product("bhgqk,bhkd->bhgqd", d_logits, k),
            product("bhgqd,bhgqk->bhdk", q, d_logits),
            product("bhgqd,bhgqk->bhdk", d_out, weights),
            d_bias,
        )

    def query_block(totals, i):
        def step(j, carry):
            if meet is None:
                parts = visit(i, j)
            else:
                shapes = jax.eval_shape(visit, i, j)
                nothing = lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
                parts = lax.cond(meet[i, j], lambda: visit(i, j), nothing)
            dq, (dk, d_values, d_bias) = carry
            dq = dq + parts[0]
            dk = _add_at(dk, parts[1], j, 3)
            d_values = _add_at(d_values, parts[2], j, 3)
            if bias is not None:
                d_bias = bias.add(d_bias, parts[3], i, j)
            return dq, (dk, d_values, d_bias)

        b, heads, groups, _, dim = arrays.q.shape
        dq = jnp.zeros((b, heads, groups, blocks.block_q, dim), acc)
        bounds = blocks.visible_keys(i, arrays.offset)
        dq, totals = lax.fori_loop(*bounds, step, (dq, totals))
        return totals, dq

    zeros = (
        jnp.zeros(arrays.k.swapaxes(2, 3).shape, acc),
        jnp.zeros(arrays.values.swapaxes(2, 3).shape, acc),
        None if bias is None else bias.zero_gradient(arrays.bias),
    )
    index = jnp.arange(blocks.query_blocks, dtype=jnp.int32)
    (dk, d_values, d_bias), dq = lax.scan(query_block, zeros, index)
    return (
        _Arrays(
            q=(_join(dq) * blocks.scale).astype(compute),
            k=(dk.swapaxes(2, 3) * blocks.scale).astype(compute),
            values=d_values.swapaxes(2, 3).astype(compute),
            bias=None if bias is None else bias.finish(arrays.bias, d_bias),
            segments=None,
            offset=None,
        ),
    )


_attend.defvjp(_forward, _backward)
