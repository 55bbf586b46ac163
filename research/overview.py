"""Compares studies that have the same scores, and rivals in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from matplotlib.figure import Figure

from research.figures import heat_map
from research.trainings import BEYOND, INSIDE, LEARNED, PlannedTrainings
from train.evaluation.grids import text_table
from train.statistics import estimate

TITLES = {
    BEYOND: "Exact match beyond the trained length, %",
    INSIDE: "Exact match at the trained lengths, %",
}
PICTURE = "overview.png"

Studies = Mapping[str, PlannedTrainings]


def tables(studies: Studies) -> Iterator[str]:
    """Yields a table for each score: rivals by studies, with mean and interval over seeds."""
    shown, rivals = _complete(studies)
    if not shown:
        return
    for key, title in TITLES.items():
        rows = [[r, *(_cell(study, r, key) for study in shown.values())] for r in rivals]
        yield (
            f"{title}; five seeds, mean and 95 % interval; `-` is unfinished, and what is not "
            "asked is empty. Tasks and encodings that have no complete row yet are left out."
        )
        yield text_table(["", *shown], rows)


def _cell(study: PlannedTrainings, rival: str, shown: str) -> str:
    if rival not in study.design.rivals:
        return ""
    values = _values(study, rival, shown)
    return "-" if values is None else str(estimate([*values.values()]))


def picture(studies: Studies) -> Figure:
    """Draws the means beyond the trained length that are complete."""
    shown, rivals = _complete(studies)
    found = {
        rival: {
            name: None if values is None else estimate([*values.values()]).mean
            for name, study in shown.items()
            for values in [_values(study, rival, BEYOND)]
        }
        for rival in rivals
    }
    low = [
        (rival, name)
        for name, study in shown.items()
        for rival, mean in study.learned().items()
        if mean < LEARNED
    ]
    return heat_map(
        TITLES[BEYOND], found, brackets=low, meaning=f"less than {LEARNED} % of the trained lengths"
    )


def has_picture(studies: Studies) -> bool:
    """Returns whether any rival of any study is complete."""
    return bool(_complete(studies)[0])


def _complete(studies: Studies) -> tuple[Studies, list[str]]:
    """Returns the studies and rivals that have something complete."""
    shown, found = {}, set[str]()
    for name, study in studies.items():
        if known := {r for r in study.design.rivals if study.values(r, BEYOND) is not None}:
            shown[name] = study
            found |= known
    rivals = dict.fromkeys(r for study in studies.values() for r in study.design.rivals)
    return shown, [rival for rival in rivals if rival in found]


def _values(study: PlannedTrainings, rival: str, shown: str) -> dict[int, float] | None:
    """Returns a score by seed; None unless the rival is there and complete."""
    return study.values(rival, BEYOND, shown) if rival in study.design.rivals else None
