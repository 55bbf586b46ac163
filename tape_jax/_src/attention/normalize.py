"""Check calls of attention, with errors that say what was given, and normalize them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax._src.attention.request import (
    AttentionRows,
    BiasFunction,
    Request,
    RowFunction,
    refuse,
)
from tape_jax._src.attention.visibility import MAX_INDEX, Band, Visibility
from tape_jax._src.core import algebra
from tape_jax._src.core.checks import (
    FLOATS,
    as_array,
    as_integers,
    broadcasts,
    concrete,
    instance,
    real,
    require,
    truth,
    window,
)
from tape_jax._src.core.sharding import Sharding

Array = jax.Array

# Types of queries, keys, values.
TYPES = tuple(map(jnp.dtype, FLOATS))


def normalize(
    q: Array,
    k: Array,
    v: Array,
    *,
    state: Array | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    window_positions: Array | tuple[Array, Array] | None = None,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    mask: Array | None = None,
    bias: Array | BiasFunction | None = None,
    scale: float | None = None,
    logit_softcap: float | None = None,
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
    q, k, v = as_array("q", q), as_array("k", k), as_array("v", v)
    _check_inputs(q, k, v)
    keys_rotated = _truth("keys_rotated", keys_rotated)
    state, query_state = _states(q, k, state, query_state, keys_rotated)
    *batch, query_length, query_heads, dim = q.shape
    pairs = (query_heads, query_length, k.shape[-3])
    lengths = {"query": query_seq_lengths, "key_value": key_value_seq_lengths}
    window = (local_window_size, window_positions)
    visibility = _visibility(
        is_causal, window, mask, query_offset, segment_ids, lengths, batch, pairs
    )
    refuse(
        _is_function(bias) and jnp.ndim(visibility.query_offset) > 0,
        "a function as bias is given query indices [Q], the same for all rows: with one "
        "query_offset a row give an array, or map over the rows by jax.vmap",
    )
    return Request(
        q=_flatten(q, batch, 3),
        k=_flatten(k, batch, 3),
        v=_flatten(v, batch, 3),
        state=state,
        query_state=query_state,
        bias=_bias(bias, batch, pairs),
        log_decay=_log_decay(log_decay, batch, pairs),
        visibility=visibility,
        scale=dim**-0.5 if scale is None else _known("scale", scale, real, "a finite number"),
        softcap=_softcap(logit_softcap),
        keys_rotated=keys_rotated,
        attend_state=_truth("attend_state", attend_state),
        interpret=_truth("interpret", interpret),
        sharding=instance("sharding", sharding, Sharding, optional=True),
        logits_fn=_row_function("logits_fn", logits_fn),
        weights_fn=_row_function("weights_fn", weights_fn),
    )


def _softcap(given: Any) -> float | None:
    """Return the bound of logits; ValueError unless it is positive or None."""
    if given is None:
        return None
    cap = _known("logit_softcap", given, real, "a positive number or None")
    require(cap > 0, f"logit_softcap must be a positive number or None; got {given!r}")
    return cap


def _visibility(
    is_causal: bool,
    window: tuple[Any, Any],
    mask: Array | None,
    offset: int | Array,
    segment_ids: Any,
    lengths: dict[str, Any],
    batch: Sequence[int],
    pairs: tuple[int, int, int],
) -> Visibility:
    """Return the visibility of a call of ``pairs`` (query heads, queries, keys).

    ``window`` is its size, and the positions that measure it.
    """
    _, queries, keys = pairs
    offset, reach = _offset(offset, batch)
    least, most = reach or (0, 0)
    farthest = max(abs(least), abs(most))
    known = isinstance(queries, int) and isinstance(keys, int)
    require(
        not known or queries + keys + farthest < 2**31,
        f"queries, keys and query_offset together must be below 2**31; got {queries}, {keys} and "
        f"{farthest}",
    )
    segments = None
    if segment_ids is not None:
        segments = _ids("segment_ids", segment_ids, batch, (queries, keys))
    if mask is not None:
        mask = as_array("mask", mask)
        require(mask.dtype == jnp.bool_, f"mask must be boolean, True = visible; got {mask.dtype}")
        mask = _broadcastable("mask", mask, batch, pairs)
    within = _within_lengths(lengths, batch, (queries, keys))
    if within is not None:
        # Ids that no other token has.
        ids = (0, 0) if segments is None else numbered(*segments)
        segments = jnp.where(within[0], ids[0], -1), jnp.where(within[1], ids[1], -2)
    words = "an integer from 0 on, or a pair (left, right) of them"
    sides = _known("local_window_size", window[0], _window, words)
    counts = None
    if window[1] is not None:
        counts = _ids("window_positions", window[1], batch, (queries, keys))
    elif sides is not None:
        # A wider window hides no more, and sums with it would leave 32-bit integers.
        widest = (MAX_INDEX, MAX_INDEX)
        if known and reach:
            widest = (queries + max(0, most), keys + max(0, -least))
            require(
                sum(widest) < 2**31,
                "with a window, queries, keys and the distance between rows' offsets together "
                f"must be below 2**31; got {queries}, {keys} and {least} to {most}",
            )
        sides = (min(sides[0], widest[0]), min(sides[1], widest[1]))
    band = Band(_truth("is_causal", is_causal), sides)
    return Visibility(band, offset, segments, mask, None if sides is None else counts)


def _window(what: str, given: Any) -> tuple[int, int] | None:
    """Return the keys a query sees on either side of its own; ValueError for anything else."""
    sizes = window(what, given)
    return (sizes, sizes) if isinstance(sizes, int) else sizes


def _within_lengths(
    lengths: dict[str, Any], batch: Sequence[int], sizes: tuple[int, int]
) -> tuple[Array, Array] | None:
    """Return which queries ``[B|1, Tq]`` and keys ``[B|1, S]`` lie within their row's length."""
    if all(x is None for x in lengths.values()):
        return None
    found = []
    for (name, given), size in zip(lengths.items(), sizes, strict=True):
        at = jnp.arange(size, dtype=jnp.int32)[None]
        if given is None:
            found.append(at >= 0)
            continue
        given = as_integers(f"{name}_seq_lengths", given)
        if not batch and given.shape == (1,):  # As jax.nn takes it.
            given = given[0]
        require(
            given.shape == (*batch,) and jnp.issubdtype(given.dtype, jnp.integer),
            f"{name}_seq_lengths must be integers of shape {(*batch,)}, one a row; got "
            f"{given.dtype} of shape {given.shape}",
        )
        found.append(at < given.reshape(-1, 1))
    return found[0], found[1]


