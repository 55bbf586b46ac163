"""Reordered weights give the logits of a rotation of neighbouring pairs."""

import jax.numpy as jnp
import numpy as np
import pytest

import tape_jax as tape
from tests import models

TIME, WIDTH, HEADS, DIM = 5, 6, 3, 8


def rotated_pairs(x, turning):
    """Rotate the dimensions ``2 i`` and ``2 i + 1`` of ``[T, H, D]``, as GPT-J does."""
    frequencies = 10_000.0 ** (-np.arange(0, turning, 2) / turning)
    turns = np.exp(1j * np.arange(TIME)[:, None, None] * frequencies)
    z = (x[..., :turning:2] + 1j * x[..., 1:turning:2]) * turns
    pairs = np.stack([z.real, z.imag], -1).reshape(*x.shape[:-1], turning)
    return np.concatenate([pairs, x[..., turning:]], -1)


@pytest.mark.parametrize(("share", "axis"), [(1.0, 0), (0.5, 1)])
def test_logits_are_those_of_neighbouring_pairs(share, axis):
    x, *kernels = (models.normal(n, m, seed=n) for n, m in ((TIME, WIDTH), (WIDTH, HEADS * DIM)))
    kernels = [*kernels, models.normal(WIDTH, HEADS * DIM, seed=3)]
    q, k = (rotated_pairs((x @ w).reshape(TIME, HEADS, DIM), int(DIM * share)) for w in kernels)
    e = tape.rotary_state(jnp.arange(TIME), DIM, partial_rotary_factor=share)

    def logits(kernels):
        new_q, new_k = (tape.rotate((x @ w).reshape(TIME, HEADS, DIM), e) for w in kernels)
        return np.einsum("ihd,jhd->hij", new_q, new_k)

    wanted = np.einsum("ihd,jhd->hij", q, k)
    reordered = [
        jnp.moveaxis(tape.halves_from_pairs(jnp.moveaxis(w, 1, axis), DIM, axis=axis), axis, 1)
        for w in map(jnp.asarray, kernels)
    ]
    np.testing.assert_allclose(logits(reordered), wanted, rtol=1e-4, atol=1e-4)
    assert np.abs(logits(kernels) - wanted).max() > 1


@pytest.mark.parametrize(
    ("shape", "head_dim", "axis", "words"),
    [
        ((6, 15), 0, 1, "must be even and divide"),
        ((6, 15), 3, 1, "must be even and divide"),
        ((6, 15), 4, 1, "must be even and divide"),
        ((6, 8), 4, 2, r"a kernel of shape \(6, 8\) has no axis 2"),
        ((6, 8), 4, -3, r"a kernel of shape \(6, 8\) has no axis -3"),
    ],
)
def test_refusals(shape, head_dim, axis, words):
    with pytest.raises(ValueError, match=words):
        tape.halves_from_pairs(jnp.zeros(shape), head_dim, axis=axis)
