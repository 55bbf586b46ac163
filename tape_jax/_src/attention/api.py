"""The public attention call: checks, normalisation, choice of a backend, errors.

A backend is a module, or an object in one, with two functions:

* ``check(request)`` raises NotImplementedError with the reason if it cannot do this call here;
* ``attend(request, **options)`` returns ``o [B, Tq, Hq, Dv]`` and ``a [B, Tq, Hq, De]`` or None.

and perhaps a third, ``candidates(request)``: other options, in JSON types, worth measuring.

To add one, write the module and add its line to :data:`BACKENDS`. It is taken by itself where
``python -m tape_jax.tune`` has found it right and fast.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax._src.attention import hopper, reference
from tape_jax._src.attention.normalise import normalise
from tape_jax._src.attention.request import BiasFunction, Request, RowFunction
from tape_jax._src.attention.tuning import choice as tuned
from tape_jax._src.attention.tuning.cases import Contender
from tape_jax._src.attention.tuning.choice import Ranking
from tape_jax._src.core.checks import choose, require
from tape_jax._src.core.operations import matrix_operations
from tape_jax._src.core.sharding import Sharding

Array = jax.Array

# Name to module, or to "module:object". A module is imported when it may be taken, or is named.
BACKENDS = {
    "pallas": "tape_jax._src.attention.pallas_triton",
    "tokamax": "tape_jax._src.attention.vendor_tokamax:tokamax",
    "tokamax_mosaic": "tape_jax._src.attention.vendor_tokamax:tokamax_mosaic",
    "tokamax_triton": "tape_jax._src.attention.vendor_tokamax:tokamax_triton",
    "cudnn": "tape_jax._src.attention.vendor_cudnn:cudnn",
    "splash": "tape_jax._src.attention.vendor_splash:splash",
    "ring": "tape_jax._src.attention.ring",
    "chunked": "tape_jax._src.attention.chunked",
    "rows": "tape_jax._src.attention.rows",
    "query_blocks": "tape_jax._src.attention.query_blocks",
    "reference": "tape_jax._src.attention.reference",
}

# What ``implementation=None`` tries where nothing was measured: plain JAX.
STATIC = {"cpu": ("query_blocks", "chunked")}
STATIC_ELSEWHERE = ("chunked",)

# ``reference`` comes before those where a head has at most so many query-key pairs, and the logits
# of all heads and rows take at most so many bytes. On a CPU, forward and backward, from 1 to 2048
# heads in all and T 32 to 512, it is then 0.9 to 1.4 times as fast; beyond either limit ``chunked``
# is 0.9 to 4 times as fast.
SMALL_PAIRS, SMALL_BYTES = 2**15, 2**24


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """Which implementation a call would take.

    Attributes:
      implementation: the name of the one that would run; None if a named one cannot.
      rejected: for every other candidate the reason why it would not run.
      options: keywords that it would be given.
      measured: seconds that implementations took on this machine, forward and with gradients, at
        the measured shape nearest to the call's; None if none is near, or names are given.
      basis: what the choice rests on, in words.
      operations: of the products of a forward pass over all pairs of query and key, a product and
        a sum being two; those of ``logits_fn`` and ``weights_fn`` included, also where an
        implementation leaves out what is hidden. None where they were not counted.
    """

    implementation: str | None
    rejected: dict[str, str]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    measured: dict[str, tuple[float, float]] | None = None
    basis: str = ""
    operations: float | None = None


def attention(
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
      state: of the keys, ``e``. Rotary ``[S, D]`` or ``[batch..., S, 1 | Hk, D]``, or tensor
        ``[S, 1, M, L, R]`` or ``[batch..., S, 1 | Hk, M, L, R]`` with ``M * L == D``. A batch axis
        may be 1; nothing between the two is guessed. None: nothing is rotated or attended but the
        values.
      is_causal: key ``j`` is visible to query ``i`` only if ``j <= i + query_offset``.
      local_window_size: positive, ``w``; key ``j`` is visible only if ``i + query_offset - w < j``,
        and unless causal ``j < i + query_offset + w``: the query's own place counts, so that
        ``jax.nn.dot_product_attention`` calls the same window ``w - 1``.
      mask: boolean, broadcasts to ``[..., Hq, Tq, S]``, True where visible.
      bias: added to the scaled logits: an array that broadcasts to ``[..., Hq, Tq, S]``, or a
        function of query indices ``[Q]`` (``query_offset`` included) and key indices ``[K]``, both
        int32, to what broadcasts to ``[..., Hq, Q, K]``. Gradients reach what it closes over.
      scale: factor on the logits; None: ``1 / sqrt(D)``.
      query_state: state of the queries, in the form of ``state``, but its number of heads is any
        that divides ``Hq``. None: ``state``, which must then have the queries' length.
      query_offset: index of the first query among the keys: an integer, or an integer array, of
        one number for all or one a row ``[batch...]``.
      keys_rotated: ``k`` is rotated already (a cache; in tensor form it is ``M * R`` wide); needs
        ``query_state``.
      segment_ids: integers ``[..., T]``; a key is visible to queries of the same id only. A tuple
        ``(queries' [..., Tq], keys' [..., S])`` if they differ. No id is special.
      log_decay: floats ``F [..., T, Hq | 1]``; ``F_i - F_j`` is added to the logit of query ``i``
        and key ``j``, after ``scale``. With the running sum of the logarithms of forget gates this
        is forgetting attention (Lin et al., 2025); causal ALiBi is ``F_t = -slope * t``. A tuple
        ``(queries' [..., Tq, Hq | 1], keys' [..., S, Hq | 1])`` if they differ. Subtracted in at
        least float32 whatever the type of ``q``. ``F`` must be finite.
      attend_state: False: ``a`` is None, and nothing is paid for it.
      implementation: a name in ``BACKENDS``; several, of which the first that can do this call
        here is taken; or None for the fastest that can, by what ``python -m tape_jax.tune`` has
        measured on this machine; if nothing was, by times of an H200 on a Hopper GPU, in 16
        bits, and plain JAX elsewhere. With kernels, shards of query heads must divide the key/value
        heads; plain JAX takes any.
      options: keywords of the named implementation, such as ``block_q`` of ``chunked``.
      interpret: run kernels, where an implementation has any, in interpreted mode.
      sharding: a mesh and rules, by which ``ring`` splits the sequence. Others leave the mesh to
        the compiler.
      logits_fn: rewrites rows of scaled logits before anything is added to them or hidden: a
        function of logits ``[B, Hq, Q, K]`` of ``Q`` queries and the first ``K`` keys, which are
        all that these queries may see, ``B`` being all batch axes, and of
        :class:`tape_jax.AttentionRows`, which says which queries they are and what they see.
        Gradients reach what it closes over.
      weights_fn: in place of the softmax: a function of the final logits, -inf where a key is not
        visible, and of the same rows, to weights of the same shape.

    Returns:
      ``o [batch..., Tq, Hq, Dv]`` in the type of ``v``, and ``a [batch..., Tq, Hq, D]`` or
      ``[batch..., Tq, Hq, M, L, R]`` in the type of ``state``, or None without a state to attend.

    Derivatives of second order, and in forward mode, are those of ``reference`` alone; the others
    raise an error.

    Raises:
      ValueError: if the call is wrong: shapes, types or names.
      NotImplementedError: if no named implementation can do this call here; the message says why.
    """
    request = normalise(
        q, k, v, state=state, is_causal=is_causal, local_window_size=local_window_size, mask=mask,
        bias=bias, scale=scale, query_state=query_state, query_offset=query_offset,
        keys_rotated=keys_rotated, segment_ids=segment_ids, log_decay=log_decay,
        attend_state=attend_state, interpret=interpret, sharding=sharding, logits_fn=logits_fn,
        weights_fn=weights_fn,
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

    Nothing is computed; arguments are checked as there. In place of an array a
    ``jax.ShapeDtypeStruct`` does.

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

    def decide(arrays: dict[int, Array]) -> None:
        args, kwargs = jax.tree.unflatten(tree, [arrays.get(n, x) for n, x in enumerate(leaves)])
        request = normalise(*args, **kwargs)
        plan = _plan(_Choice.of(request, names, options or {}))
        plans.append(_with_operations(plan, request))

    jax.eval_shape(decide, arrays)
    return plans[0]


@contextlib.contextmanager
def recorded_plans(*, operations: bool = False) -> Iterator[list[AttentionPlan]]:
    """Collects the plans of all calls of :func:`attention` made, or traced, inside.

    Args:
      operations: whether these are counted too, for which each call is traced once more.
    """
    record = _Record([], operations)
    token = _record.set(record)
    try:
        yield record.plans
    finally:
        _record.reset(token)


class _Record(NamedTuple):
    """Plans of calls, and whether their operations are to be counted."""

    plans: list[AttentionPlan]
    operations: bool


_record: contextvars.ContextVar[_Record | None] = contextvars.ContextVar("record", default=None)


class _Choice(NamedTuple):
    """What may do a call.

    Attributes:
      request: the call.
      order: what to try, the best first.
      ranking: what was measured near the call, if that is what the order rests on.
      excluded: what is not tried, and why.
      basis: what the order rests on, in words.
    """

    request: Request
    order: list[Contender]
    ranking: Ranking | None = None
    excluded: Mapping[str, str] = MappingProxyType({})
    basis: str = ""

    @classmethod
    def of(
        cls, request: Request, names: Sequence[str] | None, options: Mapping[str, Any]
    ) -> _Choice:
        """What the caller names, or what was measured. Depends on static shapes only."""
        if names is not None:
            return cls(request, [Contender(name, options) for name in names], basis="named")
        static = _static(request)
        ranking = None
        if not request.interpret:
            ranking = tuned.ranking(request, default(request).implementation, _would_try)
        order = [Contender(name) for name in static]
        if ranking is None:
            note = tuned.known().note
            basis = hopper.BASIS if hopper.order(request) else note
            unmeasured = set(BACKENDS) - {*static, "ring"} if jax.default_backend() != "cpu" else ()
            excluded = {name: note for name in BACKENDS if name in unmeasured}
        else:
            basis = f"measured: {ranking.shape}"
            excluded = ranking.struck
            order = [x for x in order if x.implementation not in ranking.wrong]
            order = [x for x in ranking.order if x.implementation in BACKENDS] + order
        if request.sharding is not None and request.sharding.shards("sequence") > 1:
            order.insert(0, Contender("ring"))
        first: dict[str, Contender] = {}
        for candidate in order:
            first.setdefault(candidate.implementation, candidate)
        return cls(request, [*first.values()], ranking, excluded, basis)

    def verdicts(self) -> Iterator[tuple[Contender, NotImplementedError | None]]:
        """Candidates, each with the reason why it cannot do this call, or None if it can.

        One at a time: what comes after the one that is taken is not imported.
        """
        for candidate in self.order:
            try:
                _check(candidate.implementation, self.request, candidate.options)
            except NotImplementedError as refusal:
                yield candidate, refusal
            else:
                yield candidate, None


def _plan(
    choice: _Choice, refused: Mapping[str, NotImplementedError] = MappingProxyType({})
) -> AttentionPlan:
    """The plan that verdicts on all candidates make; ``refused`` goes before them."""
    verdicts = [(c, refused.get(c.implementation, refusal)) for c, refusal in choice.verdicts()]
    chosen = next((candidate for candidate, refusal in verdicts if refusal is None), None)
    name = None if chosen is None else chosen.implementation
    seconds = choice.ranking.seconds if choice.ranking else None

    def slower(other: str) -> str:
        if name is None or seconds is None or not {name, other} <= seconds.keys():
            return f"can do this call, but {name!r} is tried first"
        mine, theirs = ([f"{1e3 * x:.3g}" for x in seconds[each]] for each in (name, other))
        return (
            f"measured: {theirs[0]} ms forward and {theirs[1]} ms with gradients, {name!r} "
            f"{mine[0]} and {mine[1]} ms"
        )

    reasons = {
        candidate.implementation: str(refusal or slower(candidate.implementation))
        for candidate, refusal in verdicts
        if candidate is not chosen
    }
    return AttentionPlan(
        name,
        {other: why for other, why in {**reasons, **choice.excluded}.items() if other != name},
        {} if chosen is None else dict(chosen.options),
        None if seconds is None else dict(seconds),
        choice.basis,
    )


def _with_operations(plan: AttentionPlan, request: Request) -> AttentionPlan:
    """The plan of a call with the operations of its products."""
    operations = matrix_operations(lambda: reference.attend(request))
    return dataclasses.replace(plan, operations=operations)


def _static(request: Request) -> list[str]:
    """What to try where nothing was measured."""
    names = [*hopper.order(request), *STATIC.get(jax.default_backend(), STATIC_ELSEWHERE)]
    pairs = request.query_length * request.key_length
    heads = request.q.shape[0] * request.query_heads
    size = pairs * heads * request.accumulator_dtype.itemsize
    small = pairs <= SMALL_PAIRS and size <= SMALL_BYTES
    names.append("rows")
    names.insert(0 if small else len(names), "reference")
    return names


def trials(request: Request) -> Iterator[tuple[str, Sequence[Mapping[str, Any]], str | None]]:
    """What is worth measuring: names, options beside none, and why one cannot do a call."""
    for name in BACKENDS:
        if name in ("ring", "tokamax"):  # Of several devices; the first of two others.
            continue
        try:
            _check(name, request, {})
        except NotImplementedError as refusal:
            yield name, (), str(refusal)
        else:
            yield name, _options(name, request), None


def default(request: Request) -> Contender:
    """What a call takes where nothing was measured."""
    return next(c for c in map(Contender, _static(request)) if _can(request, c))


def _can(request: Request, candidate: Contender) -> bool:
    """Whether an implementation can do a call with these options."""
    try:
        _check(candidate.implementation, request, candidate.options)
    except (NotImplementedError, KeyError):
        return False
    return True


def _would_try(request: Request, candidate: Contender) -> bool:
    """Whether an implementation would try these options in a call."""
    can = _can(request, candidate)
    return can and candidate.options in _options(candidate.implementation, request)


def _options(name: str, request: Request) -> Sequence[Mapping[str, Any]]:
    """The options beside none that are worth measuring."""
    return getattr(_backend(name), "candidates", lambda request: ())(request)


def _names(
    implementation: str | Sequence[str] | None, options: Mapping[str, Any] | None
) -> tuple[str, ...] | None:
    """The names to try, checked; None for an automatic choice."""
    names = (implementation,) if isinstance(implementation, str) else implementation
    require(
        names is None or isinstance(names, Iterable),
        f"implementation must be a name, several or None; got {implementation!r}",
    )
    for name in names or ():
        choose("attention implementation", name, BACKENDS)
    require(names is None or len(names) > 0, "implementation must hold a name; got an empty one")
    require(
        not options or (names is not None and len(names) == 1),
        f"options {options} are keywords of one implementation; got implementation="
        f"{implementation!r}",
    )
    return None if names is None else tuple(names)


def _backend(name: str) -> Any:
    """The backend of a name; NotImplementedError if it cannot be imported."""
    module, _, attribute = BACKENDS[name].partition(":")
    try:
        found = importlib.import_module(module)
    except Exception as error:  # What a library of another version may raise.
        kind = type(error).__name__
        raise NotImplementedError(f"cannot be imported here: {kind}: {error}") from error
    return getattr(found, attribute) if attribute else found


def _check(name: str, request: Request, options: Mapping[str, Any]) -> None:
    """Raises NotImplementedError if a backend cannot do a call, ValueError for unknown options."""
    backend = _backend(name)
    for option in options:
        _, *known = inspect.signature(backend.attend).parameters
        choose(f"option of attention implementation {name!r}", option, known)
    backend.check(request)


def _attend(
    request: Request, names: Sequence[str] | None, options: Mapping[str, Any]
) -> tuple[Array, Array | None]:
    """Runs the first candidate that can do this call."""
    choice = _Choice.of(request, names, options)
    refused: dict[str, NotImplementedError] = {}
    for candidate, refusal in choice.verdicts():
        name = candidate.implementation
        if refusal is None:
            try:
                out = _backend(name).attend(request, **candidate.options)
            except NotImplementedError as error:
                refusal = error
            else:
                if (record := _record.get()) is not None:
                    plan = _plan(choice, refused)
                    if record.operations:
                        plan = _with_operations(plan, request)
                    record.plans.append(plan)
                return out
        refused[name] = refusal
    reasons = [f"attention implementation {name!r}: {why}" for name, why in refused.items()]
    raise NotImplementedError("; ".join(reasons)) from refused[name]
