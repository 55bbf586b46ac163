"""Products over heads, where the way to compute them depends on the machine."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from tape_jax import ModelConfig, init_update, tensor_state, update_state
from tape_jax._src.positions.tape.mixing import mix_heads, precise_product, sum_of_products
from tape_jax._src.positions.tape.norms import polar_factor
from tape_jax.positions import MixHeadDim, NoEquivariance
from tests.models import normal


def products(function, *args):
    """All matrix products in a function."""
    found = []

    def collect(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                found.append(equation)
            for inner in jaxprs_in_params(equation.params):
                collect(inner)

    collect(jax.make_jaxpr(function)(*args).jaxpr)
    return found


def precisions(function, *args):
    """Of all matrix products in a function."""
    return [equation.params["precision"] for equation in products(function, *args)]


def test_products_of_states_are_in_full_precision():
    """They carry the states whole: rounded operands would round the states."""
    highest = (jax.lax.Precision.HIGHEST,) * 2
    params = init_update(jax.random.key(0), 8, 3, attention_mix="head_scale")
    e, x = jnp.ones((1, 5, 3, 6)), jnp.ones((1, 5, 8))
    found = products(functools.partial(update_state, implementation="reference"), params, e, e, x)
    (mixing,) = [eqn for eqn in found if math.prod(eqn.outvars[0].aval.shape) == e.size]
    assert mixing.params["precision"] == highest
    e, a = jnp.ones((3, 2, 8)), jnp.ones((3, 4, 8))
    update = {"mix": jnp.ones((2, 4))}
    assert precisions(update_state, update, e, a, jnp.ones((3, 5))) == [highest]
    assert precisions(polar_factor, jnp.ones((3, 2, 4, 3))) == [highest] * 2
    assert precisions(polar_factor, jnp.ones((3, 2, 3, 4))) == [highest] * 2
    assert not products(functools.partial(tensor_state, head_dim=8, l=4, r=4), jnp.arange(3))
    for cls in (MixHeadDim, NoEquivariance):
        config, table = ModelConfig(5, hidden_size=16, num_heads=2), jnp.ones((3, 2, 8))
        params = {
            name: jnp.ones(spec.shape) for name, spec in cls().mixing_params(config.sizes).items()
        }
        gate, *of_states = precisions(cls().mix_table, params, table, None, jnp.ones((3, 16)))
        assert gate is None
        assert of_states == [highest] * 2


def test_products_without_a_matrix_unit():
    matrix, e = (jnp.asarray(normal(2, 5, 4, n, seed=n), "float32") for n in (4, 6))
    exact = np.float64(matrix) @ np.float64(e)
    for dtype in ("float32", "bfloat16"):
        narrow = matrix.astype(dtype), e.astype(dtype)
        got, want = (jax.jit(f)(*narrow) for f in (sum_of_products, precise_product))
        assert got.dtype == want.dtype == dtype
        for actual in (got, want):
            np.testing.assert_allclose(np.float64(actual), exact, atol=12 * jnp.finfo(dtype).eps)
    for product, wanted in ((precise_product, 1), (sum_of_products, 0)):
        mix = functools.partial(mix_heads, product=product)
        assert str(jax.make_jaxpr(mix)(matrix, e)).count("dot_general") == wanted
