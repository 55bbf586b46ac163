"""The public attention call: checks, normalisation, choice of a backend, errors.

A backend is a module, or an object in one, with two functions:

* ``check(request)`` raises NotImplementedError with the reason if it cannot do this call here;
* ``attend(request, **options)`` returns ``o [B, Tq, Hq, Dv]`` and ``a [B, Tq, Hq, De]`` or None.

To add one, write the module and add its line to :data:`BACKENDS`; for it to be taken by itself,
also to :data:`ORDER`.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import importlib
import inspect
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tape_jax import algebra
from tape_jax.attention.request import BiasFunction, Request
from tape_jax.config import choose, require
from tape_jax.sharding import Sharding

Array = jax.Array

# Name to module, or to "module:object". Modules are imported when first considered.
BACKENDS = {
    "pallas": "tape_jax.attention.pallas_triton",
    "tokamax": "tape_jax.attention.vendor:tokamax",
    "tokamax_mosaic": "tape_jax.attention.vendor:tokamax_mosaic",
    "tokamax_triton": "tape_jax.attention.vendor:tokamax_triton",
    "cudnn": "tape_jax.attention.vendor:cudnn",
    "cudnn_direct": "tape_jax.attention.vendor:cudnn_direct",
    "splash": "tape_jax.attention.vendor:splash",
    "ring": "tape_jax.attention.ring",
    "chunked": "tape_jax.attention.chunked",
    "reference": "tape_jax.attention.reference",
}

# What ``implementation=None`` tries on each platform of jax, the one expected to be fastest first;
# ``reference`` comes before ``chunked`` in short calls.
ORDER = {
    "gpu": ("pallas", "tokamax_mosaic", "cudnn_direct", "cudnn", "tokamax_triton", "chunked"),
    "tpu": ("splash", "chunked"),
    "cpu": ("chunked",),
}

# Have not run on their hardware yet, so that they are taken if named, never by themselves. A
# backend leaves this set with its first measurement.
UNPROVEN = frozenset(BACKENDS) - {"chunked", "reference", "ring"}

# Up to this many query-key pairs per head ``reference`` is at least as fast as ``chunked``. On a
# CPU they break even, forward and backward, near T = 192. Elsewhere not measured yet.
REFERENCE_PAIRS = {"cpu": 2**15}
REFERENCE_PAIRS_ELSEWHERE = 2**20


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """Which implementation a call would take.

    Attributes:
      implementation: the name of the one that would run; None if a named one cannot.
      rejected: for every other candidate the reason why it would not run.
    """

    implementation: str | None
    rejected: dict[str, str]


def attention(
    q: Array,
    k: Array,
    v: Array,
    e: Array | None = None,
    *,
    causal: bool = False,
    segment_ids: Array | tuple[Array, Array] | None = None,
    window: int | None = None,
    scale: float | None = None,
    bias: Array | BiasFunction | None = None,
    mask: Array | None = None,
    query_state: Array | None = None,
    query_offset: int | Array = 0,
    keys_rotated: bool = False,
    attend_state: bool = True,
    implementation: str | None = None,
    options: Mapping[str, Any] | None = None,
    interpret: bool = False,
    sharding: Sharding | None = None,
) -> tuple[Array, Array | None]:
    """Attends over values and position states with the same probabilities.

    Queries and keys are rotated by their states, ``P`` is the softmax over visible keys of the
    scaled (and biased) logits, and ``o = P v``, ``a = P e`` (TAPE, section 3.2). A query that sees
    no key gets zeros, with zero gradients.

    Products take operands in the type of ``q``; logits, softmax and sums are kept in at least
    float32.

    Args:
      q: queries ``[batch..., Tq, Hq, D]``.
      k: keys ``[batch..., S, Hk, D]``, ``Hq`` a multiple of ``Hk``: query head ``h`` reads the
        key/value head ``h // (Hq / Hk)``.
      v: values ``[batch..., S, Hk, Dv]``.
      e: state of the keys: rotary ``[..., S, D]`` or ``[..., S, 1 | Hk, D]``, or tensor
        ``[..., S, 1 | Hk, M, L, R]`` with ``M * L == D``; batch axes may be missing. None: nothing
        is rotated or attended but the values.
      causal: key ``j`` is visible to query ``i`` only if ``j <= i + query_offset``.
      segment_ids: integers ``[..., T]``; a key is visible to queries of the same id only. A tuple
        ``(queries' [..., Tq], keys' [..., S])`` if they differ. No id is special.
      window: positive; key ``j`` is visible only if ``i + query_offset - window < j``, and unless
        causal ``j < i + query_offset + window``.
      scale: factor on the logits; None: ``1 / sqrt(D)``.
      bias: added to the scaled logits: an array that broadcasts to ``[..., Hq, Tq, S]``, or a
        function of query indices ``[Q]`` (``query_offset`` included) and key indices ``[K]``, both
        int32, to what broadcasts to ``[..., Hq, Q, K]``. Gradients reach what it closes over.
      mask: boolean, broadcasts to ``[..., Hq, Tq, S]``, True where visible. ``reference`` only.
      query_state: state of the queries, in the form of ``e``, with a number of heads that divides
        ``Hq``. None: ``e``, which must then have the queries' length.
      query_offset: an integer or a scalar integer array: index of the first query among the keys.
      keys_rotated: ``k`` is rotated already (a cache; in tensor form it is ``M * R`` wide); needs
        ``query_state``.
      attend_state: False: ``a`` is None, and nothing is paid for it.
      implementation: a name in ``BACKENDS``, or None for the fastest that can do this call here.
      options: keywords of the named implementation, such as ``block_q`` of ``chunked``.
      interpret: run kernels, where an implementation has any, in interpreted mode.
      sharding: a mesh and rules, by which ``ring`` splits the sequence. Others leave the mesh to
        the compiler.

    Returns:
      ``o [batch..., Tq, Hq, Dv]`` in the type of ``v``, and ``a [batch..., Tq, Hq, D]`` or
      ``[batch..., Tq, Hq, M, L, R]`` in the type of ``e``, or None without a state to attend.

    Raises:
      ValueError: if the call is wrong: shapes, types or names.
      NotImplementedError: if the named implementation cannot do this call here.
    """
    request = _normalise(
        q, k, v, e, causal=causal, segment_ids=segment_ids, window=window, scale=scale, bias=bias,
        mask=mask, query_state=query_state, query_offset=query_offset, keys_rotated=keys_rotated,
        attend_state=attend_state, interpret=interpret, sharding=sharding,
    )  # fmt: skip
    options = _options(implementation, options)
    if (record := _record.get()) is not None:
        record.append(_plan(_verdicts(request, implementation)))
    o, a = _backend(_first_able(request, implementation)).attend(request, **options)
    lead = jnp.shape(q)[:-1]
    o = o.reshape(*lead, o.shape[-1]).astype(request.v.dtype)
    if a is None or request.e is None:
        return o, None
    return o, a.reshape(*lead, *request.e.shape[3:]).astype(request.e.dtype)


def attention_plan(
    *args: Any,
    implementation: str | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> AttentionPlan:
    """Says which implementation :func:`attention` would run for the same arguments, and why.

    Nothing is computed; arguments are checked as there. In place of an array a
    ``jax.ShapeDtypeStruct`` does.

    Raises:
      ValueError: if the call is wrong.
    """
    _options(implementation, options)
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = {n: x for n, x in enumerate(leaves) if hasattr(x, "dtype")}
    plans = []

    def decide(arrays: dict[int, Array]) -> None:
        args, kwargs = jax.tree.unflatten(tree, [arrays.get(n, x) for n, x in enumerate(leaves)])
        plans.append(_plan(_verdicts(_normalise(*args, **kwargs), implementation)))

    jax.eval_shape(decide, arrays)
    return plans[0]


@contextlib.contextmanager
def recorded_plans() -> Iterator[list[AttentionPlan]]:
    """Collects the plans of all calls of :func:`attention` made, or traced, inside."""
    record: list[AttentionPlan] = []
    token = _record.set(record)
    try:
        yield record
    finally:
        _record.reset(token)


_record: contextvars.ContextVar[list[AttentionPlan] | None] = contextvars.ContextVar(
    "record", default=None
)


def _plan(named: Iterable[tuple[str, str | None]]) -> AttentionPlan:
    """The plan that verdicts on all candidates make."""
    verdicts = dict(named)
    chosen = next((name for name, reason in verdicts.items() if reason is None), None)
    slower = f"can do this call, but {chosen!r} is expected to be faster"
    return AttentionPlan(chosen, {n: why or slower for n, why in verdicts.items() if n != chosen})


def _candidates(request: Request) -> list[str]:
    """What to try, the one expected to be fastest first. Depends on static shapes only."""
    platform = jax.default_backend()
    names = list(ORDER.get(platform, ORDER["cpu"]))
    limit = REFERENCE_PAIRS.get(platform, REFERENCE_PAIRS_ELSEWHERE)
    short = request.query_length * request.key_length <= limit
    names.insert(names.index("chunked") + (not short), "reference")
    split = request.sharding is not None and request.sharding.shards("sequence") > 1
    return ["ring", *names] if split else names


def _backend(name: str) -> Any:
    module, _, attribute = BACKENDS[name].partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


def _options(implementation: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Checks the name of an implementation and its options."""
    if implementation is not None:
        choose("attention implementation", implementation, BACKENDS)
    if not options:
        return {}
    if implementation is None:
        raise ValueError(f"options {dict(options)} need implementation=, whose keywords they are")
    _, *known = inspect.signature(_backend(implementation).attend).parameters
    for name in options:
        choose(f"option of attention implementation {implementation!r}", name, known)
    return dict(options)


