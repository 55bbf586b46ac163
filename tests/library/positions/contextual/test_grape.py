"""GRAPE's additive forms against loops over pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax._src.positions.contextual import grape
from tape_jax._src.positions.fixed.bias import alibi_slopes
from tape_jax.positions import GrapeAdditive, GrapePath, create
from tests.library.positions import pairs as by_pairs
from tests.library.positions.pairs import DIM, HEADS, IDS, KV_HEADS, drawn, sigmoid, softplus


@pytest.mark.slow
@pytest.mark.parametrize(("gate", "is_causal"), [("query_key", True), ("key", False)])
def test_gates(gate, is_causal, x64):
    pairs = drawn(GrapeAdditive(gate), ids=IDS)
    q, k, p = pairs.arrays["q"], pairs.arrays["k"], pairs.params

    def along(x, direction):
        return softplus(x @ direction / np.linalg.norm(direction) / np.sqrt(DIM))

    def logit(b, h, i, j):
        gates = along(k[b, j, h // (HEADS // KV_HEADS)], p["key_direction"][h])
        if gate == "query_key":
            gates += along(q[b, i, h], p["query_direction"][h])
        distance = abs(pairs.place(b, i) - pairs.place(b, j))
        slope = alibi_slopes(HEADS)[h] * softplus(p["omega"][h])
        return pairs.scores(b, h)[i, j] - distance * slope * gates

    want = pairs.softmax(logit, is_causal=is_causal)
    pairs.assert_attends(want, is_causal=is_causal)
    blocks = {"implementation": "chunked", "block_q": 8, "block_k": 4}
    np.testing.assert_allclose(pairs.attend(is_causal=is_causal, **blocks), want, atol=1e-12)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("width", [4, None])
def test_path(width, x64):
    pairs = drawn(GrapePath(width), ids=IDS)
    x, kernel = pairs.arrays["x"], pairs.params["path_kernel"]
    features = (x @ kernel).reshape(*x.shape[:2], HEADS, -1)
    half = features.shape[-1] // 2

    def step(b, h, i, n):
        p = features[b, n, h]
        p = p / np.sqrt(np.mean(p**2))
        turned = (p[:half] + 1j * p[half:]) * np.exp(-1j * pairs.place(b, n))
        turned = np.concatenate([turned.real, turned.imag])
        return alibi_slopes(HEADS)[h] * np.log(sigmoid(features[b, i, h] @ turned / (2 * half)))

    def logit(b, h, i, j):
        path = [n for n in pairs.seen(b, i) if n > j]
        return pairs.scores(b, h)[i, j] + sum(step(b, h, i, n) for n in path)

    pairs.assert_attends(pairs.softmax(logit))


@pytest.mark.slow
def test_no_direction_has_a_finite_gradient():
    pairs = drawn(GrapeAdditive())
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in pairs.arrays.items()}
    params = {name: jnp.zeros(x.shape) for name, x in pairs.params.items()}
    gradients = jax.jit(jax.grad(lambda p: jnp.sum(by_pairs.attend(pairs, p, arrays) ** 2)))
    assert all(np.isfinite(x).all() for x in gradients(params).values())


def test_keys_far_away_are_rotated_by_their_own_position(x64):
    """Integers from 2**24 on are no float32."""
    far = np.array([2**24 + 1, 2**26 + 3, 2**31 - 1])
    p = jnp.ones((1, 3, 1, 2), jnp.float32)
    found = grape._rotated(p, jnp.asarray(far, jnp.int32))[0, :, 0]
    want = np.exp(-1j * far.astype(np.float64)) * (1 + 1j)
    np.testing.assert_allclose(found, np.stack([want.real, want.imag], -1), atol=1e-5)


def test_gates_start_as_alibi_does():
    """Softplus of omega is 1: the bias is that of ALiBi times the gates."""
    sizes = drawn(GrapeAdditive()).config.sizes
    omega = GrapeAdditive().layer_params(sizes, updates=False)["omega"]
    started = omega.init(jax.random.key(0), omega.shape, jnp.float32)
    np.testing.assert_allclose(jax.nn.softplus(started), 1, atol=1e-6)


@pytest.mark.parametrize("step", [1e-3, 2.0, 1000.0])
def test_steps_start_as_asked(step):
    sizes = drawn(GrapeAdditive()).config.sizes
    params = create("grape_m_ctx", initial_step=step).layer_params(sizes, updates=False)
    found = [p.init(jax.random.key(0), p.shape, jnp.float32) for p in params.values()]
    assert any(np.allclose(jax.nn.softplus(x), step, rtol=1e-3) for x in found)
