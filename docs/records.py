"""Results on record that the README and the pictures show."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

from research.page import studies_at
from research.records import Store
from research.study import Place
from research.suites import SUITES
from research.trainings import BEYOND, INSIDE, LEARNED, PlannedTrainings

ROOT = Path(__file__).parents[1]
# Names of rows and pictures, and the forms that are meant by them; at places in lists the demo's.
FORMS = {
    "TAPE + ALiBi": "tape_alibi",
    "RoPE + ALiBi": "rope_alibi",
    "ALiBi": "alibi",
    "FoX": "fox",
}
DEMO = {"address_4x_again": "tape_demo"}


class Reports(NamedTuple):
    """The reporting runs of a form at a task.

    Attributes:
      values: score of each of the five seeds.
      learned: whether 95 % of the trained lengths are right in the mean, or the task is text.
    """

    values: list[float]
    learned: bool


@functools.cache
def studies() -> dict[str, Any]:
    """The studies of places, and those that they read, by name."""
    place = Place(Store(ROOT / "research" / "records"), ROOT / "runs")
    return studies_at(SUITES["places"], place)


def form_of(study: str, name: str) -> str:
    """The form that is called ``name``, one of :data:`FORMS`, at a study."""
    return DEMO.get(study, FORMS[name]) if name == "TAPE + ALiBi" else FORMS[name]


def scores(study: str, key: str, name: str) -> Reports | None:
    """Scores at the learning rate that validation chose; None if not asked or not finished.

    Args:
      study: by name.
      key: of the score.
      name: one of :data:`FORMS`.
    """
    planned: PlannedTrainings = studies()[study]
    form = form_of(study, name)
    values = planned.values(form, key) if form in planned.design.rivals else None
    if values is None:
        return None
    inside = planned.values(form, key, INSIDE) if key == BEYOND else None
    learned = inside is None or sum(inside.values()) / len(inside) >= LEARNED
    return Reports(list(values.values()), learned)
