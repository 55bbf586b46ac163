"""The variants of research/configs/ablations.py: each is an experiment of its own, and trains."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from research.configs import ablations
from train import experiment
from train.compare import sweep
from train.training import step as training_step

PATH = Path(ablations.__file__)
VARIANTS = sweep.variants(PATH)


def made(setting):
    return experiment.from_file(PATH, setting.overrides)


def test_variants_are_what_they_are_named_for():
    models = {setting.name: made(setting).model for setting in VARIANTS}
    base = models["tape_head_scale"]
    for name, model in models.items():
        # One thing at a time, but for what has to go with it.
        different = [
            field.name
            for field in dataclasses.fields(model)
            if getattr(model, field.name) != getattr(base, field.name)
        ]
        assert different == {"tape_head_scale": [], "window": ["local_window_size"]}.get(
            name, ["position", "local_window_size"] if name == "window_rope" else ["position"]
        )
        updating = [model.position.updates(i, 6) for i in range(6)]
        expected = {
            **{other: [] for other in ("rope", "no_update", "partial_rope", "window_rope")},
            "early": [0, 1],
            "middle": [2, 3],
            "late": [3, 4],
        }.get(name, [0, 1, 2, 3, 4])
        assert np.flatnonzero(updating).tolist() == expected, name


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize("setting", VARIANTS, ids=lambda setting: setting.name)
def test_every_variant_can_be_built(setting):
    """Traced only: shapes, types and options fit together."""
    e = made(setting)
    state = jax.eval_shape(
        lambda: training_step.init_state(e, training_step.make_optimizer(e.train))
    )
    own = {path[-1].key for path, _ in jax.tree.leaves_with_path(state.params)}
    updates = any(e.model.position.updates(i, 6) for i in range(6))
    assert any(name.startswith("position_") for name in own) == updates