def _verdicts(request: Request, implementation: str | None) -> Iterator[tuple[str, str | None]]:
    """Candidates, each with the reason why it cannot do this call, or None if it can.

    A named implementation is the only candidate.
    """
    for name in [implementation] if implementation is not None else _candidates(request):
        try:
            _backend(name).check(request)
        except NotImplementedError as error:
            yield name, str(error)
        else:
            unproven = implementation is None and name in UNPROVEN
            yield name, "has never run on its hardware: name it to try it" if unproven else None


def _first_able(request: Request, implementation: str | None) -> str:
    """The first candidate that can do this call; slower ones are not even imported."""
    reasons = []
    for name, reason in _verdicts(request, implementation):
        if reason is None:
            return name
        reasons.append(f"attention implementation {name!r}: {reason}")
    raise NotImplementedError("; ".join(reasons))


def _normalise(
    q: Array,
    k: Array,
    v: Array,
    e: Array | None = None,
    *,
    causal: bool = False,
    segment_ids: Array | tuple[Array, Array] | None = None,
    window: int | None = None,
    scale: float | None = None,
    bias: Array | BiasFunction | None = None,
    mask: Array | None = None,
    query_state: Array | None = None,
    query_offset: int | Array = 0,
    keys_rotated: bool = False,
    attend_state: bool = True,
    interpret: bool = False,
    sharding: Sharding | None = None,
) -> Request:
    """Checks a call and flattens its batch axes."""
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    _check_inputs(q, k, v)
    e, query_state = _states(q, k, e, query_state, keys_rotated)
    _check_key_width(q, k, e, query_state, keys_rotated)
    *batch, query_length, query_heads, dim = q.shape
    query_offset = _offset(query_offset)
    _check_index_range(query_length, k.shape[-3], query_offset)
    pairs = (query_heads, query_length, k.shape[-3])
    segments = _segments(segment_ids, batch, query_length, k.shape[-3])
    if window is not None:
        window = operator.index(window)
        require(window >= 1, f"window must be at least 1; got {window}")
    if mask is not None:
        mask = jnp.asarray(mask)
        require(mask.dtype == jnp.bool_, f"mask must be boolean, True = visible; got {mask.dtype}")
        mask = _broadcastable("mask", mask, batch, pairs)
    return Request(
        q=_flatten(q, batch, 3),
        k=_flatten(k, batch, 3),
        v=_flatten(v, batch, 3),
        e=e,
        query_state=query_state,
        segments=segments,
        bias=_bias(bias, batch, pairs),
        mask=mask,
        query_offset=query_offset,
        scale=dim**-0.5 if scale is None else float(scale),
        causal=bool(causal),
        window=window,
        keys_rotated=keys_rotated,
        attend_state=attend_state,
        interpret=interpret,
        sharding=sharding,
    )


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


