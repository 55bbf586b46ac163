"""The Linen module for one update, against the pure functions that it calls."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tape_jax as tape
import tape_jax.linen
from tape_jax import testing
from tests import models
from tests.selection import mostly_slow

BATCH, TIME, HEADS, KV_HEADS, DIM, WIDTH, LAYERS = 2, 5, 4, 2, 8, 6, 3
GROUPED = {"num_heads": HEADS, "num_kv_heads": KV_HEADS}
SHAPES = ("attention_mix", "mlp_mix", "width", "num_heads", "num_kv_heads")
CASES = {
    "plain": {"num_heads": HEADS},
    "grouped heads": GROUPED,
    "a scale for each head": {**GROUPED, "attention_mix": "head_scale", "norm": "rms"},
    "attended state alone": {**GROUPED, "mlp_mix": False, "alpha": 0.5},
    "MLP alone": {**GROUPED, "attention_mix": "none", "activation": "tanh", "width": 3},
    "unit norm": {**GROUPED, "norm": "unit", "magnitude": 1.5},
}


def normal(*shape, seed=0):
    return jnp.asarray(models.normal(*shape, seed=seed))


def inputs(options, block=(DIM,)):
    """A state, an attended state or None, and an MLP's output."""
    kv_heads = options.get("num_kv_heads") or options["num_heads"]
    e = normal(BATCH, TIME, kv_heads, *block, seed=1)
    a = normal(BATCH, TIME, options["num_heads"], *block, seed=2)
    return e, None if options.get("attention_mix") == "none" else a, normal(BATCH, TIME, WIDTH)


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    "name", ["plain", "MLP alone", "attended state alone", "a scale for each head"]
)
def test_parameters_are_those_of_init_update(name):
    options = CASES[name]
    variables = tape.UpdateState(**options).init(jax.random.key(0), *inputs(options))
    sizes = {name: options[name] for name in SHAPES if name in options}
    wanted = tape.init_update(jax.random.key(0), WIDTH, **sizes)
    assert jax.tree.map(jnp.shape, variables["params"]) == jax.tree.map(jnp.shape, wanted)
    for name, value in variables["params"].items():
        assert value.any() == wanted[name].any(), name


BLOCKS = {"rotary": (DIM,), "tensor": (DIM // 2, 2, 2)}
CALLS = [*((name, "rotary") for name in CASES), ("grouped heads", "tensor")]


@pytest.mark.parametrize(
    ("name", "form"), mostly_slow(CALLS, ("plain", "rotary"), ("grouped heads", "tensor"))
)
def test_it_equals_the_function(name, form):
    options = CASES[name]
    e, a, x = inputs(options, BLOCKS[form])
    module = tape.UpdateState(**options)
    params = testing.random_params(None, module.init(jax.random.key(0), e, a, x)["params"])
    names = ("alpha", "norm", "magnitude", "activation", "num_kv_heads")
    given = {name: options[name] for name in names if name in options}
    wanted = tape.update_state(params, e, a, x, **given)
    got = module.apply({"params": params}, e, a, x)
    np.testing.assert_array_equal(got, wanted)
    assert not np.allclose(got, e)


class Layer(nn.Module):
    """Attention over given queries, keys and values, and the update."""

    @nn.compact
    def __call__(self, e, x):
        q = normal(BATCH, TIME, HEADS, DIM, seed=3)
        k, v = normal(2, BATCH, TIME, KV_HEADS, DIM, seed=4)
        _, a = tape.attention(q, k, v, state=e, is_causal=True)
        return tape.UpdateState(**GROUPED, name="position")(e, a, x), None


@pytest.mark.slow
def test_in_a_scan_with_remat_under_jit():
    """The layers' parameters are stacked and drawn apart; values and gradients are the loop's."""
    stack = nn.scan(
        nn.remat(Layer),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=nn.broadcast,
        length=LAYERS,
    )()
    e, _, x = inputs(GROUPED)
    variables = jax.jit(stack.init)(jax.random.key(0), e, x)
    drawn = variables["params"]["position"]["wx"]
    assert drawn.shape == (LAYERS, WIDTH, 4 * KV_HEADS)
    assert not np.allclose(drawn[0], drawn[1])
    params = testing.random_params(None, variables["params"])

    def scanned(params, x):
        return stack.apply({"params": params}, e, x)[0]

    def loop(params, x):
        state = e
        for layer in range(LAYERS):
            one = jax.tree.map(lambda p: p[layer], params)  # noqa: B023
            state, _ = Layer().apply({"params": one}, state, x)
        return state

    def with_gradients(function):
        return jax.jit(
            jax.value_and_grad(lambda *args: jnp.square(function(*args)).sum(), argnums=(0, 1))
        )(params, x)

    got, wanted = with_gradients(scanned), with_gradients(loop)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), got, wanted)
    assert all(np.abs(g).max() > 0.01 for g in jax.tree.leaves(got))


