"""The reports on questions of several lengths, and on passkeys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from train.compare.plots import heat_maps, length_curves
from train.compare.tasks import Comparison
from train.evaluation.grids import (
    INTERVALS,
    Grid,
    averages_table,
    length_table,
    pool,
    require_same_questions,
)
from train.tasks.passkey import Passkey
from train.tasks.questions import QuestionTask


def compare(task: QuestionTask, results: Mapping[str, Sequence[Grid]]) -> Comparison:
    """Reports exact match in a figure and by length; for several seeds, their means.

    The figure has a curve for each name or, with two operands, a heat map.
    """
    grids = {name: pool(list(of_seeds)) for name, of_seeds in results.items()}
    first = require_same_questions(grids)
    wording = first.wording
    if task.operands == 1:
        marks, lengths, by = "*", "length", ""
        label = f"{wording.questions} answered right, %"
        figure = length_curves({"": grids}, title=wording.title, y_label=label)
    else:
        marks, lengths = "* or \u2022", wording.cells
        by = f", by {task.counted_as}"
        figure = heat_maps(grids)
    picture = f"![Exact match by {lengths}](exact_match.png)"
    said = f"The {wording.questions} asked were held out of training."
    if first.shared.any():
        said = (
            f"Inside the trained range, the {wording.questions} asked were held out of training; "
            f"where {marks} stands, there are too few to hold any out."
        )
    return Comparison(
        title=task.heading,
        introduction=f"{task.introduction(first)} {said}",
        sections={
            "Exact match": f"{averages_table(grids)}\n\n{picture}",
            "By length": f"{INTERVALS}{by}.\n\n{length_table(grids)}",
        },
        figures={"exact_match.png": figure},
    )


def compare_passkeys(task: Passkey, results: Mapping[str, Sequence[Grid]]) -> Comparison:
    """Reports exact match as heat maps and by length; for several seeds, their means."""
    grids = {name: pool(list(of_seeds)) for name, of_seeds in results.items()}
    first = next(iter(grids.values()))
    lengths = ", ".join(f"{n:,}" for n in first.columns)
    return Comparison(
        title="Passkey retrieval beyond the trained length",
        introduction=(
            f"Trained to find a key of {task.digits} digits in {task.sequence_length:,} bytes "
            f"of filler, and asked for keys held out of training in {lengths} bytes. An answer "
            "is right if it is to the last digit, and ends there."
        ),
        sections={"Passkey retrieval": passkey_section(grids)},
        figures={"passkey.png": heat_maps(grids)},
    )


def passkey_section(grids: Mapping[str, Grid]) -> str:
    """Returns the section on grids of passkeys, which links to their figure, ``passkey.png``."""
    return (
        f"{INTERVALS}.\n\n"
        f"{averages_table(grids)}\n\n![Passkey retrieval](passkey.png)\n\n{length_table(grids)}"
    )
