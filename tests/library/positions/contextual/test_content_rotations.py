"""Rotations made of the content: Selective RoPE, multiplicative GRAPE, RePo, MapFormer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tape_jax as tape
from tape_jax import ModelConfig, positions
from tape_jax._src.core.algebra import rotate
from tape_jax._src.positions.fixed.rotary import content_state
from tape_jax._src.positions.layer import Layer
from tape_jax._src.positions.protocol import default_positions
from tests.models import VOCAB, random_variables, small_model

B, T, HEADS, KV_HEADS, D, HIDDEN = 2, 7, 4, 2, 6, 10
PACKED = np.array([[1, 1, 1, 1, 2, 2, 2], [1, 2, 1, 2, 2, 1, 1]])

VARIANTS = {
    "selective": positions.SelectiveRope(rank=3),
    "selective full": positions.SelectiveRope(
        rank=None, taps=2, spacing="rfa", learn_temperature=True, gate="standard", bias=True
    ),
    "selective one tap": positions.SelectiveRope(taps=1, theta=100.0, temperature=2.0, bias=True),
    "grape sigmoid": positions.GrapeMultiplicative(step="sigmoid", frequencies_per_head=True),
    "grape per head": positions.GrapeMultiplicative(per_head=True, frequencies_per_head=True),
    "repo": positions.Repo(width=5),
    "repo linear": positions.Repo(form="linear", base=100.0),
    "mapformer wm": positions.MapFormerWM(),
    "mapformer em": positions.MapFormerEM(rank=3),
}


def config_of(encoding, dtype="float64"):
    sizes = {"hidden_size": HIDDEN, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": D}
    return ModelConfig(
        VOCAB, num_layers=2, position=encoding, dtype=dtype, param_dtype=dtype, **sizes
    )


def drawn(specs, generator, dtype="float64"):
    return {
        name: jnp.asarray(generator.normal(size=p.shape) * 0.5, dtype) for name, p in specs.items()
    }


def inputs(encoding, dtype="float64", segment_ids=None):
    """Parameters, and a layer that random numbers enter."""
    config, generator = config_of(encoding, dtype), np.random.default_rng(0)
    params = drawn(encoding.input_params(config.sizes), generator, dtype)
    params |= drawn(encoding.layer_params(config.sizes, updates=True), generator, dtype)
    x, q, k = (
        jnp.asarray(generator.normal(size=(B, T, *tail)), dtype)
        for tail in ((HIDDEN,), (HEADS, D), (KV_HEADS, D))
    )
    ids = None if segment_ids is None else jnp.asarray(segment_ids)
    return params, Layer(x, default_positions(T), ids, True, config.sizes, q=q, k=k)


def state_of(encoding, params, layer):
    state, _ = encoding.start_from_embeddings(params, layer)
    if state is None:
        return encoding.layer_terms(params, layer).state
    return jax.tree.leaves(state)[0]


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


def repo_angles(e, p, x):
    found = []
    for row in x:
        if e.form == "swiglu":
            gate = row @ p["place_gate"]
            row = gate * sigmoid(gate) * (row @ p["place_content"])
        found.append(np.outer(row @ p["place_kernel"], e.base ** (-np.arange(0, D, 2) / D)))
    return np.array(found)


def mapformer_angles(e, p, x):
    del e
    found, path = [], np.zeros((KV_HEADS, D // 2))
    for row in x:
        path = path + (row @ p["delta_in"] @ p["delta_out"]).reshape(path.shape)
        found.append(p["omega"] * path)
    return np.array(found)


BY_HAND = {
    "selective": selective_angles,
    "grape": grape_angles,
    "repo": repo_angles,
    "mapformer": mapformer_angles,
}


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", VARIANTS)
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
    wide, narrow = (
        state_of(
            encoding,
            {name: p.astype(jnp.bfloat16).astype(dtype) for name, p in params.items()},
            dataclasses.replace(
                layer,
                x=x.astype(dtype),
                positions=default_positions(x.shape[1]),
                sizes=config_of(encoding, dtype).sizes,
            ),
        )
        for dtype in ("float32", "bfloat16")
    )
    assert wide.dtype == narrow.dtype == jnp.float32
    # Sums of 420 numbers in bfloat16 would be off by whole turns.
    assert jnp.abs(jnp.linalg.norm(narrow, axis=-1) - np.sqrt(D // 2)).max() < 1e-5
    if name.startswith(("grape", "mapformer")):
        np.testing.assert_allclose(narrow, wide, atol=2e-2)


@pytest.mark.slow
def test_gated_and_content_free_starts():
    """What initial values say: GRAPE and RePo start without positions, MapFormer with its grid."""
    config = config_of(positions.Encoding(), "float32")
    wm = positions.MapFormerWM(grid=16.0)
    specs = wm.input_params(config.sizes)
    omega = specs["omega"].init(jax.random.key(0), specs["omega"].shape, jnp.float32)
    np.testing.assert_allclose(omega, [2 * np.pi * np.array([1, 1 / 4, 1 / 16])] * 2, rtol=1e-6)
    for step, size in (("softplus", 1e-3), ("sigmoid", sigmoid(np.log(np.expm1(1e-3)) / 16))):
        grape = positions.GrapeMultiplicative(step=step)
        model = small_model(grape)
        params = model.init(jax.random.key(0), jnp.zeros((1, 2), int))["params"]
        own = {
            name.removeprefix("position_"): x[0]
            for name, x in params["layers_0"].items()
            if name.startswith("position_")
        }
        x = jnp.asarray(np.random.default_rng(0).normal(size=(T, 16)), jnp.float32)
        layer = Layer(x, default_positions(T), None, True, model.config.sizes)
        expected = tape.rotary_state(-size * jnp.arange(T, dtype=jnp.float32), 8)
        found = grape.layer_terms(own, layer).state[:, 0]
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


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: positions.SelectiveRope(rank=0), r"selective_rope: rank must be a positive"),
        (lambda: positions.SelectiveRope(taps=0), r"selective_rope: taps must be a positive"),
        (lambda: positions.SelectiveRope(spacing="rop"), r"spacing 'rop'.*did you mean 'rope'"),
        (lambda: positions.SelectiveRope(gate="gla"), r"unknown selective_rope gate 'gla'"),
        (lambda: positions.SelectiveRope(theta=0.5), r"with spacing='rope' theta must exceed 1"),
        (
            lambda: positions.SelectiveRope(spacing="rfa", theta=2.0),
            r"with spacing='rfa' theta must lie between 0 and 1; got 2.0",
        ),
        (lambda: positions.SelectiveRope(temperature=0.0), r"temperature must be positive"),
        (lambda: positions.GrapeMultiplicative(step="relu"), r"unknown grape_m_ctx step 'relu'"),
        (lambda: positions.GrapeMultiplicative(base=1.0), r"grape_m_ctx: the rotary base must"),
        (lambda: positions.GrapeMultiplicative(initial_step=0.0), r"initial_step must be positive"),
        (lambda: positions.Repo(form="swish"), r"unknown repo form 'swish'"),
        (lambda: positions.Repo(width=-1), r"repo: width must be a positive"),
        (lambda: positions.Repo(base=0.5), r"repo: the rotary base must exceed 1"),
        (lambda: positions.Repo(first_layer=-1), r"first_layer must be an integer from 0 on"),
        (lambda: positions.MapFormerWM(rank=0), r"mapformer_wm: rank must be a positive"),
        (lambda: positions.MapFormerEM(grid=0.0), r"mapformer_em: grid must be positive"),
        (
            lambda: small_model(positions.Repo(first_layer=3)),
            r"no layer would choose positions: first_layer = 3 of 3 layers",
        ),
        (
            lambda: small_model("repo", hidden_size=6, head_dim=4),
            r"an eighth of the hidden size 6 is nothing",
        ),
        (
            lambda: small_model("selective_rope", hidden_size=15, head_dim=8),
            r"share of the hidden size; got 15",
        ),
        (
            lambda: small_model(positions.SelectiveRope(spacing="rfa"), head_dim=2),
            r"got a head dimension of 2",
        ),
    ],
)
def test_misuse(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_backward_pass_keeps_what_is_rotated_and_one_state():
    def rotated(q, k, angles):
        state = content_state(angles)
        return rotate(q, state), rotate(k, state)

    def kept(*inputs):
        return jax.tree.leaves(jax.vjp(rotated, *inputs)[1])

    vectors, angles = jnp.ones((B, T, HEADS, D)), jnp.ones((B, T, HEADS, D // 2))
    found = jax.make_jaxpr(kept)(vectors, vectors, angles).jaxpr.outvars
    assert [x.aval.shape for x in set(found)] == 3 * [vectors.shape]
