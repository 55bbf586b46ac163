"""Updates of degree three: products of a state with two that are attended."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tape_jax as tape
from tape_jax import positions, testing
from tests.models import FLOAT64, small_model, without

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
    found = tape.update_state(params, e, a, x, 0.5)
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
    rotary = tape.update_state(params, e, a, x, alpha, norm="rms")
    tensor = tape.update_state(params, blocks(e), blocks(a), x, alpha, norm="rms")
    chex.assert_trees_all_close(tensor, blocks(rotary), atol=1e-12)


@pytest.mark.slow
def test_implementations_agree(x64):
    params, e, a, x = inputs(l=4)

    def loss(params, e, a, x, name):
        new = tape.update_state(params, e, a, x, norm="unit", implementation=name)
        return jnp.sin(new).sum()

    expected, found = (
        jax.value_and_grad(loss, (0, 1, 2, 3))(params, e, a, x, name)
        for name in ("reference", "unrolled")
    )
    chex.assert_trees_all_close(found, expected, atol=1e-10)


def test_a_state_goes_where_another_place_is_as_far(x64):
    """Nine tokens behind the first delimiter, it comes to lie nine behind the second."""
    here, first, second = (positions.rotary_state(jnp.array([t]), DIM) for t in (29, 20, 70))
    params = {"origin": jnp.array([[1.0, 0.0]]), "target": jnp.array([[0.0, 1e9]])}
    attended = jnp.stack([first, second], axis=1)
    new = tape.update_state(params, here[:, None], attended, jnp.zeros((1, HIDDEN)), norm="unit")
    chex.assert_trees_all_close(new[:, 0], positions.rotary_state(jnp.array([79]), DIM), atol=1e-8)


@pytest.mark.slow
def test_it_starts_as_rope_and_learns(x64):
    sizes = {"num_heads": 4, "num_kv_heads": 2, **FLOAT64}
    tape_model, rope = (
        small_model(position, scan_layers=False, num_layers=2, **sizes)
        for position in (positions.Tape(degree=3, norm="rms", attention_mix="none"), "rope")
    )
    tokens = jnp.arange(6)[None]
    variables = jax.jit(tape_model.init)(jax.random.key(0), tokens)

    def loss(variables):
        logits = tape_model.apply(variables, tokens)
        return jnp.sin(logits).sum(), logits

    gradients, found = jax.jit(jax.grad(loss, has_aux=True))(variables)
    expected = jax.jit(rope.apply)(without(variables, "position_"), tokens)
    chex.assert_trees_all_close(found, expected, atol=1e-12)
    layer = gradients["params"]["layers_0"]
    assert layer["position_origin"].shape == (2, 4)
    assert jnp.abs(layer["position_target"]).max() > 1e-6


@pytest.mark.slow
def test_the_linen_module_has_its_parameters(x64):
    params, e, a, x = inputs()
    module = tape.UpdateState(num_heads=4, num_kv_heads=2, degree=3, norm="rms")
    chex.assert_trees_all_equal_shapes(module.init(jax.random.key(0), e, a, x)["params"], params)
    found = module.apply({"params": params}, e, a, x)
    chex.assert_trees_all_close(found, tape.update_state(params, e, a, x, norm="rms"))


def test_misuse():
    params, e, a, x = inputs()
    with pytest.raises(ValueError, match=r"both of origin and target, or neither; got \['origin'"):
        tape.update_state({"origin": params["origin"]}, e, a, x)
    pair = {name: params[name] for name in ("origin", "target")}
    with pytest.raises(ValueError, match="params has an origin, so attended"):
        tape.update_state(pair, e, None, x)
    with pytest.raises(ValueError, match=r"target must have shape \(2, 4\), like mix; got \(2, 3"):
        tape.update_state({**pair, "target": jnp.zeros((2, 3))}, e, a, x)
    with pytest.raises(ValueError, match="degree = 3 needs a norm, 'rms' or 'unit'; got 'none'"):
        positions.Tape(degree=3)
    with pytest.raises(ValueError, match="unknown tape degree 2: expected one of 1, 3"):
        positions.Tape(degree=2, norm="rms")
    with pytest.raises(ValueError, match="tape_separate_cos_sin: degree is an option of TAPE's"):
        positions.create("tape_separate_cos_sin", degree=3, norm="rms")
