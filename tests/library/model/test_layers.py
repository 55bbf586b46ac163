"""The layers against values worked out in numpy."""

import dataclasses
import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import ModelConfig, Transformer, init_cache, positions
from tape_jax._src.model.attention_layer import Attention
from tape_jax._src.model.block import Block, pack_state
from tape_jax._src.model.cache import LayerCache, write_cache
from tape_jax._src.model.config import Lora, loops
from tape_jax._src.model.inputs import Context
from tape_jax._src.model.layers import Linear, Norm
from tape_jax._src.model.parameters import declared_params
from tape_jax._src.positions.protocol import OfLayer, default_positions
from tests.models import random_variables, small_model
from tests.selection import mostly_slow

CONFIG = ModelConfig(
    5, hidden_size=8, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6, intermediate_size=12
)
rng = np.random.default_rng


def random_params(module, *inputs, seed=0):
    """Parameters of the shapes that ``module`` wants, and numpy copies of them."""
    shapes = jax.eval_shape(module.init, jax.random.key(0), *inputs)
    generator = rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(generator.normal(size=x.shape), x.dtype), shapes)


def silu(x):
    return x / (1 + np.exp(-x))


def rms_norm(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + CONFIG.norm_eps) * scale


def test_rms_norm():
    x = rng(1).normal(size=(2, 3, 8)).astype(np.float32) * 3
    norm = Norm(CONFIG)
    variables = random_params(norm, jnp.asarray(x))
    expected = rms_norm(x, np.asarray(variables["params"]["scale"], np.float64))
    chex.assert_trees_all_close(norm.apply(variables, x), expected.astype(np.float32), atol=1e-5)


def test_rms_norm_of_large_float16_values_is_computed_in_float32():
    x = jnp.full((2, 8), 1000.0, jnp.float16)  # the square is infinite in float16
    norm = Norm(ModelConfig(5, hidden_size=8, dtype="float16"))
    out = norm.apply({"params": {"scale": jnp.ones(8)}}, x)
    chex.assert_type(out, jnp.float16)
    np.testing.assert_allclose(out, 1.0, rtol=1e-3)


def test_linear_acts_on_the_last_axis():
    x = rng(1).normal(size=(2, 3, 8)).astype(np.float32)
    linear = Linear(CONFIG, 7, (None, None))
    variables = random_params(linear, jnp.asarray(x))
    expected = np.einsum("abi,io->abo", x, variables["params"]["kernel"])
    chex.assert_trees_all_close(linear.apply(variables, x), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("init_scale", "residual", "expected"),
    [(None, False, 400**-0.5), (0.02, False, 0.02), (0.02, True, 0.02 / np.sqrt(2 * 8))],
)
def test_the_scale_of_initial_projections(init_scale, residual, expected):
    config = ModelConfig(5, hidden_size=400, num_layers=8, init_scale=init_scale)
    linear = Linear(config, 300, ("embed", "mlp"), residual=residual)
    kernel = linear.init(jax.random.key(0), jnp.zeros((1, 400)))["params"]["kernel"]
    np.testing.assert_allclose(kernel.std(), expected, rtol=0.01)


def test_the_low_rank_term_of_a_projection():
    x = rng(1).normal(size=(2, 3, 8)).astype(np.float32)
    linear = Linear(CONFIG, 7, ("embed", "kv_heads"), lora=Lora(rank=2, alpha=6.0))
    variables = random_params(linear, jnp.asarray(x))
    p = {name: np.asarray(leaf, np.float64) for name, leaf in variables["params"].items()}
    assert {name: leaf.shape for name, leaf in p.items()} == {
        "kernel": (8, 7),
        "lora_a": (8, 2),
        "lora_b": (2, 7),
    }
    expected = x @ (p["kernel"] + 3.0 * p["lora_a"] @ p["lora_b"])
    chex.assert_trees_all_close(linear.apply(variables, x), expected.astype(np.float32), atol=1e-4)


