"""The reference's ablations against its equations, on cosine and sine tables in numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import ModelConfig, rotary_state, rotate
from tape_jax.positions import (
    MixHeadDim,
    NoEquivariance,
    PlaceWeights,
    RelaxedEquivariance,
    SeparateCosSin,
)
from tests.models import normal

CONFIG = ModelConfig(5, hidden_size=12, num_layers=3, num_heads=3, head_dim=4)
HEADS, DIM, HIDDEN, WIDTH, TIME = 3, 4, 12, 12, 5


def silu(x):
    return x / (1 + np.exp(-x))


def params_of(encoding) -> dict[str, np.ndarray]:
    specs = encoding.layer_params(CONFIG.sizes, updates=True)
    return {name: normal(*spec.shape, seed=i) for i, (name, spec) in enumerate(specs.items())}


def tensor_of(cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Blocks with ``E_m^T = [[c_j, -s_j], [s_j', c_j']]``, from tables ``[..., D]``."""
    half = cos.shape[-1] // 2
    out = np.empty((*cos.shape[:-1], half, 2, 2))
    for j in range(half):
        out[..., j, :, :] = np.stack(
            [
                np.stack([cos[..., j], sin[..., j + half]], -1),
                np.stack([-sin[..., j], cos[..., j + half]], -1),
            ],
            axis=-2,
        )
    return out


def mixed(mix, attended):
    """``Mix(a)`` by a number per head, or by a matrix over heads, for ``[T, H, D]``."""
    return np.einsum("hk,tkd->thd", np.diag(mix) if mix.ndim == 1 else mix, attended)


def mixed_heads(params, table, attended, x, alpha):
    """Steps 2 and 4 of TAPE with heads mixed, for one table ``[T, H, N]``."""
    table = table + alpha * mixed(params["mix"], attended)
    matrix = np.einsum("hp,tp,pk->thk", params["down"], silu(x @ params["wx"]), params["up"])
    return table + alpha * np.einsum("thk,tkd->thd", matrix, table)


def mixed_dimensions(params, table, attended, x, alpha):
    table = table + alpha * params["mix"] * attended
    gate = silu(x @ params["wx"])
    return table + alpha * (table @ params["up"].T * gate[:, None]) @ params["down"].T


def mixed_everything(params, table, attended, x, alpha):
    table = table + alpha * mixed(params["mix"], attended)
    gate = silu(x @ params["wx"])
    flat = table.reshape(TIME, -1)
    change = (flat @ params["up"].T * gate) @ params["down"].T
    return table + alpha * change.reshape(table.shape)


# What is left out counts as zeros.
PARTS = [
    {"alpha": 0.6},
    {"alpha": 0.6, "mlp_mix": False},
    {"attention_mix": "none", "learn_alpha": True, "alpha_per_head": True},
]


def with_zeros(params, encoding):
    """Parameters of all parts, and the step of each head ``[H, 1]``."""
    alpha = np.broadcast_to(params.get("alpha", encoding.alpha), (HEADS,))[:, None]
    whole = params_of(dataclasses.replace(encoding, attention_mix="head_scale", mlp_mix=True))
    return {name: params.get(name, 0 * x) for name, x in whole.items()}, alpha


