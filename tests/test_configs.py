import dataclasses
import math

import jax
import pytest

from research.configs import places
from research.study import options
from tests.paths import ROOT
from train import experiment
from train.training import runs
from train.training import step as training_step

CONFIGS = sorted(
    path
    for folder in ("configs", "research/configs")
    for path in (ROOT / folder).glob("*.py")
    if path.name != "__init__.py"
)


# Configs that adapt a model, and what stands in for the base that they name.
ADAPTED = {
    "context_extension": "c4_pretrain",
    "context_extension_demo": "bytes_demo",
    "retrofit": "c4_pretrain",
    "retrofit_demo": "retrofit_base",
}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_config(path, tmp_path):
    """It parses, says what it is for, and its model and optimiser can be built."""
    header = path.read_text().split('"""')[1]
    for part in ("Claim:", "Cost:", "Command:", f"configs/{path.name}"):
        assert part in header
    given = []
    if stand_in := ADAPTED.get(path.stem):
        rope = ["--config.model.position.kind=rope"]
        base = experiment.from_file(path.with_stem(stand_in), rope, report=lambda _: None)
        runs.create(tmp_path / "base", base)
        given = [f"--config.adapt.base={tmp_path / 'base'}"]
    shipped = experiment.from_file(path, given)
    assert bool(shipped.adapt) == bool(given)
    optimizer = training_step.make_optimizer(shipped.train)
    state = jax.eval_shape(lambda: training_step.init_state(shipped, optimizer))
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(state.params)) > 0
    assert experiment.from_mapping(experiment.to_json(shipped)) == shipped


@pytest.mark.parametrize("kind", ["tape", "abacus", "position_coupling", "mrope"])
def test_the_demo_with_another_encoding(kind):
    path = next(path for path in CONFIGS if path.stem == "addition_demo")
    given = [f"--config.model.position.kind={kind}"]
    chosen = experiment.from_file(path, given, report=lambda _: None)
    assert "embedding" in runs.abstract_variables(chosen)["params"]


def test_the_size_of_the_paper():
    path = next(path for path in CONFIGS if path.stem == "addition")
    paper = experiment.from_file(path)
    model, train = paper.model, paper.train
    assert (model.num_layers, model.hidden_size, model.intermediate_size) == (16, 1024, 2048)
    assert (model.num_heads, model.position.width) == (16, 64)
    assert (train.steps, train.batch_size, train.learning_rate) == (20_000, 512, 1e-4)


def test_the_demo_of_addressing_among_places():
    """Its task and its form are repeated there, and all of its training but the steps."""
    demo = ROOT / "configs/addressing_demo.py"
    others = ROOT / "research/configs/places.py"
    fields = {f"task.{name}": value for name, value in places.TASKS["address"].items()}
    first = experiment.from_file(demo)
    second = experiment.from_file(others, options({**fields, **places.VARIANTS["base"]}))
    assert second.task == first.task
    assert second.model == first.model
    assert dataclasses.replace(second.train, steps=first.train.steps) == first.train
