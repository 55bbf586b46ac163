"""Tests of keys of programs: equal for what computes the same, and for nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import attention
from tape_jax._src.attention.jaxpr_key import jaxpr_key

N = 6


def key(function):
    index = jax.ShapeDtypeStruct((N,), jnp.int32)
    return jaxpr_key(jax.make_jaxpr(function)(index, index).jaxpr)


def table_of(table, wrap=lambda f: f):
    """A bias that reads a table, all of it within what ``wrap`` returns."""
    return wrap(lambda i, j: jnp.asarray(table, jnp.float32)[jnp.abs(i[:, None] - j)])


def with_derivative(factor):
    """Functions of equal values whose derivatives differ by a factor."""
    double = jax.custom_jvp(lambda x: x)
    double.defjvp(lambda x, t: (x[0], factor * t[0]))
    return lambda i, j: double(1.0 * (i[:, None] - j))


def with_static_factor(factor):
    """As :func:`with_derivative`, by one rule."""
    return lambda i, j: by_factor(factor, 1.0 * (i[:, None] - j))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def by_factor(factor, x):
    return x


by_factor.defjvp(lambda factor, x, t: (x[0], factor * t[0]))


def with_table(factor):
    """A derivative that reads a table."""
    double = jax.custom_jvp(lambda x: x)
    double.defjvp(lambda x, t: (x[0], jnp.asarray(factor * np.arange(N), jnp.float32) * t[0]))
    return lambda i, j: double(1.0 * (i[:, None] - j))


def scanned(x):
    return lambda i, j: jax.lax.scan(lambda c, t: (c + np.float32(x) * t, None), 0.0 * i, j)[0]


EACH = {
    "literal": lambda x: lambda i, j: x * (i[:, None] - j),
    "array_in_jit": lambda x: table_of(x * np.arange(N), jax.jit),
    "literal_in_scan": scanned,
    "derivative": with_derivative,
    "derivative_in_jit": lambda factor: jax.jit(with_derivative(factor)),
    "derivative_of_static_factor": with_static_factor,
    "derivative_with_table": with_table,
    "relu": lambda x: lambda i, j: jax.nn.relu(x * i[:, None] - j),
}


@pytest.mark.parametrize("name", EACH)
def test_programs_that_differ_have_other_keys(name):
    assert key(EACH[name](0.25)) != key(EACH[name](0.5))


@pytest.mark.parametrize("name", EACH)
def test_equal_programs_have_one_key(name):
    first, second = key(EACH[name](0.25)), key(EACH[name](0.25))
    assert first == second
    assert hash(first) == hash(second)


def test_numbers_that_python_calls_equal_are_told_apart():
    def sum_of(x):
        return lambda i, j: jnp.arctan2(x, -1.0) + i

    assert key(sum_of(0.0)) != key(sum_of(-0.0))


def test_order_of_arguments_counts():
    assert key(lambda i, j: i[:, None] - j) != key(lambda i, j: j - i[:, None])


@pytest.mark.parametrize("fault", ["raises", "symbolic_zeros", "traced"])
def test_a_derivative_that_is_not_known_equals_nothing(fault):
    def key_at(table):
        def rule(x, t):
            assert fault != "raises"
            return x[0], table * t[0] if fault == "traced" else t[0]

        same = jax.custom_jvp(lambda x: x)
        same.defjvp(rule, symbolic_zeros=fault == "symbolic_zeros")
        return key(lambda i, j: same(1.0 * (i[:, None] - j)))

    found = []
    jax.jit(lambda x: found.extend([key_at(x), key_at(x)]))(1.0)
    assert found[0] != found[1]


def test_attention_takes_no_other_derivative_for_its_own():
    q = jax.random.normal(jax.random.key(0), (1, N, 1, 4))

    def gradient(factor):
        def loss(slope):
            def bias(i, j):
                return by_factor(factor, slope * (i[:, None] - j))

            return jnp.sum(attention(q, q, q, bias=bias, implementation="chunked")[0] ** 2)

        return jax.grad(loss)(0.5)

    one = gradient(1.0)
    np.testing.assert_allclose([gradient(3.0), gradient(-1.0)], [3 * one, -one], rtol=1e-5)


def test_what_is_not_understood_equals_nothing():
    def drawn(i, j):
        return jax.jit(lambda: jax.random.normal(secret, (N,)))()

    secret = jax.random.key(0)
    assert key(drawn) != key(drawn)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["", "jit", "remat"])
def test_attention_takes_no_other_bias_for_its_own(wrap):
    q = jax.random.normal(jax.random.key(0), (1, N, 1, 4))

    def attend(table, implementation):
        bias = table_of(table, wrap)
        return attention(q, q, q, bias=bias, implementation=implementation)[0]

    for factor in (1.0, -1.0, 3.0):
        table = factor * np.arange(N)
        found, expected = attend(table, "chunked"), attend(table, "reference")
        np.testing.assert_allclose(found, expected, atol=1e-6)
