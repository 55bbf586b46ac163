"""FoPE: what the formula test of its state, with given coefficients, does not see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tape_jax
import tape_jax.linen
from tape_jax import ModelConfig
from tape_jax.positions import Fope

CONFIG = ModelConfig(10, 128, num_heads=4, num_kv_heads=2)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("learn", [True, False])
def test_coefficients_are_normal_around_one_frequency_of_each_plane(learn, x64):
    """32 dimensions, base 1e4, trained on 64 tokens: 5 frequencies, 5 planes; on 4096: 12 and 8."""
    for length, kept, planes, step in ((64, 5, 5, 1), (4096, 12, 8, 2)):
        fope = Fope(learn=learn, original_length=length, gain=1e-7)
        assert fope.shape(CONFIG.sizes) == (2, kept, planes)
        params = None
        if learn:
            specs = fope.input_params(CONFIG.sizes)
            params = {
                name: spec.init(jax.random.key(0), spec.shape, jnp.float64)
                for name, spec in specs.items()
            }
        state = fope.start(jnp.arange(9)[None], CONFIG.sizes, dtype=jnp.float64, params=params)
        found = state[0, ..., :16] + 1j * state[0, ..., 16:]
        omega = [1e4 ** (-step * n / 16) if step * n < kept else None for n in range(planes)]
        waves = [np.exp(1j * np.arange(9) * w) if w else np.zeros(9) for w in omega]
        want = np.stack([*waves, *[np.full(9, 1 + 1j)] * (16 - planes)], axis=-1)
        np.testing.assert_allclose(found, np.broadcast_to(want[:, None], found.shape), atol=1e-5)


def test_the_deviation_is_xavier_s_and_the_seed_decides():
    first, other = (Fope(gain=0.5, seed=n) for n in (0, 1))
    start = jnp.zeros((1, 1), jnp.int32)
    states = [x.start(start, CONFIG.sizes)[0, 0, :, :8] for x in (first, other)]
    assert np.abs(states[0] - states[1]).max() > 1e-2
    assert np.abs(states[0][0] - states[0][1]).max() > 1e-2
    normal = np.random.default_rng(2).normal(size=(2, 11, 8))
    drawn = first._from_normal(normal)
    ones = np.zeros((11, 8))
    ones[np.arange(0, 11, 2), np.arange(6)] = 1
    np.testing.assert_allclose((drawn - ones) / normal, 0.5 * np.sqrt(2 / (11 * 8 + 2 * 8)))


@pytest.mark.slow
def test_a_single_layer_has_a_state_for_each_head():
    """Which has the axes of the batch, as the module's queries have."""
    module = tape_jax.linen.Attention(4, num_kv_heads=2, position="fope")
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 16)), jnp.float32)
    variables = module.init(jax.random.key(0), x)
    whole, *_ = module.apply(variables, x)
    alone, *_ = module.apply(variables, x[:1])
    np.testing.assert_allclose(whole[:1], alone, atol=1e-6)
    with pytest.raises(NotImplementedError, match="acts at the embeddings"):
        tape_jax.linen.Attention(4, position=Fope(learn=True)).init(jax.random.key(0), x)
