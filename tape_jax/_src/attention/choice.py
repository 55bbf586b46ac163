"""Chooses the implementations that may do a call, best first.

A backend is a module, or an object in one, with two functions:

* ``check(request)`` raises NotImplementedError with the reason if it cannot do this call here;
* ``attend(request, **options)`` returns ``o [B, Tq, Hq, Dv]`` and ``a [B, Tq, Hq, De]`` or None.

To add one, write the module and add it to :data:`BACKENDS`. A call without names takes it if
``python -m tape_jax.tune`` found it right and fast, or if a row of :data:`RULES` names it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from tape_jax._src.attention.request import Request
from tape_jax._src.attention.tuning import records
from tape_jax._src.attention.tuning.records import CallShape
from tape_jax._src.core import devices
from tape_jax._src.core.checks import choose, instance, refuse

# Name to module, or to "module:object". A module is imported once a call may take it.
BACKENDS = {
    "pallas": "tape_jax._src.attention.pallas_triton",
    "mosaic": "tape_jax._src.attention.pallas_mosaic",
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


class Preference(NamedTuple):
    """Names to try if nothing was measured, fastest first, and for which calls.

    Attributes:
      names: names of implementations.
      basis: what the order rests on, in words; None: that nothing was measured.
      platform: jax's platform; None: any.
      generations: major compute capabilities of GPUs.
      itemsize: bytes per operand.
      window: whether there is one.
      shortest: the fewest tokens of a call, whose keys are not far more than its queries.
      widest_with_state: only calls that attend a state, with at most this head dimension.
      pairs, bytes: the most query-key pairs per head, and bytes of all heads' logits.
    """

    names: tuple[str, ...]
    basis: str | None = None
    platform: str | None = None
    generations: tuple[int, ...] | None = None
    itemsize: int | None = None
    window: bool | None = None
    shortest: int | None = None
    widest_with_state: int | None = None
    pairs: int | None = None
    bytes: int | None = None

    def holds(self, request: Request) -> bool:
        """Return whether a call meets the conditions of this preference."""
        shape, capability = CallShape.of(request), devices.compute_capability()
        pairs = request.query_length * request.key_length
        size = pairs * request.q.shape[0] * request.query_heads
        size *= request.accumulator_dtype.itemsize
        conditions = (
            self.platform in (None, jax.default_backend()),
            self.generations is None
            or (capability is not None and capability[0] in self.generations),
            self.itemsize in (None, request.compute_dtype.itemsize),
            self.window in (None, request.visibility.band.window is not None),
            self.shortest is None or (shape is not None and shape.length >= self.shortest),
            self.widest_with_state is None
            or (shape is not None and shape.state and shape.head_dim <= self.widest_with_state),
            self.pairs is None or pairs <= self.pairs,
            self.bytes is None or size <= self.bytes,
        )
        return all(conditions)


# If nothing was measured on this machine: calls on GPUs, from 256 tokens on, whose keys are not
# far more than their queries. Kernels were compared with the reference and timed on an H200, in
# causal calls with as many keys as queries (benchmarks/results/2026-11-26-nvidia-h200-2.md).
H200 = f"times of an H200; nothing was measured here ({records.COMMAND} does)"
CLAIM = f"the libraries' own claims; nothing was measured here ({records.COMMAND} does)"
HOPPER = Preference((), H200, generations=(9,), itemsize=2, shortest=256)
BLACKWELL = HOPPER._replace(generations=(10,), basis=CLAIM)
OTHERS = HOPPER._replace(generations=(8, 12), basis=CLAIM)
# No other kernel takes float32, and none was timed with it.
SINGLE = Preference(
    ("pallas",),
    "the only kernel of float32; not timed",
    generations=(8, 9, 10, 12),
    itemsize=4,
    shortest=256,
)
RULES = (
    # On a CPU, forward and backward, from 1 to 2048 heads in all and T 32 to 512, ``reference`` is
    # then 0.9 to 1.4 times as fast; beyond either limit ``chunked`` is 0.9 to 4 times as fast.
    Preference(("reference",), pairs=2**15, bytes=2**24),
    # tokamax's kernel visits, in the backward pass, blocks hidden by a window.
    HOPPER._replace(
        names=("tokamax_mosaic", "pallas", "cudnn"), window=False, widest_with_state=64
    ),
    HOPPER._replace(names=("cudnn", "pallas", "tokamax_mosaic")),
    BLACKWELL._replace(names=("tokamax_mosaic",), window=False, widest_with_state=64),
    BLACKWELL._replace(names=("cudnn", "pallas", "tokamax_mosaic")),
    OTHERS._replace(names=("cudnn", "pallas")),
    SINGLE,
    Preference(("query_blocks",), platform="cpu"),
    Preference(("chunked", "rows", "reference")),
)
# The oldest release of a library whose kernel was timed.
TIMED_RELEASES = {"tokamax_mosaic": ("tokamax", (0, 0, 17))}


class Candidate(NamedTuple):
    """One way to do a call.

    Attributes:
      implementation: its name in ``BACKENDS``.
      options: keywords of the implementation.
      basis: why it has its place, in words.
      seconds: measured seconds, forward, and forward and backward.
    """

    implementation: str
    options: Mapping[str, Any] = MappingProxyType({})
    basis: str = ""
    seconds: tuple[float, float] | None = None


class Candidates(NamedTuple):
    """Ways to do a call, best first; the first that can is taken.

    Attributes:
      order: each implementation once.
      excluded: why others are not tried, by name.
      measured: whether the order rests on measurements near the call.
    """

    order: list[Candidate]
    excluded: Mapping[str, str] = MappingProxyType({})
    measured: bool = False

    def verdicts(self, request: Request) -> Iterator[tuple[Candidate, NotImplementedError | None]]:
        """Yield each candidate with the reason why it cannot do this call, or None.

        This is lazy: nothing is imported after the candidate that is taken.
        """
        for candidate in self.order:
            try:
                check(candidate.implementation, request, candidate.options)
            except NotImplementedError as refusal:
                yield candidate, refusal
            else:
                yield candidate, None


def candidates(
    request: Request, names: Sequence[str] | None, options: Mapping[str, Any]
) -> Candidates:
    """Return the named candidates, or else the ring, the measured ones and the rules'.

    They depend only on static shapes.

    Args:
      request: the call.
      names: the caller's names, checked; None for an automatic choice.
      options: keywords of the only named implementation.

    Raises:
      ValueError: if ``options`` is no mapping.
    """
    if names is not None:
        instance("options", options, Mapping)
        return Candidates([Candidate(name, options, "named") for name in names])
    if request.symbolic:
        return Candidates([Candidate("reference", basis="shapes are symbolic")])
    wrong = records.known().wrong.get(request.q.dtype.itemsize, {})
    usual = [x for x in _by_rules(request) if x.implementation not in wrong]
    ranking = None if request.interpret else records.ranking(request, default)
    found: list[Candidate] = []
    if ranking is None:
        note = records.known().note
        kept = {"ring", *(x.implementation for x in usual)}
        others = () if jax.default_backend() == "cpu" else BACKENDS
        excluded = {name: note for name in others if name not in kept}
    else:
        note = f"measured: {ranking.shape}"
        excluded = ranking.struck
        found = [
            Candidate(x.implementation, basis=note, seconds=(x.forward, x.gradients))
            for x in ranking.order
            if x.implementation in BACKENDS
        ]
    found += [x._replace(basis=x.basis or note) for x in usual]
    if request.sharding is not None and request.sharding.shards("sequence") > 1:
        found.insert(0, Candidate("ring", basis="the mesh splits the sequence"))
    return Candidates(_once(found), {**excluded, **wrong}, ranking is not None)


def default(request: Request) -> str:
    """Return the implementation that a call takes if nothing was measured."""
    usual = Candidates(_once(_by_rules(request)))
    return next(x.implementation for x, refusal in usual.verdicts(request) if refusal is None)


def _by_rules(request: Request) -> Iterator[Candidate]:
    for rule in RULES:
        for name in rule.names if rule.holds(request) else ():
            library, oldest = TIMED_RELEASES.get(name, ("jax", ()))
            if release(library) >= oldest:
                yield Candidate(name, basis=rule.basis or "")


def _once(found: Sequence[Candidate] | Iterator[Candidate]) -> list[Candidate]:
    """Return each implementation's first."""
    first: dict[str, Candidate] = {}
    for candidate in found:
        first.setdefault(candidate.implementation, candidate)
    return [*first.values()]


@functools.cache
def release(package: str) -> tuple[int, ...]:
    """Return the release of an installed package; empty if it is not installed."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def backend(name: str) -> Any:
    """Return the backend of a name; NotImplementedError if it cannot be imported."""
    module, _, attribute = BACKENDS[name].partition(":")
    try:
        found = importlib.import_module(module)
    except Exception as error:  # What a library of another version may raise.
        kind = type(error).__name__
        raise NotImplementedError(f"cannot be imported here: {kind}: {error}") from error
    return getattr(found, attribute) if attribute else found


def check(name: str, request: Request, options: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Raise NotImplementedError if a backend cannot do a call, ValueError for unknown options."""
    found = backend(name)
    for option in options:
        _, *known = inspect.signature(found.attend).parameters
        choose(f"option of attention implementation {name!r}", option, known)
    open_sizes = ", ".join(map(repr, request.symbolic))
    refuse(
        name != "reference" and bool(open_sizes),
        f"its blocks need sizes that are known; {open_sizes} is symbolic, which 'reference' takes",
    )
    found.check(request)
