"""Tests padding to sizes and to multiples of them."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax._src.core.padding import pad_to, pad_to_multiple, round_up


def test_sizes_are_rounded_up():
    assert [round_up(n, 8) for n in (0, 1, 8, 9)] == [0, 8, 8, 16]


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_zeros_follow_the_entries_of_the_axis(axis):
    x = jnp.arange(1, 7).reshape(2, 3)
    found = np.moveaxis(np.asarray(pad_to_multiple(x, 4, axis)), axis, 0)
    expected = np.moveaxis(np.asarray(x), axis, 0)
    chex.assert_trees_all_equal(found[: len(expected)], expected)
    chex.assert_shape(found, (4, *expected.shape[1:]))
    assert not found[len(expected) :].any()


def test_options_say_what_is_filled_in():
    x = jnp.arange(3)
    chex.assert_trees_all_equal(pad_to(x, 5, 0, mode="edge"), jnp.array([0, 1, 2, 2, 2]))
    chex.assert_trees_all_equal(pad_to(x, 4, 0, constant_values=9), jnp.array([0, 1, 2, 9]))


def test_an_axis_of_that_size_stays():
    x = jnp.arange(4)
    assert pad_to(x, 4, 0) is x


def test_an_axis_is_never_shortened():
    with pytest.raises(ValueError, match="negative"):
        pad_to(jnp.arange(4), 3, 0)
