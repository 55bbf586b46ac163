"""What a report says of a word problem, and a table of the depths that solve it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tape_jax._src.checks import require
from train.comparison.plots import length_curves
from train.comparison.tasks import Comparison
from train.evaluation.grids import (
    averages_table,
    length_table,
    pool,
    require_same_questions,
    text_table,
)
from train.tasks.words import WordResult, Words


def compare(task: Words, results: Mapping[str, Sequence[WordResult]]) -> Comparison:
    """Curves and accuracies by length; the words of all seeds are counted together."""
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
            "Whole words by length": "Percentages with their 95 % intervals.\n\n"
            + length_table(words),
        },
        figures={
            "accuracy.png": length_curves(
                {"all products right": words, "this product right": products},
                title=first.wording.title,
                y_label="right, %",
            )
        },
    )


def smallest_depths(
    results: Mapping[str, Mapping[int, Sequence[WordResult]]], *, solved: float = 0.9
) -> str:
    """A table of the smallest depth that solves each length, a column for each name.

    What counts is whether a depth can do it at all: it solves a length if with its best seed at
    least the share ``solved`` of words is right to the last product. The table ends with the first
    length from which on no depth solves any.

    Args:
      results: for each name (the encoding's) the results by number of layers, one for each seed.
      solved: in (0, 1].

    Raises:
      ValueError: nothing to report, results of different questions, or ``solved`` out of range.
    """
    require(0 < solved <= 1, f"smallest depths: solved must be in (0, 1]; got {solved}")
    grids = {
        f"{name}, {depth} layers, seed {i}": result.words
        for name, by_depth in results.items()
        for depth, seeds in by_depth.items()
        for i, result in enumerate(seeds)
    }
    first = require_same_questions(grids)

    def smallest(by_depth: Mapping[int, Sequence[WordResult]], column: int) -> int | None:
        able = (
            depth
            for depth, seeds in by_depth.items()
            if max((r.words.accuracy[0, column] for r in seeds), default=0.0) >= solved
        )
        return min(able, default=None)

    depths = [
        [smallest(by_depth, column) for by_depth in results.values()]
        for column in range(len(first.columns))
    ]
    while len(depths) > 1 and not any(depths[-1] + depths[-2]):
        depths.pop()

    def say(depth: int | None, tried: Iterable[int]) -> str:
        if depth is None:
            return f"more than {max(tried)}"
        return f"at most {depth}" if depth == min(tried) > 1 else str(depth)

    rows = [
        [
            str(length),
            "trained" if length <= first.trained else "beyond",
            *map(say, row, results.values()),
        ]
        for length, row in zip(first.columns, depths, strict=False)
    ]
    return text_table([first.wording.unit, "range", *(f"{name}, layers" for name in results)], rows)
