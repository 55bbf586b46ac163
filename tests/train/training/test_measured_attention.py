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
from train.training import loop


@pytest.fixture(autouse=True)
def accelerator(monkeypatch, tmp_path):
    """An accelerator as far as the choice goes, and an empty cache folder."""
    monkeypatch.setenv("TAPE_JAX_CACHE", str(tmp_path / "cache"))
    records.device()
    monkeypatch.setattr(loop.jax, "default_backend", lambda: "gpu")
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
    loop.measure_attention(experiment, None, said.append, **{"tune": True} | keywords)
    return said


def test_own_shapes_are_measured_once(measured):
    experiment = an_experiment()
    said = prepare(experiment)
    model, train = experiment.model, experiment.train
    assert measured == [
        CallShape(
            model.dim,
            experiment.task.sequence_length,
            model.dtype,
            state,
            train.batch_size // train.accumulate,
            model.num_heads,
            model.kv_heads,
        )
        for state in (True, False)
    ]
    assert "attention is measured first, for 60 seconds at most" in said[0]
    assert prepare(experiment) == []
    assert len(measured) == 2


def test_the_shapes_are_those_of_the_batch(measured):
    """Of a task whose training sequences are shorter than those that it is judged by."""
    prepare(an_experiment(task={"name": "text", "sequence_length": 64, "train_length": 16}))
    assert {(shape.batch, shape.length) for shape in measured} == {(8 * 4 // 2, 16)}


def test_what_was_asked_for_is_not_measured(measured):
    experiment = an_experiment()
    assert prepare(experiment, tune=False) == []
    model = dataclasses.replace(experiment.model, attention_implementation="chunked")
    assert prepare(dataclasses.replace(experiment, model=model)) == []
    assert measured == []


def test_a_cpu_measures_nothing_unasked(measured, monkeypatch):
    monkeypatch.setattr(loop.jax, "default_backend", lambda: "cpu")
    assert prepare(an_experiment()) == []
    assert measured == []


def test_only_the_first_process_measures(measured, monkeypatch):
    agreed = []
    monkeypatch.setattr(loop.tuning, "agree", lambda: agreed.append(True))
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert prepare(an_experiment()) == []
    assert (measured, agreed) == ([], [True])


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(measured, monkeypatch):
    def refuse(table):
        raise OSError("read-only")

    monkeypatch.setattr(records, "write", refuse)
    assert prepare(an_experiment())[-1] == "what was measured cannot be kept: read-only"


def test_shapes_are_those_of_one_device(measured):
    experiment = an_experiment()
    sharding = ShardingConfig(data=2).build(jax.devices()[:2])
    loop.measure_attention(experiment, sharding, lambda _: None, tune=True)
    assert {shape.batch for shape in measured} == {
        experiment.train.batch_size // experiment.train.accumulate // 2
    }


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
