"""Householder-like maps of tokens, multiplied along time between a key and a query.

``A_ij = q_i^T H_i H_{i-1} ... H_{j+1} k_j`` with ``H_t = I - beta_t w_t w_t^T``, of the tokens
``t`` that stand between both and are of their segment. For all pairs of one segment at once,
``A = tril(Q K^T) - tril(Q W^T) (I + slt(B W W^T))^-1 slt(B W K^T)``, where ``slt`` is the strict
lower triangle and ``B = diag(beta)`` (PaTH, section 3).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tape_jax._src.core.algebra import precise_einsum
from tape_jax._src.positions.contextual import rows

Array = jax.Array


class Chunks(NamedTuple):
    """Tokens in ``n`` chunks of ``C``, with the system ``T = I + slt(B W W^T)`` of each.

    Attributes:
      entries: ``W`` and ``K`` below one another, ``[n, B, H, 2 C, D]``.
      solved: ``T^-1 slt(B W K^T)`` and ``T^-1 B W`` side by side, ``[n, B, H, C, C + D]``.
      ids: of segments, ``[n, B, C]``, or None.
    """

    entries: Array
    solved: Array
    ids: Array | None

    @property
    def size(self) -> int:
        """Tokens in a chunk, ``C``."""
        return self.solved.shape[-2]

    def begins(self) -> Array:
        """The first token of each chunk, ``[n]``."""
        return self.size * jnp.arange(len(self.entries), dtype=jnp.int32)


def chunked(
    k: Array, w: Array, beta: Array, segment_ids: Array | None, size: int, dtype: jnp.dtype
) -> Chunks:
    """Prepares ``k, w [B, T, H, D]``, ``beta [B, T, H]`` and ids ``[B, T]`` for all queries.

    Memory is linear in ``T``: each chunk's triangular system is solved once.
    """
    size = min(size, k.shape[1])
    beta = beta.astype(dtype)[..., None]
    k, w, beta = (
        rows.split(x.astype(dtype), size, 1).transpose(1, 0, 3, 2, 4) for x in (k, w, beta)
    )
    ids = None if segment_ids is None else rows.split(segment_ids, size, 1).swapaxes(0, 1)
    earlier = jnp.tril(jnp.ones((size, size), bool), -1)
    if ids is not None:
        earlier = earlier & (ids[:, :, None, :, None] == ids[:, :, None, None])

    entries, weighted = jnp.concatenate([w, k], axis=-2), w * beta
    pairs = precise_einsum("nbhtd,nbhjd->nbhtj", weighted, entries)
    system, right = (jnp.where(earlier, x, 0) for x in jnp.split(pairs, 2, axis=-1))
    right = jnp.concatenate([right, weighted], axis=-1)
    return Chunks(entries, precise_einsum("nbhts,nbhsj->nbhtj", inverse(system), right), ids)


def products(
    chunks: Chunks, q: Array, queries: Array, ids: Array | None, needed: Array
) -> tuple[Array, Array]:
    """``A_ij`` of some queries and all tokens of the chunks.

    From the last chunk backwards, each query goes on through the maps of those that it has passed.

    Args:
      chunks: of the tokens.
      q: ``[B, H, R, D]``.
      queries: which token each query is, ``[R]``.
      ids: of their segments, ``[B, R]``, or None.
      needed: booleans ``[n]``; other chunks are skipped, as if their tokens did not exist.

    Returns:
      ``[B, H, R, n * C]``, valid where a key is of the query's segment and not after it; and the
      queries before all chunks, ``[B, H, R, D]``.
    """
    size = chunks.size

    def step(q: Array, x: tuple[Chunks, Array, Array]) -> tuple[Array, Array]:
        chunk, begin, needed = x

        def walk(q: Array) -> tuple[Array, Array]:
            pairs = precise_einsum("bhrd,bhjd->bhrj", q, chunk.entries)
            acts = begin + jnp.arange(size, dtype=jnp.int32) <= queries[:, None]
            if ids is not None and chunk.ids is not None:
                acts = acts & (ids[:, None, :, None] == chunk.ids[:, None, None])
            seen = jnp.where(acts, pairs[..., :size], 0)
            change = precise_einsum("bhrt,bhtj->bhrj", seen, chunk.solved)
            return q - change[..., size:], pairs[..., size:] - change[..., :size]

        def skip(q: Array) -> tuple[Array, Array]:
            return q, jnp.zeros((*q.shape[:-1], size), q.dtype)

        return lax.cond(needed, walk, skip, q)

    # The backward pass makes a chunk's pairs again, of the queries that enter it.
    q, found = lax.scan(jax.checkpoint(step), q, (chunks, chunks.begins(), needed), reverse=True)
    return jnp.moveaxis(found, 0, -2).reshape(*q.shape[:-1], -1), q


def transported(
    chunks: Chunks, keys: Array, key_ids: Array, index: Array | int, time: int
) -> Array:
    """``H_last ... H_{j+1} k_j``: keys taken on through the maps of all later tokens.

    Args:
      chunks: of the ``time`` new tokens, with ids.
      keys: ``[B, H, S, D]``; those of the new tokens, from the slot ``index`` on, are not read.
      key_ids: ``[B, S]``.
      index: slot of the first new token.
      time: number of new tokens.
    """
    size = chunks.size
    slots = jnp.arange(keys.shape[2], dtype=jnp.int32)
    # New keys through the rest of their own chunk.
    w, k = jnp.split(chunks.entries, 2, axis=-2)
    k = k - precise_einsum("nbhtj,nbhtd->nbhjd", chunks.solved[..., :size], w)
    k = jnp.moveaxis(k, 0, 2).reshape(*keys.shape[:2], -1, keys.shape[-1])[:, :, :time]
    keys = lax.dynamic_update_slice_in_dim(keys.astype(k.dtype), k, index, axis=2)

    def step(keys: Array, x: tuple[Chunks, Array]) -> tuple[Array, None]:
        chunk, begin = x
        acts = slots[:, None] < index + begin
        if chunk.ids is not None:
            acts = acts & (key_ids[:, None, :, None] == chunk.ids[:, None, None])
        pairs = precise_einsum("bhsd,bhtd->bhst", keys, chunk.solved[..., size:])
        w = chunk.entries[..., :size, :]
        change = precise_einsum("bhst,bhtd->bhsd", jnp.where(acts, pairs, 0), w)
        return keys - change, None

    return lax.scan(step, keys, (chunks, chunks.begins()))[0]


def inverse(system: Array) -> Array:
    """``(I + system)^-1`` of strictly lower triangular matrices ``[..., C, C]``.

    It uses only products, ``log C`` times: a solver that calls LAPACK made compiled gradients hang
    on a CPU, and a mesh could not split it. Entries of the inverse are at most ``beta``.
    """
    *lead, size, _ = system.shape
    full = 1 << (size - 1).bit_length()
    system = jnp.pad(system, [*[(0, 0)] * len(lead), *[(0, full - size)] * 2])
    # Inverses of the blocks on the diagonal, which are joined two by two.
    found = jnp.ones((*lead, full, 1, 1), system.dtype)
    while (width := found.shape[-1]) < full:
        blocks = (full // (2 * width), 2 * width)
        corners = system.reshape(*lead, *blocks, *blocks)[..., width:, :, :width]
        corners = jnp.moveaxis(jnp.diagonal(corners, axis1=-4, axis2=-2), -1, -3)
        upper, lower = found[..., 0::2, :, :], found[..., 1::2, :, :]
        corners = -precise_einsum("...ij,...jk,...kl->...il", lower, corners, upper)
        found = jnp.concatenate(
            [
                jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1),
                jnp.concatenate([corners, lower], axis=-1),
            ],
            axis=-2,
        )
    return found[..., 0, :size, :size]