def test_a_projection_has_the_axes_and_the_role_that_it_is_given_whatever_its_name():
    lora = Lora(rank=2, targets=("k",))
    config = dataclasses.replace(CONFIG, lora=lora)

    class Projections(nn.Module):
        @nn.compact
        def __call__(self, x):
            Linear(config, 7, ("vocab", "embed"), name="k")(x)
            Linear(config, 7, ("embed", "mlp"), lora=lora, role="embeddings", name="mine")(x)

    with declared_params() as found:
        jax.eval_shape(Projections().init, jax.random.key(0), jnp.zeros((1, 8)))
    assert {path: (spec.axes, spec.role) for path, spec in found.items()} == {
        "k/kernel": (("vocab", "embed"), None),
        "mine/kernel": (("embed", "mlp"), "embeddings"),
        "mine/lora_a": (("embed", None), "lora"),
        "mine/lora_b": ((None, "mlp"), "lora"),
    }


def numpy_attention(x, p, e):
    """Causal attention of ``x [T, hidden]`` with states ``e [T, H_kv, D]``: output, ``A e``."""
    time, half = len(x), CONFIG.dim // 2

    def heads(name):
        return (x @ p[name]["kernel"]).reshape(time, -1, CONFIG.dim)

    def as_complex(y):
        return y[..., :half] + 1j * y[..., half:]

    group = CONFIG.num_heads // CONFIG.kv_heads
    states = as_complex(e).repeat(group, axis=1)
    q = as_complex(heads("q")) * states
    k = as_complex(heads("k")).repeat(group, axis=1) * states
    logits = np.einsum("ihd,jhd->hij", q, k.conj()).real / np.sqrt(CONFIG.dim)
    logits = np.where(np.tril(np.ones((time, time))), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("hij,jhd->ihd", weights, heads("v").repeat(group, axis=1))
    attended = np.einsum("hij,jhd->ihd", weights, e.repeat(group, axis=1))
    return out.reshape(time, -1) @ p["out"]["kernel"], attended


def inputs(time=5):
    """Activations ``[1, T, hidden]``, states ``[1, T, H_kv, D]``, and the context."""
    generator = rng(2)
    x = jnp.asarray(generator.normal(size=(1, time, 8)), jnp.float32)
    e = jnp.asarray(generator.normal(size=(1, time, 2, 6)), jnp.float32)
    return x, e, Context(default_positions(time), None, None, 0, is_causal=True)


def test_attention_returns_what_its_cache_gains():
    x, e, context = inputs()
    attention = Attention(CONFIG, positions.Tape(), attend_state=True)
    variables = random_params(attention, x, e, {}, context, None)
    empty = LayerCache(*(jnp.zeros((1, 2, 9, 6)) for _ in range(3)))
    context = context.replace(positions=default_positions(9), index=jnp.int32(2))
    _, _, new = jax.jit(attention.apply)(variables, x, e, {}, context, empty)
    kernels = {name: np.asarray(variables["params"][name]["kernel"]) for name in "kv"}
    k, v = ((x @ kernels[name]).reshape(1, 5, 2, 6) for name in "kv")
    turned = (k[..., :3] + 1j * k[..., 3:]) * (e[..., :3] + 1j * e[..., 3:])
    expected = LayerCache(jnp.concatenate([turned.real, turned.imag], -1), v, e)
    expected = jax.tree.map(lambda a: a.swapaxes(1, 2), expected)
    chex.assert_trees_all_close(new, expected, atol=1e-4)


def test_a_cache_is_written_where_the_index_says():
    empty = LayerCache(*(jnp.zeros((3, 1, 2, 9, 6)) for _ in range(2)), e=None)
    new = jax.tree.map(lambda a: jnp.ones((3, 1, 2, 5, 6)), empty)
    cache = jax.jit(functools.partial(write_cache, axis=3))(empty, new, jnp.int32(2))
    for array in (cache.k, cache.v):
        np.testing.assert_array_equal(array[0, 0, 0, :, 0], [0, 0, 1, 1, 1, 1, 1, 0, 0])
        assert array.sum() == 3 * 2 * 5 * 6
    assert cache.e is None


def test_block():
    x, e, context = inputs()
    encoding = positions.Tape(alpha=0.5, activation="tanh")
    block = Block(CONFIG, OfLayer(encoding, None, True), record=True)
    variables = random_params(block, (x, e), None, context, None)
    (h, state), (cache, entered) = jax.jit(block.apply)(variables, (x, e), None, context, None)
    assert cache is None
    chex.assert_trees_all_equal(entered, (x, e))

    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), variables["params"])
    x0, e0 = np.asarray(x[0], np.float64), np.asarray(e[0], np.float64)
    out, a = numpy_attention(rms_norm(x0, p["attention_norm"]["scale"]), p["attention"], e0)
    middle = x0 + out
    y = rms_norm(middle, p["mlp_norm"]["scale"])
    kernels = {name: leaf["kernel"] for name, leaf in p["mlp"].items()}
    x1 = (silu(y @ kernels["gate"]) * (y @ kernels["up"])) @ kernels["down"]
    e1 = e0 + 0.5 * np.einsum("hq,tqd->thd", p["position_mix"], a)
    gate = np.tanh(x1 @ p["position_wx"])
    hidden = np.einsum("ph,thd->tpd", p["position_up"], e1) * gate[..., None]
    e2 = e1 + 0.5 * np.einsum("hp,tpd->thd", p["position_down"], hidden)
    for actual, wanted in ((h, middle + x1), (state, e2)):
        allowed = 1e-5 * np.abs(wanted).max()
        chex.assert_trees_all_close(actual[0], wanted.astype(np.float32), atol=allowed, rtol=0)


