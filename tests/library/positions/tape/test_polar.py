"""TAPE on PoPE: an untrained model is PoPE, and logits are those of the formula for any states."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tape_jax as tape
from tape_jax import positions
from tests.models import FLOAT64, random_variables, small_model, without

SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "scan_layers": False}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 13, (2, 6)))


@pytest.mark.slow
def test_an_untrained_model_is_pope(x64):
    """A trained one is not."""
    model, plain = (small_model(kind, **SIZES, **FLOAT64) for kind in ("tape_pope", "pope"))
    variables = random_variables(model)
    params = without(variables["params"], "position_") | {}
    for layer in params:
        if layer.startswith("layers_"):
            params[layer] |= {"position_phase": variables["params"][layer]["position_phase"]}
    expected = jax.jit(plain.apply)({"params": params}, TOKENS)
    still = jax.tree.map_with_path(
        lambda path, x: 0 * x if path[-1].key in ("position_mix", "position_up") else x, variables
    )
    chex.assert_trees_all_close(jax.jit(model.apply)(still, TOKENS), expected, atol=1e-12)
    moved = jax.jit(model.apply)(variables, TOKENS)
    assert np.abs(moved - expected).max() > 1e-3


def test_logits_are_lengths_times_cosines_of_states(x64):
    """Beside numpy, of states that layers may have made."""
    rng = np.random.default_rng(1)
    config = tape.ModelConfig(1, 16, num_heads=4, num_kv_heads=2, position="tape_pope", **FLOAT64)
    q, k = rng.normal(size=(5, 4, 4)), rng.normal(size=(5, 2, 4))
    e = rng.normal(size=(5, 2, 4)) + 1j * rng.normal(size=(5, 2, 4))
    phase = rng.uniform(-2 * np.pi, 0, (2, 4))
    state = jnp.concatenate([e.real, e.imag], axis=-1)
    arrays = {"q": jnp.asarray(q), "k": jnp.asarray(k), "state": state}
    layer = positions.Layer(jnp.zeros((5, 16)), jnp.arange(5), None, True, config.sizes, **arrays)
    params = {"phase": jnp.asarray(phase)}
    features = config.position.layer_terms(params, layer).features
    query_state, key_state = config.position.rotation(state)
    own = tape.rotate(features[0], jnp.repeat(query_state, 2, axis=-2))
    other = jnp.repeat(tape.rotate(features[1], key_state), 2, axis=-2)
    found = jnp.einsum("ihc,jhc->hij", own, other)
    lengths = [np.log1p(np.exp(x)) for x in (q, k)]
    head = np.arange(4) // 2
    turned = lengths[1] * e * np.exp(1j * phase)
    expected = np.einsum("ihc,jhc->hij", lengths[0] * e[:, head], turned[:, head].conj()).real
    chex.assert_trees_all_close(found, expected, atol=1e-12)
