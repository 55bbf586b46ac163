"""How results become verdicts.

A difference counts if the 95 % interval of the paired differences between equal seeds (Student's t)
leaves out zero. Perplexities are compared by their logarithms.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from train.comparison.report import RunRecord, by_seed, mean_and_spread, paired_difference
from train.evidence.trainings import PlannedTrainings
from train.tasks import Score

# Where every mean lies below the first or above the second, in per cent, nothing is told apart.
FLOOR, CEILING = 5.0, 95.0


class Kind(enum.Enum):
    """What the results say of a claim."""

    CONFIRMED = "confirmed"
    NOT_CONFIRMED = "not confirmed"
    NOT_TESTED = "not tested at this scale"
    UNFINISHED = "unfinished"


class Verdict(NamedTuple):
    """What the results say of a claim, and why, in a sentence or more."""

    kind: Kind
    because: str


def unfinished(*studies: PlannedTrainings, rivals: Sequence[str] = ()) -> Verdict | None:
    """A verdict if a run that is needed is missing.

    Args:
      *studies: which are needed.
      rivals: of these studies; none: all.
    """
    missing = []
    for study in studies:
        results, seeds = study.results(), study.design.seeds
        wanted = rivals or results
        done = {name: len(results[name]) for name in wanted}
        if short := {name: n for name, n in done.items() if n < seeds}:
            parts = (f"{name} {n} of {seeds}" for name, n in short.items())
            missing.append(f"{study.name}: {', '.join(parts)} seeds")
    return Verdict(Kind.UNFINISHED, f"{'; '.join(missing)}.") if missing else None


def wins(
    study: PlannedTrainings, key: str, rivals: Sequence[str], *, name: str = "tape"
) -> Verdict:
    """Whether one rival is clearly better than each of the others by one score.

    A rival that cannot take the length, or whose training diverged, has lost.
    """
    if waiting := unfinished(study, rivals=[name, *rivals]):
        return waiting
    score = next(score for score in study.scores if score.key == key)
    values = {rival: by_seed(study.results()[rival], score) for rival in (name, *rivals)}
    numbers = ", ".join(f"{rival} {mean_and_spread([*x.values()])}" for rival, x in values.items())
    numbers = f"{study.name}, {score.label}: {numbers}."
    means = [statistics.fmean(x.values()) for x in values.values() if x]
    if score.higher_is_better and (max(means) < FLOOR or min(means) > CEILING):
        where = f"below {FLOOR:g} %" if max(means) < FLOOR else f"above {CEILING:g} %"
        return Verdict(Kind.NOT_TESTED, f"All are {where}, where nothing is told apart. {numbers}")
    standing = compare(values, name, score)
    if not standing.unclear and not standing.better:
        return Verdict(Kind.CONFIRMED, numbers)
    reasons = []
    if standing.better:
        reasons.append(f"clearly behind {_list(standing.better)}")
    if standing.unclear:
        reasons.append(f"not told from {_list(standing.unclear)} by these seeds")
    return Verdict(Kind.NOT_CONFIRMED, f"{name} is {' and '.join(reasons)}. {numbers}")


class Standing(NamedTuple):
    """How one rival stands to the others.

    Attributes:
      worse, better, unclear: which of the others clearly are, and which cannot be told from it.
    """

    worse: list[str]
    better: list[str]
    unclear: list[str]


def compare(values: Mapping[str, Mapping[int, float]], name: str, score: Score) -> Standing:
    """How a rival stands to the others by a score: values by rival and seed."""
    standing = Standing([], [], [])
    own = _comparable(values[name], score)
    for rival, found in values.items():
        if rival == name:
            continue
        other = _comparable(found, score)
        if len(other) < len(own):
            standing.worse.append(rival)
        elif len(own) < len(other):
            standing.better.append(rival)
        else:
            difference = paired_difference(own, other)
            same = not difference.is_clear
            place = (
                standing.unclear
                if same
                else (standing.worse if difference.mean > 0 else standing.better)
            )
            place.append(rival)
    return standing


def _comparable(values: Mapping[int, float], score: Score) -> dict[int, float]:
    """The higher the better."""
    if score.higher_is_better:
        return dict(values)
    return {seed: -math.log(x) for seed, x in values.items()}


def keeps(
    study: PlannedTrainings, short: str, long: str, *, name: str = "tape", loss: float
) -> Verdict:
    """Whether a rival loses at most so much from one score to another, in their unit.

    Perplexities may rise by the share ``loss``.
    """
    if waiting := unfinished(study, rivals=[name]):
        return waiting
    scores = {score.key: score for score in study.scores}
    first, second = scores[short], scores[long]
    runs: Sequence[RunRecord] = study.results()[name]
    start, end = by_seed(runs, first), by_seed(runs, second)
    numbers = f"{name}: {mean_and_spread([*start.values()])} {first.label}, "
    numbers += f"{mean_and_spread([*end.values()])} {second.label}."
    change = paired_difference(_comparable(end, second), _comparable(start, first))
    allowed = loss if first.higher_is_better else math.log1p(loss)
    kept = len(end) == len(start) and change.mean >= -allowed
    return Verdict(Kind.CONFIRMED if kept else Kind.NOT_CONFIRMED, numbers)


def every(*parts: Verdict) -> Verdict:
    """All of them must be confirmed.

    What speaks against a claim counts more than what is not told.
    """
    order = (Kind.UNFINISHED, Kind.NOT_CONFIRMED, Kind.NOT_TESTED, Kind.CONFIRMED)
    kind = min((part.kind for part in parts), key=order.index)
    reasons = dict.fromkeys(part.because for part in parts if part.kind is not Kind.UNFINISHED)
    waiting = [part.because for part in parts if part.kind is Kind.UNFINISHED]
    return Verdict(kind, " ".join([*reasons, *waiting]))


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)
