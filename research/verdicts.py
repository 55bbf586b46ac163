"""Verdicts from results (research/protocol.md): intervals, never means, meet a limit."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from research.trainings import PlannedTrainings
from train.statistics import LEVEL, Estimate, difference, holm
from train.tasks import Score

# The header of a verdict's rows.
HEADER = ("", "against", "by", "better by", "95 % interval", "p", "would have seen", "")


class Kind(enum.Enum):
    """The kinds of verdict on a claim, the one that counts most first."""

    UNFINISHED = "unfinished"
    CONTRADICTED = "contradicted"
    NOT_TOLD = "not told apart"
    CONFIRMED = "confirmed"


class Verdict(NamedTuple):
    """The verdict on a claim.

    Attributes:
      kind: in a word.
      rows: the tests that it rests on, under :data:`HEADER`.
      missing: what is not there yet, in words.
    """

    kind: Kind
    rows: list[list[str]]
    missing: tuple[str, ...] = ()


# A study, the key of one of its scores, and one of its rivals.
Comparison = tuple[PlannedTrainings, str, str]


class Compared(NamedTuple):
    """The comparison of one rival with another.

    Attributes:
      difference: by how much it is better.
      p: adjusted for the family.
      smallest: difference that would have been seen.
    """

    difference: Estimate
    p: float
    smallest: float

    @property
    def better(self) -> bool:
        """True if the rival is clearly better."""
        return self.p < LEVEL and self.difference.mean > 0

    @property
    def worse(self) -> bool:
        """True if the rival is clearly worse."""
        return self.p < LEVEL and self.difference.mean < 0

    @property
    def word(self) -> str:
        """The word for the comparison: better, worse or not told."""
        return "better" if self.better else "worse" if self.worse else "not told"


def family(differences: Mapping[str, Estimate], size: int = 0) -> dict[str, Compared]:
    """Returns comparisons by name, with p adjusted for all of them by Holm's method.

    Args:
      differences: those that are known.
      size: of the family, if more will be known. What is clear now then stays clear: unknown ones
        count as if they told nothing, the worst case for Holm's method.
    """
    size = max(size, len(differences))
    adjusted = holm({name: found.p for name, found in differences.items()}, size)
    return {
        name: Compared(found, adjusted[name], found.smallest(size))
        for name, found in differences.items()
    }


def best_of(
    own: Mapping[int, float], rivals: Mapping[str, Mapping[int, float]], *, name: str, score: str
) -> Verdict:
    """Judges whether something is better than all rivals: values by seed, the higher the better.

    Args:
      own: its values.
      rivals: theirs, by name.
      name: of what is judged.
      score: what the values are; if it names perplexity or growth they are minus its logarithm.
    """
    found = family({rival: difference(own, values) for rival, values in rivals.items()})
    rows = [row(name, rival, score, one) for rival, one in found.items()]
    return Verdict(leads(found, [found]), rows)


def row(name: str, rival: str, score: str, one: Compared) -> list[str]:
    """Returns a row for a comparison."""
    show = shown_as(score)
    interval = f"{show(one.difference.low)} to {show(one.difference.high)}"
    p = f"{one.p:.3f}" if one.p >= 0.001 else "< 0.001"
    return [
        name,
        rival,
        score,
        show(one.difference.mean),
        interval,
        p,
        show(one.smallest),
        one.word,
    ]


def shown_as(score: str):
    """Returns a function that writes a score's differences: in points, for logarithms in %."""
    if "perplexity" in score or "growth" in score:
        return lambda x: f"{100 * math.expm1(x):+.1f} %" if abs(x) < 5 else f"x {math.exp(x):.3g}"
    return lambda x: f"{x:+.2f}"


def wins(
    study: PlannedTrainings, key: str, rivals: Sequence[str], *, name: str = "tape"
) -> Verdict:
    """Judges whether ``name`` is better than each of these rivals by a score."""
    return together(name, [[(study, key, rival) for rival in rivals]])


def together(form: str, groups: Sequence[Sequence[Comparison]]) -> Verdict:
    """Judges, as one family, whether a form leads in some group of comparisons and trails in none.

    Args:
      form: what is judged.
      groups: a form leads in one if it is better in all of it.
    """
    asked = [*itertools.chain(*groups)]
    if waiting := missing(form, asked):
        return Verdict(Kind.UNFINISHED, [], waiting)
    found = family(differences(form, asked))
    rows = [
        row(form, rival, f"{study.name}, {study.score(key).label}", one)
        for (study, key, rival), one in zip(asked, found.values(), strict=True)
    ]
    return Verdict(leads(found, [map(_name, group) for group in groups]), rows)


