"""Tables over the finished runs of a folder."""

import json

import numpy as np
import pytest

from train import experiment, results, runs
from train.commands import eval as evaluation
from train.data.groups import WordResult
from train.grids import Grid


def finish(folder, task, kind="rope", layers=1, seed=0, correct=(10, 10), step=5):
    """A run folder as training and evaluation leave it, but for its checkpoints."""
    e = experiment.from_mapping(
        {
            "name": "x",
            "seed": seed,
            "task": task,
            "model": {
                "hidden_size": 8,
                "num_heads": 1,
                "num_layers": layers,
                "position": {"kind": kind},
            },
            "train": {"steps": 5, "batch_size": 4, "learning_rate": 1e-3},
        }
    )
    runs.create(folder, e)
    grid = Grid(
        rows=(1,),
        columns=(1, 2),
        lengths=np.array([[1, 2]]),
        correct=np.array([correct]),
        counts=np.array([[10, 10]]),
        shared=np.zeros((1, 2), bool),
        trained=1,
        wording=e.task.wording,
    )
    result = grid if task["name"] == "algorithm" else WordResult(grid, grid)
    record = {"format": evaluation.FORMAT, "step": step, "options": {}, "result": result.to_json()}
    (folder / "evaluation.json").write_text(json.dumps(record))


def cells(table):
    lines = [line for line in table.splitlines() if line.startswith("|") and "--" not in line]
    return [[cell.strip().split(" ")[0] for cell in line.split("|")[1:-1]] for line in lines]


def test_length_suite(tmp_path):
    for problem, correct in (("sort", (10, 4)), ("copy", (9, 1))):
        task = {"name": "algorithm", "problem": problem, "max_length": 1}
        for kind in ("tape", "rope"):
            own = correct if kind == "tape" else (0, 0)
            finish(tmp_path / problem / kind, task, kind, correct=own)
            finish(tmp_path / problem / f"{kind}-seed1", task, kind, seed=1, correct=own)
    finish(tmp_path / "unfinished", task, "alibi", step=4)
    finish(tmp_path / "other", {"name": "words", "max_length": 1})
    assert cells(results.length_suite(tmp_path))[1:] == [
        ["copy", "1", "0", "90.0"],
        ["copy", "beyond", "0", "10.0"],
        ["sort", "1", "0", "100"],
        ["sort", "beyond", "0", "40.0"],
    ]
    with pytest.raises(ValueError, match="holds no finished run of the task 'Algorithm'"):
        results.length_suite(tmp_path / "other")


def test_smallest_depths(tmp_path):
    for group in ("S5", "Z60"):
        task = {"name": "words", "group": group, "max_length": 1}
        for layers, correct in ((1, (10, 0)), (2, (10, 9 if group == "Z60" else 8))):
            finish(tmp_path / group / str(layers), task, layers=layers, correct=correct)
    first, second = results.smallest_depths(tmp_path).split("S5")
    assert first.startswith("Z60")
    assert cells(first)[1:] == [["1", "trained", "1"], ["2", "beyond", "2"]]
    assert cells(second)[1:] == [["1", "trained", "1"], ["2", "beyond", "more"]]
    loose = results.smallest_depths(tmp_path, solved=0.8)
    assert "more than" not in loose


def test_smallest_depths_of_different_words(tmp_path):
    """Words of generators, and of another length, are other problems: each has its own table."""
    for number, options in enumerate(({}, {"generators": 3}, {"generators": 2})):
        task = {"name": "words", "group": "A5", "max_length": 1, **options}
        finish(tmp_path / str(number), task, layers=number + 1)
    finish(tmp_path / "longer", {"name": "words", "group": "A5", "max_length": 2})
    tables = results.smallest_depths(tmp_path)
    headings = [line for line in tables.splitlines() if line.startswith("A5")]
    assert headings == [
        "A5, trained on words of 1",
        "A5, trained on words of 2",
        "A5 with 2 generators, trained on words of 1",
        "A5 with 3 generators, trained on words of 1",
    ]
    first = [row[2] for row in cells(tables) if row[0] == "1"]
    assert first == ["1", "1", "at", "at"]
