"""Features in place of queries and keys: in models, in combinations, and in single layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tape_jax
import tape_jax.linen
from tape_jax import ModelConfig, positions
from tests.models import FLOAT64, assert_near, random_variables, small_model


def test_others_have_the_heads_that_attend():
    model = small_model("rope_pp+fox+alibi", num_heads=4, num_kv_heads=2, head_dim=6)
    shapes = {path: spec.shape.shape for path, spec in model.parameters().items()}
    assert shapes["layers_0/position_fox_forget_kernel"] == (3, 16, 8)
    assert shapes["layers_0/attention/out/kernel"] == (3, 48, 16)
    assert model.config.attention_heads == 8


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rope_pp", "pope"])
def test_modules_for_other_models(kind, x64):
    """A single layer equals attention over the features of its projections."""
    config = ModelConfig(1, 16, num_heads=4, num_kv_heads=2, position=kind, **FLOAT64)
    module = tape_jax.linen.Attention(4, num_kv_heads=2, position=kind, **FLOAT64)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 16)))
    variables = module.init(jax.random.key(0), x)
    params = variables["params"]
    q, k, v = ((x @ params[name]).reshape(2, 5, -1, 4) for name in ("q", "k", "v"))
    encoding = config.position
    state = encoding.start(jnp.arange(5), config.sizes, dtype=jnp.float64)
    own = {n.removeprefix("position_"): p for n, p in params.items() if n.startswith("position_")}
    layer = positions.Layer(x, jnp.arange(5), None, True, config.sizes, q=q, k=k, state=state)
    features = encoding.layer_terms(own, layer).features
    want, _ = tape_jax.attention(*features, v, is_causal=True, scale=0.5)
    found = module.apply(variables, x)[0]
    assert_near(found, want.reshape(2, 5, -1) @ params["out"], 1e-12)


def test_phases_of_pope():
    sizes = ModelConfig(1, 16, num_heads=4, num_kv_heads=2).sizes
    for uniform, low in ((False, 0.0), (True, -2 * np.pi)):
        encoding = positions.Pope(uniform_phase=uniform, partial_rotary_factor=0.5)
        (spec,) = encoding.layer_params(sizes, updates=False).values()
        phase = spec.init(jax.random.key(0), spec.shape, jnp.float32)
        assert phase.shape == (2, 2)
        assert ((phase >= low) & (phase <= 0)).all()
        assert bool((phase < 0).any()) is uniform


@pytest.mark.slow
def test_a_free_phase_of_pope_has_a_period_and_a_gradient(x64):
    """Turned by a whole turn above 0, the logits stay; cut, they are those of 0."""
    free, cut = (
        small_model(positions.Pope(clip=x), num_layers=1, **FLOAT64) for x in (False, True)
    )
    variables, tokens = random_variables(free), jnp.arange(5)[None]

    @functools.partial(jax.jit, static_argnums=0)
    def logits_and_slope(model, phase):
        def logits(phase):
            own = variables["params"]["layers_0"] | {"position_phase": phase}
            return model.apply({"params": variables["params"] | {"layers_0": own}}, tokens)

        return logits(phase), jax.grad(lambda x: logits(x)[0, 4, 0])(phase)

    zero = jnp.zeros_like(variables["params"]["layers_0"]["position_phase"])
    expected, slope = logits_and_slope(cut, zero)
    assert jnp.abs(slope).max() > 1e-8
    for model, phase, moves in ((free, zero + 2 * np.pi, True), (cut, zero + 1, False)):
        found, slope = logits_and_slope(model, phase)
        assert_near(found, expected, 1e-10)
        assert bool((jnp.abs(slope) > 1e-8).any()) is moves
