"""Draws from logits: their distribution, and options that cannot be."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import init_cache
from tape_jax._src.model.generate import decode, sample_logits
from tests.models import random_variables, small_model

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
        ({"top_k": 50}, [0, 1, 2, 3, 4]),
        ({"top_p": 1e-9}, [1]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.69}, [1, 3]),
        ({"top_p": 0.71}, [1, 3, 4]),
        ({"top_p": 0.96}, [0, 1, 2, 3, 4]),
        ({"top_p": 1.0}, [0, 1, 2, 3, 4]),
        ({"top_k": 3, "top_p": 0.8}, [1, 3]),  # 0.4 / 0.85 and 0.3 / 0.85 make 0.82
        ({"top_k": 2, "top_p": 0.99}, [1, 3]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4]),
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


@pytest.mark.mostly_slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.5}])
def test_types_of_16_bits_are_drawn_from_in_float32(dtype, options):
    """Noise of 16 bits has ties, of which argmax takes the first, and no rare values."""
    vocab = 4096
    logits = jnp.zeros((1000, vocab), dtype)
    drawn = sample(logits, jax.random.key(0), **options)
    np.testing.assert_array_equal(
        drawn, sample(logits.astype(jnp.float32), jax.random.key(0), **options)
    )
    assert abs(drawn.mean() / vocab - options.get("top_p", 1) / 2) < 0.02


@pytest.mark.parametrize(
    ("name", "values"),
    [("temperature", (1e-6, 1.0, 5.0)), ("top_k", (1, 2, 3)), ("top_p", (0.1, 0.6, 1.0))],
)
def test_each_row_may_have_options_of_its_own(name, values):
    """Also where there are as many rows as tokens."""
    logits = jnp.log(jnp.asarray([[0.2, 0.5, 0.3]] * 3))
    keys = jax.random.split(jax.random.key(0), 200)
    found = jax.vmap(lambda key: sample_logits(logits, key, **{name: jnp.asarray(values)}))(keys)
    for row, value in enumerate(values):
        draw = functools.partial(sample_logits, logits, **{name: value})
        np.testing.assert_array_equal(found[:, row], jax.vmap(draw)(keys)[:, row])


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


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"top_k": 0},
        {"top_p": 2.0},
        {"top_p": 0},
        {"temperature": np.float32(np.nan)},
        {"temperature": "a"},
        {"temperature": True},
        {"temperature": jnp.float32(-1)},
        {"temperature": jnp.ones(3)},
        {"top_p": jnp.ones(5)},
        {"top_k": np.int64(0)},
    ],
)
def test_bad_sampling_options(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
        sample_logits(jnp.zeros(5), jax.random.key(0), **options)


@pytest.mark.parametrize("option", [{"temperature": -1.0}, {"top_p": 1.5}, {"top_k": 0}])
def test_wrong_options_are_seen_while_traced(option):
    """By their values, which are known, and so while decoding too."""
    key = jax.random.key(0)
    with pytest.raises(ValueError, match=next(iter(option))):
        jax.jit(lambda logits: sample_logits(logits, key=key, **option))(jnp.zeros((1, 4)))
    model = small_model("rope", num_layers=1)
    variables, token = random_variables(model), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match=next(iter(option))):
        decode(model, variables, init_cache(model, 1, 4), token, 2, key=key, **option)
