"""Runs that are continued otherwise than they were started."""

import json

import chex
import numpy as np
import pytest

from tests.train.training.tiny import an_experiment, final_state, numbers
from train import experiment
from train.training import changes, loop, runs

CONSTANT = {"schedule": "constant", "warmup": 0.0, "save_every": 5, "log_every": 4}


def longer(folder, *overrides):
    """A run continued with some options; returns what it said."""
    said = []
    wanted = experiment.change(runs.load(folder), overrides)
    loop.train(wanted, folder, resume=True, report=said.append)
    return said


@pytest.mark.slow
def test_a_run_made_longer_is_one_that_was_long_from_the_start(tiny, tmp_path):
    """Bit for bit, with its lines of metrics, where the schedule is constant."""
    loop.train(an_experiment(**CONSTANT, steps=6), tmp_path / "parts")
    loop.train(an_experiment(**CONSTANT, steps=14), tmp_path / "whole")
    said = longer(tmp_path / "parts", "--config.train.steps=14")
    chex.assert_trees_all_equal(final_state(tmp_path / "parts"), final_state(tmp_path / "whole"))
    assert [line["step"] for line in numbers(tmp_path / "whole")] == [4, 8, 12, 14]
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    assert "from step 6 on: train.steps 6 -> 14" in said
    assert "the learning rate has been that of a training of so many steps" in said

    assert runs.load(tmp_path / "parts") == runs.load(tmp_path / "whole")
    record = json.loads((tmp_path / "parts" / "experiment.json").read_text())
    assert record["changes"] == [{"step": 6, "train.steps": [6, 14]}]
    before = (tmp_path / "parts" / "experiment.json").read_bytes()
    longer(tmp_path / "parts")
    assert (tmp_path / "parts" / "experiment.json").read_bytes() == before


@pytest.mark.slow
def test_what_becomes_of_the_learning_rate_is_said(tiny, tmp_path):
    loop.train(an_experiment(schedule="cosine", warmup=0.0), tmp_path / "run")
    said = longer(tmp_path / "run", "--config.train.steps=24")
    (line,) = (line for line in said if "schedule" in line)
    assert "the schedule 'cosine' now spans 24 steps" in line
    assert "the learning rate goes from 0 to 0.005 here" in line
    rates = [line["learning_rate"] for line in numbers(tmp_path / "run")]
    np.testing.assert_allclose(rates[6], 0.01 * np.mean([0.5, 0.43474]), rtol=1e-3)


@pytest.mark.parametrize(
    ("position", "adds"), [("tape", False), ("tape_relaxed_equivariance", True)]
)
def test_what_becomes_of_a_loss_of_the_encoding_is_said(position, adds):
    overrides = [f"--config.model.position.kind={position}"]
    before = experiment.change(an_experiment(**CONSTANT, steps=6), overrides)
    now = experiment.change(before, ["--config.train.steps=14"])
    lines = changes.describe(before, now, 6)
    assert any(line.startswith(f"what {position!r} adds to the loss") for line in lines) == adds


@pytest.mark.slow
def test_when_it_is_saved_and_logged_may_change(tiny, tmp_path):
    loop.train(an_experiment(steps=6), tmp_path / "run")
    longer(
        tmp_path / "run",
        *("--config.train.steps=12", "--config.train.log_every=3", "--config.train.save_every=2"),
        "--config.evaluation.longest=3",
    )
    assert [line["step"] for line in numbers(tmp_path / "run")] == [2, 4, 6, 9, 12]
    assert runs.saved_steps(tmp_path / "run") == [8, 10, 12]
    kept = runs.load(tmp_path / "run")
    assert (kept.train.steps, kept.train.log_every, kept.evaluation.longest) == (12, 3, None)


@pytest.mark.slow
def test_a_run_is_guarded_after_its_record_was_written_anew(tiny, tmp_path, monkeypatch):
    loop.train(an_experiment(steps=2), tmp_path / "run")
    make = loop.Metrics

    def another(*args, **options):
        with pytest.raises(ValueError, match="another process is training"):
            runs.guarded(tmp_path / "run").__enter__()
        return make(*args, **options)

    monkeypatch.setattr(loop, "Metrics", another)
    longer(tmp_path / "run", "--config.train.steps=4")
    assert final_state(tmp_path / "run")[0] == 4


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("train.learning_rate=0.5", r"train\.learning_rate: 0\.01 there, 0\.5 here"),
        ("train.steps=3", r"train\.steps = 3: the run has already taken 4 steps"),
    ],
)
def test_what_may_not_change_is_named(tiny, tmp_path, option, message):
    loop.train(an_experiment(steps=4), tmp_path / "run")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=message):
        longer(tmp_path / "run", f"--config.{option}")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_comparison_trains_all_equally_long(tmp_path):
    runs.create(tmp_path / "run", an_experiment())
    changes.check_same(tmp_path / "run", an_experiment(save_every=7))
    with pytest.raises(ValueError, match=r"train\.steps: 12 there, 13 here"):
        changes.check_same(tmp_path / "run", an_experiment(steps=13))


def test_a_mesh_may_be_given_to_a_run_that_had_none():
    wanted = experiment.change(an_experiment(), ["--config.sharding.data=-1"])
    assert wanted.sharding.data == -1