@pytest.mark.parametrize("options", [*PARTS, {"attention_mix": "head_scale"}], ids=str)
def test_separate_cos_sin(x64, options):
    encoding = SeparateCosSin(**options)
    params = params_of(encoding)
    e, a = normal(TIME, HEADS, DIM), normal(TIME, HEADS, DIM, seed=1)
    x = normal(TIME, HIDDEN, seed=2)
    got = jax.jit(encoding.update_state)(params, e, a, x)
    full, alpha = with_zeros(params, encoding)
    for i, half in enumerate((slice(0, DIM // 2), slice(DIM // 2, DIM))):
        own = {name: v if name in ("wx", "alpha") else v[i] for name, v in full.items()}
        want = mixed_heads(own, e[..., half], a[..., half], x, alpha)
        np.testing.assert_allclose(got[..., half], want, atol=1e-12)


@pytest.mark.parametrize("options", PARTS, ids=str)
@pytest.mark.parametrize(
    ("cls", "oracle"), [(MixHeadDim, mixed_dimensions), (NoEquivariance, mixed_everything)]
)
def test_untied(x64, cls, oracle, options):
    encoding = cls(**options)
    params = params_of(encoding)
    tables, attended = ([normal(TIME, HEADS, DIM, seed=i) for i in n] for n in ((0, 1), (2, 3)))
    x = normal(TIME, HIDDEN, seed=4)
    got = jax.jit(encoding.update_state)(params, tensor_of(*tables), tensor_of(*attended), x)
    full, alpha = with_zeros(params, encoding)
    want = [oracle(full, t, a, x, alpha) for t, a in zip(tables, attended, strict=True)]
    np.testing.assert_allclose(got, tensor_of(*want), atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "norm"), [(SeparateCosSin, "none"), (MixHeadDim, "rms"), (NoEquivariance, "unit")]
)
def test_they_start_as_rope_and_stay_so_untrained(cls, norm):
    encoding = cls(norm=norm)
    start = encoding.start(jnp.arange(TIME), CONFIG.sizes)
    q = jnp.asarray(normal(TIME, HEADS, DIM), jnp.float32)
    np.testing.assert_allclose(
        rotate(q, start), rotate(q, rotary_state(np.arange(TIME), DIM)), atol=1e-6
    )
    state = encoding.carry(start, (TIME,), CONFIG.sizes)
    specs = encoding.layer_params(CONFIG.sizes, updates=True)
    params = {k: s.init(jax.random.key(0), s.shape, jnp.float32) for k, s in specs.items()}
    got = jax.jit(encoding.update_state)(params, state, 2 * state, jnp.ones((TIME, HIDDEN)))
    np.testing.assert_allclose(got, state, atol=1e-6)


def test_place_weights(x64):
    encoding = PlaceWeights(alpha=0.6, waves=2, base=100.0)
    params = params_of(encoding)
    assert params["places"].shape == (4, HEADS)
    e, a, x = normal(TIME, HEADS, DIM), normal(TIME, HEADS, DIM, seed=1), normal(TIME, HIDDEN)
    places = np.array([0, 1, 0, 1, 2])
    state = encoding.carry((jnp.asarray(e), jnp.asarray(places)), (TIME,), CONFIG.sizes)
    got, kept = jax.jit(encoding.update_state)(params, state, a, x)
    waves = np.stack(
        [f(places * omega) for omega in (1, 100**-0.5) for f in (np.sin, np.cos)], axis=-1
    )
    scale = 1 + waves @ params["places"]
    want = e + scale[..., None] * (mixed_heads(params, e, a, x, 0.6) - e)
    np.testing.assert_allclose(got, want, atol=1e-12)
    np.testing.assert_array_equal(kept, np.repeat(places[:, None], HEADS, axis=1))


def test_places_are_counted_in_segments():
    encoding, tokens = PlaceWeights(), jnp.zeros((2, 6), int)
    positions = jnp.array([7, 9, 9, 30, 31, 32])
    np.testing.assert_array_equal(encoding.coordinates(tokens, positions), [range(6)] * 2)
    segments = jnp.array([[2, 2, 1, 1, 1, 2], [3, 3, 3, 3, 3, 3]])
    np.testing.assert_array_equal(
        encoding.coordinates(tokens, positions, segments), [[0, 1, 0, 1, 2, 2], range(6)]
    )


def test_relaxed_equivariance(x64):
    encoding = RelaxedEquivariance(alpha=0.6)
    params = params_of(encoding)
    assert params["mirror"].shape == (2, HEADS, DIM // 2)
    e, a, x = normal(TIME, HEADS, DIM), normal(TIME, HEADS, DIM, seed=1), normal(TIME, HIDDEN)
    got = jax.jit(encoding.update_state)(params, e, a, x)
    moved = mixed_heads(params, e, a, x, 0.6)
    number = moved[..., : DIM // 2] + 1j * moved[..., DIM // 2 :]
    number = number + (params["mirror"][0] + 1j * params["mirror"][1]) * number.conj()
    want = np.concatenate([number.real, number.imag], axis=-1)
    np.testing.assert_allclose(got, want, atol=1e-12)


def test_relaxed_equivariance_is_held_back_by_its_loss():
    """The schedule of the weight; nothing but the mirrors, in all layers, is pulled to zero."""
    encoding = RelaxedEquivariance(penalty=(3.0, 1.0))
    mirrors = jnp.asarray(normal(4, 2, HEADS, 2), jnp.float32)
    params = [{"mirror": mirrors, "mix": jnp.ones(3)}, {}]
    value, slope = jax.value_and_grad(encoding.loss)(params, 0.25)
    np.testing.assert_allclose(value, 2.5 * np.square(mirrors).sum(), rtol=1e-6)
    np.testing.assert_allclose(slope[0]["mirror"], 5 * mirrors, rtol=1e-6)
    np.testing.assert_array_equal(slope[0]["mix"], 0)
    assert encoding.loss([], 0.5) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "norm"), [(PlaceWeights, "rms"), (RelaxedEquivariance, "unit")])
def test_broken_updates_are_bounded_like_others(cls, norm):
    encoding = cls(norm=norm)
    start = encoding.start(jnp.arange(TIME), CONFIG.sizes)
    state = encoding.carry(encoding.locate(start, jnp.arange(TIME)), (TIME,), CONFIG.sizes)
    attended = jnp.asarray(normal(TIME, HEADS, DIM), jnp.float32)
    params = params_of(encoding)
    new = encoding.update_state(
        params, state, attended, jnp.asarray(normal(TIME, HIDDEN), jnp.float32)
    )
    e = encoding.rotation(new)[1]
    np.testing.assert_allclose(np.square(e).sum(-1), DIM / 2, rtol=1e-5)