def numbered(queries: Array, keys: Array) -> tuple[Array, Array]:
    """Renumber ids from 0 on, equal ids alike: int32 ``[B|1, Tq]`` and ``[B|1, S]``."""
    rows = max(queries.shape[0], keys.shape[0])
    ids = jnp.concatenate([jnp.broadcast_to(x, (rows, x.shape[1])) for x in (queries, keys)], 1)
    order = jnp.argsort(ids, axis=1)
    ascending = jnp.take_along_axis(ids, order, axis=1)
    first = jnp.pad(ascending[:, 1:] != ascending[:, :-1], ((0, 0), (1, 0)))
    ranks = jnp.cumsum(first, axis=1, dtype=jnp.int32)
    ranks = jnp.take_along_axis(ranks, jnp.argsort(order, axis=1), axis=1)
    return ranks[:, : queries.shape[1]], ranks[:, queries.shape[1] :]


def _row_function(name: str, function: Any) -> RowFunction | None:
    """Wrap a function of logits and rows to check its result; ValueError for anything else."""
    if function is None:
        return None
    require(callable(function), f"{name} must be a function of logits and rows; got {function!r}")

    def checked(logits: Array, rows: AttentionRows) -> Array:
        out = as_array(f"the value of {name}", function(logits, rows))
        require(
            out.shape == logits.shape and jnp.issubdtype(out.dtype, jnp.floating),
            f"{name} must return floating-point numbers [B, Hq, Q, S] = {logits.shape}, as it is "
            f"given; got {out.dtype} of shape {out.shape}",
        )
        return out.astype(logits.dtype)

    return checked


def _truth(name: str, value: Any) -> bool:
    """Return a truth value, or raise ValueError."""
    return _known(name, value, truth, "True or False")


def _known(name: str, value: Any, kind: Callable[[str, Any], Any], expected: str) -> Any:
    """Return ``kind(name, value)``; ValueError if that fails, as it does for traced values."""
    try:
        return kind(name, value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} must be {expected}, known when the call is compiled; got {value!r}"
        ) from error


def _check_inputs(q: Array, k: Array, v: Array) -> None:
    """Check types, axes, heads of q, k, v."""
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
            x.dtype in TYPES,
            f"{name} must be floating-point, {', '.join(t.name for t in TYPES)}; got {x.dtype}",
        )


