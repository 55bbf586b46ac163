"""Which learning rate to try next, and which one is the best, from the scores of those tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tape_jax._src.core.checks import choose


class Step(NamedTuple):
    """What the scores call for.

    Attributes:
      missing: rates that have no score yet and are needed next.
      chosen: the rate; None while some are missing.
      at_end: whether it is the best and the first or the last of the ladder, so that one beyond it
        may be better.
    """

    missing: tuple[str, ...]
    chosen: str | None = None
    at_end: bool = False


def step(
    scores: Mapping[str, float], first: str, ladder: Sequence[str], within: float = 0.0
) -> Step:
    """The next step of a walk that ends where the best has both its neighbours.

    Args:
      scores: by rate, the higher the better; of equals the one nearest to ``first`` is the best,
        then the smaller rate.
      first: where the walk begins; it and its neighbours are tried in any case.
      ladder: all rates, ascending.
      within: where the best has both its neighbours, the smallest of all that were tried and are at
        most this much below it is chosen; 0: the best itself.

    Raises:
      ValueError: a rate that is not on the ladder.
    """
    for rate in (first, *scores):
        choose("rate of the ladder", rate, ladder)
    start = ladder.index(first)

    def beside(place: int) -> tuple[str, ...]:
        around = ladder[max(place - 1, 0) : place + 2]
        return tuple(rate for rate in around if rate not in scores)

    if missing := beside(start):
        return Step(missing)

    def order(rate: str) -> tuple[float, int, int]:
        place = ladder.index(rate)
        return scores[rate], -abs(place - start), -place

    best = max(scores, key=order)
    place = ladder.index(best)
    if missing := beside(place):
        return Step(missing)
    if place in (0, len(ladder) - 1):
        return Step((), best, at_end=True)
    tried = [rate for rate in ladder if rate in scores]
    near = [rate for rate in tried if scores[rate] >= scores[best] - within]
    return Step((), near[0] if within else best)
