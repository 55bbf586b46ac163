"""Wall attention against loops over pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import ModelConfig, attention, positions
from tape_jax.positions import Wall
from tests.library.positions.pairs import HEADS, IDS, KV_HEADS, drawn, layer_of, sigmoid
from tests.selection import mostly_slow


@pytest.mark.parametrize("chunk", mostly_slow([1, 4, 32], 4))
def test_formula(chunk, x64):
    pairs = drawn(Wall(chunk=chunk), ids=IDS)
    q, k, x, p = (*(pairs.arrays[name] for name in "qkx"), pairs.params)
    gates = sigmoid(x @ p["forget_kernel"] + p["forget_bias"])
    gates = gates.reshape(q.shape)

    def logit(b, h, i, j):
        between = [n for n in pairs.seen(b, i) if n > j]
        kept = gates[b, between, h].prod(axis=0)
        key = k[b, j, h // (HEADS // KV_HEADS)]
        return (q[b, i, h] * kept * key).sum() / np.sqrt(q.shape[-1])

    pairs.assert_attends(pairs.softmax(logit))


def test_strong_gates_are_finite():
    """Where the product of gates over a chunk is below the smallest float, and its inverse is not
    a number."""
    pairs = drawn(Wall(), time=70, dtype="float32")
    params = {name: jnp.asarray(x) * 0.1 for name, x in pairs.params.items()}
    params["forget_bias"] = params["forget_bias"] - 40

    def total(params, arrays):
        layer = layer_of(pairs, arrays)
        terms = pairs.encoding.layer_terms(params, layer)
        q, k, v = (arrays[name] for name in "qkv")
        return attention(q, k, v, is_causal=True, **terms.keywords())[0].sum()

    arrays = {name: jnp.asarray(x) for name, x in pairs.arrays.items()}
    gradients = jax.jit(jax.grad(total, argnums=(0, 1)))(params, arrays)
    for x in jax.tree.leaves(gradients):
        assert jnp.isfinite(x).all()
    # The query's own key has no gate, so something is left.
    assert jnp.abs(gradients[1]["q"]).max() > 0.01


def test_the_scalar_gate_is_that_of_fox():
    both = positions.create("wall_scalar", bias=6.0)
    assert both == positions.Combined((Wall(bias=6.0), positions.Fox()))
    config = ModelConfig(13, 16, 1, 2, position="wall_scalar")
    assert config.position.kind == "wall+fox"