def _states(
    q: Array, k: Array, e: Array | None, query_state: Array | None, keys_rotated: bool
) -> tuple[Array | None, Array | None]:
    """Checks the states of keys and queries and gives them all axes, with flattened batch axes."""
    if query_state is None:
        require(not keys_rotated, "keys_rotated=True needs query_state, the state of the queries")
        require(
            e is None or q.shape[-3] == k.shape[-3],
            "query_state is required where queries and keys differ in length (arrays are [batch, "
            f"time, heads, D]); got q {q.shape}, k {k.shape}",
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
    _check_key_width(q, k, e, query_state, keys_rotated)
    return e, query_state


def _state(
    name: str, state: Array | None, x: Any, of: str, heads: tuple[int, ...] | None = None
) -> Array | None:
    """Check a state of ``x [batch..., T, H, D]``; return it as ``[B|1, T, h, ...]``."""
    if state is None:
        return None
    state = as_array(name, state)
    tail = algebra.check_state(state, x, name=name, of=of, heads=heads)
    return _flatten(algebra.align_state(state), x.shape[:-3], 2 + tail)


def _check_key_width(
    q: Array, k: Array, e: Array | None, query_state: Array | None, keys_rotated: bool
) -> None:
    """Raises ValueError unless keys are as wide as queries (as rotated queries, if rotated)."""
    width = algebra.rotated_width(q.shape[-1], query_state if keys_rotated else None)
    require(
        k.shape[-1] == width,
        f"k must have head dimension {width}{' (rotated)' if keys_rotated else ''}; got q {q.shape}"
        f", k {k.shape}" + ("" if e is None else f", state {e.shape}"),
    )


def _of_both(
    name: str, given: Any, lengths: tuple[int, int], convert: Callable[[str, Any, int], Array]
) -> tuple[Array, Array]:
    """Return the arrays of queries and of keys; one given array serves both as one object.

    Args:
      name: the argument's name.
      given: the array, or a tuple of two.
      lengths: queries and keys.
      convert: checks an array, given name and length.
    """
    require(
        not (isinstance(given, list) and any(getattr(x, "ndim", 0) for x in given)),
        f"{name} must be an array or a tuple of two, queries' and keys'; got a list of arrays",
    )
    if not isinstance(given, tuple):
        require(
            lengths[0] == lengths[1],
            f"{name} must be a tuple (queries', keys') where lengths differ: {lengths[0]} queries, "
            f"{lengths[1]} keys",
        )
        own = convert(name, given, lengths[0])
        return own, own
    require(len(given) == 2, f"{name} must be an array or a pair of arrays; got {len(given)}")
    queries = convert(f"query {name}", given[0], lengths[0])
    return queries, convert(f"key {name}", given[1], lengths[1])


def _ids(
    what: str, ids: Any, batch: Sequence[int], lengths: tuple[int, int]
) -> tuple[Array, Array]:
    """Return integers of queries ``[B|1, Tq]`` and of keys ``[B|1, S]``."""

    def converted(name: str, ids: Any, length: int) -> Array:
        ids = as_integers(name, ids)
        require(jnp.issubdtype(ids.dtype, jnp.integer), f"{what} must be integers; got {ids.dtype}")
        require(
            ids.ndim >= 1 and ids.shape[-1] == length and broadcasts(ids.shape[:-1], batch),
            f"{name}: expected shape {(*batch, length)}, batch axes may be missing; got "
            f"{ids.shape}",
        )
        return _flatten(algebra.at_least_32_bits(ids), batch, 1)

    queries, keys = _of_both(what, ids, lengths, converted)
    if queries.dtype == keys.dtype:
        return queries, keys
    both = np.promote_types(queries.dtype, keys.dtype)
    require(
        both.kind in "iu" and jax.dtypes.canonicalize_dtype(both) == both,
        f"{what} of queries and keys must be of one type, or a wider one must hold both; got "
        f"{queries.dtype} and {keys.dtype}",
    )
    return queries.astype(both), keys.astype(both)


def _log_decay(
    given: Any, batch: Sequence[int], pairs: tuple[int, int, int]
) -> tuple[Array, Array] | None:
    """Return log decay of queries ``[B|1, Tq, Hq|1]`` and of keys ``[B|1, S, Hq|1]``, one type."""
    heads, *_ = pairs

    def converted(name: str, x: Any, length: int) -> Array:
        x = as_array(name, x)
        require(
            jnp.issubdtype(x.dtype, jnp.floating), f"{name} must be floating-point; got {x.dtype}"
        )
        require(
            x.ndim >= 2
            and x.shape[-2] == length
            and x.shape[-1] in (1, heads)
            and broadcasts(x.shape[:-2], batch),
            f"{name}: expected shape {(*batch, length, heads)}, one head for all or batch axes "
            f"missing; got {x.shape}",
        )
        return _flatten(x, batch, 2)

    if given is None:
        return None
    queries, keys = _of_both("log_decay", given, pairs[1:], converted)
    dtype = algebra.at_least_float32(jnp.result_type(queries, keys))
    return queries.astype(dtype), keys.astype(dtype)


def _bias(
    bias: Array | BiasFunction | None, batch: Sequence[int], pairs: tuple[int, int, int]
) -> Array | BiasFunction | None:
    """Return a bias with all axes and a flattened batch: an array, or a function returning one."""
    if bias is None:
        return None
    if not _is_function(bias):
        return _broadcastable("bias", _floating("bias", bias), batch, pairs)
    function: Any = bias
    heads = pairs[0]

    def normalized(query_index: Array, key_index: Array) -> Array:
        sizes = (heads, query_index.shape[0], key_index.shape[0])
        what = "the value of the bias function"
        value = _floating(what, function(query_index, key_index))
        return _broadcastable(what, value, batch, sizes)

    jax.eval_shape(normalized, *(jax.ShapeDtypeStruct((n,), jnp.int32) for n in pairs[1:]))
    return normalized


def _is_function(bias: Any) -> bool:
    """Return whether a bias is a function; an ``nnx.Param`` can be called too."""
    return callable(bias) and not hasattr(bias, "__jax_array__")


def _floating(name: str, bias: Any) -> Array:
    """Return the bias as an array; ValueError unless it is floating-point."""
    require(bias is not None, f"{name} must be a floating-point array; got None")
    bias = as_array(name, bias)
    require(
        jnp.issubdtype(bias.dtype, jnp.floating),
        f"{name} must be floating-point (for a boolean, use mask); got {bias.dtype}",
    )
    return bias


def _offset(
    offset: int | Array, batch: Sequence[int]
) -> tuple[int | Array, tuple[int, int] | None]:
    """Return the offset (int, or int32 scalar or ``[B]``), and its least and most if known."""
    if isinstance(offset, int | np.integer) and not isinstance(offset, bool):
        return int(offset), (int(offset), int(offset))
    values = concrete(offset) if hasattr(offset, "dtype") else None
    offset = as_integers("query_offset", offset)
    require(
        jnp.issubdtype(offset.dtype, jnp.integer) and broadcasts(offset.shape, batch),
        f"query_offset must be an integer or one a row, {tuple(batch)}; got shape {offset.shape}, "
        f"{offset.dtype}",
    )
    reach = None if values is None else (int(values.min()), int(values.max()))
    offset = _flatten(offset.astype(jnp.int32), batch, 0)
    return (offset[0] if offset.size == 1 else offset), reach


def _broadcastable(name: str, x: Array, batch: Sequence[int], pairs: tuple[int, int, int]) -> Array:
    """Return ``x``, checked to broadcast to ``[*batch, *pairs]``, as ``[B|1, Hq|1, Tq|1, S|1]``."""
    given, hint = x.shape, ""
    if given in {(*batch, n) for n in pairs[1:]}:
        hint = (
            f": one number a key is {name}[..., None, None, :], or {name}[:, None, None, :] in a "
            "batch of one axis; segment_ids= hides padding without any mask"
        )
    x = x.reshape((1,) * (3 - x.ndim) + x.shape)
    if not batch and x.ndim == 4 and x.shape[0] == 1:  # As jax.nn takes it.
        x = x[0]
    require(
        broadcasts(x.shape[:-3], batch) and broadcasts(x.shape[-3:], pairs),
        f"{name} must broadcast to [batch..., query heads, queries, keys] = {(*batch, *pairs)}; "
        f"got {given}{hint}",
    )
    return _flatten(x, batch, 3)


def _flatten(x: Array, batch: Sequence[int], tail: int) -> Array:
    """Flattens all but the last ``tail`` axes, which broadcast to ``batch``, to one of B or 1."""
    lead, core = x.shape[: x.ndim - tail], x.shape[x.ndim - tail :]
    lead = (1,) * (len(batch) - len(lead)) + lead
    if any(n != 1 for n in lead) and lead != tuple(batch):
        lead = tuple(batch)
        x = jnp.broadcast_to(x, (*lead, *core))
    return x.reshape(math.prod(lead), *core)
