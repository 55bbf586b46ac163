"""Every attention backend against one table of cases.

The outputs of ``reference`` in float64 are compared with loops in numpy, its gradients with finite
differences; then it is the oracle of the others. To have a backend tested, add a line to BACKENDS.
"""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from tape_jax.attention import attention
from tests.attention.cases import BY_NAME, CASES, MASKED, bias_function, call, inputs, oracle

# (implementation, keywords of attention). Blocks are small, so that cases span several.
BACKENDS = {
    "reference": {"implementation": "reference"},
    "chunked": {"implementation": "chunked", "options": {"block_q": 8, "block_k": 4}},
}
BLOCKWISE = [name for name in BACKENDS if name != "reference"]
# Largest error relative to the largest value, against float64.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}

# Less optimisation halves the time that compilation takes; what is computed stays the same.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
backends = pytest.mark.parametrize("backend", BACKENDS)


def run(case, dtype, rounding=None, **keywords):
    """Outputs and the gradients of all floats, for fixed cotangents; all as float64 numpy.

    Inputs and cotangents are rounded to the type ``rounding`` first.
    """

    def cast(x):
        return jnp.asarray(x.astype(jnp.dtype(rounding or dtype)), dtype)

    floats, fixed = inputs(case)
    rng = np.random.default_rng(1)

    @jit
    def outputs_and_gradients(floats):
        out, pull = jax.vjp(lambda f: call(attention, case, f, fixed, **keywords), floats)
        cotangents = jax.tree.map(lambda x: cast(rng.normal(size=x.shape)), out)
        return out, pull(cotangents)[0]

    out = outputs_and_gradients(jax.tree.map(cast, floats))
    chex.assert_trees_all_equal_dtypes(*jax.tree.leaves(out))
    return jax.tree.map(lambda x: np.asarray(x, np.float64), out)


@functools.cache
def expected(name, rounding="float64"):
    """Outputs and gradients of ``reference`` in float64."""
    with jax.enable_x64(True):
        return run(BY_NAME[name], "float64", rounding, implementation="reference")