def _check_index_range(query_length: int, key_length: int, query_offset: int | Array) -> None:
    """Indices, and distances between them, must be 32-bit integers."""
    offset = query_offset if isinstance(query_offset, int) else 0
    require(
        query_length + key_length + abs(offset) < 2**31,
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
        "query_state without e rotates queries only: give e, or keys_rotated=True",
    )
    keys = jax.ShapeDtypeStruct((*k.shape[:-1], q.shape[-1]), k.dtype)
    e = _state("e", e, keys, "k", repeat=True)
    query_state = _state("query_state", query_state, q, "q", repeat=False)
    if e is not None and query_state is not None:
        require(
            e.shape[3:] == query_state.shape[3:],
            f"e and query_state must have one form; got blocks {e.shape[3:]} and "
            f"{query_state.shape[3:]}",
        )
    return e, query_state


def _state(name: str, e: Array | None, x: Any, of: str, *, repeat: bool) -> Array | None:
    """A state of ``x [batch..., T, H, D]`` as ``[B|1, T, heads, ...]``.

    Its heads divide ``H``; with ``repeat`` they are 1 or ``H``.
    """
    if e is None:
        return None
    e = jnp.asarray(e)
    algebra.check_state(e, x, name=name, of=of)
    tensor = algebra.is_tensor_form(e, x)
    e = algebra.align_state(e, x)
    if repeat:
        e = algebra.repeat_heads(e, x.shape[-2], tensor=tensor)
    return _flatten(e, x.shape[:-3], 5 if tensor else 3)


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
        f", k {k.shape}" + ("" if e is None else f", e {e.shape}"),
    )


