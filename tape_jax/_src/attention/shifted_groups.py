"""Attention inside shifted groups of the sequence, for training on long sequences."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tape_jax._src.attention.api import attention
from tape_jax._src.attention.normalize import numbered
from tape_jax._src.core import algebra
from tape_jax._src.core.checks import as_integers, concrete, require

Array = jax.Array


# Keywords whose values would have to be divided into groups.
UNGROUPED = (
    *("mask", "bias", "logits_fn", "weights_fn", "window_positions", "query_offset"),
    *("query_seq_lengths", "key_value_seq_lengths"),
)


def shifted_group_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    groups: int,
    state: Array | None = None,
    query_state: Array | None = None,
    segment_ids: Array | None = None,
    log_decay: Array | tuple[Array, Array] | None = None,
    **options: Any,
) -> tuple[Array, Array | None]:
    """Computes attention inside groups of tokens (shifted sparse attention, LongLoRA, section 3.2).

    The first half of the heads attends inside ``groups`` groups of ``T / groups`` tokens. In the
    second half, the groups begin half a group earlier, so that neighbouring groups overlap. The
    half groups at the beginning and the end are separate groups: joined into one, they would let
    the first tokens see the last.

    Args:
      q, k, v, state, query_state: as in :func:`tape_jax.attention`, of one length ``T``; states
        have one head or as many as ``k``. The number of heads is even; ``k`` may have 1.
      groups: number of groups.
      segment_ids: integers ``[..., T]``, or None.
      log_decay: as in :func:`tape_jax.attention`.
      **options: other keywords of :func:`tape_jax.attention`, except ``mask``, ``bias``,
        ``logits_fn``, ``weights_fn``, ``window_positions``, lengths and offsets.

    Returns:
      ``o [..., T, H, Dv]`` and ``a [..., T, H, ...]`` or None, as :func:`tape_jax.attention`.

    Raises:
      ValueError: if ``T`` is not a multiple of ``2 * groups``, heads cannot be halved, a state or a
        decay does not fit, or one of the excepted keywords is given.
    """
    _check(q, k, groups, options)
    time, batch, heads = q.shape[-3], q.ndim - 3, k.shape[-2]
    half = time // groups // 2

    def grouped(x: Array) -> Array:
        """Maps ``[batch..., T, H, ...]`` to ``[2, batch..., groups, T / groups, H / 2, ...]``."""
        first, second = (x, x) if x.shape[batch + 1] == 1 else jnp.split(x, 2, axis=batch + 1)
        x = jnp.stack([first, jnp.roll(second, -half, axis=batch)])
        return x.reshape(*x.shape[: batch + 1], groups, 2 * half, *x.shape[batch + 2 :])

    def joined(x: Array) -> Array:
        """Inverse of ``grouped``."""
        x = x.reshape(*x.shape[: batch + 1], time, *x.shape[batch + 3 :])
        return jnp.concatenate([x[0], jnp.roll(x[1], half, axis=batch)], axis=batch + 1)

    def with_batch(x: Array, ndim: int) -> Array:
        return x.reshape((1,) * (ndim - x.ndim) + x.shape)

    def grouped_state(name: str, x: Array | None) -> Array | None:
        if x is None:
            return None
        tail = algebra.check_state(x, k, name=name, of="k", heads=(1, heads))
        return grouped(with_batch(algebra.align_state(x), batch + 2 + tail))

    def grouped_decay(x: Array) -> Array:
        x = jnp.asarray(x)
        require(
            x.ndim >= 2 and x.shape[-2] == time and x.shape[-1] in (1, q.shape[-2]),
            f"log_decay: expected shape {q.shape[:-1]}, one head for all or batch axes missing; "
            f"got {x.shape}",
        )
        return grouped(with_batch(x, batch + 2))

    ids = jnp.zeros(time, jnp.int32)
    if segment_ids is not None:
        ids = as_integers("segment_ids", segment_ids)
        rows = ids.reshape(-1, ids.shape[-1])
        ids = numbered(rows, rows[:, :0])[0].reshape(ids.shape)
    ids = 2 * with_batch(ids, batch + 1)
    # After the roll, the first half group shares the last group with tokens it must not see.
    ids = jnp.stack([ids, ids + (jnp.arange(time) < half)], axis=-1)
    out, attended = attention(
        grouped(q),
        grouped(k),
        grouped(v),
        state=grouped_state("state", state),
        query_state=grouped_state("query_state", query_state),
        segment_ids=grouped(ids)[..., 0],
        log_decay=jax.tree.map(grouped_decay, log_decay),
        **options,
    )
    return joined(out), None if attended is None else joined(attended)


def _check(q: Array, k: Array, groups: int, options: dict[str, Any]) -> None:
    """Raise ValueError if length or heads cannot be divided, or for an excepted keyword."""
    time, heads = q.shape[-3], k.shape[-2]
    require(
        time % (2 * groups) == 0,
        f"shifted_groups = {groups} needs a length that is a multiple of {2 * groups}; got {time}",
    )
    for name in UNGROUPED:
        given = options.get(name)
        require(
            given is None or (name == "query_offset" and concrete(given) == 0),
            f"shifted_groups = {groups} needs an encoding and a call without {name}; got one",
        )
    require(
        q.shape[-2] % 2 == 0 and (heads == 1 or heads % 2 == 0),
        f"shifted_groups = {groups} shifts half of the heads; got q {q.shape}, k {k.shape}",
    )
