"""Attention under jit, grad, vmap, scan, checkpoint and shardings is what it is by itself."""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tape_jax import rotary_state
from tape_jax._src.attention import attention, chunked
from tests.library.attention.backends import (
    ARRAYS,
    BACKENDS,
    assert_close,
    assert_sharded_alone,
    attend,
    each,
    jit,
    outputs_and_gradients,
    qkve,
)
from tests.library.attention.cases import BY_NAME, bias_function, inputs, oracle
from tests.selection import mostly_slow


def of_closures(floats, rank, **keywords):
    """A scalar of a call whose bias function closes over floats and integers."""
    bias = bias_function(jnp.tanh(floats["bias"]), floats["phase"], rank + 1)
    arrays = [floats[name] for name in ARRAYS]
    o, a = attend(*arrays, is_causal=True, bias=bias, **keywords)
    return jnp.sum(jnp.sin(o)) + jnp.sum(a**2)


@pytest.mark.parametrize(
    "transform", mostly_slow(["outside_jit", "vmap", "checkpoint", "scan"], "vmap")
)
def test_bias_closures(transform):
    """Gradients reach floats that a bias function closes over, whatever transforms the call."""
    floats, fixed = inputs(BY_NAME["multi_query"])
    floats = {n: jnp.asarray(x, jnp.float32) for n, x in floats.items()}
    rank = jnp.asarray(fixed["rank"])
    f = functools.partial(of_closures, **BACKENDS["chunked"])

    def by_row(floats, rank):
        batched = dict.fromkeys(floats, 0) | {"bias": None}
        return jnp.sum(jax.vmap(f, in_axes=(batched, 0))(floats, rank))

    def by_scan(floats, rank):
        def step(total, bias):
            return total + f({**floats, "bias": bias}, rank), None

        return jax.lax.scan(step, 0.0, floats["bias"][None])[0]

    gradient = {
        "outside_jit": jax.grad(f),
        "vmap": jit(jax.grad(by_row)),
        "checkpoint": jit(jax.grad(jax.checkpoint(f))),
        "scan": jit(jax.grad(by_scan)),
    }[transform](floats, rank)
    want = jit(jax.grad(functools.partial(of_closures, implementation="reference")))
    assert_close(gradient, want(floats, rank), 2e-5)


@pytest.mark.slow
@each("splash")
def test_sharded_over_batch_and_heads(backend, keywords):
    """Each device attends with its rows and heads, and talks to no other."""
    args = qkve(19, heads=4, kv_heads=2)
    ids = jnp.sort(jnp.asarray(np.random.default_rng(0).integers(0, 3, (2, 19))))

    def f(ids, *args, **implementation):
        return outputs_and_gradients(*args, is_causal=True, segment_ids=ids, **implementation)

    assert_sharded_alone(functools.partial(f, **keywords), f, ids, *args)


