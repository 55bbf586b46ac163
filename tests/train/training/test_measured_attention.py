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


def prepare(experiment, sharding=None, *, tune=True):
    said = []
    loop.measure_attention(experiment, sharding, said.append, tune=tune)
    return said


@pytest.mark.parametrize("devices", [1, 2])
def test_shapes_of_one_device_are_measured_once(measured, devices):
    experiment = an_experiment()
    sharding = None if devices == 1 else ShardingConfig(data=2).build(jax.devices()[:2])
    said = prepare(experiment, sharding)
    model, train = experiment.model, experiment.train
    assert measured == [
        CallShape(
            model.dim,
            experiment.task.sequence_length,
            model.dtype,
            state,
            train.batch_size // train.accumulate // devices,
            model.num_heads,
            model.kv_heads,
        )
        for state in (True, False)
    ]
    assert "attention is measured first, for 60 seconds at most" in said[0]
    assert prepare(experiment, sharding) == []
    assert len(measured) == 2


def test_nothing_is_measured_where_it_is_not_wanted(measured, monkeypatch):
    """With ``--no-tune``, where a way to attend was asked for, on a CPU, or by another process."""
    experiment = an_experiment()
    assert prepare(experiment, tune=False) == []
    model = dataclasses.replace(experiment.model, attention_implementation="chunked")
    assert prepare(dataclasses.replace(experiment, model=model)) == []
    with monkeypatch.context() as patch:
        patch.setattr(loop.jax, "default_backend", lambda: "cpu")
        assert prepare(experiment) == []
    agreed = []
    monkeypatch.setattr(loop.tuning, "agree", lambda: agreed.append(True))
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert prepare(experiment) == []
    assert (measured, agreed) == ([], [True])


def test_the_option(monkeypatch, tmp_path, capsys):
    def train(*args, tune, **kwargs):
        raise ValueError(f"tune is {tune}")

    monkeypatch.setattr(loop, "train", train)
    run = ["train", "--config=configs/addition_demo.py", f"--run={tmp_path / 'run'}"]
    for options, wanted in (([], True), (["--no-tune"], False)):
        assert program.main([*run, *options]) == program.USER_ERROR
        assert f"tune is {wanted}" in capsys.readouterr().err
