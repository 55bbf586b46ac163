"""Log decay alone; its results are tested with those of all other calls."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tape_jax._src.attention import attention
from tape_jax._src.attention.shifted_groups import shifted_group_attention
from tests.library.attention.backends import (
    BACKENDS,
    assert_close,
    assert_sharded_alone,
    attend,
    jit,
    normal,
    qkve,
)
from tests.selection import mostly_slow


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "dtype"), [("chunked", "bfloat16"), ("pallas", "bfloat16")])
def test_large_decays_are_subtracted_first(backend, dtype):
    """Thousands that all arrays share change nothing: their differences here are exact."""
    q, k, v, _ = qkve(33, dtype=dtype)
    near = jnp.asarray(np.random.default_rng(0).integers(-40, 40, (2, 33, 2)) / 16, jnp.float32)

    @jax.jit
    def f(log_decay):
        def loss(*args):
            o, _ = attention(*args[:3], log_decay=args[3], is_causal=True, **BACKENDS[backend])
            return jnp.sum(jnp.sin(o.astype(jnp.float32))), o

        return jax.grad(loss, (0, 1, 2, 3), has_aux=True)(q, k, v, log_decay)

    for far in (4096, -4096):
        chex.assert_trees_all_equal(f(near + far), f(near))
    assert f(near)[0][3].dtype == jnp.float32


@pytest.mark.slow
def test_type_of_the_decay_is_kept(x64):
    """Float64 is subtracted in float64, also where all else is float32; half types in float32."""
    q, k, v, _ = qkve(9)
    near = np.random.default_rng(0).normal(size=(2, 9, 2))

    @jax.jit
    def f(log_decay):
        return attention(q, k, v, log_decay=log_decay, **BACKENDS["chunked"])[0]

    far = jnp.asarray(near + 2.0**30)
    np.testing.assert_allclose(f(far), f(jnp.asarray(near)), atol=1e-6)
    for dtype in (jnp.float64, jnp.bfloat16):
        given = jnp.asarray(near, dtype)
        assert jax.grad(lambda x: jnp.sum(f(x) ** 2))(given).dtype == dtype
        np.testing.assert_allclose(f(given), f(given.astype(jnp.float64)), atol=1e-6)


@pytest.mark.parametrize("backend", mostly_slow(["reference", "chunked", "pallas"], "chunked"))
def test_what_a_whole_row_is_given_has_no_gradient(backend):
    """Exact zeros for queries, and for keys that nothing sees."""
    q, k, v, _ = qkve(12, dtype="bfloat16")

    def loss(queries, keys):
        hidden = np.arange(12) < 3
        o, _ = attention(
            q, k, v, log_decay=(queries, keys), segment_ids=(0 * hidden, 1 * hidden),
            **BACKENDS[backend],
        )  # fmt: skip
        return jnp.sum(jnp.sin(o.astype(jnp.float32)))

    queries, keys = normal(0, 2, 12, 2), normal(1, 12, 1)
    d_queries, d_keys = jax.jit(jax.grad(loss, (0, 1)))(queries, keys)
    assert np.all(d_queries == 0)
    assert np.all(d_keys[:3] == 0)
    assert np.all(d_keys[3:] != 0)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["chunked", "pallas"])
def test_vmap(backend):
    """With a decay for each row, and with one for all, which is not batched."""
    q, k, v, e = qkve(12)
    decay = normal(7, 2, 12, 2)

    def f(q, k, v, e, decay, **keywords):
        o, a = attention(q, k, v, state=e, log_decay=decay, is_causal=True, **keywords)
        return jnp.sum(jnp.sin(o)) + jnp.sum(a**2)

    grad = jax.grad(f, (0, 1, 2, 3, 4))
    of_reference = jit(lambda *args: grad(*args, implementation="reference"))
    of_rows = functools.partial(grad, **BACKENDS[backend])
    by_row = jit(jax.vmap(of_rows))(q, k, v, e, decay)
    assert_close(by_row, of_reference(q, k, v, e, decay), 1e-5)
    shared = jit(jax.vmap(of_rows, in_axes=(0, 0, 0, 0, None)))(q, k, v, e, decay[0])
    want = of_reference(q, k, v, e, jnp.stack([decay[0]] * 2))
    assert_close(shared, want, 1e-5)


def test_sharded_over_batch_and_heads():
    """Each device runs the kernels with its rows, its heads and their decay."""

    def f(ids, q, k, v, decay, **implementation):
        def loss(*args):
            options = {"is_causal": True, "segment_ids": ids, **implementation}
            o, _ = attention(*args[:3], log_decay=args[3][..., 0], **options)
            return jnp.sum(jnp.sin(o)), o

        return jax.grad(loss, (0, 1, 2, 3), has_aux=True)(q, k, v, decay)

    q, k, v, _ = qkve(19, heads=4, kv_heads=2)
    ids = jnp.sort(jnp.asarray(np.random.default_rng(0).integers(0, 3, (2, 19))))
    decay = normal(9, 2, 19, 4, 1)
    assert_sharded_alone(functools.partial(f, **BACKENDS["pallas"]), f, ids, q, k, v, decay)


@pytest.mark.slow
def test_one_decay_for_sharded_batch_and_heads():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    q, k, v, _ = qkve(19, heads=4, kv_heads=2)
    decay = normal(9, 19, 1)

    def loss(q, k, v, decay, **implementation):
        o, _ = attention(q, k, v, log_decay=decay, is_causal=True, **implementation)
        return jnp.sum(jnp.sin(o))

    want = jax.jit(jax.grad(functools.partial(loss, implementation="reference"), (0, 3)))
    found = jax.jit(jax.grad(functools.partial(loss, **BACKENDS["pallas"]), (0, 3)))
    placed = NamedSharding(mesh, PartitionSpec("data", None, "model"))
    got = jax.device_get(found(*jax.device_put((q, k, v), placed), decay))
    assert_close(got, jax.device_get(want(q, k, v, decay)), 1e-5)


@pytest.mark.slow
def test_shifted_groups():
    """Each half of the heads attends inside of its own groups, which segment ids can say too."""
    q, k, v, e = qkve(24, heads=4)
    decay = -jnp.cumsum(jnp.abs(normal(6, 24, 4)), axis=0)
    call = {"is_causal": True}
    halves = []
    for half, ids in enumerate((np.arange(24) // 8, (np.arange(24) + 4) // 8)):
        h, g = slice(2 * half, 2 * half + 2), slice(half, half + 1)
        arrays = q[:, :, h], k[:, :, g], v[:, :, g], e[:, :, g]
        halves.append(attend(*arrays, segment_ids=ids, log_decay=decay[:, h], **call))
    want = jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), *halves)
    for given in (decay, (decay, decay)):
        found = shifted_group_attention(q, k, v, groups=3, state=e, log_decay=given, **call)
        chex.assert_trees_all_close(found, want, atol=1e-5)
    with pytest.raises(ValueError, match=r"log_decay: expected shape .*; got \(23, 1\)"):
        shifted_group_attention(q, k, v, groups=3, log_decay=jnp.zeros((23, 1)), **call)


def test_distant_ids_in_shifted_groups():
    """Ids may be any integers, as in ``attention``."""
    q, k, v, _ = qkve(8, heads=2)
    near, far = (jnp.repeat(jnp.array(pair), 4) for pair in ([1, 2], [-(2**30), 2**30]))
    both = [shifted_group_attention(q, k, v, groups=1, segment_ids=ids)[0] for ids in (near, far)]
    np.testing.assert_array_equal(*both)
    with pytest.raises(ValueError, match="segment_ids must fit in int32"):
        shifted_group_attention(q, k, v, groups=1, segment_ids=np.full(8, 2**32))
    for name, value in {"window_positions": jnp.arange(8), "query_offset": 1}.items():
        with pytest.raises(ValueError, match=f"a call without {name}; got one"):
            shifted_group_attention(q, k, v, groups=1, **{name: value})


@pytest.mark.mostly_slow
@pytest.mark.parametrize("backend", ["query_blocks", "chunked", "reference"])
def test_a_head_that_is_not_finite_spoils_no_other(backend):
    q, k, v = (normal(i, 1, 8, 3, 4) for i in range(3))
    decay = normal(3, 1, 8, 3)
    wrong = decay.at[0, 3, 1:].set(jnp.array([jnp.nan, -jnp.inf]))

    @functools.partial(jit, static_argnums=1)
    def attended(decay, implementation):
        call = {"is_causal": True, "implementation": implementation}
        return attention(q, k, v, log_decay=decay, **call)[0]

    out, expected = attended(wrong, backend), attended(decay, "reference")
    chex.assert_trees_all_close(out[:, :, 0], expected[:, :, 0], atol=1e-5)
    assert jnp.isnan(out[:, 3:, 1:]).all()


@pytest.mark.slow
def test_a_float32_bias_of_float64_queries_has_gradients(x64):
    """By blocks, where gradients are summed in the type of the bias."""
    q = normal(0, 1, 9, 2, 8, dtype=jnp.float64)

    def loss(bias, decay, backend):
        o, _ = attention(q, q, q, bias=bias, log_decay=decay, **BACKENDS[backend])
        return jnp.sum(jnp.sin(o))

    bias, decay = normal(1, 9, 9), normal(2, 9, 2)
    want, found = (
        jax.grad(loss, (0, 1))(bias, decay, backend) for backend in ("reference", "chunked")
    )
    chex.assert_trees_all_equal_dtypes(found, want)
    chex.assert_trees_all_close(found, want, atol=1e-6)
