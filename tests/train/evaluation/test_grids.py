"""Grids against counts by hand, and what tables say of them."""

import dataclasses
import json

import numpy as np
import pytest

from tests.train.small import sum_grid
from train.evaluation.grids import (
    Grid,
    Proportion,
    length_table,
    pool,
    require_same_questions,
)


def example_grid():
    return sum_grid(
        rows=(1, 2, 3),
        columns=(1, 2, 3),
        correct=[[3, 2, 0], [1, 4, 5], [0, 0, 1]],
        counts=np.full((3, 3), 5),
        shared=[[1, 1, 0], [1, 0, 0], [0, 0, 0]],
        trained=2,
    )


class TestGrid:
    def test_averages(self):
        grid = example_grid()
        assert grid.inside == Proportion(3 + 2 + 1 + 4, 4 * 5)
        assert grid.inside_held_out == Proportion(4, 5)
        assert grid.outside == Proportion(0 + 5 + 0 + 0 + 1, 5 * 5)
        assert grid.summary() == {"exact_match_inside": 0.5, "exact_match_outside": 0.24}
        np.testing.assert_allclose(grid.accuracy[0], [0.6, 0.4, 0.0])

    def test_round_trip(self):
        grid = example_grid()
        record = json.loads(json.dumps(grid.to_json()))
        assert "wording" not in record
        # Records of before have a wording of their own, which does not count.
        old = dataclasses.asdict(dataclasses.replace(grid.wording, title="of before"))
        for read in (record, {**record, "wording": old}):
            restored = Grid.from_json(read, grid.wording)
            for name in ("rows", "columns", "trained", "wording"):
                assert getattr(restored, name) == getattr(grid, name)
            for name in ("lengths", "correct", "counts", "shared"):
                np.testing.assert_array_equal(getattr(restored, name), getattr(grid, name))
                assert getattr(restored, name).dtype == getattr(grid, name).dtype
        with pytest.raises(ValueError, match=r"expected a record of format 'tape-jax.*'other'"):
            Grid.from_json({"format": "other"}, grid.wording)
        del record["counts"]
        with pytest.raises(ValueError, match="a Grid has the fields"):
            Grid.from_json(record, grid.wording)

    @pytest.mark.parametrize(
        ("columns", "correct", "counts", "message"),
        [
            ((1,), [[0]], [[1, 1]], r"counts has shape \(1, 2\), expected \(1, 1\)"),
            ((1,), [[2]], [[1]], "between 0 and counts"),
            ((2, 1), [[1, 1]], [[1, 1]], r"columns must ascend; got \(2, 1\)"),
        ],
    )
    def test_bad_shapes(self, columns, correct, counts, message):
        shared = np.zeros((1, len(columns)), bool)
        with pytest.raises(ValueError, match=message):
            sum_grid((1,), columns, correct, counts, shared, trained=1)


class TestProportion:
    def test_wilson_interval(self):
        # Newcombe (1998), table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
        for correct, count, low, high in (
            (81, 263, 0.2553, 0.3662),
            (15, 148, 0.0624, 0.1605),
            (0, 20, 0.0000, 0.1611),
            (1, 29, 0.0061, 0.1718),
        ):
            np.testing.assert_allclose(Proportion(correct, count).interval, (low, high), atol=5e-5)
        assert Proportion(0, 0).interval == (0, 1)
        for count in range(1, 300):
            assert Proportion(count, count).interval[1] == 1

    def test_models_are_the_units_of_several(self):
        """Seeds at 91, 20 and 18 of a hundred tell little, however many answers each gave."""
        grids = [
            sum_grid((1,), (1, 2), [[n, 0]], [[100, 0]], [[False, False]], trained=1)
            for n in (91, 20, 18)
        ]
        found = pool(grids).inside
        assert str(found) == "43.0 [0, 100]"
        alike = pool([grids[1], grids[1]])
        assert (alike.inside.interval, alike.outside.count) == ((0.2, 0.2), 0)
        assert pool(grids[:1]) is grids[0]
        assert str(alike.outside) == "none asked"
        assert grids[0].summary() == {"exact_match_inside": 0.91}

    def test_only_exact_shares_are_written_as_exact(self):
        assert str(Proportion(99_999, 100_000)).startswith("99.9 [")
        assert str(Proportion(1, 100_000)).startswith("0.1 [")
        assert str(Proportion(5, 5)).startswith("100 [")
        assert str(Proportion(0, 0)) == "none asked"


class TestTable:
    def test_questions_that_one_model_cannot_be_asked(self):
        def grid(counts):
            wording = dataclasses.replace(example_grid().wording, questions="keys", unit="tokens")
            fields = {"shared": [[False] * 3], "trained": 4, "wording": wording}
            counts = np.array([counts])
            return Grid((5,), (2, 4, 8), [[2, 4, 8]], counts // 2, counts, **fields)

        grids = {"all": grid([6, 6, 6]), "short": grid([6, 6, 0])}
        lines = [
            [c.strip() for c in x.strip("|").split("|")] for x in length_table(grids).splitlines()
        ]
        assert lines[0] == ["tokens", "range", "keys", "all, %", "short, %"]
        assert lines[4][:3] == ["8", "beyond", "6"]
        assert lines[4][4] == lines[6][4] == "none asked"
        assert [line[1] for line in lines[5:]] == ["trained range", "beyond it"]
        assert pool([grids["all"], grids["short"]]).counts.tolist() == [[12, 12, 6]]
        with pytest.raises(
            ValueError, match=r"were not asked the same: counts is \[6 6\] and \[6 7\]"
        ):
            length_table({"a": grids["short"], "b": grid([6, 7, 7])})

    def test_rows(self):
        lines = length_table({"tape": example_grid(), "rope": example_grid()}).splitlines()
        cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines[:8]]
        assert cells[0] == ["digits", "range", "sums", "tape, %", "rope, %"]
        assert [row[:3] for row in cells[2:]] == [
            ["1*", "trained", "5"],
            ["2*", "trained", "15"],
            ["3", "beyond", "25"],
            ["all", "trained range", "20"],
            ["all", "... held out only", "5"],
            ["all", "beyond it", "25"],
        ]
        assert cells[2][3].startswith("60.0 [")
        assert cells[3][3].startswith("46.7 [")
        assert cells[7][4].startswith("24.0 [")
        assert "training and evaluation share them" in lines[-1]

    def test_different_questions(self):
        other = sum_grid((1, 2), (1, 2), np.zeros((2, 2)), np.ones((2, 2)), np.zeros((2, 2)), 2)
        with pytest.raises(ValueError, match=r"'a' and 'b' were not asked the same: rows"):
            require_same_questions({"a": example_grid(), "b": other})
