"""Which run each rival gets."""

import json

import pytest

from tape_jax import positions
from train import experiment
from train.compare.jobs import ENCODINGS, METHODS, Choice, plan, record
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


def test_schedules_have_flat_folders(config, tmp_path):
    names = ["rope/none", "rope|none", "rope-none"]
    known = dict.fromkeys(names, ())
    jobs = plan(config, tmp_path, Choice("rival", known), names, 1, [])
    folders = [job.folder.relative_to(tmp_path) for job in jobs]
    assert [folder.parts for folder in folders] == [
        ("rope%2Fnone",), ("rope%7Cnone",), ("rope-none",),
    ]  # fmt: skip


def test_a_folder_that_a_kill_left_without_a_run_is_no_obstacle(config, tmp_path):
    folder = tmp_path / "rope"
    folder.mkdir()
    (folder / ".experiment.json.7.tmp").touch()
    assert plan(config, tmp_path, ENCODINGS, ["rope"], 1, [])[0].folder == folder
    (folder / "precious").touch()
    with pytest.raises(ValueError, match="rope exists already: choose another --run"):
        plan(config, tmp_path, ENCODINGS, ["rope"], 1, [])


def test_a_record_of_lines_without_losses(config, tmp_path):
    """All steps of a line were skipped; a training that diverged has no scores."""
    (job,) = plan(config, tmp_path, ENCODINGS, ["rope"], 1, [])
    job.folder.mkdir()
    lines = [{"step": 1, "loss": 2.0}, {"step": 2, "skipped": 1.0}]
    (job.folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    found = record(job, ask=True, diverged=True)
    assert (found.steps, found.losses, found.facts["last loss"]) == ([1], [2.0], "2.00000")
    assert (found.scores, found.samples) == ({}, ())


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
