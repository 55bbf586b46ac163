"""What a call takes, by what was measured on this machine.

The file is read at the first call of a process and not again, so that all of its programs agree.
Everything is decided by static shapes.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tape_jax._src.attention.request import Request
from tape_jax._src.attention.tuning import store
from tape_jax._src.attention.tuning.cases import CallShape, Contender, Measured
from tape_jax._src.core.processes import broadcast_text

COMMAND = "python -m tape_jax.tune"
# What beats the default takes at most this much of its time in either direction. Between processes
# on a CPU times differ by more than one process shows: 0.83 in one was 1.13 in the next.
GAIN, CPU_GAIN = 0.95, 0.8
# How many times the logits of the measured case ``reference`` may have where it is not the default,
# and how many bytes they may take: every layer of a model keeps its own for the backward pass,
# which one call does not show.
REACH, MOST_BYTES = 2, 2**26


class Ranking(NamedTuple):
    """What was measured at the shape nearest to a call's.

    Attributes:
      shape: that shape.
      order: what may be taken, the best first; an implementation may occur with several options.
      seconds: of each implementation with its best options: forward, and forward and backward.
      struck: by name why an implementation was not timed.
      wrong: those of them that disagreed with the reference.
    """

    shape: CallShape
    order: list[Contender]
    seconds: dict[str, tuple[float, float]]
    struck: dict[str, str]
    wrong: set[str]


class Known(NamedTuple):
    """What a process knows of its machine, and what to say of a call of which that says nothing."""

    table: Mapping[CallShape, list[Measured]]
    note: str


_agreed: str | None = None


@functools.cache
def known() -> Known:
    """What was measured on this machine, read once; files that do not count are named."""
    if _agreed is not None:
        return _known(store.loads(_agreed, check=False) if _agreed else None)
    if jax.process_count() > 1:
        return Known({}, "nothing is read where several processes might not agree")
    table, ignored = store.read()
    for file, why in ignored.items() if table is None else ():
        warnings.warn(f"{file} is ignored: {why}. {COMMAND} measures again", stacklevel=2)
    return _known(table)


def _known(table: store.Table | None) -> Known:
    what = "no shape near this one" if table else "nothing"
    return Known(without_wrong(table or {}), f"{what} was measured here ({COMMAND} does)")


def without_wrong(table: store.Table) -> store.Table:
    """Measurements in which what disagrees anywhere is struck off everywhere, for its types."""
    wrong: dict[int, list[Measured]] = {}
    for shape, results in table.items():
        wrong.setdefault(_width(shape), []).extend(x for x in results if x.wrong)

    def struck(shape: CallShape, result: Measured) -> Measured:
        same = (x for x in wrong[_width(shape)] if x.contender == result.contender)
        other = next(same, None)
        if other is None or result.wrong:
            return result
        return Measured(result.contender, error=other.error, struck=other.struck, wrong=True)

    return {shape: [struck(shape, x) for x in results] for shape, results in table.items()}


def _width(shape: CallShape) -> int:
    return jnp.dtype(shape.dtype).itemsize


@functools.cache
def _nearest(shape: CallShape) -> CallShape | None:
    return nearest(shape, known().table)


def forget() -> None:
    """Lets the next call read the file again. Programs compiled before stay as they are."""
    global _agreed
    _agreed = None
    known.cache_clear()
    _nearest.cache_clear()


def agree() -> None:
    """Lets all processes go by what the first one has measured.

    All processes call it, before their first call of attention, and outside of ``jax.jit``. Without
    it several processes go by nothing that was measured: programs that differ would wait for one
    another for ever.
    """
    if jax.process_count() == 1:
        return
    text = ""
    if jax.process_index() == 0:
        table, _ = store.read()
        text = store.dumps(table) if table else ""
    adopt(broadcast_text(text or " ").strip())


def adopt(text: str) -> None:
    """Goes by the content of a file in place of the file; by nothing if it is empty."""
    global _agreed
    forget()
    _agreed = text


def ranking(
    request: Request, default: str, usable: Callable[[Request, Contender], bool]
) -> Ranking | None:
    """What was measured at the shape nearest to a call's; None if nothing near was.

    Args:
      request: the call.
      default: the implementation that it takes without measurements.
      usable: whether the options of a candidate suit a call.
    """
    shape = CallShape.of(request)
    near = None if shape is None else _nearest(shape)
    if shape is None or near is None:
        return None
    results = [
        result
        for result in known().table[near]
        if not result.contender.options or usable(request, result.contender)
    ]
    size = shape.logits * request.accumulator_dtype.itemsize
    untried = shape.logits > REACH * near.logits or size > MOST_BYTES
    if untried and default != "reference":
        results = [x for x in results if x.contender.implementation != "reference"]
    best = ranked(results, default)
    seconds: dict[str, tuple[float, float]] = {}
    for result in best:
        times = (result.forward, result.gradients)
        seconds.setdefault(result.contender.implementation, times)
    struck = {
        x.contender.implementation: x
        for x in reversed(results)
        if x.struck is not None and x.contender.implementation not in seconds
    }
    return Ranking(
        near,
        [result.contender for result in best],
        seconds,
        {name: x.struck or "" for name, x in struck.items()},
        {name for name, x in struck.items() if x.wrong},
    )


def nearest(shape: CallShape, table: Iterable[CallShape]) -> CallShape | None:
    """The measured shape nearest to another; None if all are of another kind or much longer.

    Types of other widths, and calls with a state or without, have nothing to say of one another. Of
    the others those of the nearest head dimension count, and of these the nearest in length; four
    times the heads count as much as twice the length. A call shorter than half of all of these is
    not known: what takes time in it is something else.
    """

    def apart(other: CallShape, name: str) -> float:
        return abs(math.log2(getattr(shape, name) / getattr(other, name)))

    def distance(other: CallShape) -> tuple[float, CallShape]:
        return apart(other, "length") + apart(other, "rows") / 2, other

    alike = [x for x in table if x.state == shape.state and _width(x) == _width(shape)]
    least = min((apart(x, "head_dim") for x in alike), default=0.0)
    alike = [x for x in alike if apart(x, "head_dim") == least]
    if not alike or 2 * shape.length < min(x.length for x in alike):
        return None
    return min(alike, key=distance)


def ranked(results: Iterable[Measured], default: str) -> list[Measured]:
    """What was timed, the best first.

    The default gives way only to what is faster in both directions, by more than noise.
    """
    timed = sorted(
        (x for x in results if x.timed and x.struck is None),
        key=lambda x: (x.score, str(x.contender)),
    )
    base = next((x for x in timed if x.contender == Contender(default)), None)
    if base is None:
        return timed
    gain = CPU_GAIN if jax.default_backend() == "cpu" else GAIN
    first = [x for x in timed if x.clearly_faster(base, gain)]
    return [*first, base, *(x for x in timed if x is not base and x not in first)]
