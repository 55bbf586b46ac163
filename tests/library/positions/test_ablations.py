"""The reference's ablations against its equations, on cosine and sine tables in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import ModelConfig, rotary_state, rotate
from tape_jax._src.positions.ablations import join_tables, split_tables
from tape_jax.positions import (
    MixHeadDim,
    NoEquivariance,
    PlaceWeights,
    RelaxedEquivariance,
    SeparateCosSin,
    Tape,
)
from tests.models import normal

CONFIG = ModelConfig(5, hidden_size=12, num_layers=3, num_heads=3, head_dim=4)
HEADS, DIM, HIDDEN, WIDTH, TIME = 3, 4, 12, 12, 5
each_mix = pytest.mark.parametrize("mix", ["heads", "head_scale"])


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


def test_tables_and_blocks_are_one_another(x64):
    cos, sin = normal(2, TIME, HEADS, 8), normal(2, TIME, HEADS, 8, seed=1)
    blocks = tensor_of(cos, sin)
    np.testing.assert_array_equal(join_tables(jnp.asarray(cos), jnp.asarray(sin)), blocks)
    for got, want in zip(split_tables(jnp.asarray(blocks)), (cos, sin), strict=True):
        np.testing.assert_array_equal(got, want)


def test_blocks_rotate_as_the_reference_does(x64):
    """``x cos + rotate_half(x) sin`` with halves that are not tied."""
    x, cos, sin = (normal(TIME, HEADS, 8, seed=i) for i in range(3))
    turned = np.concatenate([-x[..., 4:], x[..., :4]], -1)
    np.testing.assert_allclose(rotate(x, tensor_of(cos, sin)), x * cos + turned * sin, atol=1e-13)


def mixed(mix, attended):
    """``Mix(a)`` by a number per head, or by a matrix over heads, for ``[T, H, D]``."""
    return np.einsum("hk,tkd->thd", np.diag(mix) if mix.ndim == 1 else mix, attended)


def mixed_heads(params, table, attended, x, alpha):
    """Steps 2 and 4 of TAPE with heads mixed, for one table ``[T, H, N]``."""
    table = table + alpha * mixed(params["mix"], attended)
    gate = silu(x @ params["wx"])
    up = np.einsum("tp,ph,thd->tpd", gate, params["up"], table)
    return table + alpha * np.einsum("hp,tpd->thd", params["down"], up)


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


@each_mix
def test_separate_cos_sin(x64, mix):
    encoding = SeparateCosSin(alpha=0.6, attention_mix=mix)
    params = params_of(encoding)
    assert {k: v.shape for k, v in params.items()} == {
        "mix": (2, HEADS, HEADS) if mix == "heads" else (2, HEADS),
        "wx": (HIDDEN, WIDTH),
        "up": (2, WIDTH, HEADS),
        "down": (2, HEADS, WIDTH),
    }
    e, a = normal(TIME, HEADS, DIM), normal(TIME, HEADS, DIM, seed=1)
    x = normal(TIME, HIDDEN, seed=2)
    got = encoding.update_state(params, jnp.asarray(e), jnp.asarray(a), x)
    for i, half in enumerate((slice(0, DIM // 2), slice(DIM // 2, DIM))):
        own = {name: v if name == "wx" else v[i] for name, v in params.items()}
        want = mixed_heads(own, e[..., half], a[..., half], x, 0.6)
        np.testing.assert_allclose(got[..., half], want, atol=1e-12)


@pytest.mark.parametrize(
    ("cls", "oracle", "shapes"),
    [
        (MixHeadDim, mixed_dimensions, {"mix": (4,), "up": (12, 4), "down": (4, 12)}),
        (NoEquivariance, mixed_everything, {"mix": (3, 3), "up": (12, 12), "down": (12, 12)}),
    ],
)
def test_untied(x64, cls, oracle, shapes):
    encoding = cls(alpha=0.6)
    params = params_of(encoding)
    assert {k: v.shape for k, v in params.items()} == {"wx": (HIDDEN, WIDTH), **shapes}
    tables = [normal(TIME, HEADS, DIM, seed=i) for i in range(2)]
    attended = [normal(TIME, HEADS, DIM, seed=i) for i in range(2, 4)]
    x = normal(TIME, HIDDEN, seed=4)
    got = encoding.update_state(
        params, jnp.asarray(tensor_of(*tables)), jnp.asarray(tensor_of(*attended)), x
    )
    want = [oracle(params, t, a, x, 0.6) for t, a in zip(tables, attended, strict=True)]
    np.testing.assert_allclose(got, tensor_of(*want), atol=1e-12)


KINDS = [SeparateCosSin, MixHeadDim, NoEquivariance]


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "norm"), [*zip(KINDS, ("none", "rms", "unit"), strict=True)])
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


STEP_PER_HEAD = {"learn_alpha": True, "alpha_per_head": True}


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (SeparateCosSin, {"mlp_mix": False}),
        (SeparateCosSin, {"attention_mix": "none"}),
        (SeparateCosSin, {"learn_alpha": True}),
        (SeparateCosSin, STEP_PER_HEAD),
        (MixHeadDim, {"mlp_mix": False}),
        (MixHeadDim, STEP_PER_HEAD),
        (NoEquivariance, {"mlp_mix": False}),
        (NoEquivariance, STEP_PER_HEAD),
    ],
)
def test_parts_can_be_left_out(x64, cls, options):
    """Leaving a part out is the same as zeros in its place; a learned step is its value."""
    encoding, whole = cls(**options), cls(alpha=0.3)
    params = params_of(encoding)
    full = params_of(whole) | params
    if not encoding.mlp_mix:
        full["up"] = 0 * full["up"]
    if not encoding.attends_state:
        full["mix"] = 0 * full["mix"]
    if encoding.learn_alpha:
        params["alpha"] = jnp.full(params["alpha"].shape, 0.3)
    else:
        whole = cls(alpha=1.0)
    full.pop("alpha", None)
    block = (DIM,) if cls is SeparateCosSin else (DIM // 2, 2, 2)
    state, attended = (jnp.asarray(normal(TIME, HEADS, *block, seed=i)) for i in range(2))
    x = normal(TIME, HIDDEN, seed=2)
    got = encoding.update_state(params, state, attended if encoding.attends_state else None, x)
    np.testing.assert_allclose(got, whole.update_state(full, state, attended, x), atol=1e-12)


def test_misuse():
    with pytest.raises(ValueError, match=r"tape_place_weights: waves must be positive; got 0"):
        PlaceWeights(waves=0)
    with pytest.raises(ValueError, match=r"penalty must be a number from 0 on; got -1"):
        RelaxedEquivariance(penalty=(1, -1))
    with pytest.raises(ValueError, match=r"tape_relaxed_equivariance exists in rotary form only"):
        RelaxedEquivariance(form="tensor")
    with pytest.raises(ValueError, match=r"tape_separate_cos_sin exists in rotary form only"):
        SeparateCosSin(form="tensor")
    for cls in (MixHeadDim, NoEquivariance):
        with pytest.raises(ValueError, match=r"tensor form with l = r = 2 only; got form='rotary'"):
            cls(form="rotary")
        with pytest.raises(ValueError, match=r"l=4, r=4"):
            cls(l=4, r=4)
        grouped = ModelConfig(5, hidden_size=12, num_heads=3, num_kv_heads=1, head_dim=4)
        with pytest.raises(ValueError, match=r"num_heads = 3, num_kv_heads = 1"):
            cls().check(grouped.sizes)
        cls().check(CONFIG.sizes)
    with pytest.raises(ValueError, match=r"a scale per dimension; got attention_mix='heads'"):
        MixHeadDim(attention_mix="heads").layer_params(CONFIG.sizes, updates=True)
    with pytest.raises(ValueError, match=r"unknown tape_mix_head_dim norm 'unt'"):
        MixHeadDim(norm="unt")


def test_they_are_tape_otherwise():
    for cls in KINDS:
        assert issubclass(cls, Tape)
        assert cls().layer_params(CONFIG.sizes, updates=False) == {}
        assert [cls(layers=(1, 2)).updates(i, 3) for i in range(3)] == [False, True, False]


def tape_update(params, e, a, x, alpha):
    """``(I + alpha G(x)) (e + alpha Mix(a))`` in numpy, for states ``[T, H, D]``."""
    e = e + alpha * mixed(params["mix"], a)
    matrix = np.einsum("hp,tp,pk->thk", params["down"], silu(x @ params["wx"]), params["up"])
    return e + alpha * np.einsum("thk,tkd->thd", matrix, e)


@each_mix
def test_place_weights(x64, mix):
    encoding = PlaceWeights(alpha=0.6, waves=2, base=100.0, attention_mix=mix)
    params = params_of(encoding)
    assert params["places"].shape == (4, HEADS)
    e, a, x = normal(TIME, HEADS, DIM), normal(TIME, HEADS, DIM, seed=1), normal(TIME, HIDDEN)
    places = np.array([0, 1, 0, 1, 2])
    state = encoding.carry((jnp.asarray(e), jnp.asarray(places)), (TIME,), CONFIG.sizes)
    got, kept = encoding.update_state(params, state, jnp.asarray(a), x)
    waves = np.stack(
        [f(places * omega) for omega in (1, 100**-0.5) for f in (np.sin, np.cos)], axis=-1
    )
    scale = 1 + waves @ params["places"]
    want = e + scale[..., None] * (tape_update(params, e, a, x, 0.6) - e)
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


@each_mix
def test_relaxed_equivariance(x64, mix):
    encoding = RelaxedEquivariance(alpha=0.6, attention_mix=mix)
    params = params_of(encoding)
    assert params["mirror"].shape == (2, HEADS, DIM // 2)
    e, a, x = normal(TIME, HEADS, DIM), normal(TIME, HEADS, DIM, seed=1), normal(TIME, HIDDEN)
    got = encoding.update_state(params, jnp.asarray(e), jnp.asarray(a), x)
    moved = tape_update(params, e, a, x, 0.6)
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
