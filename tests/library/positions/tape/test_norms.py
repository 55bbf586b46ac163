"""Norms of states against numpy in float64."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from tape_jax import RopeScaling, rotary_state, tensor_state, update_state
from tape_jax._src.positions.tape.norms import normalize, polar_factor
from tests.models import normal
from tests.selection import mostly_slow


def polar_by_svd(e: np.ndarray) -> np.ndarray:
    u, _, vt = np.linalg.svd(e, full_matrices=False)
    return u @ vt


def test_rms_of_rotary_states(x64):
    e = normal(3, 2, 8)
    square = (e[..., :4] ** 2 + e[..., 4:] ** 2).mean(-1)
    np.testing.assert_allclose(
        normalize(e, "rms", 1.5), 1.5 * e / np.sqrt(square)[..., None], atol=1e-13
    )


@pytest.mark.parametrize("shape", [(3, 2, 5), (3, 4, 2)])
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


def test_polar_factor_in_closed_form(x64):
    e = normal(50, 2, 2)
    signs = np.sign(np.linalg.det(e))
    assert set(signs) == {-1, 1}
    got = jax.jit(polar_factor)(jnp.asarray(e))
    np.testing.assert_allclose(got, polar_by_svd(e), atol=1e-11)
    np.testing.assert_allclose(np.linalg.det(got), signs, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 3), (4, 3)])
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


def test_zero_stays_zero_with_finite_gradients():
    def found(zero, norm):
        fn = functools.partial(normalize, norm=norm, tensor=zero.ndim == 4)
        return fn(zero), jax.grad(lambda e: (fn(e) * 0.3).sum())(zero)

    zeros = {name: jnp.zeros((2, *block)) for name, block in STATES.items()}
    results = jax.jit(lambda zeros: [found(zeros[name], norm) for norm, name in NORMED])(zeros)
    for (out, slope), (_, name) in zip(results, NORMED, strict=True):
        np.testing.assert_array_equal(out, zeros[name])
        assert np.isfinite(slope).all()


@pytest.mark.parametrize(("norm", "name"), mostly_slow(NORMED, ("unit", "rotary"), ("unit", "2x3")))
def test_gradients(x64, norm, name):
    """Also at rotations: there singular values coincide, and an SVD has no gradient."""
    block, places = STATES[name], jnp.arange(2)
    tensor = len(block) == 3
    start = tensor_state(places, 8, *block[1:])[:, 0] if tensor else rotary_state(places, 8)
    fn = jax.jit(lambda e: normalize(e, norm, tensor=tensor))
    check_grads(fn, (start,), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)
    check_grads(fn, (jnp.asarray(normal(2, *block)),), order=1, modes=["rev"], atol=1e-5, rtol=1e-5)


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("l", "r", "norm", "kind"),
    [
        (None, None, "rms", "yarn"),
        (2, 2, "unit", "yarn"),
        (4, 4, "rms", "yarn"),
        (4, 5, "unit", "none"),
    ],
)
def test_the_start_state_is_left_as_it_is(x64, l, r, norm, kind):
    scaling = RopeScaling(kind, 4.0, 16) if kind != "none" else RopeScaling()
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
