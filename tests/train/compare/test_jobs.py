"""Which run each rival gets."""

import pytest

from tape_jax import positions
from train import experiment
from train.compare.jobs import ENCODINGS, METHODS, plan
from train.main import main


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


def test_options_of_one_rival(config, tmp_path):
    names = ["rope", "rope+fox+alibi:bias=5.0", "tape:alpha=8:norm=rms"]
    jobs = plan(config, tmp_path, ENCODINGS, names, 2, [])[::2]
    assert [job.name for job in jobs] == names
    assert [job.folder.name for job in jobs] == [name.replace(":", "-") for name in names]
    assert [job.experiment.model.position for job in jobs] == [
        positions.create(position)
        for position in (
            "rope",
            ("rope", positions.Fox(bias=5.0), "alibi"),
            positions.Tape(alpha=8, norm="rms"),
        )
    ]
    for name, message in {
        "rope:bias=5.0": "bias",
        "rope:5.0": "expected NAME:OPTION=VALUE.*got '5.0' after 'rope'",
        "tape+alib": "unknown position encoding 'alib'.*mean 'alibi'",
    }.items():
        with pytest.raises(ValueError, match=message):
            plan(config, tmp_path, ENCODINGS, [name], 1, [])


def test_encodings_among_methods():
    position = "--config.model.position"
    assert METHODS.overrides("tape:alpha=8") == (
        "--config.adapt.method=tape",
        f"{position}.alpha=8",
    )
    assert METHODS.overrides("rope+alibi:slopes=learned_from_zero") == (
        "--config.adapt.method=encoding",
        f"{position}.kind=rope+alibi",
        f"{position}.slopes=learned_from_zero",
    )
    for name, message in {
        "lorra": "unknown adapt method 'lorra'.*mean 'lora'",
        "rope+alib": "unknown position encoding 'alib'.*mean 'alibi'",
    }.items():
        with pytest.raises(ValueError, match=message):
            METHODS.overrides(name)


def test_what_cannot_be_asked_for_is_known_before(tmp_path, capsys):
    """Nothing is written for a comparison whose trainings would refuse."""
    folder = tmp_path / "compared"
    command = ["compare", "--config=configs/addressing_demo.py", f"--run={folder}"]
    assert main([*command, "--encodings=rope", "--config.evaluation.longest=400"]) == 2
    assert "from 10 to 32 tokens can be asked for; got 400" in capsys.readouterr().err
    assert main([*command, "--encodings=rope", "--config.model.max_length=40"]) == 2
    assert "sequences have 48 tokens, but the model accepts at most 40" in capsys.readouterr().err
    assert not folder.exists()
