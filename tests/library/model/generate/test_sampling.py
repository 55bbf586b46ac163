"""Draws from logits: their distribution, and options that cannot be."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax._src.model.generate import sample_logits

PROBABILITIES = np.array([0.1, 0.4, 0.05, 0.3, 0.15])
DRAWS = 20_000
sample = jax.jit(sample_logits)


def frequencies(probabilities, seed=0, **options):
    """Frequency of each token in many draws."""
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(probabilities, jnp.float32)), (DRAWS, 5))
    drawn = sample(logits, jax.random.key(seed), **options)
    chex.assert_shape(drawn, (DRAWS,))
    chex.assert_type(drawn, jnp.int32)
    return np.bincount(drawn, minlength=5) / DRAWS


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_p": 1e-9}, [1]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.71}, [1, 3, 4]),
        ({"top_p": 1.0}, [0, 1, 2, 3, 4]),
        ({"top_k": 3, "top_p": 0.8}, [1, 3]),  # 0.4 / 0.85 and 0.3 / 0.85 make 0.82
        ({"temperature": 0.5, "top_k": 3}, [1, 3, 4]),
        # At temperature 2 the likeliest have 0.29, 0.25 and 0.18.
        ({"temperature": 2.0, "top_p": 0.6}, [1, 3, 4]),
    ],
)
def test_sampling_has_the_right_distribution(options, kept):
    expected = PROBABILITIES ** (1 / options.get("temperature", 1.0))
    expected = np.where(np.isin(np.arange(5), kept), expected, 0)
    expected /= expected.sum()
    actual = frequencies(PROBABILITIES, **options)
    assert set(np.flatnonzero(actual)) == set(kept)
    error = 5 * np.sqrt(expected * (1 - expected) / DRAWS)
    np.testing.assert_array_less(np.abs(actual - expected), error + 1e-9)


def test_top_k_keeps_exactly_k_of_equal_tokens():
    assert np.count_nonzero(frequencies(np.full(5, 0.2), top_k=2)) == 2


def test_impossible_tokens_are_never_drawn():
    with np.errstate(divide="ignore"):
        actual = frequencies([0.5, 0.0, 0.5, 0.0, 0.0], top_p=1.0, top_k=5, temperature=3.0)
    np.testing.assert_array_equal(actual > 0, [True, False, True, False, False])


def test_without_a_key_the_most_likely_token_is_taken():
    logits = jnp.log(jnp.asarray([PROBABILITIES, PROBABILITIES[::-1]]))
    np.testing.assert_array_equal(sample(logits), [1, 3])
    tiny = sample(logits, jax.random.key(0), temperature=1e-42)
    np.testing.assert_array_equal(tiny, [1, 3])


def test_types_of_16_bits_are_drawn_from_in_float32():
    """Noise of 16 bits has ties, of which argmax takes the first, and no rare values."""
    logits = jnp.zeros((1000, 4096), jnp.bfloat16)
    drawn = sample(logits, jax.random.key(0))
    expected = sample(logits.astype(jnp.float32), jax.random.key(0))
    np.testing.assert_array_equal(drawn, expected)
    assert abs(drawn.mean() / 4096 - 1 / 2) < 0.02


@pytest.mark.parametrize(
    ("name", "values"),
    [("temperature", (1e-6, 1.0, 5.0)), ("top_k", (1, 2, 3)), ("top_p", (0.1, 0.6, 1.0))],
)
def test_each_row_may_have_options_of_its_own(name, values):
    """Also where there are as many rows as tokens."""
    logits = jnp.log(jnp.asarray([[0.2, 0.5, 0.3]] * 3))
    keys = jax.random.split(jax.random.key(0), 200)

    @jax.jit
    def draws(option):
        return jax.vmap(lambda key: sample_logits(logits, key, **{name: option}))(keys)

    found = draws(jnp.asarray(values))
    for row, value in enumerate(values):
        np.testing.assert_array_equal(found[:, row], draws(jnp.asarray(value))[:, row])


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": np.float32(np.nan)},
        {"temperature": jnp.ones(3)},
        {"top_k": 0},
        {"top_p": 2.0},
        {"top_p": jnp.ones(5)},
    ],
)
def test_bad_options(options):
    """By their values, which are known while logits are traced."""
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
        jax.jit(lambda logits: sample_logits(logits, jax.random.key(0), **options))(jnp.zeros(5))