def _segments(
    ids: Any, batch: Sequence[int], query_length: int, key_length: int
) -> tuple[Array, Array] | None:
    """Segment ids of queries ``[B|1, Tq]`` and of keys ``[B|1, S]``."""
    if ids is None:
        return None
    if not isinstance(ids, tuple):
        require(
            query_length == key_length,
            f"segment_ids must be a tuple (queries', keys') where lengths differ: {query_length} "
            f"queries, {key_length} keys",
        )
        # One object, by which backends know that every query sees its own key.
        own = _ids("segment_ids", ids, batch, query_length)
        return own, own
    require(len(ids) == 2, f"segment_ids must be an array or a pair of arrays; got {len(ids)}")
    return (
        _ids("query segment_ids", ids[0], batch, query_length),
        _ids("key segment_ids", ids[1], batch, key_length),
    )


def _ids(name: str, ids: Any, batch: Sequence[int], length: int) -> Array:
    """Segment ids ``[batch..., length]`` as ``[B|1, length]``."""
    ids = jnp.asarray(ids)
    require(
        jnp.issubdtype(ids.dtype, jnp.integer), f"segment_ids must be integers; got {ids.dtype}"
    )
    require(
        ids.ndim >= 1 and ids.shape[-1] == length and _batch_fits(ids.shape[:-1], batch),
        f"{name}: expected shape {(*batch, length)}, batch axes may be missing; got {ids.shape}",
    )
    return _flatten(ids, batch, 1)


def _bias(
    bias: Array | BiasFunction | None, batch: Sequence[int], pairs: tuple[int, int, int]
) -> Array | BiasFunction | None:
    """A bias with all axes, batch ones flattened: an array, or a function that returns one."""
    if bias is None:
        return None
    if not callable(bias):
        bias = jnp.asarray(bias)
        require(
            jnp.issubdtype(bias.dtype, jnp.floating),
            f"bias must be floating-point (for a boolean, use mask); got {bias.dtype}",
        )
        return _broadcastable("bias", bias, batch, pairs)
    function, heads = bias, pairs[0]

    def normalised(query_index: Array, key_index: Array) -> Array:
        sizes = (heads, query_index.shape[0], key_index.shape[0])
        value = jnp.asarray(function(query_index, key_index))
        return _broadcastable("the value of the bias function", value, batch, sizes)

    jax.eval_shape(normalised, *(jax.ShapeDtypeStruct((n,), jnp.int32) for n in pairs[1:]))
    return normalised


def _offset(offset: int | Array) -> int | Array:
    if isinstance(offset, int):
        return offset
    offset = jnp.asarray(offset)
    require(
        offset.ndim == 0 and jnp.issubdtype(offset.dtype, jnp.integer),
        f"query_offset must be an integer scalar; got shape {offset.shape}, {offset.dtype}",
    )
    return offset.astype(jnp.int32)


def _broadcastable(name: str, x: Array, batch: Sequence[int], pairs: tuple[int, int, int]) -> Array:
    """``x``, which must broadcast to ``[*batch, *pairs]``, as ``[B|1, Hq|1, Tq|1, S|1]``."""
    x = x.reshape((1,) * (3 - x.ndim) + x.shape)
    require(
        _batch_fits(x.shape[:-3], batch) and _batch_fits(x.shape[-3:], pairs),
        f"{name} must broadcast to [batch..., query heads, queries, keys] = {(*batch, *pairs)}; "
        f"got {x.shape}",
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