def test_a_packed_state():
    e = jnp.arange(2 * 5 * 3 * 4).reshape(2, 5, 3, 4)
    state = {"rotary": e, "tensor": e[..., None, None] * jnp.ones((2, 2)), "places": e[..., 0, 0]}
    state |= {"layer": jnp.int32(3)}
    packed = pack_state(state, 2)
    shapes = jax.tree.map(jnp.shape, packed.flat)
    assert shapes == {"rotary": (2, 5, 12), "tensor": (2, 5, 48), "places": (2, 5), "layer": ()}
    chex.assert_trees_all_equal(packed.unpack(), state)


def test_a_packed_state_leaves_a_block_packed():
    x, e, context = inputs()
    block = Block(CONFIG, OfLayer(positions.Tape(), None, True), record=True)
    variables = random_params(block, (x, e), None, context, None)
    apply = jax.jit(block.apply)
    (h, state), (_, entered) = apply(variables, (x, e), None, context, None)
    packed = apply(variables, (x, pack_state(e, 2)), None, context, None)
    assert packed[0][1].flat.shape == (*e.shape[:2], e[0, 0].size)
    chex.assert_trees_all_equal((packed[0][0], packed[0][1].unpack()), (h, state))
    chex.assert_trees_all_equal(packed[1][1], entered)


def test_a_block_that_does_not_update_hands_the_state_on():
    x, e, context = inputs()
    block = Block(CONFIG, OfLayer(positions.Tape(), None, False))
    variables = random_params(block, (x, None), e, context, None)
    assert not [name for name in variables["params"] if name.startswith("position")]
    (_, state), _ = jax.jit(block.apply)(variables, (x, None), e, context, None)
    assert state is None


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("a", [(0, 1, 1)]),
        ("abba", [(0, 1, 1), (1, 1, 2), (3, 1, 1)]),
        ("aaab", [(0, 1, 3), (3, 1, 1)]),
        ("aabaab", [(0, 3, 2)]),
        ("aabaabaa", [(0, 3, 2), (6, 1, 2)]),
        ("abcabd", [(0, 1, 1), (1, 1, 1), (2, 1, 1), (3, 1, 1), (4, 1, 1), (5, 1, 1)]),
        ("aaaaab" * 10 + "aa", [(0, 6, 10), (60, 1, 2)]),
    ],
)
def test_loops(kinds, expected):
    assert loops(kinds) == expected


@pytest.mark.slow
@pytest.mark.parametrize("scan_layers", [True, False])
def test_attention_maps(scan_layers):
    """Maps are rows of probabilities that no later token enters; without asking there are none."""
    config = dataclasses.replace(CONFIG, num_layers=3, scan_layers=scan_layers)
    model, tokens = Transformer(config), jnp.arange(7)[None] % 5
    variables = model.init(jax.random.key(0), tokens)
    assert set(variables) == {"params"}
    logits, sown = model.apply(variables, tokens, mutable=["maps"])
    chex.assert_trees_all_close(logits, model.apply(variables, tokens))
    layers = jax.tree.leaves(sown["maps"])
    maps = np.concatenate([np.reshape(x, (-1, 7, 4, 7)) for x in layers])
    assert maps.shape == (3, 7, 4, 7)
    np.testing.assert_allclose(maps.sum(-1), 1, atol=1e-6)
    assert np.all(maps.swapaxes(1, 2)[..., *np.triu_indices(7, 1)] == 0)
    assert np.all(maps.swapaxes(1, 2)[..., *np.tril_indices(7)] > 0)


