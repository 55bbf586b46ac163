"""The report on a word problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from research.tasks.words import WordResult, Words
from train.compare.plots import length_curves
from train.compare.tasks import Comparison
from train.evaluation.grids import INTERVALS, averages_table, length_table, pool


def compare(task: Words, results: Mapping[str, Sequence[WordResult]]) -> Comparison:
    """Returns curves and accuracies by length, averaged over seeds."""
    words, products = (
        {name: pool([getattr(r, part) for r in seeds]) for name, seeds in results.items()}
        for part in ("words", "products")
    )
    first = next(iter(words.values()))
    return Comparison(
        title=task.heading,
        introduction=(
            f"{task.introduction(first)} The words asked were held out of training; where * "
            "stands, there are too few to hold any out."
        ),
        sections={
            "Whole words": averages_table(words) + "\n\n![Accuracy by length](accuracy.png)",
            "Products": averages_table(products),
            "Whole words by length": f"{INTERVALS}.\n\n{length_table(words)}",
        },
        figures={
            "accuracy.png": length_curves(
                {"all products right": words, "this product right": products},
                title=first.wording.title,
                y_label="right, %",
            )
        },
    )
