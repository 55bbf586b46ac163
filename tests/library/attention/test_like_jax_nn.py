"""Keywords that ``jax.nn.dot_product_attention`` has too mean what they mean there."""

from __future__ import annotations

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import attention
from tape_jax._src.attention.normalize import normalize

B, T, S, D = 2, 7, 9, 8
KEYWORDS = {
    "is_causal": (False, True),
    "local_window_size": (None, 0, 3, (2, 1), (0, 4)),
    "query_seq_lengths": (None, jnp.array([7, 4], jnp.int32)),
    "key_value_seq_lengths": (None, jnp.array([5, 9], jnp.int32)),
    "mask": (False, True),
    "bias": (False, True),
    "scale": (None, 0.3),
}
# Of heads 4 and 2, and of types.
FORMS = (((4, 2), "float32"), ((4, 1), "bfloat16"))


def arrays(heads, dtype):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    q, (k, v) = normal(B, T, heads[0], D), (normal(B, S, heads[1], D) for _ in range(2))
    mask = jnp.asarray(rng.random((B, 1, T, S)) < 0.7)
    return (q, k, v), {"mask": mask, "bias": normal(1, heads[0], T, S)}


def seen(call):
    """Which queries see any key: of the others jax.nn makes a mean of hidden values, we zeros."""
    i, j = np.arange(T)[:, None], np.arange(S)
    found = np.ones((B, 1, T, S), bool)
    if call["is_causal"]:
        found &= j <= i
    if (window := call["local_window_size"]) is not None:
        left, right = window if isinstance(window, tuple) else (window, window)
        found &= (i - left <= j) & (j <= i + right)
    if (lengths := call["key_value_seq_lengths"]) is not None:
        found &= j < np.asarray(lengths)[:, None, None, None]
    if call["mask"] is not None:
        found &= np.asarray(call["mask"])
    return found.any(-1)[:, 0]


def test_there_is_every_keyword_of_jax_nn():
    theirs = set(inspect.signature(jax.nn.dot_product_attention).parameters)
    ours = set(inspect.signature(attention).parameters)
    # What a state needs has no residual.
    assert theirs - ours - {"query", "key", "value"} <= {"return_residual"}


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("heads", "dtype"), FORMS)
def test_over_their_product(heads, dtype):
    """Every fifteenth of all calls, among which each two values of two keywords meet."""
    (q, k, v), given = arrays(heads, dtype)
    tolerance = 2e-2 if dtype == "bfloat16" else 2e-6
    for values in itertools.islice(itertools.product(*KEYWORDS.values()), 1, None, 15):
        call = dict(zip(KEYWORDS, values, strict=True))
        call |= {name: given[name] if call[name] else None for name in given}
        want = jax.nn.dot_product_attention(q, k, v, implementation="xla", **call)
        got, attended = attention(q, k, v, implementation="reference", **call)
        assert attended is None
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        rows = seen(call)
        if call["query_seq_lengths"] is not None:
            rows = rows | (np.arange(T) >= np.asarray(call["query_seq_lengths"])[:, None])
        np.testing.assert_allclose(
            *(np.asarray(x, np.float32)[rows] for x in (got, want)), atol=tolerance, rtol=tolerance
        )


def test_without_a_batch_axis():
    """There ``jax.nn`` wants one in masks, biases and lengths."""
    (q, k, v), given = arrays((4, 2), "float32")
    call = {"mask": given["mask"][:1], "bias": given["bias"]}
    call |= {"query_seq_lengths": jnp.array([7]), "key_value_seq_lengths": jnp.array([5])}
    want = jax.nn.dot_product_attention(q[0], k[0], v[0], implementation="xla", **call)
    got, _ = attention(q[0], k[0], v[0], implementation="reference", **call)
    rows = seen({"is_causal": False, "local_window_size": None, **call})[0]
    assert rows.any()
    np.testing.assert_allclose(got[rows], want[rows], atol=2e-6)


@pytest.mark.parametrize("rows", [1, B])
def test_lengths_beside_segments_need_no_mask(rows):
    """Which kernels would refuse; ids may be any integers, the least and the largest also."""
    (q, k, v), _ = arrays((4, 2), "float32")
    least, largest = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    own = np.array([[least, least, -1, -1, 0, 5, largest], [0, 0, 0, 1, 1, -2, -1]])[:rows]
    others = np.array([[least, -1, -1, -2, 0, 0, 6, 5, largest], [0] * 3 + [1] * 6])[:rows]
    lengths = {"query_seq_lengths": jnp.array([6, 7]), "key_value_seq_lengths": jnp.array([9, 5])}
    visible = own[:, :, None] == others[:, None]
    visible = visible & (np.arange(T) < lengths["query_seq_lengths"][:, None])[:, :, None]
    visible = visible & (np.arange(S) < lengths["key_value_seq_lengths"][:, None])[:, None]
    want, _ = attention(q, k, v, mask=jnp.asarray(visible[:, None]), implementation="reference")
    call = {"segment_ids": (jnp.asarray(own), jnp.asarray(others)), **lengths}
    assert normalize(q, k, v, **call).visibility.mask is None
    got, _ = attention(q, k, v, **call, implementation="reference")
    np.testing.assert_allclose(got, want, atol=1e-6)