@pytest.mark.slow
def test_parameters_are_of_the_default_type_or_the_given_one(x64):
    made = {
        dtype: tape.UpdateState(4, param_dtype=dtype).init(
            jax.random.key(0), *inputs({"num_heads": 4})
        )
        for dtype in (None, jnp.bfloat16)
    }
    assert {x.dtype for x in jax.tree.leaves(made[None])} == {jnp.dtype("float64")}
    assert {x.dtype for x in jax.tree.leaves(made[jnp.bfloat16])} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 4, "attention_mix": "head"}, "unknown attention_mix 'head'"),
        ({"num_heads": 4, "norm": "batch"}, "unknown norm 'batch'"),
        ({"num_heads": 4, "num_kv_heads": 3}, "not a multiple"),
        ({"num_heads": 8}, "has 4 heads; the parameters expect 8"),
        ({"num_heads": 4, "mlp_mix": "no"}, "mlp_mix must be True or False; got 'no'"),
        ({"num_heads": "4"}, "num_heads must be an integer; got '4'"),
        ({"num_heads": 4, "alpha": float("nan")}, "alpha must be a finite number; got nan"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wrong_options_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        tape.UpdateState(**options).init(jax.random.key(0), *inputs({"num_heads": 4}))


@pytest.mark.parametrize(
    "position", [{"kind": "repo", "first_layer": 1}, {"kind": "random_rope", "each_layer": True}]
)
def test_one_layer_of_what_differs_by_layer_is_refused(position):
    with pytest.raises(NotImplementedError, match="treats layers differently"):
        tape.linen.Attention(num_heads=2, position=position).init(
            jax.random.key(0), normal(1, 2, 8)
        )


@pytest.mark.parametrize("position", ["rope", "rope+fox+alibi"])
def test_positions_without_the_first_batch_axis(position):
    layer, x = tape.linen.Attention(num_heads=2, position=position), normal(2, 3, 4, 8)
    positions = jnp.arange(4) + jnp.array([[0], [5], [9]])
    segments = jnp.ones((2, 1, 4), jnp.int32)
    variables = layer.init(jax.random.key(0), x)
    short, whole = (
        layer.apply(variables, x, positions=given, segment_ids=segments)[0]
        for given in (positions, jnp.broadcast_to(positions, (2, 3, 4)))
    )
    np.testing.assert_allclose(short, whole, atol=1e-6)


def test_a_state_that_nobody_reads_is_refused():
    layer, x = tape.linen.Attention(num_heads=2, position="alibi"), normal(1, 2, 8)
    with pytest.raises(ValueError, match="'alibi' reads no state"):
        layer.init(jax.random.key(0), x, tape.rotary_state(jnp.arange(2), 4))


def test_a_window_beside_segments_of_queries_and_keys():
    layer = tape.linen.Attention(num_heads=2, position="rope", local_window_size=1)
    x, ids = normal(1, 4, 8), jnp.array([[1, 1, 2, 2]])
    variables = layer.init(jax.random.key(0), x)
    both = [layer.apply(variables, x, segment_ids=given)[0] for given in (ids, (ids, ids))]
    np.testing.assert_array_equal(*both)


@pytest.mark.parametrize("known", [True, False], ids=["known", "traced"])
def test_behind_its_last_slot_a_cache_gives_no_number(known):
    layer, x = tape.linen.Attention(num_heads=2), normal(1, 2, 8)
    variables = layer.init(jax.random.key(0), x)

    def step(index):
        cache = layer.init_cache(8, 1, 3)
        return layer.apply(variables, x, cache=cache, index=index)[:2]

    if known:
        with pytest.raises(
            ValueError, match="2 tokens do not fit into a cache of capacity 3 with 2"
        ):
            step(2)
        with pytest.raises(ValueError, match=r"do not fit .* with -1 in use"):
            jax.jit(lambda: step(-1))()
    else:
        assert all(np.isnan(y).all() for y in jax.jit(step)(2))
        assert all(np.isfinite(y).all() for y in jax.jit(step)(1))
