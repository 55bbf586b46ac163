"""Calls of attention: checked, with errors that say what was given, and brought into one form."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax._src.attention.request import (
    MAX_INDEX,
    AttentionRows,
    BiasFunction,
    Request,
    RowFunction,
    refuse,
)
from tape_jax._src.core import algebra
from tape_jax._src.core.checks import as_integers, concrete, require
from tape_jax._src.core.sharding import Sharding

Array = jax.Array


def normalise(
    q: Array,
    k: Array,
    v: Array,
    *,
    state: Array | None = None,
    is_causal: bool = False,
    local_window_size: int | None = None,
    mask: Array | None = None,
    bias: Array | BiasFunction | None = None,
    scale: float | None = None,
    query_state: Array | None = None,
    query_offset: int | Array = 0,
    keys_rotated: bool = False,
    segment_ids: Array | tuple[Array, Array] | None = None,
    log_decay: Array | tuple[Array, Array] | None = None,
    attend_state: bool = True,
    interpret: bool = False,
    sharding: Sharding | None = None,
    logits_fn: RowFunction | None = None,
    weights_fn: RowFunction | None = None,
) -> Request:
    """Checks a call of :func:`tape_jax.attention` and flattens its batch axes.

    Raises:
      ValueError: if the call is wrong.
      NotImplementedError: if no implementation can do it.
    """
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    _check_inputs(q, k, v)
    state, query_state = _states(q, k, state, query_state, keys_rotated)
    _check_key_width(q, k, state, query_state, keys_rotated)
    *batch, query_length, query_heads, dim = q.shape
    query_offset, farthest = _offset(query_offset, batch)
    _check_index_range(query_length, k.shape[-3], farthest or 0)
    pairs = (query_heads, query_length, k.shape[-3])
    segments = _segments(segment_ids, batch, query_length, k.shape[-3])
    if local_window_size is not None:
        local_window_size = _window(local_window_size)
        # A wider window hides no more, and sums with it would leave 32-bit integers.
        widest = MAX_INDEX if farthest is None else query_length + k.shape[-3] + farthest
        local_window_size = min(local_window_size, widest)
    if mask is not None:
        mask = jnp.asarray(mask)
        require(mask.dtype == jnp.bool_, f"mask must be boolean, True = visible; got {mask.dtype}")
        mask = _broadcastable("mask", mask, batch, pairs)
    refuse(
        callable(bias) and jnp.ndim(query_offset) > 0,
        "a function as bias is given query indices [Q], the same for all rows: with one "
        "query_offset a row give an array, or map over the rows by jax.vmap",
    )
    return Request(
        q=_flatten(q, batch, 3),
        k=_flatten(k, batch, 3),
        v=_flatten(v, batch, 3),
        state=state,
        query_state=query_state,
        segments=segments,
        bias=_bias(bias, batch, pairs),
        mask=mask,
        log_decay=_log_decay(log_decay, batch, pairs),
        query_offset=query_offset,
        scale=dim**-0.5 if scale is None else _known("scale", scale, float, "a number"),
        is_causal=_known("is_causal", is_causal, bool, "True or False"),
        local_window_size=local_window_size,
        keys_rotated=keys_rotated,
        attend_state=attend_state,
        interpret=interpret,
        sharding=sharding,
        logits_fn=_row_function("logits_fn", logits_fn),
        weights_fn=_row_function("weights_fn", weights_fn),
    )


def _row_function(name: str, function: Any) -> RowFunction | None:
    """A function of rows of logits that returns as many numbers; ValueError for anything else."""
    if function is None:
        return None
    require(callable(function), f"{name} must be a function of logits and rows; got {function!r}")

    def checked(logits: Array, rows: AttentionRows) -> Array:
        out = jnp.asarray(function(logits, rows))
        require(
            out.shape == logits.shape and jnp.issubdtype(out.dtype, jnp.floating),
            f"{name} must return floating-point numbers [B, Hq, Q, S] = {logits.shape}, as it is "
            f"given; got {out.dtype} of shape {out.shape}",
        )
        return out.astype(logits.dtype)

    return checked


def _known(name: str, value: Any, kind: Callable[[Any], Any], expected: str) -> Any:
    """``kind(value)``; ValueError if that fails, as it does for what is traced."""
    try:
        return kind(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} must be {expected}, known when the call is compiled; got {value!r}"
        ) from error


def _window(size: Any) -> int:
    """The size of a window, checked."""
    size = _known("local_window_size", size, operator.index, "one positive integer")
    require(size >= 1, f"local_window_size must be at least 1; got {size}")
    return size


def _check_inputs(q: Array, k: Array, v: Array) -> None:
    """Types, axes and heads of q, k and v."""
    shapes = f"got q {q.shape}, k {k.shape}, v {v.shape}"
    require(
        q.ndim >= 3 and k.ndim == q.ndim == v.ndim,
        f"q, k and v must have shapes [batch..., time, heads, head_dim], with equal axes; {shapes}",
    )
    require(
        q.shape[:-3] == k.shape[:-3] == v.shape[:-3], f"batch axes of q, k and v disagree; {shapes}"
    )
    require(
        k.shape[-3:-1] == v.shape[-3:-1], f"k and v must agree in length and in heads; {shapes}"
    )
    require(0 not in (*q.shape, *k.shape, *v.shape), f"q, k and v must not be empty; {shapes}")
    require(
        q.shape[-2] % k.shape[-2] == 0,
        f"query heads must be a multiple of key/value heads; {shapes}: {q.shape[-2]} query heads, "
        f"{k.shape[-2]} key/value heads",
    )
    for name, x in (("q", q), ("k", k), ("v", v)):
        require(
            jnp.issubdtype(x.dtype, jnp.floating), f"{name} must be floating-point; got {x.dtype}"
        )


def _check_index_range(query_length: int, key_length: int, offset: int) -> None:
    """Indices, and distances between them, must be 32-bit integers."""
    require(
        query_length + key_length + offset < 2**31,
        f"queries, keys and query_offset together must be below 2**31; got {query_length}, "
        f"{key_length} and {offset}",
    )


def _states(
    q: Array, k: Array, e: Array | None, query_state: Array | None, keys_rotated: bool
) -> tuple[Array | None, Array | None]:
    """Checks the states of keys and queries and gives them all axes (batch ones flattened)."""
    if query_state is None:
        require(not keys_rotated, "keys_rotated=True needs query_state, the state of the queries")
        require(
            e is None or q.shape[-3] == k.shape[-3],
            f"query_state is required where queries and keys differ in length; got q {q.shape}, "
            f"k {k.shape}",
        )
        query_state = e
    require(
        e is not None or query_state is None or keys_rotated,
        "query_state without state rotates queries only: give state, or keys_rotated=True",
    )
    keys = jax.ShapeDtypeStruct((*k.shape[:-1], q.shape[-1]), k.dtype)
    e = _state("state", e, keys, "k", heads=(1, k.shape[-2]))
    query_state = _state("query_state", query_state, q, "q")
    if e is not None and query_state is not None:
        require(
            e.shape[3:] == query_state.shape[3:],
            f"state and query_state must have one form; got blocks {e.shape[3:]} and "
            f"{query_state.shape[3:]}",
        )
    return e, query_state


def _state(
    name: str, state: Array | None, x: Any, of: str, heads: tuple[int, ...] | None = None
) -> Array | None:
    """A state of ``x [batch..., T, H, D]`` as ``[B|1, T, h, ...]``; :func:`algebra.check_state`."""
    if state is None:
        return None
    state = jnp.asarray(state)
    tail = algebra.check_state(state, x, name=name, of=of, heads=heads)
    return _flatten(algebra.align_state(state), x.shape[:-3], 2 + tail)


def _check_key_width(
    q: Array, k: Array, e: Array | None, query_state: Array | None, keys_rotated: bool
) -> None:
    """Keys are as wide as the queries, or as rotated queries if they come rotated."""
    width = q.shape[-1]
    if keys_rotated and query_state is not None and query_state.ndim == 6:
        width = query_state.shape[3] * query_state.shape[5]
    require(
        k.shape[-1] == width,
        f"k must have head dimension {width}{' (rotated)' if keys_rotated else ''}; got q {q.shape}"
        f", k {k.shape}" + ("" if e is None else f", state {e.shape}"),
    )


def _segments(
    ids: Any, batch: Sequence[int], query_length: int, key_length: int
) -> tuple[Array, Array] | None:
    """Segment ids of queries ``[B|1, Tq]`` and of keys ``[B|1, S]``."""
    if ids is None:
        return None
    if not isinstance(ids, tuple):
        _check_one_for_both("segment_ids", query_length, key_length)
        # One object, by which backends know that every query sees its own key.
        own = _ids("segment_ids", ids, batch, query_length)
        return own, own
    _check_pair("segment_ids", ids)
    return (
        _ids("query segment_ids", ids[0], batch, query_length),
        _ids("key segment_ids", ids[1], batch, key_length),
    )


def _ids(name: str, ids: Any, batch: Sequence[int], length: int) -> Array:
    """Segment ids ``[batch..., length]`` as ``[B|1, length]``."""
    ids = as_integers(name, ids)
    require(
        jnp.issubdtype(ids.dtype, jnp.integer), f"segment_ids must be integers; got {ids.dtype}"
    )
    require(
        ids.ndim >= 1 and ids.shape[-1] == length and _batch_fits(ids.shape[:-1], batch),
        f"{name}: expected shape {(*batch, length)}, batch axes may be missing; got {ids.shape}",
    )
    return _flatten(ids, batch, 1)


def _check_one_for_both(name: str, query_length: int, key_length: int) -> None:
    """One array for queries and keys needs as many of both."""
    require(
        query_length == key_length,
        f"{name} must be a tuple (queries', keys') where lengths differ: {query_length} queries, "
        f"{key_length} keys",
    )


def _check_pair(name: str, given: tuple[Any, ...]) -> None:
    require(len(given) == 2, f"{name} must be an array or a pair of arrays; got {len(given)}")


def _log_decay(
    given: Any, batch: Sequence[int], pairs: tuple[int, int, int]
) -> tuple[Array, Array] | None:
    """Log decay of queries ``[B|1, Tq, Hq|1]`` and of keys ``[B|1, S, Hq|1]``, of one type."""
    heads, *lengths = pairs
    if given is None:
        return None
    names = ("query log_decay", "key log_decay")
    if not isinstance(given, tuple):
        _check_one_for_both("log_decay", *lengths)
        given, names = (given, given), ("log_decay", "log_decay")
    _check_pair("log_decay", given)
    arrays = []
    for name, x, length in zip(names, given, lengths, strict=True):
        x = jnp.asarray(x)
        require(
            jnp.issubdtype(x.dtype, jnp.floating), f"{name} must be floating-point; got {x.dtype}"
        )
        require(
            x.ndim >= 2
            and x.shape[-2] == length
            and x.shape[-1] in (1, heads)
            and _batch_fits(x.shape[:-2], batch),
            f"{name}: expected shape {(*batch, length, heads)}, one head for all or batch axes "
            f"missing; got {x.shape}",
        )
        arrays.append(_flatten(x, batch, 2))
    dtype = algebra.at_least_float32(jnp.result_type(*arrays))
    queries, keys = (x.astype(dtype) for x in arrays)
    return queries, keys


def _bias(
    bias: Array | BiasFunction | None, batch: Sequence[int], pairs: tuple[int, int, int]
) -> Array | BiasFunction | None:
    """A bias with all axes, batch ones flattened: an array, or a function that returns one."""
    if bias is None:
        return None
    if not callable(bias):
        return _broadcastable("bias", _floating("bias", bias), batch, pairs)
    function, heads = bias, pairs[0]

    def normalised(query_index: Array, key_index: Array) -> Array:
        sizes = (heads, query_index.shape[0], key_index.shape[0])
        what = "the value of the bias function"
        value = _floating(what, function(query_index, key_index))
        return _broadcastable(what, value, batch, sizes)

    jax.eval_shape(normalised, *(jax.ShapeDtypeStruct((n,), jnp.int32) for n in pairs[1:]))
    return normalised


def _floating(name: str, bias: Any) -> Array:
    """The bias as an array; ValueError if it is not floating-point."""
    require(bias is not None, f"{name} must be a floating-point array; got None")
    bias = jnp.asarray(bias)
    require(
        jnp.issubdtype(bias.dtype, jnp.floating),
        f"{name} must be floating-point (for a boolean, use mask); got {bias.dtype}",
    )
    return bias


def _offset(offset: int | Array, batch: Sequence[int]) -> tuple[int | Array, int | None]:
    """An int, or int32: a scalar or ``[B]``; and the largest distance, None if it is not known."""
    if isinstance(offset, int | np.integer):
        return int(offset), abs(int(offset))
    values = concrete(offset) if hasattr(offset, "dtype") else None
    offset = as_integers("query_offset", offset)
    require(
        jnp.issubdtype(offset.dtype, jnp.integer) and _batch_fits(offset.shape, batch),
        f"query_offset must be an integer or one a row, {tuple(batch)}; got shape {offset.shape}, "
        f"{offset.dtype}",
    )
    farthest = None if values is None else max(abs(int(values.min())), abs(int(values.max())))
    offset = _flatten(offset.astype(jnp.int32), batch, 0)
    return (offset[0] if offset.size == 1 else offset), farthest


def _broadcastable(name: str, x: Array, batch: Sequence[int], pairs: tuple[int, int, int]) -> Array:
    """``x``, which must broadcast to ``[*batch, *pairs]``, as ``[B|1, Hq|1, Tq|1, S|1]``."""
    given, hint = x.shape, ""
    if given in {(*batch, n) for n in pairs[1:]}:
        hint = (
            f": one number a key is {name}[..., None, None, :], or {name}[:, None, None, :] in a "
            "batch of one axis; segment_ids= hides padding without any mask"
        )
    x = x.reshape((1,) * (3 - x.ndim) + x.shape)
    require(
        _batch_fits(x.shape[:-3], batch) and _batch_fits(x.shape[-3:], pairs),
        f"{name} must broadcast to [batch..., query heads, queries, keys] = {(*batch, *pairs)}; "
        f"got {given}{hint}",
    )
    return _flatten(x, batch, 3)


def _batch_fits(shape: Sequence[int], full: Sequence[int]) -> bool:
    """Whether ``shape`` broadcasts to ``full``, which has at least as many axes."""
    return len(shape) <= len(full) and all(
        a in (1, b) for a, b in zip(shape[::-1], full[::-1], strict=False)
    )


def _flatten(x: Array, batch: Sequence[int], tail: int) -> Array:
    """Flattens the axes before the last ``tail``, which broadcast to ``batch``, to one: B or 1."""
    lead, core = x.shape[: x.ndim - tail], x.shape[x.ndim - tail :]
    lead = (1,) * (len(batch) - len(lead)) + lead
    if any(n != 1 for n in lead) and lead != tuple(batch):
        lead = tuple(batch)
        x = jnp.broadcast_to(x, (*lead, *core))
    return x.reshape(math.prod(lead), *core)
