"""Measures many cases, one after another, and keeps each as soon as it is done."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from tape_jax._src.attention import api
from tape_jax._src.attention.normalise import normalise
from tape_jax._src.attention.tuning import choice, store
from tape_jax._src.attention.tuning.cases import CallShape, Contender, Measured
from tape_jax._src.attention.tuning.measure import LATE, Attend, Limits, measure

Array = jax.Array


class Trials(NamedTuple):
    """What could do a call.

    Attributes:
      candidates: to be measured, what the others are to beat first, those with options last.
      refused: by name why others cannot do it.
      default: what is taken where nothing was measured.
    """

    candidates: list[Contender]
    refused: dict[str, str]
    default: Contender


def trials(shape: CallShape) -> Trials:
    """What could do a call of a shape."""
    found: list[Trials] = []

    def decide(q: Array, k: Array, v: Array, e: Array | None = None) -> None:
        request = normalise(q, k, v, state=e, is_causal=True)
        plain, others, refused = [], [], {}
        for name, options, why in api.trials(request):
            if why is None:
                plain.append(Contender(name))
                others += [Contender(name, given) for given in options]
            else:
                refused[name] = why
        default = api.default(request)
        plain.sort(key=lambda x: x != default)
        found.append(Trials(plain + others, refused, default))

    jax.eval_shape(decide, *shape.structs())
    return found[0]


def tune(
    shapes: Sequence[CallShape],
    *,
    seconds: float,
    brief: bool = False,
    again: bool = False,
    limits: Limits | None = None,
    say: Callable[[str], None] = print,
    **measuring: Any,
) -> store.Table:
    """Measures what the file of this machine lacks, and writes each case as soon as it is done.

    Args:
      shapes: to measure, in this order.
      seconds: after which nothing new is begun.
      brief: whether each of the shapes gets an equal part of the time, and what the file has of one
        in part suffices.
      again: whether to measure what the file has, too.
      limits: what may be spent on a case.
      say: called with a line about each case.
      **measuring: further arguments of :func:`~tape_jax._src.attention.tuning.measure.measure`.

    Returns:
      All that the file holds.
    """
    limits = limits or Limits()
    end = time.monotonic() + seconds
    table: store.Table = {}
    for done, shape in enumerate(shapes):
        # One case at a time, so that several processes measure in turns and not beside each other.
        with store.locked():
            table = store.read()[0] or {}
            if shape in table and not again and (brief or finished(table[shape])):
                continue
            now = time.monotonic()
            if now >= end:
                say(f"{len(shapes) - done} of {len(shapes)} cases are left: the time is over")
                break
            until = now + (end - now) / (len(shapes) - done) if brief else end
            results = _case(shape, table, dataclasses.replace(limits, deadline=until), measuring)
            table[shape] = results
            store.write(table)
        say(f"{done + 1} of {len(shapes)}, {shape}: {describe(results, trials(shape).default)}")
    choice.forget()
    return table


def finished(results: Sequence[Measured]) -> bool:
    """Whether there was time for all candidates."""
    return all(result.struck != LATE for result in results)


def _case(
    shape: CallShape, table: store.Table, limits: Limits, measuring: dict[str, Any]
) -> list[Measured]:
    """All results of one case."""
    found = trials(shape)
    results = [Measured(Contender(name), struck=why) for name, why in found.refused.items()]
    wanted = []
    for candidate in found.candidates:
        why = foreseen(candidate, shape, table, limits)
        if why is None:
            wanted.append(candidate)
        else:
            results.append(Measured(candidate, struck=why))
    if wanted:
        results += measure(shape, wanted, caller, default=found.default, limits=limits, **measuring)
    return results


def foreseen(
    candidate: Contender, shape: CallShape, table: store.Table, limits: Limits
) -> str | None:
    """Why a candidate need not be tried, by what it took for shorter sequences; None: it may."""
    shorter = [
        known
        for known in table
        if known.length < shape.length
        and dataclasses.replace(known, length=shape.length, batch=shape.batch) == shape
    ]
    for known in sorted(shorter, reverse=True)[:1]:
        for result in table[known]:
            if result.contender != candidate or not result.timed:
                continue
            expected = result.gradients * shape.logits / known.logits
            if expected > limits.seconds:
                return f"would take about {expected:.0f} s a call, limit {limits.seconds:g} s"
    return None


def caller(candidate: Contender) -> Attend:
    """The causal call that a candidate is, of q, k, v and perhaps e."""

    def call(q: Array, k: Array, v: Array, e: Array | None = None) -> Any:
        return api.attention(
            q,
            k,
            v,
            state=e,
            is_causal=True,
            implementation=candidate.implementation,
            options=candidate.options,
        )

    return call


def describe(results: Sequence[Measured], default: Contender) -> str:
    """What is taken in a case, and what was struck off, in a line."""
    ranked = choice.ranked(results, default.implementation)
    if not ranked:
        return "nothing was measured"
    best = ranked[0]
    base = next((x for x in ranked if x.contender == default), best)
    text = f"{best.contender}, {1e3 * best.forward:.3g} ms forward, "
    text += f"{1e3 * best.gradients:.3g} ms with gradients"
    if best is not base:
        ratios = best.forward / base.forward, best.gradients / base.gradients
        text += f": {ratios[0]:.2f} and {ratios[1]:.2f} x {base.contender}"
    wrong = [str(x.contender) for x in results if x.wrong]
    return text + (f"; struck off: {', '.join(wrong)}" if wrong else "")