def missing(form: str, asked: Iterable[Comparison]) -> tuple[str, ...]:
    """Returns what comparisons of a form lack, a phrase each."""
    found = [
        (study, what)
        for study, key, rival in asked
        for what in (
            study.missing(form, key),
            study.missing(rival, key),
            _unlike_texts(study, key, form, rival),
        )
    ]
    return tuple(dict.fromkeys(f"{study.name}, {what}" for study, what in found if what))


def _unlike_texts(study: PlannedTrainings, key: str, first: str, second: str) -> str | None:
    """Returns a phrase naming paired runs that were judged by different texts; None if none."""
    here, there = study.texts(first, key), study.texts(second, key)
    unlike = sorted(seed for seed in here.keys() & there.keys() if here[seed] != there[seed])
    if not unlike:
        return None
    seeds = ", ".join(map(str, unlike))
    pair = f"{here[unlike[0]]} and {there[unlike[0]]}"
    return f"{first} and {second} again by one text: seeds {seeds} were judged by two ({pair})"


def differences(form: str, asked: Iterable[Comparison]) -> dict[str, Estimate]:
    """Returns how much better a form is, by comparison; all of them must be complete."""
    found = {}
    for study, key, rival in asked:
        score = study.score(key)
        own, other = (comparable(study, name, key, score) for name in (form, rival))
        found[_name((study, key, rival))] = difference(own, other)
    return found


def _name(one: Comparison) -> str:
    """Returns the name of a comparison."""
    study, key, rival = one
    return f"{study.name} {key} {rival}"


def leads(found: Mapping[str, Compared], groups: Iterable[Iterable[str]]) -> Kind:
    """Returns the kind of verdict on being better in all of some group, and worse nowhere."""
    if any(one.worse for one in found.values()):
        return Kind.CONTRADICTED
    led = any(all(found[name].better for name in group) for group in groups)
    return Kind.CONFIRMED if led else Kind.NOT_TOLD


def comparable(study: PlannedTrainings, rival: str, key: str, score: Score) -> dict[int, float]:
    """Returns a complete rival's score by seed, the higher the better."""
    values = study.values(rival, key, score.key)
    assert values is not None
    return {seed: study.comparable(value, score) for seed, value in values.items()}


def keeps(
    study: PlannedTrainings, short: str, long: str, *, name: str = "tape", loss: float
) -> Verdict:
    """Judges whether a rival loses at most ``loss`` from one score to another, in the same runs.

    Args:
      study: of the rival.
      short: key of the score at the trained length.
      long: key of the one beyond, which chose the rate.
      name: of the rival.
      loss: allowed, in points; for perplexities, the share by which they may rise.
    """
    if what := study.missing(name, long):
        return Verdict(Kind.UNFINISHED, [], (f"{study.name}, {what}",))
    first, second = study.score(short), study.score(long)
    change = difference(comparable(study, name, long, second), comparable(study, name, long, first))
    allowed = loss if first.higher_is_better else math.log1p(loss)
    label = f"{study.name}, {second.label}"
    return limited(change, -allowed, name=name, against=f"itself, {first.label}", score=label)


def limited(
    found: Estimate, least: float, *, name: str, against: str, score: str, multiple: bool = False
) -> Verdict:
    """Judges whether all of an estimate's interval is at least ``least``.

    Args:
      found: the estimate.
      least: the limit.
      name: of what is judged.
      against: what it is compared with.
      score: what is estimated, as in :func:`best_of`.
      multiple: whether it is 1 minus a multiple; the multiple is shown instead, with its own limit.
    """
    kind = Kind.NOT_TOLD
    if found.low >= least:
        kind = Kind.CONFIRMED
    elif found.high < least:
        kind = Kind.CONTRADICTED
    show, shown = shown_as(score), found
    limit = show(least)
    if multiple:
        show, limit = "{:.3f}".format, f"{1 - least:.3f}"
        shown = found._replace(mean=1 - found.mean, low=1 - found.high, high=1 - found.low)
    elif "perplexity" in score:
        limit = f"{100 * math.expm1(-least):.3g} % more (1/{math.exp(-least):.3g} is {limit})"
    said = {Kind.CONFIRMED: "within", Kind.CONTRADICTED: "beyond", Kind.NOT_TOLD: "not told"}[kind]
    interval = f"{show(shown.low)} to {show(shown.high)}"
    cells = [name, f"{against}, limit {limit}", score, show(shown.mean), interval, ""]
    return Verdict(kind, [[*cells, show(found.smallest()), said]])


def every(*parts: Verdict) -> Verdict:
    """Joins the verdicts on parts of a claim; the kind that counts most is that of the whole."""
    kind = min((part.kind for part in parts), key=list(Kind).index)
    rows = [cells for part in parts for cells in part.rows]
    return Verdict(kind, rows, tuple(dict.fromkeys(x for part in parts for x in part.missing)))
