"""Rotations made of the content: Selective RoPE, multiplicative GRAPE, RePo, MapFormer."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tape_jax as tape
from tape_jax import ModelConfig, positions
from tape_jax._src.core.algebra import rotate
from tape_jax._src.positions.contextual import selective
from tape_jax._src.positions.fixed.rotary import content_state
from tape_jax._src.positions.layer import Layer
from tape_jax._src.positions.protocol import default_positions
from tests.models import VOCAB, random_variables, small_model

B, T, HEADS, KV_HEADS, D, HIDDEN = 2, 7, 4, 2, 6, 10
PACKED = np.array([[1, 1, 1, 1, 2, 2, 2], [1, 2, 1, 2, 2, 1, 1]])

VARIANTS = {
    "selective": positions.SelectiveRope(rank=3, theta=100.0, temperature=2.0),
    "selective full": positions.SelectiveRope(
        rank=None, taps=2, spacing="rfa", learn_temperature=True, gate="standard", bias=True
    ),
    "grape sigmoid": positions.GrapeMultiplicative(step="sigmoid", frequencies_per_head=True),
    "grape per head": positions.GrapeMultiplicative(per_head=True),
    "mapformer em": positions.MapFormerEM(rank=3),
}


def config_of(encoding, dtype="float64"):
    sizes = {"hidden_size": HIDDEN, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": D}
    return ModelConfig(
        VOCAB, num_layers=2, position=encoding, dtype=dtype, param_dtype=dtype, **sizes
    )


def inputs(encoding, dtype="float64", segment_ids=None):
    """Parameters, and a layer that random numbers enter."""
    config, generator = config_of(encoding, dtype), np.random.default_rng(0)
    specs = encoding.input_params(config.sizes) | encoding.layer_params(config.sizes, updates=True)
    params = {
        name: jnp.asarray(generator.normal(size=p.shape) * 0.5, dtype) for name, p in specs.items()
    }
    x, q, k = (
        jnp.asarray(generator.normal(size=(B, T, *tail)), dtype)
        for tail in ((HIDDEN,), (HEADS, D), (KV_HEADS, D))
    )
    ids = None if segment_ids is None else jnp.asarray(segment_ids)
    return params, Layer(x, default_positions(T), ids, True, config.sizes, q=q, k=k)


def state_of(encoding, params, layer):
    @jax.jit
    def run(params, x):
        given = dataclasses.replace(layer, x=x)
        state, _ = encoding.start_from_embeddings(params, given)
        if state is None:
            return encoding.layer_terms(params, given).state
        return jax.tree.leaves(state)[0]

    return run(params, layer.x)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def selective_angles(e, p, x):
    """Angles ``[T, H, D/2]`` of one sequence, token by token."""
    share, planes = HIDDEN // KV_HEADS, D // 2
    phis, found, total = [], [], np.zeros((KV_HEADS, planes))
    if e.spacing == "rfa":
        temperature = p.get("temperature")
    else:
        theta = e.theta or 500_000.0
        temperature = [e.temperature / theta ** (2 * c / D) for c in range(planes)]
    for t in range(len(x)):
        parts = [x[t, h * share : (h + 1) * share] for h in range(KV_HEADS)]
        parts = [part / np.sqrt((part**2).sum() + 1e-6) for part in parts]
        xn, phi = np.concatenate(parts), np.zeros((KV_HEADS, planes))
        for h in range(KV_HEADS):
            for c in range(planes):
                if e.rank is None:
                    column = p["phase_kernel"][h, :, c]
                    phi[h, c] = p["phase_scale"][h] * parts[h] @ column / np.linalg.norm(column)
                else:
                    phi[h, c] = xn @ p["phase_down"] @ p["phase_up"][:, h * planes + c]
        phis.append(phi)
        step = sum(
            p["conv_kernel"][..., e.taps - 1 - n] * phis[t - n] for n in range(min(e.taps, t + 1))
        )
        if e.bias:
            step = step + np.exp(p["phase_bias"])
        if e.gate == "standard":
            step = step * sigmoid(xn @ p["gate_kernel"] + p["gate_bias"])[:, None]
        total = total + step
        found.append(total * temperature)
    return np.array(found)


def grape_angles(e, p, x):
    found, phase = [], np.zeros(p["step_bias"].shape)
    for t in range(len(x)):
        turns = np.broadcast_to(np.exp(p["log_frequencies"]), (KV_HEADS, D // 2))
        found.append([-np.broadcast_to(phase, (KV_HEADS,))[h] * turns[h] for h in range(KV_HEADS)])
        logit = x[t] @ p["step_kernel"] + p["step_bias"]
        phase = phase + (sigmoid(logit / 16) if e.step == "sigmoid" else np.log1p(np.exp(logit)))
    return np.array(found)


BY_HAND = {"selective": selective_angles, "grape": grape_angles}


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", [name for name in VARIANTS if name.split()[0] in BY_HAND])
def test_states_are_those_of_the_formula(name, x64):
    encoding = VARIANTS[name]
    params, layer = inputs(encoding, segment_ids=PACKED)
    found = state_of(encoding, params, layer)
    p = {name: np.asarray(x) for name, x in params.items()}
    expected = np.zeros((B, T, KV_HEADS, D))
    for b in range(B):
        for segment in set(PACKED[b]):
            here = PACKED[b] == segment
            angles = BY_HAND[name.split()[0]](encoding, p, np.asarray(layer.x)[b, here])
            expected[b, here] = np.concatenate([np.cos(angles), np.sin(angles)], axis=-1)
    np.testing.assert_allclose(np.broadcast_to(found, expected.shape), expected, atol=1e-12)


@pytest.mark.slow
def test_episodic_memory_multiplies_content_and_place(x64):
    """Logits by hand, for grouped heads."""
    encoding = VARIANTS["mapformer em"]
    params, layer = inputs(encoding)
    (own, keys), _ = encoding.start_from_embeddings(params, layer)
    assert encoding.rotation((own, keys)) == (None, None)
    layer = dataclasses.replace(layer, state=(own, keys))
    terms = encoding.layer_terms(params, layer)
    v = jnp.broadcast_to(jnp.eye(T)[:, None], (B, T, KV_HEADS, T))
    found = tape.attention(layer.q, layer.k, v, is_causal=True, logits_fn=terms.logits_fn)[0]

    def turned(vector, state):
        c, s, a, b = *np.split(np.asarray(state), 2), *np.split(np.asarray(vector), 2)
        return np.concatenate([a * c - b * s, a * s + b * c])

    for b, i, h in np.ndindex(B, T, HEADS):
        g = h // (HEADS // KV_HEADS)
        logits = [
            (layer.q[b, i, h] @ layer.k[b, j, g] / np.sqrt(D))
            * (turned(params["q0"][h], own[b, i, g]) @ turned(params["k0"][g], own[b, j, g]))
            / np.sqrt(D)
            for j in range(i + 1)
        ]
        weights = np.exp(logits) / np.exp(logits).sum()
        np.testing.assert_allclose(found[b, i, h, : i + 1], weights, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["selective full", "grape sigmoid", "mapformer em"])
def test_sums_of_narrow_inputs_are_in_float32(name):
    """Angles hardly change if what enters is rounded, however long the path."""
    encoding = VARIANTS[name]
    params, layer = inputs(encoding, "float32")
    x = jnp.tile(layer.x, (1, 60, 1)).astype(jnp.bfloat16)

    def run(dtype):
        given = {name: p.astype(jnp.bfloat16).astype(dtype) for name, p in params.items()}
        sizes, places = config_of(encoding, dtype).sizes, default_positions(x.shape[1])
        whole = dataclasses.replace(layer, x=x.astype(dtype), positions=places, sizes=sizes)
        return state_of(encoding, given, whole)

    wide, narrow = run("float32"), run("bfloat16")
    assert wide.dtype == narrow.dtype == jnp.float32
    # Sums of 420 numbers in bfloat16 would be off by whole turns.
    assert jnp.abs(jnp.linalg.norm(narrow, axis=-1) - np.sqrt(D // 2)).max() < 1e-5
    if name.startswith(("grape", "mapformer")):
        np.testing.assert_allclose(narrow, wide, atol=2e-2)


def test_gated_and_content_free_starts():
    """What initial values say: GRAPE starts with steps of a size, MapFormer with its grid."""

    def initial(encoding):
        sizes = config_of(encoding, "float32").sizes
        specs = encoding.input_params(sizes) | encoding.layer_params(sizes, updates=True)
        key = jax.random.key(0)
        return {name: spec.init(key, spec.shape, jnp.float32) for name, spec in specs.items()}

    omega = initial(positions.MapFormerWM(grid=16.0))["omega"]
    np.testing.assert_allclose(omega, [2 * np.pi * np.array([1, 1 / 4, 1 / 16])] * 2, rtol=1e-6)
    for step, size in (("softplus", 1e-3), ("sigmoid", sigmoid(np.log(np.expm1(1e-3)) / 16))):
        grape = positions.GrapeMultiplicative(step=step)
        _, layer = inputs(grape, "float32")
        expected = tape.rotary_state(-size * jnp.arange(T, dtype=jnp.float32), D)
        found = state_of(grape, initial(grape), layer)[0, :, 0]
        np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.slow
def test_layers_before_the_first_that_chooses_positions_have_rope():
    late = positions.Repo(first_layer=2, base=10_000.0)
    model, tokens = small_model(late), jnp.arange(5)[None]
    assert [blocks.like.updates for blocks in model.blocks] == [False, True]
    variables = random_variables(model)
    assert not any(name.startswith("position") for name in variables["params"]["layers_0"])
    rope = small_model("rope", num_layers=2)
    found, expected = (
        m.apply(
            {"params": {**random_variables(rope)["params"], **extra}}, tokens, return_states=True
        )
        for m, extra in ((rope, {}), (model, {"layers_2": variables["params"]["layers_2"]}))
    )
    for x, y in zip(found[1].hidden, expected[1].hidden[:3], strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)
    assert expected[1].position[2] is None


def test_backward_pass_keeps_what_is_rotated_and_one_state():
    def rotated(q, k, angles):
        state = content_state(angles)
        return rotate(q, state), rotate(k, state)

    def kept(*inputs):
        return jax.tree.leaves(jax.vjp(rotated, *inputs)[1])

    vectors, angles = jnp.ones((B, T, HEADS, D)), jnp.ones((B, T, HEADS, D // 2))
    found = jax.make_jaxpr(kept)(vectors, vectors, angles).jaxpr.outvars
    assert [x.aval.shape for x in set(found)] == 3 * [vectors.shape]


def test_a_kernel_of_zeros_has_a_finite_gradient():
    params = {"phase_kernel": jnp.zeros((2, 3, 4)), "phase_scale": jnp.ones(2)}
    gradients = jax.grad(lambda p: selective._by_head(p, jnp.ones((5, 2, 3)), jnp.float32).sum())
    chex.assert_tree_all_finite(gradients(params))
