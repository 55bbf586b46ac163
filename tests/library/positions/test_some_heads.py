"""Biases and decays that only the first heads have."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import ModelConfig
from tape_jax.positions import Layer, create
from tests.models import small_model

KINDS = ("alibi", "kerple", "fire", "t5", "fox")
TIME, HIDDEN = 5, 16


def decays_and_bias(encoding, heads, params, *, is_causal=True):
    config = ModelConfig(13, HIDDEN, num_heads=heads, num_kv_heads=1, head_dim=4, dtype="float64")
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, TIME, HIDDEN)))
    at = jnp.arange(TIME)

    @jax.jit
    def run(params):
        found = encoding.layer_terms(params, Layer(x, at, None, is_causal, config.sizes))
        return found.log_decay, None if found.bias is None else found.bias(at, at)

    return run(params)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_heads_are_those_of_a_model_of_so_many(x64, kind):
    config = ModelConfig(13, HIDDEN, num_heads=3, num_kv_heads=1, head_dim=4)
    encoding, all_heads = create(kind, on_heads=2), create(kind)
    specs = encoding.layer_params(config.sizes, updates=True)
    keys = jax.random.split(jax.random.key(0), max(len(specs), 1))
    params = {
        name: jnp.abs(jax.random.normal(key, spec.shape))
        for key, (name, spec) in zip(keys, specs.items(), strict=False)
    }
    of_heads, of_two = (encoding, 3, params), (all_heads, 2, params)
    if kind in ("alibi", "fox"):
        pairs = zip(*(decays_and_bias(*one)[0] for one in (of_heads, of_two)), strict=True)
        for whole, part in pairs:
            chex.assert_trees_all_equal(whole[..., :2], part)
            assert not whole[..., 2].any()
    if kind == "fox":
        return
    # Where tokens see later ones ALiBi is a bias.
    whole, part = (decays_and_bias(*one, is_causal=False)[1] for one in (of_heads, of_two))
    chex.assert_trees_all_equal(whole[..., :2, :, :], part)
    assert np.abs(part).max() > 0
    assert not whole[..., 2, :, :].any()


def test_an_implementation_of_the_update_is_the_states(x64):
    model = small_model(create("tape+alibi", on_heads=1), update_implementation="unrolled")
    assert model.attention_plan(1, 4)
