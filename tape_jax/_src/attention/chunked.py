"""Attention by online softmax over blocks, in plain JAX: O(T) memory in both directions.

Queries and keys are cut into blocks. For each block of queries, a loop runs over the blocks of keys
that the causal rule and the window let it see. It keeps a running maximum, a running sum and the
weighted values ``[v | e]`` (Milakov and Gimelshein, 2018; Rabe and Staats, 2021). For the backward
pass, the inputs, the output and each row's maximum and sum are saved; each block's probabilities
are recomputed (FlashAttention; Dao et al., 2022).
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tape_jax._src.attention.block_bias import (
    ArrayBias,
    BlockBias,
    DecayBias,
    FunctionBias,
    SumOfBiases,
)
from tape_jax._src.attention.request import (
    Request,
    from_rows,
    hide,
    pairs_to_rows,
    refuse,
    refuse_rows,
    scaled_beforehand,
    to_rows,
)
from tape_jax._src.attention.visibility import Visibility, visible_blocks
from tape_jax._src.core import algebra
from tape_jax._src.core.checks import positive
from tape_jax._src.core.explicit import varying, varying_names
from tape_jax._src.core.padding import pad_to_multiple
from tape_jax._src.core.partition import once_differentiated

Array = jax.Array

# Logits in one block, over batch and heads. On a CPU, 2^18 in float32 fill 1 MiB, a level-2 cache.
# This is within 7 % of the best power of two, forward and backward, from 1 to 32 heads in all and T
# 256 to 4096. Not measured elsewhere.
BLOCK_LOGITS = {"cpu": 2**18}
BLOCK_LOGITS_ELSEWHERE = 2**24


# Fields of a request with gradients.
DIFFERENTIABLE = ("q", "k", "v", "state", "query_state", "bias", "log_decay")


def check(request: Request) -> None:
    """Raises NotImplementedError for calls that need whole rows of logits, or lack derivatives."""
    refuse_rows(request)
    arrays = {name: getattr(request, name) for name in DIFFERENTIABLE if name != "bias"}
    refuse(
        callable(request.bias) and bool(varying_names(arrays, request.visibility)),
        "a function as bias= has no derivative here in jax.shard_map: give that check_vma=False",
    )


def attend(
    request: Request, *, block_q: int | None = None, block_k: int | None = None
) -> tuple[Array, Array | None]:
    """Computes attention block by block.

    Args:
      request: the call.
      block_q: queries in a block; None chooses by the size of the call.
      block_k: keys in a block; None: likewise.

    Returns:
      ``o [B, Tq, Hq, Dv]`` and ``a [B, Tq, Hq, De]`` (None if no state is attended), in the
      accumulator type.

    Raises:
      ValueError: if a block size is not a positive integer.
    """
    block_q, block_k = (
        positive(name, size, optional=True)
        for name, size in (("block_q", block_q), ("block_k", block_k))
    )
    default_q, default_k = default_blocks(request)
    request = _varying_alike(request)
    q, k = request.rotated()
    q, scale = scaled_beforehand(q, request.scale)
    blocks = Blocks(
        query_length=request.query_length,
        key_length=request.key_length,
        block_q=min(block_q or default_q, request.query_length),
        block_k=min(block_k or default_k, request.key_length),
        groups=request.groups,
        scale=scale,
        softcap=request.softcap,
    )
    visibility = _padded_visibility(request.visibility, blocks)
    bias, source = _block_bias(request, blocks, jnp.asarray(visibility.query_offset))
    arrays = Arrays(
        q=to_rows(pad_to_multiple(q, blocks.block_q, axis=1), request.kv_heads, blocks.block_q),
        k=pad_to_multiple(k.transpose(0, 2, 1, 3), blocks.block_k, axis=2),
        values=pad_to_multiple(request.values().transpose(0, 2, 1, 3), blocks.block_k, axis=2),
        bias=source,
        visibility=visibility,
    )
    if callable(request.bias):
        # Other calls cannot reuse this program, so it lives only as long as this call.
        out = jax.jit(partial(_attend, blocks, bias))(arrays)
    else:
        out = _attend_compiled(blocks, bias, arrays)
    out = from_rows(out, request.query_heads, blocks.block_q)[:, : request.query_length]
    width = request.v.shape[-1]
    return out[..., :width], None if out.shape[-1] == width else out[..., width:]


def _varying_alike(request: Request) -> Request:
    """Return a call whose arrays that have gradients vary along manual mesh axes alike.

    Gradients of arrays that devices share are then summed once, outside of the loops.
    """
    if callable(request.bias):
        return request
    found = {name: getattr(request, name) for name in DIFFERENTIABLE}
    return dataclasses.replace(request, **varying(found, found, request.visibility))


def default_blocks(request: Request) -> tuple[int, int]:
    """Return the numbers of queries and keys in a block; see :func:`block_length`."""
    heads = request.q.shape[0] * request.query_heads
    return block_length(request.query_length, heads), block_length(request.key_length, heads)


def block_length(length: int, heads: int) -> int:
    """Return the length of equal blocks that ``BLOCK_LOGITS`` allows for ``heads``."""
    budget = BLOCK_LOGITS.get(jax.default_backend(), BLOCK_LOGITS_ELSEWHERE)
    side = math.isqrt(budget // heads)
    largest = 2 ** (min(max(side, 64), 256).bit_length() - 1)
    count = -(-length // largest)
    return -(-length // (8 * count)) * 8


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The static part of a call: sizes and numbers of blocks.

    Indices of blocks are ``i`` for queries and ``j`` for keys.
    """

    query_length: int
    key_length: int
    block_q: int
    block_k: int
    groups: int
    scale: float
    softcap: float | None = None

    @property
    def rows(self) -> int:
        """Rows in a block of queries, over all query heads of a key/value head."""
        return self.groups * self.block_q

    @property
    def query_blocks(self) -> int:
        """Number of blocks of queries."""
        return -(-self.query_length // self.block_q)

    @property
    def key_blocks(self) -> int:
        """Number of blocks of keys."""
        return -(-self.key_length // self.block_k)

    def visible_keys(self, i: Array, visibility: Visibility) -> tuple[Array, Array]:
        """Return the range of key blocks that query block ``i`` may see by position."""
        band, offset = visibility.by_index, jnp.asarray(visibility.query_offset)
        first = i * self.block_q + offset.min()
        last = jnp.minimum((i + 1) * self.block_q, self.query_length) - 1 + offset.max()
        limits = (band.lowest, band.highest)
        return visible_blocks(limits, first, last, self.block_k, self.key_blocks)

    def meet(self, visibility: Visibility) -> Array | None:
        """Return :meth:`Visibility.blocks_meet` of these blocks."""
        return visibility.blocks_meet(
            (self.block_q, self.query_blocks), (self.block_k, self.key_blocks)
        )

    def visible(self, visibility: Visibility, i: Array, j: Array) -> Array | None:
        """Return which pairs of block ``(i, j)`` are visible, ``[B|1, Hq|1, Q|1, K|1]``."""
        own = visibility.of_queries(i * self.block_q, self.block_q)
        pairs = own.of_keys(j * self.block_k, self.block_k).pairs(self.block_q, self.block_k)
        if self.key_length % self.block_k:
            exist = j * self.block_k + jnp.arange(self.block_k) < self.key_length
            pairs = exist[None, None, None] if pairs is None else pairs & exist
        return pairs


class Arrays(NamedTuple):
    """Inputs in heads-first order, padded to whole blocks (``Tq'``, ``S'``).

    Attributes:
      q: rotated queries by rows ``[B, Hk, G * Tq', D']``.
      k: rotated keys ``[B, Hk, S', D']``.
      values: ``[v | e]``, ``[B, Hk, S', Dv + De]``.
      bias: the source of the bias.
      visibility: of padded queries and keys; its offset is an int32 array.
    """

    q: Array
    k: Array
    values: Array
    bias: Any
    visibility: Any


def _block_bias(request: Request, blocks: Blocks, offset: Array) -> tuple[BlockBias | None, Any]:
    """Returns the bias, decay included, and its source."""
    bias = request.bias
    found: list[tuple[BlockBias, Any]] = []
    if callable(bias):
        traced = FunctionBias.trace(
            bias,
            offset,
            query_length=blocks.query_length,
            key_length=blocks.key_length,
            block_q=blocks.block_q,
            block_k=blocks.block_k,
        )
        found.append(traced)
    elif bias is not None:
        found.append((ArrayBias(blocks.block_q, blocks.block_k), _padded_pairs(bias, blocks)))
    if request.log_decay is not None:
        decay = DecayBias(blocks.block_q, blocks.block_k)
        found.append((decay, _padded_times(*request.log_decay, blocks)))
    if len(found) < 2:
        return found[0] if found else (None, None)
    biases, sources = zip(*found, strict=True)
    return SumOfBiases(biases), sources


def _padded_pairs(x: Array, blocks: Blocks) -> Array:
    """Pads biases or masks ``[B|1, Hq|1, Tq|1, S|1]`` to whole blocks."""
    for axis, size in ((2, blocks.block_q), (3, blocks.block_k)):
        if x.shape[axis] > 1:
            x = pad_to_multiple(x, size, axis)
    return x


def _padded_visibility(visibility: Visibility, blocks: Blocks) -> Visibility:
    """Return ``visibility`` padded to whole blocks; the last id repeats, so no range grows."""
    segments, mask, counts = visibility.segments, visibility.mask, visibility.counts
    return dataclasses.replace(
        visibility,
        query_offset=jnp.asarray(visibility.query_offset, jnp.int32),
        segments=None if segments is None else _padded_times(*segments, blocks),
        mask=None if mask is None else _padded_pairs(mask, blocks),
        counts=None if counts is None else _padded_times(*counts, blocks),
    )


def _padded_times(queries: Array, keys: Array, blocks: Blocks) -> tuple[Array, Array]:
    """Pads ``[B|1, Tq, ...]`` and ``[B|1, S, ...]`` to whole blocks with the last values."""
    return (
        pad_to_multiple(queries, blocks.block_q, axis=1, mode="edge"),
        pad_to_multiple(keys, blocks.block_k, axis=1, mode="edge"),
    )


def _scores(blocks: Blocks, arrays: Arrays, i: Array, j: Array) -> Array:
    """Returns the scaled, bounded logits of one block, ``[B, Hk, G * block_q, block_k]``."""
    q = _take(arrays.q, i, blocks.rows)
    k = _take(arrays.k, j, blocks.block_k)
    return algebra.capped(_product("bhrd,bhkd->bhrk", q, k) * blocks.scale, blocks.softcap)


def _logits(
    blocks: Blocks, bias: BlockBias | None, arrays: Arrays, scores: Array, i: Array, j: Array
) -> Array:
    """Return the logits of one block: its :func:`_scores` with the bias, masked."""
    logits = scores
    by_rows = partial(
        pairs_to_rows, kv_heads=scores.shape[1], groups=blocks.groups, block=blocks.block_q
    )
    if bias is not None:
        logits = logits + by_rows(bias.block(arrays.bias, i, j)).astype(logits.dtype)
    visible = blocks.visible(arrays.visibility, i, j)
    return hide(logits, None if visible is None else by_rows(visible))


def _product(spec: str, x: Array, y: Array) -> Array:
    """Multiplies operands in the compute type and sums in at least float32."""
    return jnp.einsum(spec, x, y, preferred_element_type=algebra.at_least_float32(x.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(blocks: Blocks, bias: BlockBias | None, arrays: Arrays) -> Array:
    """Computes attention over ``values``, ``[B, Hk, G * Tq', Dv + De]`` in the accumulator type."""
    return forward(blocks, bias, arrays)[0]


class Saved(NamedTuple):
    """Residuals of the backward pass: the inputs, the output and each row's softmax.

    ``top`` is the largest logit, ``total`` the sum of ``exp(logit - top)``. They stay apart because
    a large ``top`` would round the other away in ``top + log(total)``.
    """

    arrays: Arrays
    out: Array
    top: Array
    total: Array


def forward(blocks: Blocks, bias: BlockBias | None, arrays: Arrays) -> tuple[Array, Saved]:
    """Returns the output and the backward pass's residuals."""
    meet = blocks.meet(arrays.visibility)
    rows = (*arrays.q.shape[:2], blocks.rows)
    acc = algebra.at_least_float32(arrays.q.dtype)

    def visit(i, j, carry):
        """Adds one block of keys to the running softmax of a block of queries."""
        top, total, out = carry
        logits = _logits(blocks, bias, arrays, _scores(blocks, arrays, i, j), i, j)
        values = _take(arrays.values, j, blocks.block_k)
        new_top = jnp.maximum(top, jnp.max(logits, axis=-1, keepdims=True))
        weights = jnp.exp(logits - new_top)
        shrink = jnp.exp(top - new_top)
        total = total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
        out = out * shrink + _product("bhrk,bhkd->bhrd", weights.astype(values.dtype), values)
        return new_top, total, out

    def query_block(i):
        def step(j, carry):
            if meet is None:
                return visit(i, j, carry)
            return lax.cond(meet[i, j], lambda c: visit(i, j, c), lambda c: c, carry)

        start = (
            # Not -inf, so that the weights of a row that sees no key are 0 without a special case.
            jnp.full((*rows, 1), jnp.finfo(acc).min, acc),
            jnp.zeros((*rows, 1), acc),
            jnp.zeros((*rows, arrays.values.shape[-1]), acc),
        )
        limits = blocks.visible_keys(i, arrays.visibility)
        top, total, out = lax.fori_loop(*limits, step, varying(start, arrays))
        total = jnp.where(total > 0, total, 1)
        return out / total, top, total

    found = lax.map(query_block, jnp.arange(blocks.query_blocks, dtype=jnp.int32))
    saved = Saved(arrays, *map(_join, found))
    return saved.out, saved


def _backward(blocks: Blocks, bias: BlockBias | None, saved: Saved, d_out: Array) -> tuple[Arrays]:
    """Returns the cotangents of the arrays."""
    found = gradients(blocks, bias, saved, d_out)
    compute = saved.arrays.q.dtype
    q, k, values = (x.astype(compute) for x in (found.q, found.k, found.values))
    return (found._replace(q=q, k=k, values=values),)


def gradients(blocks: Blocks, bias: BlockBias | None, saved: Saved, d_out: Array) -> Arrays:
    """Returns gradients of the arrays; those of q, k and values are in the accumulator type.

    If the keys are only part of those behind the output, ``saved`` still describes all keys. The
    gradients of q are then the part's share.
    """
    arrays = saved.arrays
    compute, acc = arrays.q.dtype, saved.out.dtype
    delta = jnp.sum(d_out * saved.out, axis=-1, keepdims=True)
    d_out = d_out.astype(compute)
    meet = blocks.meet(arrays.visibility)

    def visit(i, j):
        """Return block (i, j)'s share of the gradients of q, k, values and the bias."""
        q, k = _take(arrays.q, i, blocks.rows), _take(arrays.k, j, blocks.block_k)
        values = _take(arrays.values, j, blocks.block_k)
        d_rows = _take(d_out, i, blocks.rows)
        scores = _scores(blocks, arrays, i, j)
        logits = _logits(blocks, bias, arrays, scores, i, j)
        top, total = (_take(x, i, blocks.rows) for x in (saved.top, saved.total))
        weights = jnp.exp(logits - top) / total
        d_weights = _product("bhrd,bhkd->bhrk", d_rows, values)
        d_logits = weights * (d_weights - _take(delta, i, blocks.rows))
        d_bias = None
        if bias is not None:
            pairs = d_logits.reshape(d_logits.shape[0], -1, blocks.block_q, blocks.block_k)
            d_bias = bias.block_gradient(arrays.bias, i, j, pairs)
        if blocks.softcap is not None:
            d_logits = d_logits * (1 - jnp.square(scores / blocks.softcap))
        weights, d_logits = weights.astype(compute), d_logits.astype(compute)
        return (
            _product("bhrk,bhkd->bhrd", d_logits, k),
            _product("bhrk,bhrd->bhkd", d_logits, q),
            _product("bhrk,bhrd->bhkd", weights, d_rows),
            d_bias,
        )

    def query_block(totals, i):
        def step(j, carry):
            dq, (dk, d_values, d_bias) = carry
            if meet is None:
                parts = visit(i, j)
            else:
                shapes = jax.eval_shape(visit, i, j)
                nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
                parts = lax.cond(meet[i, j], lambda: visit(i, j), lambda: varying(nothing, arrays))
            if bias is not None:
                d_bias = bias.add(d_bias, parts[3], i, j)
            return dq + parts[0], (_add_at(dk, parts[1], j), _add_at(d_values, parts[2], j), d_bias)

        dq = jnp.zeros((*arrays.q.shape[:2], blocks.rows, arrays.q.shape[-1]), acc)
        limits = blocks.visible_keys(i, arrays.visibility)
        dq, totals = lax.fori_loop(*limits, step, (varying(dq, arrays), totals))
        return totals, dq

    start = (
        jnp.zeros(arrays.k.shape, acc),
        jnp.zeros(arrays.values.shape, acc),
        None if bias is None else bias.zero_gradient(arrays.bias),
    )
    index = jnp.arange(blocks.query_blocks, dtype=jnp.int32)
    (dk, d_values, d_bias), dq = lax.scan(query_block, varying(start, arrays), index)
    return Arrays(
        q=_join(dq) * blocks.scale,
        k=dk * blocks.scale,
        values=d_values,
        bias=None if bias is None else bias.finish(arrays.bias, d_bias),
        visibility=None,
    )


_attend.defvjp(
    lambda blocks, bias, arrays: once_differentiated(partial(forward, blocks, bias))(arrays),
    lambda blocks, bias, *given: once_differentiated(partial(_backward, blocks, bias))(*given),
)
_attend_compiled = jax.jit(_attend, static_argnums=(0, 1))


def _take(x: Array, index: Array, size: int) -> Array:
    """Takes block ``index`` of rows, along axis 2."""
    return lax.dynamic_slice_in_dim(x, index * size, size, 2)


def _add_at(x: Array, part: Array, index: Array) -> Array:
    """Adds ``part`` to block ``index`` of keys or values."""
    size = part.shape[2]
    return lax.dynamic_update_slice_in_dim(x, part + _take(x, index, size), index * size, 2)


def _join(x: Array) -> Array:
    """Reshapes ``[blocks, B, Hk, rows, D]`` to ``[B, Hk, blocks * rows, D]``."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])
