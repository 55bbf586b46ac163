"""The algebra of states against complex numbers and matrices in numpy."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import rotate, transform
from tape_jax._src.core import algebra
from tape_jax.testing import random_orthogonal, random_phases, random_state
from tests.models import normal


def as_complex(x) -> np.ndarray:
    """``[..., D]`` to ``D/2`` complex numbers."""
    real, imaginary = np.split(np.asarray(x, np.float64), 2, axis=-1)
    return real + 1j * imaginary


def as_real(z: np.ndarray) -> np.ndarray:
    return np.concatenate([z.real, z.imag], axis=-1)


def blocks_of(q: np.ndarray, l: int) -> np.ndarray:
    """Oracle of the pairing: ``L`` numbers of each block, found one by one."""
    dim = q.shape[-1]
    out = np.empty((*q.shape[:-1], dim // l, l))
    for m in range(dim // l):
        for row in range(l):
            if l % 2:
                d = m * l + row
            else:  # Pairs (j, j + D/2), l/2 of them in a block.
                d = m * l // 2 + row // 2 + (dim // 2 if row % 2 else 0)
            out[..., m, row] = q[..., d]
    return out


class TestRotate:
    @pytest.mark.parametrize("state", [(5, 8), (1, 5, 4, 8), (2, 5, 2, 8)])
    def test_is_complex_multiplication(self, x64, state):
        q, e = normal(2, 5, 4, 8), normal(*state, seed=1)
        full = e if e.ndim == 4 else e[:, None]
        full = np.repeat(full, 4 // full.shape[-2], axis=-2)
        want = as_real(as_complex(q) * as_complex(full))
        np.testing.assert_allclose(rotate(q, e), want, atol=1e-14)

    @pytest.mark.parametrize(("l", "r"), [(2, 3), (4, 1), (1, 2), (3, 3)])
    def test_logits_are_products_of_transformed_blocks(self, x64, l, r):
        """``sum_m (E_i^T q_m) . (E_j^T k_m)``, with two query heads on one state head."""
        q, k = normal(2, 5, 4, 12), normal(2, 5, 4, 12, seed=1)
        e = normal(1, 5, 2, 12 // l, l, r, seed=2)
        rotated = [rotate(x, e) for x in (q, k)]
        assert all(x.shape == (2, 5, 4, 12 // l * r) for x in rotated)
        got = np.einsum("bihd,bjhd->bhij", *rotated)
        per_head = np.repeat(e[0], 2, axis=1)
        vectors = [np.einsum("bthml,thmlr->bthmr", blocks_of(x, l), per_head) for x in (q, k)]
        want = np.einsum("bihmr,bjhmr->bhij", *vectors)
        np.testing.assert_allclose(got, want, atol=1e-12)

    def test_two_by_two_rotations_are_the_rotary_form(self, x64):
        q, z = normal(5, 3, 8), as_complex(normal(5, 3, 8, seed=1))
        tensor = np.stack(
            [np.stack([z.real, z.imag], -1), np.stack([-z.imag, z.real], -1)], axis=-2
        )
        np.testing.assert_allclose(rotate(q, tensor), rotate(q, as_real(z)), atol=1e-14)

    def test_a_tensor_state_may_lack_the_batch(self, x64):
        q, e = normal(2, 3, 5, 2, 8), normal(5, 1, 2, 4, 6, seed=1)
        want = rotate(q, np.broadcast_to(e, (2, 3, 5, 1, 2, 4, 6)))
        np.testing.assert_array_equal(rotate(q, e), want)

    def test_the_product_is_rounded_once_and_keeps_the_type(self):
        q = jnp.asarray(normal(5, 2, 8), jnp.bfloat16)
        e = jnp.asarray(normal(5, 8, seed=1), jnp.float32)
        got = rotate(q, e)
        assert got.dtype == jnp.bfloat16
        wide = rotate(q.astype(jnp.float32), e)
        np.testing.assert_array_equal(got, wide.astype(jnp.bfloat16))

    @pytest.mark.parametrize(
        ("q", "e", "words"),
        [
            ((5, 8), (5, 8), r"q must have shape \[\.\.\., T, H, D\]; got \(5, 8\)"),
            ((5, 2, 7), (5, 7), r"even.*head dimension 7"),
            ((5, 2, 8), (4, 8), r"state of shape \(4, 8\) does not fit q of shape \(5, 2, 8\)"),
            ((5, 2, 8), (5, 6), r"state of shape \(5, 6\)"),
            ((5, 2, 8), (5, 3, 8), r"expected \(5, 8\) or \(5, h, 8\), .*h = 1, 2$"),
            ((3, 5, 2, 8), (2, 5, 2, 8), r"state of shape \(2, 5, 2, 8\)"),
            ((3, 5, 2, 8), (3, 5, 8), r"state\[\.\.\., None, :\] has an axis of heads"),
            ((5, 2, 8), (5, 1, 3, 2, 2), r"M \* L = 8"),
            (
                (3, 5, 2, 8),
                (2, 5, 1, 4, 2, 2),
                r"expected \(5, 1, M, L, R\) or \(3, 5, h, M, L, R\)",
            ),
        ],
    )
    def test_misfits(self, q, e, words):
        with pytest.raises(ValueError, match=words):
            rotate(jnp.zeros(q), jnp.zeros(e))

    @pytest.mark.parametrize("types", [("int32", "float32"), ("float32", "int32")])
    def test_integers_are_refused(self, types):
        with pytest.raises(ValueError, match="must be a floating-point array; got int32"):
            rotate(jnp.zeros((5, 2, 8), types[0]), jnp.zeros((5, 8), types[1]))


class TestBlocks:
    @pytest.mark.parametrize("size", [2, 3, 4])
    def test_split_pairs_dimensions(self, x64, size):
        x = normal(5, 12)
        got = algebra.split_blocks(jnp.asarray(x), size)
        np.testing.assert_array_equal(got, blocks_of(x, size))
        np.testing.assert_array_equal(algebra.merge_blocks(got), x)


class TestTransform:
    def test_phases(self, x64):
        e, phases = normal(2, 5, 3, 8), normal(4, seed=1)
        want = as_real(as_complex(e) * np.exp(1j * phases))
        np.testing.assert_allclose(transform(e, phases), want, atol=1e-14)
        scalar = as_real(as_complex(e) * np.exp(0.7j))
        np.testing.assert_allclose(transform(e, 0.7), scalar, atol=1e-14)

    def test_a_matrix_acts_from_the_right(self, x64):
        e, omega = normal(5, 1, 4, 2, 3), random_orthogonal(None, 3, reflection=True)
        np.testing.assert_allclose(transform(e, omega), np.matmul(e, omega), atol=1e-14)

    @pytest.mark.parametrize("form", ["rotary", "tensor"])
    def test_logits_do_not_change(self, x64, form):
        q, k = normal(5, 2, 8), normal(5, 2, 8, seed=1)
        if form == "rotary":
            e, omega = random_state(None, (5, 2, 8)), random_phases(None, 4)
        else:
            e, omega = random_state(None, (5, 2, 8), l=4, r=3), random_orthogonal(None, 3)

        def logits(e):
            return np.einsum("qhd,khd->hqk", rotate(q, e), rotate(k, e))

        np.testing.assert_allclose(logits(transform(e, omega)), logits(e), atol=1e-13)

    def test_integer_states_are_refused(self):
        with pytest.raises(ValueError, match="state must be a floating-point array; got int32"):
            transform(jnp.zeros((5, 8), jnp.int32), 0.5)

    def test_keeps_the_type(self, x64):
        e = jnp.ones((5, 8), jnp.float32)
        assert transform(e, np.ones(4)).dtype == jnp.float32
        assert transform(jnp.ones((4, 2, 2), jnp.bfloat16), np.eye(2)).dtype == jnp.bfloat16

    def test_the_result_of_a_narrow_state_is_rounded_once(self):
        """Angles and products are in float32, as in ``rotate``."""
        e, phases = jnp.asarray(normal(5, 8), jnp.bfloat16), jnp.asarray([0.7, 100.7, 1000.3, 3.0])
        want = transform(e.astype(jnp.float32), phases).astype(jnp.bfloat16)
        np.testing.assert_array_equal(transform(e, phases), want)
        blocks, omega = e.reshape(5, 2, 2, 2), random_orthogonal(None, 2).astype(np.float32)
        want = transform(blocks.astype(jnp.float32), omega).astype(jnp.bfloat16)
        np.testing.assert_array_equal(transform(blocks, omega), want)

    @pytest.mark.parametrize(
        ("e", "omega", "words"),
        [
            ((5, 8), (3,), r"shape \(4,\), for a rotary state of shape \(5, 8\); got omega .*\(3,"),
            ((5, 1, 4, 2, 2), (3, 3), r"R = 3; the state has shape \(5, 1, 4, 2, 2\)"),
            ((8, 8), (8, 8), r"acts on a tensor state"),
            ((5, 7), (), r"even.*\(5, 7\)"),
        ],
    )
    def test_misfits(self, e, omega, words):
        with pytest.raises(ValueError, match=words):
            transform(jnp.zeros(e), jnp.zeros(omega))

    @pytest.mark.parametrize("omega", [1j, np.eye(2) * 1j, np.zeros((1, 2, 2))])
    def test_what_is_no_element_of_the_group(self, omega):
        with pytest.raises(ValueError, match="omega must be a real matrix, phases or a phase; got"):
            transform(jnp.zeros((5, 1, 4, 2, 2)), omega)


def test_lists_are_arrays():
    chex.assert_trees_all_equal(rotate([[[1.0, 2.0]]], [[0.0, 1.0]]), jnp.array([[[-2.0, 1.0]]]))
    turned = jnp.array([[np.cos(0.5), np.sin(0.5)]])
    chex.assert_trees_all_close(transform([[1.0, 0.0]], 0.5), turned)
    for call in (lambda: rotate("none", [[0.0, 1.0]]), lambda: transform([[1.0, 0.0]], "none")):
        with pytest.raises(ValueError, match="must be an array of numbers; got"):
            call()


@pytest.mark.parametrize(
    ("function", "other"), [(rotate, jnp.zeros((5, 2, 8))), (transform, jnp.eye(2))]
)
def test_tensor_states_are_not_rounded(function, other):
    state = jnp.zeros((5, 1, 4, 2, 2))
    arguments = (other, state) if function is rotate else (state, other)
    assert "Precision.HIGHEST" in str(jax.make_jaxpr(function)(*arguments))


def test_with_heads():
    state = algebra.with_heads(jnp.zeros((2, 3, 5, 8)))
    assert state.shape == (2, 3, 5, 1, 8)
    assert algebra.with_heads(jnp.zeros((5, 8))).shape == (5, 8)
