"""Growth through depth against norms worked out by hand, divergence, and what is written."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from research import stability
from research.stability import Profile
from tape_jax import positions
from tests.models import random_variables, small_model
from tests.train import small
from train import experiment
from train.compare import sweep
from train.training import step as training_step


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    variants = {"tape": {}, "rope": {"model.position.kind": "rope"}}
    task, folder = {"name": "addition", "max_digits": 1}, tmp_path_factory.mktemp("configs")
    return small.config(folder, task, train={"steps": 3}, VARIANTS=variants)


@pytest.fixture(scope="module")
def measured(config):
    """TAPE with three layers, RoPE with two, not to be changed."""
    found = []
    for name, depth in (("tape", 3), ("rope", 2)):
        given = (*sweep.variants(config, [name])[0].overrides, f"--config.model.num_layers={depth}")
        found.append(stability.trace(experiment.from_file(config, given), name, noise=0.3))
    return found


def batch_of(tokens):
    return {
        "inputs": tokens,
        "targets": np.roll(tokens, 1),
        "weights": np.ones(tokens.shape, np.float32),
    }


@pytest.mark.parametrize("form", ["rotary", "tensor"])
@pytest.mark.slow
def test_profile(form):
    """The states that the model returns, and the gradients of single layers."""
    model = small_model(positions.Tape(form=form), num_layers=3)
    variables = random_variables(model, std=0.3)
    tokens = np.arange(12).reshape(2, 6) % 7
    profile = stability.make_probe(model)(variables["params"], batch_of(tokens))

    def loss(params):
        logits, states = model.apply({"params": params}, tokens, return_states=True)
        batch = batch_of(tokens)
        total = training_step.weighted_loss(logits, batch["targets"], batch["weights"])
        return total / 12, states.position

    grads, states = jax.jit(jax.grad(loss, has_aux=True))(variables["params"])
    entering = [model.encoding.rotation(state)[1] for state in states]
    tail = (-3, -2, -1) if form == "tensor" else -1
    norms = [np.sqrt(np.square(e).sum(tail)) for e in entering]
    relative = [np.max(norm / norms[0]) for norm in norms]
    np.testing.assert_allclose(profile.states, relative, rtol=1e-4)
    assert profile.growth == max(profile.states) > 1.05

    for layer, found in enumerate(profile.gradients):
        run, row = ("layers_0", layer) if layer < 2 else ("layers_2", 0)
        squares = [np.square(x[row]).sum() for x in jax.tree.leaves(grads[run])]
        assert found == pytest.approx(math.sqrt(sum(squares)), rel=1e-4)
    assert profile.spread == max(profile.gradients) / min(profile.gradients)


def test_profiles_that_are_not_finite():
    profile = Profile(stability.finite([1.0, np.inf]), stability.finite([0.5, np.nan]))
    assert profile == Profile((1.0, None), (0.5, None))
    assert (profile.growth, profile.spread) == (math.inf, math.inf)
    assert Profile((), (0.0, 2.0, 0.5)).growth == 1
    assert Profile((), (0.0, 2.0, 0.5)).spread == 4


@pytest.mark.slow
def test_traces(measured, config):
    traces = measured
    assert [(t.variant, t.depth) for t in traces] == [("tape", 3), ("rope", 2)]
    for t in traces:
        assert t.diverged is None
        assert len(t.losses) == len(t.gradients) == 3
        assert all(len(getattr(t, m).gradients) == t.depth for m in stability.MOMENTS)
        np.testing.assert_allclose(t.initial.states, np.ones(t.depth), rtol=1e-5)
        if t.variant == "rope":
            assert t.disturbed == t.initial
            np.testing.assert_allclose(t.trained.states, np.ones(t.depth), rtol=1e-5)
    tape = traces[0]
    assert tape.disturbed.states[0] == tape.trained.states[0] == pytest.approx(1)
    assert tape.disturbed.growth > 1.1
    assert tape.trained.growth != tape.initial.growth


@pytest.mark.parametrize(
    ("losses", "norms", "step"),
    [
        ((1.0, 1.9, 2.1, 0.1), (1.0,) * 4, 3),
        ((1.0, math.nan), (1.0, 1.0), 2),
        ((1.0, 0.5), (1.0, math.inf), 2),
        ((1.0, 2.0, 0.5, 0.4), (1.0,) * 4, None),
    ],
)
def test_divergence(config, monkeypatch, losses, norms, step):
    """The first step that is bad ends a training."""
    steps = zip(losses, norms, strict=True)

    def step_fn(state, batch):
        loss, norm = next(steps)
        return state, {"loss": loss, "gradient_norm": norm}

    state = training_step.TrainState({}, None, None, None)
    monkeypatch.setattr(stability.jax, "jit", lambda f: lambda: state)
    monkeypatch.setattr(
        stability, "make_probe", lambda model: lambda params, batch: Profile((), ())
    )
    monkeypatch.setattr(training_step, "make_step", lambda *args: step_fn)
    e = experiment.from_file(config, [f"--config.train.steps={len(losses)}"])
    t = stability.trace(e, "wild", noise=0.1)
    assert t.diverged == step
    assert t.losses == stability.finite(losses[:step])
    json.dumps(dataclasses.asdict(t), allow_nan=False)
