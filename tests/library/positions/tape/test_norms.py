"""Norms of states against numpy in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from tape_jax import RopeScaling, rotary_state, tensor_state, update_state
from tape_jax._src.positions.tape.norms import normalize, polar_factor
from tests.models import normal


def polar_by_svd(e: np.ndarray) -> np.ndarray:
    u, _, vt = np.linalg.svd(e, full_matrices=False)
    return u @ vt


def test_rms_of_rotary_states(x64):
    e = normal(3, 2, 8)
    square = (e[..., :4] ** 2 + e[..., 4:] ** 2).mean(-1)
    np.testing.assert_allclose(
        normalize(e, "rms", 1.5), 1.5 * e / np.sqrt(square)[..., None], atol=1e-13
    )


@pytest.mark.parametrize("shape", [(4, 2, 2), (3, 2, 5), (3, 4, 2)])
def test_rms_of_tensor_states(x64, shape):
    e = normal(3, 2, *shape)
    frobenius = np.linalg.norm(e, axis=(-2, -1)) ** 2
    square = frobenius.mean(-1) / min(shape[1:])
    np.testing.assert_allclose(
        normalize(e, "rms", 0.5, tensor=True),
        0.5 * e / np.sqrt(square)[..., None, None, None],
        atol=1e-13,
    )


def test_unit_of_rotary_states(x64):
    e = normal(3, 2, 8)
    z = e[..., :4] + 1j * e[..., 4:]
    z = 1.5 * z / np.abs(z)
    np.testing.assert_allclose(
        normalize(e, "unit", 1.5), np.concatenate([z.real, z.imag], -1), atol=1e-13
    )


@pytest.mark.parametrize("sign", [1, -1])
def test_polar_factor_in_closed_form(x64, sign):
    e = normal(50, 2, 2)
    e[np.sign(np.linalg.det(e)) != sign, 0] *= -1
    got = polar_factor(jnp.asarray(e))
    np.testing.assert_allclose(got, polar_by_svd(e), atol=1e-11)
    np.testing.assert_allclose(np.linalg.det(got), sign, atol=1e-12)


@pytest.mark.parametrize("shape", [(1, 3), (4, 3), (4, 4)])
def test_polar_factor_by_iteration(x64, shape):
    e = normal(20, *shape, seed=2)
    # The iteration is made for states, whose singular values are not far apart.
    u, s, vt = np.linalg.svd(e, full_matrices=False)
    e = u @ (np.clip(s, 0.05, None)[..., None] * vt)
    got = jax.jit(polar_factor)(jnp.asarray(e))
    np.testing.assert_allclose(got, polar_by_svd(e), atol=1e-10)


def test_polar_factor_of_a_singular_block_is_a_partial_isometry(x64):
    e = np.outer([3.0, 4.0], [1.0, 2.0])
    want = np.outer([0.6, 0.8], np.array([1.0, 2.0]) / math.sqrt(5))
    np.testing.assert_allclose(polar_factor(jnp.asarray(e)), want, atol=1e-12)


STATES = {
    "rotary": (8,),
    "2x2": (4, 2, 2),
    "2x3": (4, 2, 3),
    "4x4": (2, 4, 4),
}
NORMED = [("rms", "rotary"), *(("unit", name) for name in STATES)]


@pytest.mark.parametrize(("norm", "name"), NORMED)
def test_zero_stays_zero_with_finite_gradients(norm, name):
    block = STATES[name]
    tensor = len(block) == 3

    def fn(e):
        return normalize(e, norm, tensor=tensor)

    zero = jnp.zeros((2, *block))
    np.testing.assert_array_equal(fn(zero), zero)
    slope = jax.jit(jax.grad(lambda e: (fn(e) * 0.3).sum()))(zero)
    assert np.isfinite(slope).all()


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "name"), NORMED)
def test_gradients_at_rotations(x64, norm, name):
    """Where the singular values coincide, and the gradient of an SVD does not exist."""
    block = STATES[name]
    tensor = len(block) == 3
    if tensor:
        e = tensor_state(jnp.arange(2), 8, *block[1:])[:, 0]
    else:
        e = rotary_state(jnp.arange(2), 8)
    fn = jax.jit(lambda e: normalize(e, norm, tensor=tensor))
    check_grads(fn, (e,), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)


def test_gradients_elsewhere(x64):
    for e in (normal(2, 8), normal(2, 3, 2, 2), normal(2, 3, 2, 4)):
        fn = jax.jit(lambda e: normalize(e, "unit", tensor=e.ndim > 3))
        check_grads(fn, (jnp.asarray(e),), order=1, modes=["rev"], atol=1e-5, rtol=1e-5)


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("l", "r", "norm", "kind"),
    [
        (None, None, "rms", "yarn"),
        (2, 2, "unit", "yarn"),
        (2, 4, "unit", "none"),
        (4, 4, "rms", "yarn"),
        (4, 5, "unit", "none"),
    ],
)
def test_the_start_state_is_left_as_it_is(x64, l, r, norm, kind):
    scaling = RopeScaling(kind, factor=4.0, original_length=16)
    if l is None:
        start = rotary_state(jnp.arange(20), 8, scaling=scaling)[:, None]
    else:
        start = tensor_state(jnp.arange(20), 8, l, r, scaling=scaling)
    moved = update_state(
        {}, start, None, jnp.ones((20, 3)), norm=norm, magnitude=scaling.state_magnitude
    )
    np.testing.assert_allclose(moved, start, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "dtype"), [("rms", jnp.bfloat16), ("unit", jnp.float16)])
def test_narrow_states_are_normalised_in_float32(norm, dtype):
    for e, tensor in ((normal(4, 8), False), (normal(4, 2, 2, 2), True)):
        e = jnp.asarray(e, dtype)
        wide = normalize(e.astype(jnp.float32), norm, tensor=tensor)
        got = normalize(e, norm, tensor=tensor)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, wide.astype(dtype))
        assert not normalize(jnp.zeros_like(e), norm, tensor=tensor).any()
