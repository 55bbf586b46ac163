"""A table of many algorithmic problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tape_jax._src.checks import require
from train.evaluation.grids import Grid, pool, require_same_questions, text_table


def suite_table(results: Mapping[str, Mapping[str, Sequence[Grid]]]) -> str:
    """Exact match of all problems, inside and beyond the trained length, a column for each name.

    Args:
      results: for each problem the results by name (the encodings'), one for each seed.

    Raises:
      ValueError: no results, names that are not those of the first problem, or results of one
        problem that are of different questions.
    """
    require(len(results) > 0, "no problems to report")
    names = list(next(iter(results.values())))
    rows = []
    for problem, by_name in results.items():
        require(
            list(by_name) == names,
            f"the problem {problem!r} has results of {list(by_name)}, the first one of {names}",
        )
        grids = {name: pool(list(of_seeds)) for name, of_seeds in by_name.items()}
        trained = require_same_questions(grids).trained
        for where, label in (("inside", f"1 to {trained}"), ("outside", f"beyond {trained}")):
            rows.append([problem, label, *(str(getattr(g, where)) for g in grids.values())])
    return text_table(["problem", "length", *(f"{name}, %" for name in names)], rows)
