"""Tokens, positions and batch axes of every kind that a call may have."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import init_cache, positions
from tests.models import (
    VOCAB,
    assert_near,
    jit_quickly,
    random_tokens,
    random_variables,
    run,
    small_model,
)


def test_ids_of_a_type_that_has_no_number_for_the_vocabulary():
    model = small_model("none", num_layers=1, vocab_size=300)
    variables, tokens = random_variables(model), random_tokens(2, 4)
    expected = run(model, variables, tokens)
    chex.assert_trees_all_equal(run(model, variables, tokens.astype("uint8")), expected)


def test_64_bit_integers_are_not_cut():
    wide = np.array([[0, 1, 2**32 + 1]])
    model = small_model("rope", num_layers=1)
    for name in ("tokens", "positions", "segment_ids"):
        given = {"tokens": np.array([[1, 2, 3]]), name: wide}
        with pytest.raises(ValueError, match=f"{name} must fit in int32"):
            model.apply(random_variables(model), **given)


@pytest.mark.slow
@pytest.mark.parametrize(
    "position", [positions.Tape(form="tensor", attention_mix="heads"), "abacus"]
)
def test_any_batch_axes(position):
    model = small_model(position, num_layers=2)
    variables, tokens = random_variables(model), random_tokens(2, 3, 5)
    places = jnp.asarray(np.random.default_rng(1).integers(0, 9, (2, 3, 5)))
    segments = jnp.asarray([2, 2, 1, 1, 1])
    options = {"positions": places, "segment_ids": segments}
    whole = run(model, variables, tokens, **options)
    chex.assert_shape(whole, (2, 3, 5, VOCAB))
    flat = run(
        model, variables, tokens.reshape(6, 5), positions=places.reshape(6, 5), segment_ids=segments
    )
    assert_near(flat, whole.reshape(6, 5, VOCAB))
    one = run(model, variables, tokens[1, 2], positions=places[1, 2], segment_ids=segments)
    assert_near(one, whole[1, 2])
    mapped = jit_quickly(
        jax.vmap(lambda t, p: model.apply(variables, t, positions=p, segment_ids=segments)),
    )(tokens, places)
    assert_near(mapped, whole)


@pytest.mark.slow
def test_token_ids_beyond_the_vocabulary_are_refused_or_give_nan():
    """Never the row of a neighbour."""
    model, tokens = small_model("none", num_layers=1), jnp.array([[3, 4, 5, 6]])
    variables = random_variables(model)
    for wrong in (tokens.at[0, 2].set(VOCAB), tokens.at[0, 2].set(-1)):
        for given in ({}, {"cache": init_cache(model, 1, 4)}):
            with pytest.raises(ValueError, match=rf"token ids must lie in 0 \.\. {VOCAB - 1}; got"):
                model.apply(variables, wrong, **given)
            found = jax.jit(model.apply)(variables, wrong, **given)
            assert jnp.isnan((found[0] if given else found)[0, 2:]).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["alibi", "t5"])
def test_narrow_integers_do_not_overflow(kind):
    """Unsigned differences would wrap around, and sums of small types too."""
    model = small_model(kind, num_layers=1)
    variables, tokens = random_variables(model), random_tokens(1, 6)
    at = np.array([0, 3, 60, 61, 100, 127])
    expected = run(model, variables, tokens, positions=at, is_causal=False)
    for dtype in (np.uint8, np.int8, np.uint32):
        found = run(model, variables, tokens, positions=at.astype(dtype), is_causal=False)
        assert_near(found, expected)


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    "position", [positions.Tape(axes=2, base=100.0), positions.Tape(axes=2, form="tensor", r=3)]
)
def test_coordinates_of_two_axes(position):
    model = small_model(position, num_layers=2)
    variables, tokens = random_variables(model), random_tokens(2, 6)
    row, column = np.divmod(np.arange(6), 3)
    places = np.stack([row, column], axis=-1)
    expected = run(model, variables, tokens, positions=places)
    assert_near(run(model, variables, tokens, positions=places + np.array([7, -4])), expected)
    for axis in range(2):
        moved = places.copy()
        moved[0, axis] += 1
        assert jnp.abs(run(model, variables, tokens, positions=moved) - expected).max() > 1e-3
