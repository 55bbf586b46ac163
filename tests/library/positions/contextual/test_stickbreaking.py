"""Stick-breaking attention against loops over pairs, and where numbers are extreme."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import attention
from tape_jax.positions import StickBreaking
from tests.library.positions.pairs import IDS, drawn, sigmoid

CASES = [StickBreaking(False, "none"), StickBreaking(True, "value")]


@pytest.mark.mostly_slow
@pytest.mark.parametrize("encoding", CASES, ids=str)
def test_formula(encoding, x64):
    pairs = drawn(encoding, ids=IDS)

    def weigh(b, h, i, seen):
        weights, left = [0.0] * len(seen), 1.0
        for n, j in reversed(list(enumerate(seen))):
            if j < i or encoding.current:
                share = sigmoid(pairs.scores(b, h)[i, j])
                weights[n], left = left * share, left * (1 - share)
        if encoding.remainder == "value":
            weights[seen.index(i)] += left
        return weights

    pairs.assert_attends(pairs.looped(weigh))


@pytest.mark.slow
@pytest.mark.parametrize("encoding", CASES, ids=str)
def test_extreme_logits(encoding):
    """In float32, where a share rounds to 0 or 1, weights and gradients are what they should be."""
    time, size = 7, 1e4
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (1, 1, time, time))
    v = jnp.eye(time)[None, :, None]

    def weights(logits):
        q = jnp.zeros((1, time, 1, 2))
        given = {"bias": logits, "weights_fn": encoding.weights}
        return attention(q, q, v, is_causal=True, **given)[0][0, :, 0]

    found, pull = jax.vjp(weights, jnp.asarray(size * signs, jnp.float32))
    want = np.zeros((time, time))
    for i in range(time):
        taken = [j for j in range(i + encoding.current) if signs[0, 0, i, j] > 0]
        if taken:
            want[i, taken[-1]] = 1
        elif encoding.remainder == "value":
            want[i, i] = 1
    np.testing.assert_array_equal(found, want)
    np.testing.assert_array_equal(pull(jnp.ones_like(found))[0], np.zeros_like(signs))


@pytest.mark.slow
@pytest.mark.parametrize(("encoding", "hides"), [(CASES[0], "mask"), (CASES[1], "bias")], ids=str)
def test_rows_without_keys_give_zeros(encoding, hides):
    pairs = drawn(encoding)
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in pairs.arrays.items()}
    visible = np.arange(9)[:, None] != [[3]]
    given = {"mask": visible} if hides == "mask" else {"bias": jnp.where(visible, 0, -jnp.inf)}

    def loss(arrays):
        q, k, v = (arrays[name] for name in "qkv")
        o = attention(q, k, v, is_causal=True, weights_fn=encoding.weights, **given)[0]
        return jnp.sum(jnp.sin(o)), o

    gradients, o = jax.jit(jax.grad(loss, has_aux=True))(arrays)
    assert np.all(o[:, 3] == 0)
    assert np.all(gradients["q"][:, 3] == 0)
    assert np.all(o[:, 4:] != 0)
    for x in jax.tree.leaves(gradients):
        assert np.all(np.isfinite(x))


@pytest.mark.slow
def test_nan_is_not_taken_for_hidden():
    pairs = drawn(StickBreaking())
    pairs.arrays["k"][:, 2] = np.nan
    o = pairs.attend()
    assert np.isnan(o[:, 3:]).all()
    assert np.isfinite(o[:, :2]).all()
