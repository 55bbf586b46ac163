"""The public attention call, run by the first implementation that can do it."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax._src.attention import choice, reference
from tape_jax._src.attention.choice import Candidate, Candidates
from tape_jax._src.attention.normalize import normalize
from tape_jax._src.attention.request import BiasFunction, Request, RowFunction
from tape_jax._src.core.checks import choose, require
from tape_jax._src.core.explicit import automatic_inside, joined, names_of
from tape_jax._src.core.operations import matrix_operations
from tape_jax._src.core.sharding import Sharding

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """The implementation that a call of :func:`attention` would run, and why.

    Attributes:
      implementation: its name; None if no named implementation can run.
      rejected: the reason why each other candidate would not run.
      options: keywords that the implementation would get.
      measured: seconds that implementations took on this machine, forward and with gradients, at
        the measured shape nearest to the call's; None if none is near, or you gave names.
      basis: what the choice rests on, in words.
      operations: number of operations of the products in a forward pass; a product and a sum count
        as two. All query-key pairs count, even if an implementation skips hidden ones, and so do
        ``logits_fn`` and ``weights_fn``. None if they were not counted.
    """

    implementation: str | None
    rejected: dict[str, str]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    measured: dict[str, tuple[float, float]] | None = None
    basis: str = ""
    operations: float | None = None


def _explicit_axes(given: Mapping[str, Any], shapes: Any) -> tuple[Any, Any]:
    """Return the mesh axes of the outputs of :func:`attention` on a mesh with explicit axes."""
    q, k, v = (given[name] for name in "qkv")
    of_q, of_k, of_v = (names_of(x, np.ndim(q)) for x in (q, k, v))
    kv_heads = of_k[-2] if np.shape(q)[-2:-1] == np.shape(k)[-2:-1] else None
    batch = zip(of_q[:-3], of_k[:-3], of_v[:-3], strict=True)
    lead = [joined("a batch axis of q, k and v", *names) for names in batch]
    lead += [of_q[-3], joined("the axis of heads of q and k", of_q[-2], kv_heads)]
    _, a = shapes
    if a is None:
        return (*lead, of_v[-1]), None
    return (*lead, of_v[-1]), (*lead, *names_of(given.get("state"), a.ndim)[len(lead) :])


@automatic_inside(_explicit_axes)
def attention(
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
    implementation: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    interpret: bool = False,
    sharding: Sharding | None = None,
    logits_fn: RowFunction | None = None,
    weights_fn: RowFunction | None = None,
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
      state: state ``e`` of the keys. Rotary ``[S, D]`` or ``[batch..., S, 1 | Hk, D]``, or tensor
        ``[S, 1, M, L, R]`` or ``[batch..., S, 1 | Hk, M, L, R]`` with ``M * L == D``. A batch axis
        may be 1; no shape in between is accepted. None: nothing is rotated, and only the values
        are attended.
      is_causal: key ``j`` is visible to query ``i`` only if ``j <= i + query_offset``.
      local_window_size: as in ``jax.nn``: how many keys before and after its own position a query
        sees, an integer or a pair ``(left, right)``; 0: only its own. Padding and other segments
        count too, unless ``window_positions`` are given.
      window_positions: integers ``[..., T]``, or a tuple (queries' ``[..., Tq]``, keys'
        ``[..., S]``), by which ``local_window_size`` measures instead of by indices, for example
        positions within segments. In plain JAX only.
      query_seq_lengths, key_value_seq_lengths: integers ``[batch...]``, as in ``jax.nn``: tokens
        beyond a row's length are padding, and outputs of padding queries are zero.
      mask: boolean, broadcasts to ``[..., Hq, Tq, S]``, True where visible.
      bias: added to the scaled logits: an array that broadcasts to ``[..., Hq, Tq, S]``, or a
        function of query indices ``[Q]`` (``query_offset`` included) and key indices ``[K]``, both
        int32, whose result broadcasts to ``[..., Hq, Q, K]``. Gradients reach what it closes over.
        Call it within ``jax.jit``: outside, ``chunked`` recompiles a function at each call.
      scale: factor on the logits; None: ``1 / sqrt(D)``.
      logit_softcap: bound ``c`` of the scaled logits, which become ``c tanh(logits / c)`` before
        anything is added to them or hidden (Gemma 2, section 2); None: no bound. In plain JAX, in
        ``ring`` and in ``splash``.
      query_state: state of the queries, in the form of ``state``, but with any number of heads
        that divides ``Hq``. None: ``state``, which must then have the queries' length.
      query_offset: index of the first query among the keys: an integer, or an integer array with
        one number for all rows or one per row ``[batch...]``.
      keys_rotated: ``k`` is already rotated (a cache; in tensor form it is ``M * R`` wide); needs
        ``query_state``.
      segment_ids: integers ``[..., T]``; only queries of the same id see a key. A tuple
        ``(queries' [..., Tq], keys' [..., S])`` if they differ. No id is special.
      log_decay: floats ``F [..., T, Hq | 1]``; ``F_i - F_j`` is added to the logit of query ``i``
        and key ``j``, after ``scale``. With the cumulative sum of log forget gates this
        is forgetting attention (Lin et al., 2025); causal ALiBi is ``F_t = -slope * t``. A tuple
        ``(queries' [..., Tq, Hq | 1], keys' [..., S, Hq | 1])`` if they differ. The difference is
        taken in at least float32, whatever the type of ``q``. ``F`` must be finite.
      attend_state: False: ``a`` is None and costs nothing.
      implementation: a name in ``BACKENDS``; several names, to take the first that can do this
        call here; or None for the fastest that can, as ``python -m tape_jax.tune`` has
        measured on this machine. Without measurements: a kernel on NVIDIA GPUs from Ampere on,
        from 256 tokens on, in 16 bits (on Hopper by times of an H200, on others by the libraries'
        claims) and in float32 (not timed); plain JAX elsewhere. Kernels gather heads that are not
        split alike, or whose shards do not divide the key/value heads; plain JAX need not. If a
        projection splits single heads over devices, jax ends with an INTERNAL error: first make
        heads whole with ``jax.lax.with_sharding_constraint``.
      options: keywords of the named implementation, such as ``block_q`` of ``chunked``.
      interpret: run kernels, if an implementation has any, in interpreted mode.
      sharding: a mesh and rules, by which ``ring`` splits the sequence. Other implementations
        leave the mesh to the compiler.
      logits_fn: rewrites rows of scaled logits (after any softcap), before anything is added to
        them or hidden. It takes logits ``[B, Hq, Q, K]`` of ``Q`` queries and the first
        ``K`` keys, which are all that these queries may see; ``B`` is all batch axes. It also takes
        :class:`tape_jax.AttentionRows`, which describes the queries and what they see.
        Gradients reach what it closes over.
      weights_fn: replaces the softmax: a function of the final logits, -inf where a key is not
        visible, and of the same rows, that returns weights of the same shape.

    Returns:
      ``o [batch..., Tq, Hq, Dv]`` in the type of ``v``, and ``a [batch..., Tq, Hq, D]`` or
      ``[batch..., Tq, Hq, M, L, R]`` in the type of ``state``, or None without a state to attend.
      On a mesh with explicit axes they are split as the einsum would: batch, time and heads like
      ``q``, the last axes like ``v`` and ``state``.

    ``reference``, ``query_blocks`` and ``rows`` have second-order and forward-mode derivatives;
    kernels and ``chunked`` raise an error.

    Raises:
      ValueError: if the call is wrong: shapes, types or names.
      NotImplementedError: if no named implementation can do this call here; the message says why.
    """
    request = normalize(
        q, k, v, state=state, is_causal=is_causal, local_window_size=local_window_size,
        window_positions=window_positions,
        query_seq_lengths=query_seq_lengths, key_value_seq_lengths=key_value_seq_lengths, mask=mask,
        bias=bias, scale=scale, logit_softcap=logit_softcap, query_state=query_state,
        query_offset=query_offset, keys_rotated=keys_rotated, segment_ids=segment_ids,
        log_decay=log_decay, attend_state=attend_state, interpret=interpret, sharding=sharding,
        logits_fn=logits_fn, weights_fn=weights_fn,
    )  # fmt: skip
    names = _names(implementation, options)
    o, a = _attend(request, names, options or {})
    lead = jnp.shape(q)[:-1]
    o = o.reshape(*lead, o.shape[-1]).astype(request.v.dtype)
    if a is None or request.state is None:
        return o, None
    return o, a.reshape(*lead, *request.state.shape[3:]).astype(request.state.dtype)


