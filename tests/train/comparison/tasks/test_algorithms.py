"""The table of all problems."""

import pytest

from train.comparison.tasks.algorithms import suite_table
from train.evaluation.grids import Grid, Proportion
from train.tasks.algorithms import Algorithm


def test_suite_table():
    task = Algorithm("copy", 1)
    trained = {"counts": [[4, 8]], "lengths": [[1, 2]], "shared": [[True, False]]}

    def grid(correct):
        return Grid(
            rows=(1,), columns=(1, 2), correct=correct, trained=1, wording=task.wording, **trained
        )

    table = suite_table(
        {"copy": {"tape": [grid([[4, 2]]), grid([[4, 4]])], "rope": [grid([[1, 0]])] * 2}}
    )
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert lines[0] == ["problem", "length", "tape, %", "rope, %"]
    assert lines[2] == ["copy", "1 to 1", str(Proportion(8, 8)), str(Proportion(2, 8))]
    assert lines[3] == ["copy", "beyond 1", str(Proportion(6, 16)), str(Proportion(0, 16))]
    with pytest.raises(ValueError, match=r"'sort' has results of \['rope'\]"):
        suite_table({"copy": {"tape": [grid([[4, 2]])]}, "sort": {"rope": [grid([[4, 2]])]}})
    with pytest.raises(ValueError, match="no problems to report"):
        suite_table({})
