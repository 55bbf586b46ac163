"""Chooses a study's budget and each rival's learning rate (research/protocol.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from research.protocol import WORTH_PERPLEXITY, WORTH_POINTS
from train.checks import choose


class Curve(NamedTuple):
    """The score and the rivals that decide a study's budget.

    Attributes:
      score: key of the score, at the trained lengths.
      most: the largest multiple of the configuration's steps that the study may take.
      rivals: the rivals that are trained for it.
      sudden: whether a gain by any longer training counts, not only by the next multiple: for
        tasks that are learned all at once.
    """

    score: str
    most: int
    rivals: Sequence[str] = ("rope", "alibi")
    sudden: bool = False


class Budget(NamedTuple):
    """A multiple of a configuration's steps.

    Attributes:
      multiple: the chosen one.
      improving: whether longer training was still worth its cost; None if it was not tried.
    """

    multiple: int
    improving: bool | None


def choose_budget(
    values: Mapping[str, Mapping[int, float]],
    most: int,
    *,
    higher_is_better: bool,
    sudden: bool = False,
) -> Budget:
    """Returns the smallest multiple after which no rival gains enough from the next.

    Args:
      values: points of exact match or perplexities, by rival and multiple.
      most: the largest multiple that may be chosen.
      higher_is_better: whether the values are exact match.
      sudden: as in :class:`Curve`.
    """
    multiples = sorted(next(iter(values.values())))
    for place, multiple in enumerate(multiples[:-1], 1):
        later = multiples[place:] if sudden else multiples[place : place + 1]
        pairs = [(found[multiple], found[after]) for found in values.values() for after in later]
        if higher_is_better:
            improving = any(b - a > WORTH_POINTS for a, b in pairs)
        else:
            improving = any(b < a * (1 - WORTH_PERPLEXITY) for a, b in pairs)
        if not improving or multiple >= most:
            return Budget(multiple, improving)
    return Budget(multiples[-1], None)


class RateStep(NamedTuple):
    """The learning rate that the scores so far choose, or the rates to try next.

    Attributes:
      missing: rates that have no score yet and are needed next.
      chosen: the rate; None while some are missing.
      at_end: whether the best rate is the first or the last of the ladder, so that one beyond it
        may be better.
    """

    missing: tuple[str, ...]
    chosen: str | None = None
    at_end: bool = False


def next_rates(
    scores: Mapping[str, float], first: str, ladder: Sequence[str], within: float = 0.0
) -> RateStep:
    """Returns the next step of a walk, which ends once the best rate's neighbours have scores.

    Args:
      scores: by rate, the higher the better; among equals the one nearest to ``first`` is best,
        then the smaller rate.
      first: where the walk begins; it and its neighbours are tried in any case.
      ladder: all rates, ascending.
      within: if the best has both its neighbours, the smallest rate whose score is at most this
        much below it is chosen; 0: the best itself.

    Raises:
      ValueError: a rate is not on the ladder.
    """
    for rate in (first, *scores):
        choose("rate of the ladder", rate, ladder)
    start = ladder.index(first)

    def beside(place: int) -> tuple[str, ...]:
        around = ladder[max(place - 1, 0) : place + 2]
        return tuple(rate for rate in around if rate not in scores)

    if missing := beside(start):
        return RateStep(missing)

    def order(rate: str) -> tuple[float, int, int]:
        place = ladder.index(rate)
        return scores[rate], -abs(place - start), -place

    best = max(scores, key=order)
    place = ladder.index(best)
    if missing := beside(place):
        return RateStep(missing)
    if place in (0, len(ladder) - 1):
        return RateStep((), best, at_end=True)
    tried = [rate for rate in ladder if rate in scores]
    near = [rate for rate in tried if scores[rate] >= scores[best] - within]
    return RateStep((), near[0] if within else best)
