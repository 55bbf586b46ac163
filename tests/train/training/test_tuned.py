"""What a training measures before it begins. Nothing is timed."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from tape_jax._src.attention.tuning import measure as tuning
from tape_jax._src.attention.tuning import records
from tape_jax._src.attention.tuning.records import CallShape, Measured
from tape_jax.sharding import ShardingConfig
from tests.train.training.tiny import an_experiment
from train import main as program
from train.training import loop, tuned


@pytest.fixture(autouse=True)
def accelerator(monkeypatch, tmp_path):
    """An accelerator as far as the choice goes, and an empty cache folder."""
    monkeypatch.setenv("TAPE_JAX_CACHE", str(tmp_path / "cache"))
    records.device()
    monkeypatch.setattr(tuned.jax, "default_backend", lambda: "gpu")
    records.forget()
    yield
    records.forget()


@pytest.fixture
def measured(monkeypatch):
    """The shapes that were measured, each with the seconds that there were."""
    calls = []

    def measure(shape, names, **_):
        calls.append(shape)
        return [Measured("chunked", 1.0, 2.0, error=0.0)]

    monkeypatch.setattr(tuning, "measure", measure)
    return calls


def prepare(experiment, **keywords):
    said = []
    tuned.prepare(experiment, None, said.append, **{"tune": True} | keywords)
    return said


def test_own_shapes_are_measured_once(measured):
    experiment = an_experiment()
    said = prepare(experiment)
    assert measured == tuned.shapes(experiment, None)
    assert [shape.state for shape in measured] == [True, False]
    assert "for a minute at most (--no-tune leaves it out" in said[0]
    assert prepare(experiment) == []
    assert len(measured) == 2


def test_what_was_asked_for_is_not_measured(measured):
    experiment = an_experiment()
    assert prepare(experiment, tune=False) == []
    model = dataclasses.replace(experiment.model, attention_implementation="chunked")
    assert prepare(dataclasses.replace(experiment, model=model)) == []
    assert measured == []


def test_a_cpu_measures_nothing_unasked(measured, monkeypatch):
    monkeypatch.setattr(tuned.jax, "default_backend", lambda: "cpu")
    assert prepare(an_experiment()) == []
    assert measured == []


def test_only_the_first_process_measures(measured, monkeypatch):
    agreed = []
    monkeypatch.setattr(tuned.records, "agree", lambda: agreed.append(True))
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert prepare(an_experiment()) == []
    assert (measured, agreed) == ([], [True])


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(measured, monkeypatch):
    def refuse(table):
        raise OSError("read-only")

    monkeypatch.setattr(records, "write", refuse)
    assert prepare(an_experiment())[-1] == "what was measured cannot be kept: read-only"


def test_shapes_are_those_of_one_device():
    experiment = an_experiment()
    whole = tuned.shapes(experiment, None)[0]
    assert whole == CallShape(
        experiment.model.dim,
        experiment.task.sequence_length,
        experiment.model.dtype,
        True,
        experiment.train.batch_size // experiment.train.accumulate,
        experiment.model.num_heads,
        experiment.model.kv_heads,
    )
    sharding = ShardingConfig(data=2).build(jax.devices()[:2])
    assert tuned.shapes(experiment, sharding)[0].batch == whole.batch // 2


@pytest.mark.parametrize(("options", "wanted"), [([], True), (["--no-tune"], False)])
def test_the_option(monkeypatch, tmp_path, options, wanted):
    asked = []

    def train(*args, tune, **kwargs):
        asked.append(tune)
        raise ValueError("far enough")

    monkeypatch.setattr(loop, "train", train)
    command = ["train", "--config=configs/addition_demo.py", f"--run={tmp_path / 'run'}"]
    assert program.main([*command, *options]) == program.USER_ERROR
    assert asked == [wanted]
