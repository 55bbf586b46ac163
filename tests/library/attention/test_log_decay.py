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
    lowered,
    normal,
    qkve,
)

OURS = ("reference", "chunked", "pallas")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("reference", "float32"), ("chunked", "bfloat16"), ("pallas", "bfloat16")],
)
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
    for backend in ("reference", "chunked"):

        def f(log_decay, backend=backend):
            return attention(q, k, v, log_decay=log_decay, **BACKENDS[backend])[0]

        far = jnp.asarray(near + 2.0**30)
        np.testing.assert_allclose(f(far), f(jnp.asarray(near)), atol=1e-6)
        for dtype in (jnp.float64, jnp.float32, jnp.bfloat16):
            given = jnp.asarray(near, dtype)
            gradient = jax.grad(lambda x, f=f: jnp.sum(f(x) ** 2))(given)
            assert gradient.dtype == dtype
            np.testing.assert_allclose(f(given), f(given.astype(jnp.float64)), atol=1e-6)


@pytest.mark.parametrize("backend", OURS)
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
def test_decoding_with_a_cache():
    """The last queries of each row, by offsets for all or each, are those of the whole pass."""
    q, k, v, _ = qkve(20, heads=4)
    decay = -jnp.cumsum(jnp.abs(normal(5, 2, 20, 4)), axis=1)
    named = {"is_causal": True, **BACKENDS["pallas"]}
    want = attention(q, k, v, log_decay=decay, is_causal=True, implementation="reference")[0]

    @jax.jit
    def last(starts, offset):
        def cut(x):
            rows = zip(x, starts, strict=True)
            return jnp.stack([jax.lax.dynamic_slice_in_dim(row, n, 3) for row, n in rows])

        pair = (cut(decay), decay)
        found = attention(cut(q), k, v, log_decay=pair, query_offset=offset, **named)[0]
        return found, cut(want)

    for starts, offset in (([17, 17], 17), ([17, 4], jnp.array([17, 4]))):
        found, expected = last(starts, offset)
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["chunked", "pallas"])
def test_vmap_and_donated_arrays(backend):
    q, k, v, e = qkve(12)
    decay = normal(7, 2, 12, 2)

    def f(q, k, v, e, decay, **keywords):
        o, a = attention(q, k, v, state=e, log_decay=decay, is_causal=True, **keywords)
        return jnp.sum(jnp.sin(o)) + jnp.sum(a**2)

    grad = jax.grad(f, (0, 1, 2, 3, 4))
    want = jax.jit(lambda *args: grad(*args, implementation="reference"))(q, k, v, e, decay)

    def of_backend(*args):
        return grad(*args, **BACKENDS[backend])

    by_row = jax.jit(jax.vmap(of_backend))(q, k, v, e, decay)
    assert_close(by_row, want, 1e-5)
    # One decay for all rows, which is not batched.
    shared = jax.jit(jax.vmap(of_backend, in_axes=(0, 0, 0, 0, None)))(q, k, v, e, decay[0])
    rows = [of_backend(*(x[n] for x in (q, k, v, e)), decay[0]) for n in range(2)]
    assert_close(shared, jax.tree.map(lambda *x: jnp.stack(x), *rows), 1e-5)
    donated = jax.jit(of_backend, donate_argnums=tuple(range(5)))
    assert_close(donated(*map(jnp.copy, (q, k, v, e, decay))), want, 1e-5)


@pytest.mark.slow
def test_second_derivatives_of_reference(x64):
    """Those of the sum of the gates, through the queries' decay too, are those of a bias."""
    q, k, v, _ = (x.astype(jnp.float64) for x in qkve(6, heads=1, kv_heads=1, batch=1, dim=4))
    named = {"is_causal": True, "implementation": "reference"}

    def by_decay(f):
        return jnp.sum(jnp.sin(attention(q, k, v, log_decay=f[:, None], **named)[0]))

    def by_bias(f):
        return jnp.sum(jnp.sin(attention(q, k, v, bias=f[:, None] - f, **named)[0]))

    f = normal(3, 6, dtype=jnp.float64)
    for derivative in (jax.grad, jax.hessian, jax.jacfwd):
        np.testing.assert_allclose(derivative(by_decay)(f), derivative(by_bias)(f), atol=1e-12)