@each("pallas", "splash", slow=["splash"])
def test_sharded_time_is_gathered(backend, keywords):
    """A sharded axis over which the kernels cannot be split gives the right result too."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    args = qkve(20, heads=2, kv_heads=1)
    want = jit(functools.partial(attend, is_causal=True, implementation="reference"))(*args)
    f = jit(functools.partial(attend, is_causal=True, **keywords))
    got = f(*jax.device_put(args, NamedSharding(mesh, PartitionSpec("data", "model"))))
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(want), atol=1e-6)


@each(slow=["rows", "pallas"], refused=["query_blocks", "splash"])
def test_traced_offset(backend, keywords):
    """query_offset may be traced, and batched by vmap."""
    case = BY_NAME["cache"]
    floats = {name: jnp.asarray(x, jnp.float32) for name, x in inputs(case)[0].items()}

    @jit
    @functools.partial(jax.vmap, in_axes=(0, None, 0))
    def f(q, rest, offset):
        return attention(
            q, *rest[:2], state=rest[2], is_causal=True, local_window_size=case.local_window_size,
            keys_rotated=True, query_offset=offset, query_state=floats["query_state"], **keywords,
        )  # fmt: skip

    offsets = [18, 3, -2]
    q = jnp.stack([floats["q"]] * 3)
    got = f(q, [floats[name] for name in ARRAYS[1:]], jnp.asarray(offsets))
    for n, offset in enumerate(offsets):
        want = oracle(dataclasses.replace(case, query_offset=offset), *inputs(case))
        assert_close(jax.tree.map(lambda x, n=n: np.asarray(x[n], np.float64), got), want, 1e-5)


@pytest.mark.slow
@each(refused=["query_blocks", "splash"])
def test_one_offset_for_each_row(backend, keywords):
    """Outputs and gradients are those of the rows, each by itself with its own offset."""
    case = BY_NAME["cache"]
    floats = {name: jnp.asarray(x, jnp.float32) for name, x in inputs(case)[0].items()}
    fixed = {"is_causal": True, "local_window_size": 8, "keys_rotated": True, **keywords}

    def loss(floats, offset):
        o, a = attention(**floats, query_offset=offset, **fixed)
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(a)), (o, a)

    gradients = jax.grad(loss, has_aux=True)
    got = jit(gradients)(floats, jnp.array([18, 5]))
    both = zip(*(jnp.split(x, 2) for x in floats.values()), strict=True)
    rows = [
        gradients(dict(zip(floats, row, strict=True)), n)
        for row, n in zip(both, (18, 5), strict=True)
    ]
    chex.assert_trees_all_close(got, jax.tree.map(lambda *x: jnp.concatenate(x), *rows), atol=1e-5)


def bias_of(table, factor, wrap=lambda f: f):
    """A bias that reads a table within what ``wrap`` returns, its derivative times ``factor``."""
    scaled = jax.custom_jvp(lambda x: x)
    scaled.defjvp(lambda x, t: (x[0], factor * t[0]))
    return wrap(lambda i, j: scaled(jnp.asarray(table)[jnp.abs(i[:, None] - j)]))


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["", "remat"])
def test_no_bias_function_is_taken_for_another(wrap):
    """Whether they differ in an array, or in their derivatives alone."""
    q, k, v, e = qkve(19)

    def loss(table, factor, implementation):
        bias = bias_of(table, factor, wrap)
        call = {"is_causal": True, "bias": bias, "implementation": implementation}
        return jnp.sum(jnp.sin(attention(q, k, v, state=e, **call)[0]))

    for sign, factor in ((1.0, 1.0), (-1.0, 1.0), (1.0, 3.0)):
        table = sign * jnp.arange(19.0) / 4
        found, want = (
            jax.value_and_grad(loss)(table, factor, name) for name in ("chunked", "reference")
        )
        assert_close(found, want, 1e-5)


def test_a_bias_function_is_compiled_once_with_the_program_around_it():
    """Outside of a program each call compiles its own, which goes when the call is over."""
    q, k, v, e = qkve(19)

    def call(table):
        call = {"is_causal": True, "bias": bias_of(table, 1.0), "implementation": "chunked"}
        return attention(q, k, v, state=e, **call)[0]

    compiled, kept = jax.jit(call), chunked._attend_compiled._cache_size()
    for n in range(3):
        table = jnp.arange(19.0) + n
        chex.assert_trees_all_close(compiled(table), call(table), atol=1e-6)
    assert compiled._cache_size() == 1
    assert chunked._attend_compiled._cache_size() == kept


@pytest.mark.slow
def test_chunked_names_who_has_second_derivatives():
    q, k, v, e = qkve(19)

    def squared(q, implementation):
        options = {"state": e, "is_causal": True, "implementation": implementation}
        gradient = jax.grad(lambda q: jnp.sum(attention(q, k, v, **options)[0] ** 2))(q)
        return jnp.sum(gradient**2)

    second = jit(jax.grad(functools.partial(squared, implementation="reference")))(q)
    assert jnp.isfinite(second).all()
    with pytest.raises(NotImplementedError, match="second order: name implementation='reference'"):
        jit(jax.grad(functools.partial(squared, implementation="chunked")))(q)


# --- Programs for sizes that are not known yet ---------------------------------------------------


def windowed(q, k, v, implementation=None):
    length = q.shape[1]
    return attention(
        q, k, v, state=rotary_state(jnp.arange(length), q.shape[-1]), is_causal=True,
        local_window_size=(3, 0), segment_ids=jnp.zeros(q.shape[:2], int),
        implementation=implementation,
    )  # fmt: skip


def open_sizes(shape):
    batch, time = export.symbolic_shape(shape)
    return [jax.ShapeDtypeStruct((batch, time, heads, 8), jnp.float32) for heads in (4, 2, 2)]


@pytest.mark.mostly_slow
@pytest.mark.parametrize("shape", ["2, t", "b, t"])
def test_one_program_for_all_sizes(shape):
    exported = export.export(jax.jit(windowed))(*open_sizes(shape))
    rng = np.random.default_rng(0)
    for batch, time in ((2, 6), (3, 40)):
        given = [jnp.asarray(rng.normal(size=(batch, time, h, 8)), jnp.float32) for h in (4, 2, 2)]
        if shape == "b, t" or (batch, time) == (2, 6):
            np.testing.assert_allclose(exported.call(*given)[0], windowed(*given)[0], atol=1e-6)


@pytest.mark.parametrize("name", ["chunked", "query_blocks", "rows"])
def test_what_needs_known_sizes_says_so(name):
    with pytest.raises(NotImplementedError, match=f"'{name}'.* 't' is symbolic, which 'reference'"):
        export.export(jax.jit(lambda q, k, v: windowed(q, k, v, name)))(*open_sizes("2, t"))
