"""Studies beside each other that have the same scores, and rivals in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from matplotlib.figure import Figure

from train.evaluation.grids import text_table
from train.evidence.figures import heat_map
from train.evidence.statistics import estimate
from train.evidence.suite import BEYOND, INSIDE
from train.evidence.trainings import PlannedTrainings

TITLES = {
    BEYOND: "Exact match beyond the trained length, %",
    INSIDE: "Exact match at the trained lengths, %",
}
PICTURE = "overview.png"

Studies = Mapping[str, PlannedTrainings]


def tables(studies: Studies) -> Iterator[str]:
    """A table for each score: rivals by studies, with the mean and the interval of the seeds."""
    for key, title in TITLES.items():
        rows = []
        for rival in _rivals(studies):
            rows.append([rival, *(_cell(study, rival, key) for study in studies.values())])
        yield (
            f"{title}; five seeds, mean and 95 % interval; `-` is unfinished, and what is not "
            "asked is empty:"
        )
        yield text_table(["", *studies], rows)


def _cell(study: PlannedTrainings, rival: str, shown: str) -> str:
    if rival not in study.design.rivals:
        return ""
    values = _values(study, rival, shown)
    return "-" if values is None else str(estimate([*values.values()]))


def picture(studies: Studies) -> Figure | None:
    """Means beyond the trained length, as far as they are complete; None before any is."""
    if not has_picture(studies):
        return None
    found = {
        rival: {
            name: None if values is None else estimate([*values.values()]).mean
            for name, study in studies.items()
            for values in [_values(study, rival, BEYOND)]
        }
        for rival in _rivals(studies)
    }
    return heat_map(TITLES[BEYOND], found)


def has_picture(studies: Studies) -> bool:
    """Whether anything is complete."""
    return any(study.values(r, BEYOND) for study in studies.values() for r in study.design.rivals)


def _values(study: PlannedTrainings, rival: str, shown: str) -> dict[int, float] | None:
    """A score by seed; None unless the rival is there and complete."""
    return study.values(rival, BEYOND, shown) if rival in study.design.rivals else None


def _rivals(studies: Studies) -> list[str]:
    return [*dict.fromkeys(r for study in studies.values() for r in study.design.rivals)]
