"""Products over heads, where the way to compute them depends on the machine."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax.positions.mixing import mix_heads, precise_product, sum_of_products
from tape_jax.sharding import ShardingConfig
from tests.arrays import normal


def test_states_are_mixed_without_a_matrix_unit_on_a_tpu(monkeypatch):
    matrix, e = (jnp.asarray(normal(2, 5, 4, n, seed=n), "float32") for n in (4, 6))
    exact = np.float64(matrix) @ np.float64(e)
    for dtype in ("float32", "bfloat16"):
        narrow = matrix.astype(dtype), e.astype(dtype)
        got, want = (jax.jit(f)(*narrow) for f in (sum_of_products, precise_product))
        assert got.dtype == want.dtype == dtype
        for actual in (got, want):
            np.testing.assert_allclose(np.float64(actual), exact, atol=12 * jnp.finfo(dtype).eps)
    products = str(jax.make_jaxpr(mix_heads)(matrix, e)).count("dot_general")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert products == 1
    assert "dot_general" not in str(jax.make_jaxpr(lambda *args: mix_heads(*args))(matrix, e))
    whole, split = (
        ShardingConfig(**sizes).build(jax.devices()[:2]) for sizes in ({"fsdp": 2}, {"tensor": 2})
    )
    for sharding, wanted in ((whole, 0), (split, 1)):
        mix = functools.partial(mix_heads, sharding=sharding)
        found = str(jax.make_jaxpr(mix)(matrix, e))
        assert found.count("dot_general") == wanted
