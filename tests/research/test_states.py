"""What is said of states, and the runs that it is read off."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from research.states import COLUMNS, StateUse, states_figure, updating, without_layer
from research.study import Base
from research.trainings import Trainings
from tests.models import encoding, small_model
from tests.research.results import BEYOND, MADE, choose_all, diverge, finish_all
from train.evaluation.inside import before_training

RIGHT = {"tape": 0.6, "rope": 0.3, "none": 0.2}


@pytest.fixture
def planned(design, place):
    """A study of states of three layers, and the study that it reads."""
    of = dataclasses.replace(design, fields={"model.num_layers": 3})
    found = StateUse("states", [of], forms=("tape", "tape_heads")).at(place)
    return found, found.of["copying"]


def put(states, without: float, lost=(0.5, 0.0), moved=0.2) -> None:
    """Writes what looking into every run would have found."""
    for i, item in enumerate(states.items):
        found = {
            "moved": [0.0, 0.1, moved + 0.01 * i],
            "trained": {BEYOND: 0.6 + 0.01 * i},
            "without": {BEYOND: without + 0.01 * i},
            "loss": 1.0,
            "loss_without": 2.0,
            "lost": [x + 0.01 * (-1) ** i for x in lost],
        }
        states.place.store.put(item, found, MADE)


def test_from_nothing_to_a_sentence(planned):
    states, trainings = planned
    assert states.pairs == [("copying", "tape")], "of forms that a study has"
    assert states.items == []
    assert len(states.state.unfinished) == states.state.total == 5
    choose_all(trainings)
    assert [item.name for item in states.items][:1] == ["copying-tape-1x-3e-3-seed2"]
    finish_all(trainings, RIGHT)
    assert states.cut("copying", "tape") is None
    assert states.said("copying", "tape") is None
    assert states.pictures("", ()) == {}
    put(states, without=0.25)
    assert not states.state.unfinished
    found = states.cut("copying", "tape")
    np.testing.assert_allclose(found.without, [25, 26, 27, 28, 29])
    np.testing.assert_allclose(found.trained, [60, 61, 62, 63, 64])
    said = states.said("copying", "tape")
    assert "22.00 [20.04, 23.96] % of their norm" in said
    assert "to 27.00 [" in said
    assert ", by -35.00 [" in said
    assert said.endswith("raises the loss, by an interval above zero: 1")
    (row,) = states.rows()
    assert row[:2] == ["copying", "`tape`"]
    assert len(row) == len(COLUMNS)
    assert states_figure(states).axes
    put(states, without=0.25, lost=(0.0, 0.0))
    assert "; no layer alone" in states.said("copying", "tape")
    diverge(trainings, trainings.reports("tape", BEYOND)[0])
    assert len(states.items) == 4, "what diverged is left out"


@pytest.mark.slow
def test_adapted_models(place):
    """They are trained again with their bases, and have updates of their own."""
    sizes = {"model.hidden_size": 8, "model.num_heads": 1, "model.position.kind": "rope"}
    key = "perplexity_overlapping_1x"
    of = Trainings(
        name="adapting",
        config=Path("configs/context_extension_demo.py"),
        rivals={name: {"adapt.method": name} for name in ("tape", "lora")},
        fields={"train.steps": 2, "evaluation.tokens": 2048},
        base=Base(Path("configs/bytes_demo.py"), sizes, {"cpu": {"train.steps": 2}}),
        scores=(key,),
        minutes=1.0,
    )
    states = StateUse("states", [of], forms=("tape",)).at(place)
    trainings = states.of["adapting"]
    found = {"result": None, "diverged": {"step": 1}, "losses": []}
    for rates in range(3):
        for job in trainings.walk("tape", key)[0][2 * rates :]:
            place.store.put(trainings.item(job), found, MADE)
    for job in trainings.reports("tape", key)[1:]:
        place.store.put(trainings.item(job), found, MADE)
    made = []
    states.run(made.append)
    assert [item.name for item in made] == [item.name for item in states.items]
    assert len(made) == 1, "the others diverged"
    assert made[0].base.model.position.kind == "rope"
    seen = states.recorded(made[0]).found
    assert key in seen["without"]
    assert key in seen["trained"]
    assert max(seen["moved"]) > 0
    states.run(lambda item: pytest.fail("made twice"))


@pytest.mark.slow
@pytest.mark.parametrize("scan_layers", [True, False])
def test_one_layer_cut_off(scan_layers):
    model = small_model(encoding("tape"), num_layers=4, scan_layers=scan_layers)
    fresh = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 1), np.int32))
    trained = jax.tree.map(lambda x: x + 1, fresh)
    whole = before_training(model, trained)
    assert updating(model) == [0, 1, 2]
    found = trained
    for layer in updating(model):
        one = without_layer(model, trained, layer, whole)
        changed = sum(
            bool((a != b).any())
            for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(trained), strict=True)
        )
        assert changed == len(model.encoding.layer_params(model.config.sizes, updates=True))
        found = without_layer(model, found, layer, whole)
    jax.tree.map(np.testing.assert_array_equal, found, whole)