def test_kernels_refuse_float64(x64):
    q, k, v, _ = qkve(9)
    with pytest.raises(NotImplementedError, match="got float64"):
        attention(q, k, v, log_decay=jnp.zeros((9, 1)), **BACKENDS["pallas"])
    decay = jnp.zeros((9, 1), jnp.bfloat16)
    attention(q, k, v, log_decay=decay, **BACKENDS["pallas"])


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


@pytest.mark.usefixtures("any_device")
def test_lowers_to_cuda(x64):
    """Still one kernel forward and two backward, with rows past the end of a block."""
    q = jax.ShapeDtypeStruct((2, 200, 4, 64), "bfloat16")
    kv = jax.ShapeDtypeStruct((2, 200, 2, 64), "bfloat16")
    decay = jax.ShapeDtypeStruct((2, 200, 4), "float32")

    def forward(q, k, v, decay):
        return attention(q, k, v, log_decay=decay, is_causal=True, implementation="pallas")[0]

    backward = jax.grad(lambda *args: jnp.sum(forward(*args)), (0, 1, 2, 3))
    call = "custom_call @__gpu$xla.gpu.triton"
    assert lowered("cuda", forward, q, kv, kv, decay).count(call) == 1
    assert lowered("cuda", backward, q, kv, kv, decay).count(call) == 3


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 4])
def test_shifted_groups(heads):
    """Each half of the heads attends inside of its own groups, which segment ids can say too."""
    q, k, v, e = qkve(24, heads=4)
    decay = -jnp.cumsum(jnp.abs(normal(6, 24, heads)), axis=0)
    time = np.arange(24)

    def in_groups(decay):
        halves = []
        for half, ids in enumerate((time // 8, (time + 4) // 8)):
            h, g = slice(2 * half, 2 * half + 2), slice(half, half + 1)
            mine = decay if heads == 1 else decay[:, h]
            halves.append(
                attention(
                    q[:, :, h], k[:, :, g], v[:, :, g], state=e[:, :, g], is_causal=True,
                    segment_ids=ids, log_decay=mine, implementation="reference",
                )
            )  # fmt: skip
        return jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), *halves)

    def shifted(log_decay):
        return shifted_group_attention(
            q, k, v, groups=3, state=e, is_causal=True, log_decay=log_decay
        )

    for given in (decay, (decay, decay)):
        chex.assert_trees_all_close(shifted(given), in_groups(decay), atol=1e-5)
    gradients = [
        jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(x)[0])))(decay) for f in (shifted, in_groups)
    ]
    chex.assert_trees_all_close(*gradients, atol=1e-5)
    with pytest.raises(ValueError, match=r"log_decay: expected shape .*; got \(23, 1\)"):
        shifted(jnp.zeros((23, 1)))


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


@pytest.mark.parametrize("backend", ["reference", "query_blocks", "chunked"])
def test_a_head_that_is_not_finite_spoils_no_other(backend):
    q, k, v = (normal(i, 1, 8, 3, 4) for i in range(3))
    decay = normal(3, 1, 8, 3)
    wrong = decay.at[0, 3, 1:].set(jnp.array([jnp.nan, -jnp.inf]))
    out = attention(q, k, v, log_decay=wrong, is_causal=True, implementation=backend)[0]
    expected = attention(q, k, v, log_decay=decay, is_causal=True, implementation="reference")[0]
    chex.assert_trees_all_close(out[:, :, 0], expected[:, :, 0], atol=1e-5)
    assert jnp.isnan(out[:, 3:, 1:]).all()
