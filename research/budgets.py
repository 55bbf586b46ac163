"""How long to train, from a curve of scores over budgets (research/protocol.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from research.protocol import WORTH_PERPLEXITY, WORTH_POINTS


class Curve(NamedTuple):
    """What the budget of a study is chosen by.

    Attributes:
      score: its key; at the trained lengths.
      most: the largest multiple of the configuration's steps that the study may take.
      rivals: those that are trained for it.
      sudden: whether a gain by any longer training counts, not by the next multiple alone: for
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
      improving: whether longer training was still worth its cost; None: it was not tried.
    """

    multiple: int
    improving: bool | None


def choose(
    values: Mapping[str, Mapping[int, float]],
    most: int,
    *,
    higher_is_better: bool,
    sudden: bool = False,
) -> Budget:
    """The smallest multiple after which none of the rivals gains enough from the next.

    Args:
      values: by rival and multiple: points of exact match, or perplexities.
      most: the largest multiple that may be chosen.
      higher_is_better: whether they are exact match.
      sudden: of :class:`Curve`.
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
