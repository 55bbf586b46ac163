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
from tests.models import normal

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


def test_arrays_that_disagree():
    q, k, v, e = arrays()
    other = jax.make_mesh((4,), ("all",), devices=jax.devices()[4:])
    for mesh, spec, words in (
        (mesh_of(), P("tensor"), r"a batch axis of q, k and v .*'data' and 'tensor'"),
        (other, P(None), "arrays must lie on one mesh; got float32"),
    ):
        with pytest.raises(ValueError, match=words):
            attend(*put(mesh_of(), P("data"), q), *put(mesh, spec, k, v, e))
