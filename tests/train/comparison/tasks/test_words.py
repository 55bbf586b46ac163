"""The table of the depths that solve a word problem."""

import pytest

from train.comparison.tasks.words import smallest_depths
from train.evaluation.grids import Grid
from train.tasks.words import WordResult, Words


def test_smallest_depths():
    wording = Words("A5", 1).wording

    def result(*correct):
        grid = Grid(
            rows=(1,),
            columns=(1, 2, 3),
            lengths=[[1, 2, 3]],
            correct=[correct],
            counts=[[10] * 3],
            shared=[[False] * 3],
            trained=1,
            wording=wording,
        )
        return WordResult(grid, grid)

    results = {
        "rope": {1: [result(9, 3, 0)], 2: [result(0, 0, 0), result(10, 9, 8)]},
        "tape": {1: [result(10, 9, 9)]},
    }
    lines = [line.split("|")[1:-1] for line in smallest_depths(results).splitlines()]
    assert [[c.strip() for c in line] for line in (lines[0], *lines[2:])] == [
        ["elements", "range", "rope, layers", "tape, layers"],
        ["1", "trained", "1", "1"],
        ["2", "beyond", "2", "1"],
        ["3", "beyond", "more than 2", "1"],
    ]
    results = {
        "rope": {2: [result(10, 8, 8)], 3: [result(10, 9, 8)]},
        "tape": {1: [result(9, 0, 0)]},
    }
    lines = [line.split("|")[1:-1] for line in smallest_depths(results).splitlines()]
    assert [[c.strip() for c in line[2:]] for line in lines[2:]] == [
        ["at most 2", "1"],
        ["3", "more than 1"],
        ["more than 3", "more than 1"],
    ]
    unsolved = {"rope": {1: [result(8, 0, 0)], 2: [result(8, 0, 0)]}}
    (line,) = smallest_depths(unsolved).splitlines()[2:]
    assert line.split("|")[3].strip() == "more than 2"
    with pytest.raises(ValueError, match=r"solved must be in \(0, 1\]; got 0"):
        smallest_depths(results, solved=0)
    with pytest.raises(ValueError, match="no grids to compare"):
        smallest_depths({})