def shifted_mask(time, groups, heads, segments=None):
    """Visible pairs ``[H, T, T]``, written down token by token."""
    width = time // groups
    mask = np.zeros((heads, time, time), bool)
    for h in range(heads):
        shift = width // 2 if h >= heads // 2 else 0
        for i in range(time):
            for j in range(i + 1):
                same_group = (i + shift) // width == (j + shift) // width
                mask[h, i, j] = same_group and (segments is None or segments[i] == segments[j])
    return mask


@pytest.mark.parametrize(
    ("position", "options", "packed"),
    mostly_slow(
        [
            (positions.Tape(), {}, False),
            (positions.Tape(form="tensor", attention_mix="heads"), {"num_kv_heads": 2}, True),
            ("xpos", {"local_window_size": 3}, False),
            ("none", {}, True),
        ],
        (positions.Tape(), {}, False),
        ("none", {}, True),
    ),
)
def test_shifted_groups_equal_their_mask(position, options, packed):
    options = {"num_heads": 4, "num_layers": 2, **options}
    full, shifted = (small_model(position, **options, shifted_groups=n) for n in (None, 3))
    variables, tokens = random_variables(full), jnp.asarray(rng(3).integers(0, 13, (2, 12)))
    segments = np.array([-1, -1, -1, -1, -1, 5, 5, 5, 5, 5, 2, 2]) if packed else None
    mask = shifted_mask(12, 3, 4, segments)
    expected = jax.jit(full.apply)(variables, tokens, mask=mask)
    actual = jax.jit(shifted.apply)(variables, tokens, segment_ids=segments)
    chex.assert_trees_all_close(actual, expected, atol=2e-5 * float(jnp.abs(expected).max()))


def test_gradients_of_shifted_groups_reach_exactly_the_visible_tokens():
    """No later token, not even round the end of the sequence, and every token of the group."""
    x, e, context = inputs(time=12)
    config = dataclasses.replace(CONFIG, shifted_groups=3)
    attention = Attention(config, positions.Tape(), attend_state=True)
    variables = random_params(attention, x, e, {}, context, None)

    def out(x):
        return attention.apply(variables, x, e, {}, context, None)[0][0].sum(-1)

    def attended(e):
        return attention.apply(variables, x, e, {}, context, None)[1][0].sum((-2, -1))

    visible = shifted_mask(12, 3, 4).any(0)
    for function, of in ((out, x), (attended, e)):
        jacobian = jax.jit(jax.jacrev(function))(of)
        depends = np.abs(jacobian.reshape(12, 12, -1)).max(-1) > 0
        np.testing.assert_array_equal(depends, visible)


def test_misuse_of_shifted_groups():
    model = small_model("tape", shifted_groups=2)
    variables, tokens = random_variables(model), jnp.zeros((1, 6), jnp.int32)

    def trace(model, **options):
        jax.eval_shape(lambda: model.apply(variables, tokens, **options))

    with pytest.raises(ValueError, match=r"length that is a multiple of 4; got 6"):
        trace(model)
    tokens = tokens[:, :4]
    with pytest.raises(ValueError, match=r"without mask; got one"):
        trace(model, mask=jnp.ones((4, 4), bool))
    with pytest.raises(ValueError, match=r"caches and attention maps need full attention"):
        trace(model, mutable=["maps"])
    with pytest.raises(ValueError, match=r"caches and attention maps need full attention"):
        trace(model, cache=init_cache(model, 1, 8))
    for position, kind in (("fire", "fire"), ("path+fox", "path"), ("rope+stickbreaking", "stick")):
        with pytest.raises(ValueError, match=rf"shifted_groups = 2 cuts .* which '{kind}"):
            small_model(position, shifted_groups=2)
    small_model("tape+fox+alibi", shifted_groups=2)