def attention_plan(
    *args: Any,
    implementation: str | Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> AttentionPlan:
    """Says which implementation :func:`attention` would run for the same arguments, and why.

    It checks the arguments as :func:`attention` does and computes nothing. You can give a
    ``jax.ShapeDtypeStruct`` for an array.

    Raises:
      ValueError: if the call is wrong.
    """
    names = _names(implementation, options)
    leaves, tree = jax.tree.flatten((args, kwargs))
    known = np.ndarray | np.generic | jax.Array
    arrays = {
        n: x for n, x in enumerate(leaves) if hasattr(x, "dtype") and not isinstance(x, known)
    }
    plans = []

    @automatic_inside(lambda given, shapes: ())
    def decide(leaves: list[Any]) -> Array:
        args, kwargs = jax.tree.unflatten(tree, leaves)
        request = normalize(*args, **kwargs)
        plan = _plan(request, choice.candidates(request, names, options or {}))
        plans.append(_with_operations(plan, request))
        # A result, for its sharding names the mesh.
        return jnp.zeros(())

    jax.eval_shape(lambda arrays: decide([arrays.get(n, x) for n, x in enumerate(leaves)]), arrays)
    return plans[0]


@contextlib.contextmanager
def recorded_plans(*, operations: bool = False) -> Iterator[list[AttentionPlan]]:
    """Collects the plans of all :func:`attention` calls that are made or traced inside.

    Args:
      operations: whether to count operations too, which traces each call once more.
    """
    record = _Record([], operations)
    token = _record.set(record)
    try:
        yield record.plans
    finally:
        _record.reset(token)


class _Record(NamedTuple):
    """Plans of calls, and whether to count their operations."""

    plans: list[AttentionPlan]
    operations: bool


_record: contextvars.ContextVar[_Record | None] = contextvars.ContextVar("record", default=None)


def _plan(
    request: Request,
    candidates: Candidates,
    refused: Mapping[str, NotImplementedError] = MappingProxyType({}),
) -> AttentionPlan:
    """Return the plan of a call; ``refused`` overrides the candidates' own verdicts."""
    verdicts = [
        (candidate, refused.get(candidate.implementation, refusal))
        for candidate, refusal in candidates.verdicts(request)
    ]
    chosen = next((candidate for candidate, refusal in verdicts if refusal is None), None)
    reasons = {
        candidate.implementation: str(refusal or _later(candidate, chosen))
        for candidate, refusal in verdicts
        if candidate is not chosen
    }
    basis = (chosen or candidates.order[0]).basis
    if chosen is None:
        return AttentionPlan(None, reasons, basis=basis)
    excluded = {n: x for n, x in candidates.excluded.items() if n != chosen.implementation}
    seconds = {x.implementation: x.seconds for x in candidates.order if x.seconds is not None}
    return AttentionPlan(
        chosen.implementation,
        {**reasons, **excluded},
        dict(chosen.options),
        seconds if candidates.measured else None,
        basis,
    )


def _later(other: Candidate, chosen: Candidate | None) -> str:
    """Return why a call does not take a candidate that could do it."""
    assert chosen is not None
    if chosen.seconds is None or other.seconds is None:
        return f"can do this call, but {chosen.implementation!r} is tried first"
    mine, theirs = ([f"{1e3 * x:.3g}" for x in each.seconds or ()] for each in (chosen, other))
    return (
        f"measured: {theirs[0]} ms forward and {theirs[1]} ms with gradients, "
        f"{chosen.implementation!r} {mine[0]} and {mine[1]} ms"
    )


def _with_operations(plan: AttentionPlan, request: Request) -> AttentionPlan:
    """Return the plan with the operations of its products."""
    operations = matrix_operations(lambda: reference.attend(request))
    return dataclasses.replace(plan, operations=operations)


def _names(
    implementation: str | Sequence[str] | None, options: Mapping[str, Any] | None
) -> tuple[str, ...] | None:
    """Return the checked names to try; None for an automatic choice."""
    names = (implementation,) if isinstance(implementation, str) else implementation
    require(
        names is None or isinstance(names, Sequence),
        f"implementation must be a name, several or None; got {implementation!r}",
    )
    for name in names or ():
        choose("attention implementation", name, choice.BACKENDS)
    require(names is None or len(names) > 0, "implementation must hold a name; got an empty one")
    require(
        not options or (names is not None and len(names) == 1),
        f"options {options} are keywords of one implementation; got implementation="
        f"{implementation!r}",
    )
    return None if names is None else tuple(names)


def _attend(
    request: Request, names: Sequence[str] | None, options: Mapping[str, Any]
) -> tuple[Array, Array | None]:
    """Run the first candidate that can do this call."""
    candidates = choice.candidates(request, names, options)
    refused: dict[str, NotImplementedError] = {}
    for candidate, refusal in candidates.verdicts(request):
        name = candidate.implementation
        if refusal is None:
            try:
                out = choice.backend(name).attend(request, **candidate.options)
            except NotImplementedError as error:
                refusal = error
            else:
                if (record := _record.get()) is not None:
                    plan = _plan(request, candidates, refused)
                    if record.operations:
                        plan = _with_operations(plan, request)
                    record.plans.append(plan)
                return out
        refused[name] = refusal
    reasons = [f"attention implementation {name!r}: {why}" for name, why in refused.items()]
    raise NotImplementedError("; ".join(reasons)) from refused[name]
