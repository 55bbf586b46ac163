"""Which run each rival gets."""

import pytest

from train import experiment
from train.comparison.jobs import ENCODINGS, plan


def test_a_plan_of_several_seeds(config, tmp_path):
    jobs = plan(config, tmp_path, ENCODINGS, ["tape", "none"], 2, ["--config.seed=7"])
    assert [job.label for job in jobs] == [
        "tape, seed 7",
        "tape, seed 8",
        "none, seed 7",
        "none, seed 8",
    ]
    assert [job.folder.name for job in jobs] == ["tape", "tape-seed8", "none", "none-seed8"]
    assert [job.experiment.seed for job in jobs] == [7, 8, 7, 8]
    assert [job.experiment.model.position.kind for job in jobs[1:3]] == ["tape", "none"]
    for job in jobs:
        file, *own = job.command
        assert experiment.from_file(file.partition("=")[2], own) == job.experiment


def test_what_joins_several_encodings():
    assert ENCODINGS.overrides("rope") == ("--config.model.position.kind=rope",)
    for name in ("path_fox", "tape+alibi"):
        assert ENCODINGS.overrides(name) == (f"--config.model.position.kind={name}",)
    with pytest.raises(ValueError, match=r"unknown position encoding 'alib'.*mean 'alibi'"):
        ENCODINGS.overrides("tape+alib")