def assert_close(got, want, tolerance):
    chex.assert_trees_all_equal_shapes(got, want)
    scale = jax.tree.map(lambda x: max(1.0, np.abs(x).max()), want)
    got, want = (jax.tree.map(np.divide, x, scale) for x in (got, want))
    chex.assert_trees_all_close(got, want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", CASES + MASKED, ids=str)
def test_reference_outputs(case):
    assert_close(expected(case.name)[0], oracle(case, *inputs(case)), TOLERANCE["float64"])


@pytest.mark.parametrize("name", ["grouped_heads", "tensor", "bias_function", "cache"])
def test_reference_gradients(name, x64):
    """By finite differences."""
    case = BY_NAME[name]
    floats, fixed = inputs(case)
    f = jax.jit(lambda floats: call(attention, case, floats, fixed, implementation="reference"))
    check_grads(f, (jax.tree.map(jnp.asarray, floats),), order=1, modes=["rev"], rtol=1e-5)


@pytest.mark.parametrize("backend", BLOCKWISE)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients(backend, case):
    got = run(case, "float32", **BACKENDS[backend])
    assert_close(got, expected(case.name), TOLERANCE["float32"])


@pytest.mark.parametrize(("block_q", "block_k"), [(4, 16), (19, 5)])
@pytest.mark.parametrize("name", ["grouped_heads", "cross"])
def test_blocks_of_any_size(name, block_q, block_k):
    options = {"block_q": block_q, "block_k": block_k}
    got = run(BY_NAME[name], "float32", implementation="chunked", options=options)
    assert_close(got, expected(name), TOLERANCE["float32"])


@backends
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_types(backend, dtype):
    with jax.enable_x64(dtype == "float64"):
        got = run(BY_NAME["grouped_heads"], dtype, **BACKENDS[backend])
    assert_close(got, expected("grouped_heads", dtype), TOLERANCE[dtype])


@backends
def test_mixed_types(backend):
    """o is in the type of v, a in the type of e; both are as exact as the type of q allows."""
    case = BY_NAME["causal"]
    floats, fixed = inputs(case)
    types = {"q": jnp.bfloat16, "k": jnp.bfloat16, "v": jnp.float16, "e": jnp.float32}
    floats = {name: jnp.asarray(x, types[name]) for name, x in floats.items()}
    o, a = jit(lambda floats: call(attention, case, floats, fixed, **BACKENDS[backend]))(floats)
    assert (o.dtype, a.dtype) == (jnp.float16, jnp.float32)
    got = jax.tree.map(lambda x: np.asarray(x, np.float64), (o, a))
    assert_close(got, expected("causal")[0], TOLERANCE["bfloat16"])


@backends
def test_rows_without_keys_give_zeros(backend):
    case = BY_NAME["before_the_keys"]
    hidden = np.arange(case.queries) + case.query_offset < 0
    assert 0 < hidden.sum() < case.queries

    (o, a), gradients = run(case, "float32", **BACKENDS[backend])
    for x in (o, a, gradients["q"], gradients["query_state"]):
        assert np.all(x[:, hidden] == 0)
        assert np.all(np.isfinite(x))
        assert np.any(x[:, ~hidden] != 0)


@backends
def test_all_rows_hidden(backend):
    floats, _ = inputs(BY_NAME["causal"])
    ids = np.zeros(19, int)

    def f(floats):
        o, a = attention(**floats, segment_ids=(ids, ids + 1), **BACKENDS[backend])
        return o.sum() + a.sum(), (o, a)

    gradients, out = jit(jax.grad(f, has_aux=True))(jax.tree.map(jnp.asarray, floats))
    chex.assert_trees_all_equal((gradients, out), jax.tree.map(jnp.zeros_like, (gradients, out)))


@pytest.mark.parametrize("backend", BLOCKWISE)
@pytest.mark.parametrize("transform", ["jit_grad", "grad_jit", "vmap", "checkpoint", "scan"])
def test_bias_closures(backend, transform):
    """Gradients reach floats that a bias function closes over, whatever transforms the call."""
    case = BY_NAME["multi_query"]
    floats, fixed = inputs(case)
    floats = {n: jnp.asarray(x, jnp.float32) for n, x in floats.items()}
    rank = jnp.asarray(fixed["rank"])

    def f(floats, rank):
        bias = bias_function(jnp.tanh(floats["bias"]), floats["phase"], rank + 1)
        qkve = [floats[name] for name in "qkve"]
        o, a = attention(*qkve, causal=True, bias=bias, **BACKENDS[backend])
        return jnp.sum(jnp.sin(o)) + jnp.sum(a**2)

    def by_row(floats, rank):
        batched = dict.fromkeys(floats, 0) | {"bias": None}
        return jnp.sum(jax.vmap(f, in_axes=(batched, 0))(floats, rank))

    def by_scan(floats, rank):
        rest = {n: x for n, x in floats.items() if n != "bias"}

        def step(total, x):
            return total + f({**rest, "bias": x}, rank), None

        total, _ = jax.lax.scan(step, 0.0, floats["bias"][None])
        return total

    gradient = {
        "jit_grad": jit(jax.grad(f)),
        "grad_jit": jax.grad(jax.jit(f)),
        "vmap": jit(jax.grad(by_row)),
        "checkpoint": jit(jax.grad(jax.checkpoint(f))),
        "scan": jit(jax.grad(by_scan)),
    }[transform](floats, rank)
    assert_close(gradient, closure_gradients(), 2e-5)


@pytest.mark.parametrize("backend", BLOCKWISE)
def test_outside_jit(backend):
    """A call that is not compiled gives the same, gradients of closures included."""
    case = BY_NAME["multi_query"]
    floats, fixed = inputs(case)
    floats = {n: jnp.asarray(x, jnp.float32) for n, x in floats.items()}

    def f(floats):
        o, a = call(attention, case, floats, fixed, **BACKENDS[backend])
        return jnp.sum(o) + jnp.sum(a)

    chex.assert_trees_all_close(jax.grad(f)(floats), jit(jax.grad(f))(floats), atol=1e-5)


@functools.cache
def closure_gradients():
    """The gradients of test_bias_closures by ``reference``, the bias given as an array."""
    case = BY_NAME["multi_query"]
    floats, fixed = inputs(case)
    index = np.arange(case.queries)

    def f(floats):
        bias = bias_function(jnp.tanh(floats["bias"]), floats["phase"], fixed["rank"] + 1)
        qkve = [floats[name] for name in "qkve"]
        o, a = attention(*qkve, causal=True, bias=bias(index, index), implementation="reference")
        return jnp.sum(jnp.sin(o)) + jnp.sum(a**2)

    with jax.enable_x64(True):
        return jit(jax.grad(f))(jax.tree.map(jnp.asarray, floats))


@backends
def test_traced_offset(backend):
    """query_offset may be traced, and batched by vmap."""
    case = BY_NAME["cache"]
    floats = {n: jnp.asarray(x, jnp.float32) for n, x in inputs(case)[0].items()}

    @jit
    @functools.partial(jax.vmap, in_axes=(None, 0))
    def f(floats, offset):
        qkve = [floats[name] for name in "qkve"]
        return attention(
            *qkve,
            causal=True,
            window=case.window,
            query_state=floats["query_state"],
            keys_rotated=True,
            query_offset=offset,
            **BACKENDS[backend],
        )

    offsets = [18, 3, -2]
    got = f(floats, jnp.asarray(offsets))
    for n, offset in enumerate(offsets):
        want = oracle(dataclasses.replace(case, query_offset=offset), *inputs(case))
        assert_close(jax.tree.map(lambda x, n=n: np.asarray(x[n], np.float64), got), want, 1e-5)


@pytest.mark.parametrize("backend", BLOCKWISE)
@pytest.mark.parametrize("rule", ["causal", "window", "segments"])
def test_masked_blocks_are_not_visited(backend, rule):
    """A visited block would turn NaN values into NaN outputs, even with weight 0."""
    rng = np.random.default_rng(0)
    q, k, v, e = (jnp.asarray(rng.normal(size=(1, 64, 1, 8)), jnp.float32) for _ in range(4))
    rows = {"causal": slice(0, 32), "window": slice(32, 64), "segments": slice(0, 32)}[rule]
    unseen = {"causal": slice(32, 64), "window": slice(0, 16), "segments": slice(32, 64)}[rule]
    options = {
        "causal": {"causal": True},
        "window": {"window": 9},
        "segments": {"segment_ids": np.repeat([3, -1], 32)},
    }[rule]
    spoiled = v.at[:, unseen].set(jnp.nan)

    @jit
    def f(v):
        def loss(q):
            o, a = attention(q, k, v, e, **options, **BACKENDS[backend])
            return jnp.sum(o[:, rows]) + jnp.sum(a[:, rows])

        return jax.value_and_grad(loss)(q)

    value, gradient = f(spoiled)
    want_value, want_gradient = f(v)
    np.testing.assert_array_equal(value, want_value)
    np.testing.assert_array_equal(gradient[:, rows], want_gradient[:, rows])


def temporary_bytes(backend, length, **shapes):
    """Temporary memory of forward and backward with [v | e], one head of 64, in bytes."""
    x = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.float32)

    def loss(*qkve):
        o, a = attention(*qkve, causal=True, implementation=backend, **shapes)
        return jnp.sum(o**2) + jnp.sum(a**2)

    compiled = jit(jax.value_and_grad(loss, (0, 1, 2, 3))).lower(x, x, x, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_chunked_memory_is_linear():
    growth = {
        name: temporary_bytes(name, 4096) / temporary_bytes(name, 2048)
        for name in ("reference", "chunked")
    }
    assert growth["reference"] > 3.5
    assert growth["chunked"] < 2.2


def test_chunked_fits_16k_tokens_in_2_gib():
    assert temporary_bytes("chunked", 16384) < 2 * 2**30
