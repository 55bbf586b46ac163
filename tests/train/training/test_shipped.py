"""Models in one file: written and read back, refused with words, and those of docs/play."""

import re

import chex
import jax
import numpy as np
import pytest

from docs.play.make import ENCODINGS, MODELS
from tests.models import random_variables
from tests.paths import ROOT
from train import experiment
from train.main import main
from train.training import runs, shipped

CONFIG = ROOT / "configs" / "addressing_demo.py"
SMALL = ["--config.model.hidden_size=8", "--config.model.intermediate_size=8"]
RIGHT = "q d m c x a k f t b h z +5 c?"


@pytest.fixture
def trained():
    """A small model as a run would have it."""
    made = experiment.from_file(CONFIG, SMALL)
    model = runs.Transformer(made.model)
    return runs.TrainedRun(made, 7, model, random_variables(model))


def test_is_read_back_in_16_bits(trained, tmp_path):
    """And no other file, nor one that is damaged."""
    path = tmp_path / "small.js"
    shipped.write(path, trained, {"seed": 2})
    back = shipped.read(path)
    assert (back.experiment, back.step) == (trained.experiment, 7)
    half = jax.tree.map(lambda x: np.asarray(x, np.float16).astype(np.float32), trained.variables)
    chex.assert_trees_all_equal(back.variables, half)
    record = shipped.read_record(path)
    assert (record["seed"], record["symbols"]) == (2, list(trained.experiment.task.names))

    text = path.read_text()
    for damaged, expected in (
        (text.replace("version 1", "version 0"), "is not a shipped model"),
        ("", "is not a shipped model"),
        (text.replace("final_norm", "norm"), "do not fit its experiment"),
        (re.sub('(?<="weights": ").{8}', "", text), "do not fit its experiment"),
    ):
        path.write_text(damaged)
        with pytest.raises(ValueError, match=expected):
            shipped.read(path)
    with pytest.raises(ValueError, match="there is no file"):
        shipped.read(tmp_path / "none.js")


def test_the_demo_answers_without_training(capsys):
    assert main(["ask", f"--model={MODELS / 'tape.js'}", RIGHT]) == 0
    assert capsys.readouterr().out == f"{RIGHT} = t (right)\n"
    assert main(["ask", f"--model={MODELS / 'tape.js'}", "c b a +1 d?"]) == 2
    assert "d is not in the list" in capsys.readouterr().err


def test_shipped_models_are_small_and_the_middle_of_three():
    paths = [MODELS / f"{name}.js" for name in ENCODINGS]
    assert sum(path.stat().st_size for path in paths) < 1.5e6
    for path in paths:
        record = shipped.read_record(path)
        scores = {score["seed"]: score["beyond"] for score in record["scores"]}
        assert len(scores) == 3
        assert scores[record["seed"]] == sorted(scores.values())[1]
