"""Meshes as ``jax.make_mesh`` makes them: values, gradients and shardings in types."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import tape_jax as tape
from tape_jax import losses
from tape_jax._src.core.explicit import distinct
from tests.models import normal, random_tokens, random_variables, small_model

BATCH, TIME, HEADS, KV_HEADS, DIM = 2, 8, 4, 2, 8
SPLITS = {
    "batch": P("data", None, None, None),
    "heads": P(None, None, "tensor", None),
    "both": P("data", None, "tensor", None),
}


def mesh_of(kind=AxisType.Explicit):
    return jax.make_mesh((2, 2), ("data", "tensor"), (kind,) * 2, devices=jax.devices()[:4])


def put(mesh, spec, *arrays):
    return [jax.device_put(x, NamedSharding(mesh, P(*spec[: np.ndim(x)]))) for x in arrays]


def arrays():
    sizes = [HEADS, KV_HEADS, KV_HEADS, KV_HEADS]
    return [
        jnp.asarray(normal(BATCH, TIME, h, DIM, seed=n), "float32") for n, h in enumerate(sizes)
    ]


def attend(q, k, v, e, implementation=None):
    interpret = implementation == "pallas"
    return tape.attention(
        q, k, v, state=e, is_causal=True, implementation=implementation, interpret=interpret
    )


def with_gradients(function):
    """Values, and gradients of a sum of them."""

    def total(*args):
        out = function(*args)
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(out)), out

    def run(*args):
        (_, out), gradients = jax.value_and_grad(total, range(len(args)), has_aux=True)(*args)
        return out, gradients

    return jax.jit(run)


@pytest.mark.mostly_slow(3)
@pytest.mark.parametrize(
    ("implementation", "split", "kind"),
    [
        ("reference", "both", AxisType.Explicit),
        ("chunked", "both", AxisType.Explicit),
        ("chunked", "heads", AxisType.Auto),
        ("pallas", "both", AxisType.Explicit),
        ("chunked", "batch", AxisType.Explicit),
        ("rows", "both", AxisType.Explicit),
        ("query_blocks", "both", AxisType.Explicit),
    ],
)
def test_attention(implementation, split, kind):
    run = with_gradients(functools.partial(attend, implementation=implementation))
    args, spec, mesh = arrays(), SPLITS[split], mesh_of(kind)
    with jax.set_mesh(mesh):
        got = run(*put(mesh, spec, *args))
    chex.assert_trees_all_close(got, run(*args), atol=1e-4)
    if kind == AxisType.Explicit:
        specs = {jax.typeof(x).sharding.spec for x in jax.tree.leaves(got)}
        assert specs == {spec}


def test_update():
    q, e, *_ = arrays()
    x = jnp.asarray(normal(BATCH, TIME, 16), "float32")
    params = tape.init_update(jax.random.key(0), 16, HEADS, num_kv_heads=KV_HEADS)
    params = jax.tree.map(lambda z: z + 0.1, params)
    run = with_gradients(functools.partial(tape.update_state, alpha=0.7, norm="rms"))
    mesh, spec = mesh_of(), SPLITS["both"]
    with jax.set_mesh(mesh):
        got = run(params, *put(mesh, spec, e, q), *put(mesh, spec[:1], x))
    chex.assert_trees_all_close(got, run(params, e, q, x), atol=1e-4)
    assert jax.typeof(got[0]).sharding.spec == spec


def test_without_a_context():
    """A call that is not jitted: its arrays say which mesh it is."""
    args, mesh, spec = arrays(), mesh_of(), SPLITS["both"]
    split = put(mesh, spec, *args)
    got = attend(*split)
    chex.assert_trees_all_close(got, attend(*args), atol=1e-5)
    assert jax.typeof(got[1]).sharding.spec == spec


def test_manual_axes():
    args, mesh = arrays(), mesh_of()
    spec = SPLITS["both"]
    mapped = jax.shard_map(
        attend, mesh=mesh, in_specs=(spec,) * 4, out_specs=(spec, spec), check_vma=False
    )
    chex.assert_trees_all_close(jax.jit(mapped)(*put(mesh, spec, *args)), attend(*args), atol=1e-5)


def test_loops_under_manual_axes():
    """Arrays that devices share too: their gradients are sums over devices."""
    q, k, v, _ = arrays()
    shared = normal(TIME, DIM), normal(1, 1, TIME, TIME, seed=1), normal(1, TIME, 1, seed=2)
    args = q, k, v, *(jnp.asarray(x, "float32") for x in shared)
    ids = jnp.array([0] * 3 + [1] * (TIME - 3))

    def blocks(q, k, v, e, bias, decay):
        return tape.attention(
            q, k, v, state=e, bias=bias, log_decay=decay, is_causal=True, local_window_size=5,
            segment_ids=ids, implementation="chunked", options={"block_q": 4, "block_k": 4},
        )  # fmt: skip

    mesh, spec = mesh_of(), SPLITS["both"]
    mapped = jax.shard_map(
        blocks, mesh=mesh, in_specs=(spec,) * 3 + (P(),) * 3, out_specs=(spec, spec)
    )
    moved = *put(mesh, spec, q, k, v), *put(mesh, (), *args[3:])
    chex.assert_trees_all_close(
        with_gradients(mapped)(*moved), with_gradients(blocks)(*args), atol=1e-4
    )


def test_a_loss_under_manual_axes():
    hidden, kernel = (jnp.asarray(normal(*s), "float32") for s in ((BATCH, TIME, DIM), (DIM, 12)))

    def each(hidden, kernel):
        targets = jnp.broadcast_to(jnp.arange(TIME), hidden.shape[:-1])
        return losses.cross_entropy(hidden, kernel, targets, chunk=3)[None]

    mesh = mesh_of()
    mapped = jax.shard_map(each, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    got = with_gradients(lambda *args: mapped(*args).sum())(
        *put(mesh, P("data"), hidden), *put(mesh, (), kernel)
    )
    want = with_gradients(lambda *args: each(*args).sum())(hidden, kernel)
    chex.assert_trees_all_close(got, want, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"remat": "groups"}, {"position": "rope+alibi"}], ids=str)
def test_a_model_under_manual_axes(options):
    """Its state starts equal on all devices, and is updated by what each of them has."""
    model = small_model(**{"position": "tape", "num_layers": 4, **options})
    variables, tokens = random_variables(model), random_tokens(BATCH, TIME)
    mesh = mesh_of()
    mapped = jax.shard_map(model.apply, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    (moved,) = put(mesh, P("data"), tokens)
    got = with_gradients(lambda v: mapped(v, moved))(
        jax.device_put(variables, NamedSharding(mesh, P()))
    )
    want = with_gradients(lambda v: model.apply(v, tokens))(variables)
    chex.assert_trees_all_close(got, want, atol=1e-3)


def test_functions_as_bias_under_manual_axes():
    """Those that are differentiable there do it; chunked says why not."""
    q, k, v, _ = arrays()
    mesh, spec = mesh_of(), SPLITS["batch"]

    def call(q, k, v, implementation=None):
        bias = lambda i, j: -0.3 * abs(i[:, None] - j)  # noqa: E731
        return tape.attention(q, k, v, bias=bias, implementation=implementation)[0]

    def on_devices(function):
        mapped = jax.shard_map(function, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
        return with_gradients(mapped)(*put(mesh, spec, q, k, v))

    got = on_devices(functools.partial(call, implementation=("chunked", "rows")))
    chex.assert_trees_all_close(got, with_gradients(call)(q, k, v), atol=1e-4)
    with pytest.raises(NotImplementedError, match=r"no derivative here in jax\.shard_map"):
        on_devices(functools.partial(call, implementation="chunked"))


def test_manual_axes_beside_explicit_ones():
    args, mesh, spec = arrays(), mesh_of(), SPLITS["both"]
    run = with_gradients(attend)
    manual, rest = P("data"), P(None, None, "tensor")
    outs = jax.tree.map(lambda x: manual, jax.eval_shape(attend, *args))
    mapped = jax.shard_map(
        lambda *args: (attend(*args), jax.grad(lambda *a: jnp.sum(jnp.sin(attend(*a)[0])))(*args)),
        axis_names={"data"}, in_specs=(manual,) * 4, out_specs=(outs, manual),
    )  # fmt: skip
    with jax.set_mesh(mesh):
        got, gradient = jax.jit(mapped)(*put(mesh, rest, *args))
    chex.assert_trees_all_close(got, run(*args)[0], atol=1e-5)
    want = jax.grad(lambda *a: jnp.sum(jnp.sin(attend(*a)[0])))(*args)
    chex.assert_trees_all_close(gradient, want, atol=1e-5)
    assert {jax.typeof(x).sharding.spec for x in (*got, gradient)} == {spec}


def test_a_mesh_axis_splits_one_axis_of_a_result():
    """Values split by width where queries are split by heads."""
    (q, k, v, e), mesh = arrays(), mesh_of()
    moved = *put(mesh, SPLITS["heads"], q), *put(mesh, (), k)
    got, _ = attend(*moved, *put(mesh, P(None, None, None, "tensor"), v), *put(mesh, (), e))
    chex.assert_trees_all_close(got, attend(q, k, v, e)[0], atol=1e-5)
    assert jax.typeof(got).sharding.spec == SPLITS["heads"]
    assert distinct((("a", "b"), None, ("b", "c"), "a")) == (("a", "b"), None, "c", None)


def test_a_plan():
    """Of arrays and of shapes, with a mesh that is set and without."""
    args, mesh = arrays(), mesh_of()
    split = put(mesh, SPLITS["both"], *args)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in split]

    def plan(q, k, v, e):
        return tape.attention_plan(q, k, v, state=e, is_causal=True)

    assert plan(*args) == plan(*split) == plan(*shapes)
    with jax.set_mesh(mesh):
        assert plan(*args) == plan(*split) == plan(*shapes)


def test_arrays_that_disagree():
    q, k, v, e = arrays()
    other = jax.make_mesh((4,), ("all",), devices=jax.devices()[4:])
    for mesh, spec, words in (
        (mesh_of(), P("tensor"), r"a batch axis of q, k and v .*'data' and 'tensor'"),
        (other, P(None), "arrays must lie on one mesh; got float32"),
    ):
        with pytest.raises(ValueError, match=words):
            attend(*put(mesh_of(), P("data"), q), *put(mesh, spec, k, v, e))
