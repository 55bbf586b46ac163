"""How training says what becomes of the loss of held-out text, and that it changes nothing."""

import re

import chex
import jax
import numpy as np
import pytest

from tests.train.training.tiny import an_experiment, final_state
from train import experiment
from train.tasks.text import Text
from train.training import loop
from train.training.held_out import HeldOut


@pytest.fixture
def wanted(tmp_path):
    """Text of which much is learned by heart in no time."""
    for i in range(12):
        letters = np.random.default_rng(i).choice(list("abcdefgh "), 60)
        (tmp_path / f"{i}.txt").write_text("".join(letters))
    return experiment.from_mapping(
        {
            "name": "test",
            "task": {
                "name": "text",
                "source": f"{tmp_path}/*.txt",
                "cache": f"{tmp_path}/cache",
                "held_out": 0.4,
                "sequence_length": 16,
            },
            "model": {"hidden_size": 16, "num_heads": 2, "num_layers": 1, "position": "rope"},
            "train": {"steps": 6, "batch_size": 4, "learning_rate": 0.01, "save_every": 3},
            "evaluation": {"factors": (1,), "tokens": 64},
        }
    )


def test_a_batch_is_held_out_text(wanted):
    task = wanted.task
    tokens = task.held_out_stream().tokens
    count = (len(tokens) - 1) // 16
    batch = task.held_out_batch(count + 3)
    rows = {tuple(row.tolist()) for row in batch["inputs"][:count]}
    assert rows == {tuple(row.tolist()) for row in tokens[: count * 16].reshape(count, 16)}
    np.testing.assert_array_equal(batch["targets"][:, :-1], batch["inputs"][:, 1:])
    # Rows that lack weigh nothing.
    assert batch["weights"][:count].all()
    assert not batch["weights"][count:].any()
    chex.assert_trees_all_equal(task.held_out_batch(2), jax.tree.map(lambda x: x[:2], batch))
    assert HeldOut.of(an_experiment(), None) is None, "a task without text"


def test_a_batch_of_packed_documents_is_packed_as_in_training(wanted):
    values = experiment.to_json(wanted)
    values["task"] |= {"packing": "documents", "sequence_length": 80}
    task = experiment.from_mapping(values).task
    batch = task.held_out_batch(2)
    assert {x.shape for x in batch.values()} == {(2, 80)}
    # Each document has 60 letters and its end; nobody is asked for the first letter.
    documents = {tuple(x.tolist()) for x in task.evaluation_documents()}
    assert {
        (*row[:1], *rest[:60])
        for row, rest in zip(batch["inputs"].tolist(), batch["targets"].tolist(), strict=True)
    } <= documents
    np.testing.assert_array_equal(batch["weights"].sum(axis=1), 60)
    np.testing.assert_array_equal(batch["positions"][:, :60], [range(60)] * 2)


@pytest.mark.slow
def test_training_says_how_it_goes_and_is_the_same(wanted, tmp_path, monkeypatch):
    said = []
    loop.train(wanted, tmp_path / "watched", report=said.append)
    lines = [line for line in said if "held-out loss" in line]
    epochs = [step * 4 / len(wanted.task.packed()) for step in (3, 6)]
    assert [re.match(r"step (\d): (\S+) epochs", line).groups() for line in lines] == [
        (str(step), f"{n:.3g}") for step, n in zip((3, 6), epochs, strict=True)
    ]
    monkeypatch.delattr(Text, "held_out_batch")
    said.clear()
    loop.train(wanted, tmp_path / "alone", report=said.append)
    assert not any("held-out loss" in line for line in said)
    chex.assert_trees_all_equal(final_state(tmp_path / "watched"), final_state(tmp_path / "alone"))


def test_devices_share_its_rows_evenly(wanted):
    """Also where they share more rows in training, of parts of sequences."""
    values = experiment.to_json(wanted)
    values["train"] |= {"batch_size": 4, "accumulate": 1}
    values["sharding"] = {"data": 8}
    parts = experiment.from_mapping(values)
    sharding = parts.sharding.build(jax.devices())
    watch = HeldOut(parts, sharding)
    assert watch._batch["weights"].shape[0] == 8


@pytest.mark.slow
def test_a_rise_is_said(wanted):
    watch = HeldOut.of(wanted, None)
    first = jax.jit(lambda: loop.init_state(wanted, loop.make_optimizer(wanted.train)))().params
    assert "up from" not in watch.describe(1, first)
    worse = jax.tree.map(lambda x: 30 * x, first)
    assert watch.describe(2, worse).endswith("at step 1")
    assert "at step 1: the model learns its text by heart" in watch.describe(2000, worse)
    assert "up from" not in watch.describe(3, jax.tree.map(lambda x: 0.9 * x, first))


@pytest.mark.slow
def test_a_run_goes_on_without_text_that_is_gone(wanted, tmp_path):
    apart = tmp_path / "apart.text"
    apart.write_text("kept apart " * 20)
    values = experiment.to_json(wanted)
    values["task"]["held_out_source"] = str(apart)
    values["train"]["steps"] = 3
    loop.train(experiment.from_mapping(values), tmp_path / "run")
    apart.unlink()
    values["train"]["steps"] = 6
    said = []
    loop.train(experiment.from_mapping(values), tmp_path / "run", resume=True, report=said.append)
    assert f"no held-out loss will be said: there is no '{apart}'" in said
    assert final_state(tmp_path / "run")[0] == 6
