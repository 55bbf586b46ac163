"""Programs for sizes that are not known yet."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from tape_jax import attention, rotary_state


def attend(q, k, v, implementation=None):
    length = q.shape[1]
    return attention(
        q, k, v, state=rotary_state(jnp.arange(length), q.shape[-1]), is_causal=True,
        local_window_size=(3, 0), segment_ids=jnp.zeros(q.shape[:2], int),
        implementation=implementation,
    )  # fmt: skip


def open_sizes(shape):
    batch, time = export.symbolic_shape(shape)
    return [jax.ShapeDtypeStruct((batch, time, heads, 8), jnp.float32) for heads in (4, 2, 2)]


@pytest.mark.parametrize("shape", ["b, 6", "2, t", "b, t"])
def test_one_program_for_all_sizes(shape):
    exported = export.export(jax.jit(attend))(*open_sizes(shape))
    rng = np.random.default_rng(0)
    for batch, time in ((2, 6), (3, 40)):
        given = [jnp.asarray(rng.normal(size=(batch, time, h, 8)), jnp.float32) for h in (4, 2, 2)]
        if shape == "b, t" or (batch, time) == (2, 6):
            np.testing.assert_allclose(exported.call(*given)[0], attend(*given)[0], atol=1e-6)


@pytest.mark.parametrize("name", ["chunked", "query_blocks", "rows"])
def test_what_needs_known_sizes_says_so(name):
    with pytest.raises(NotImplementedError, match=f"'{name}'.* 't' is symbolic, which 'reference'"):
        export.export(jax.jit(lambda q, k, v: attend(q, k, v, name)))(*open_sizes("2, t"))
