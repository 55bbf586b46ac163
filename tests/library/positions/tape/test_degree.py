"""Updates of degree three: products of a state with two that are attended."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tape_jax as tape
from tape_jax import testing

TIME, HIDDEN, DIM = 3, 5, 8


def inputs(heads=4, kv_heads=2, seed=0, l=None, **options):
    """Parameters of an update, a state, attended states and what the MLP says."""
    key, generator = jax.random.key(seed), np.random.default_rng(seed)
    params = tape.init_update(key, HIDDEN, heads, num_kv_heads=kv_heads, degree=3, **options)
    params = testing.random_params(key, params, std=0.5)
    e, a = (testing.random_state(jax.random.key(n), (2, TIME, n, DIM), l=l) for n in (2, 4))
    return params, e, a, jnp.asarray(generator.standard_normal((2, TIME, HIDDEN)))


def test_by_hand(x64):
    params, e, a, x = inputs(attention_mix="heads", mlp_mix=False)
    found = jax.jit(tape.update_state)(params, e, a, x, 0.5)
    z, w, u = (
        states[..., : DIM // 2] + 1j * states[..., DIM // 2 :]
        for states in (
            e + 0.5 * jnp.einsum("hq,btqd->bthd", params["mix"], a),
            jnp.einsum("hq,btqd->bthd", params["origin"], a),
            jnp.einsum("hq,btqd->bthd", params["target"], a),
        )
    )
    want = z + 0.5 * z * w.conj() * u
    chex.assert_trees_all_close(found, jnp.concatenate([want.real, want.imag], -1), atol=1e-12)


@pytest.mark.slow
def test_both_forms_are_one(x64):
    """A rotary state as 2 x 2 blocks, ``[[c, s], [-s, c]]``."""
    params, e, a, x = inputs(attention_mix="head_scale")

    def blocks(state):
        c, s = jnp.split(state, 2, -1)
        return jnp.stack([jnp.stack([c, s], -1), jnp.stack([-s, c], -1)], -2)

    alpha = jnp.array([0.5, 2.0])
    update = jax.jit(lambda *given: tape.update_state(params, *given, x, alpha, norm="rms"))
    rotary, tensor = update(e, a), update(blocks(e), blocks(a))
    chex.assert_trees_all_close(tensor, blocks(rotary), atol=1e-12)


@pytest.mark.slow
def test_implementations_agree(x64):
    params, e, a, x = inputs(l=4)

    def loss(params, e, a, x, name):
        new = tape.update_state(params, e, a, x, norm="unit", implementation=name)
        return jnp.sin(new).sum()

    both = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)), static_argnums=4)
    expected, found = (both(params, e, a, x, name) for name in ("reference", "unrolled"))
    chex.assert_trees_all_close(found, expected, atol=1e-10)


@pytest.mark.slow
def test_the_linen_module_has_its_parameters(x64):
    params, e, a, x = inputs()
    module = tape.UpdateState(num_heads=4, num_kv_heads=2, degree=3, norm="rms")
    chex.assert_trees_all_equal_shapes(module.init(jax.random.key(0), e, a, x)["params"], params)
    found = module.apply({"params": params}, e, a, x)
    chex.assert_trees_all_close(found, tape.update_state(params, e, a, x, norm="rms"))


@pytest.mark.parametrize(
    ("params", "without", "words"),
    [
        ({"origin": (2, 4)}, "", r"both of origin and target, or neither; got \['origin'"),
        ({"origin": (2, 4), "target": (2, 4)}, "a", "params has an origin, so attended"),
        (
            {"origin": (2, 4), "target": (2, 3)},
            "",
            r"target must have shape \(2, 4\), like mix; got",
        ),
    ],
)
def test_misfits(params, without, words):
    _, e, a, x = inputs()
    params = {name: jnp.zeros(shape) for name, shape in params.items()}
    with pytest.raises(ValueError, match=words):
        tape.update_state(params, e, None if without else a, x)
