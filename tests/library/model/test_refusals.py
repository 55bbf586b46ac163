"""Wrong configurations, encodings, inputs and caches: errors that say what was given."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import init_cache, positions
from tests.models import random_tokens, small_model

GRID, MROPE = positions.Rope(axes=2), "mrope"


@pytest.mark.parametrize(
    ("position", "tokens", "options", "message"),
    [
        (positions.Tape(form="tensor", l=4, r=2), None, {}, "for even l and r >= l"),
        ("tape", jnp.zeros((2, 5)), {}, r"tokens must be integers .* float32 of shape \(2, 5\)"),
        ("tape", jnp.int32(3), {}, r"tokens must be integers .* shape \(\)"),
        ("tape", jnp.zeros((2, 0), jnp.int32), {}, r"at least one token; got shape \(2, 0\)"),
        ("tape", jnp.zeros((1, 9), jnp.int32), {}, "9 tokens exceeds the model's max_length of 8"),
        ("tape", None, {"positions": jnp.arange(6)}, r"positions of shape \(6,\).*\(2, 5\)"),
        ("tape", None, {"positions": jnp.zeros((1, 2, 5))}, r"positions of shape \(1, 2, 5\)"),
        ("alibi", None, {"positions": jnp.ones(5, bool)}, "positions must be integers or floats"),
        (GRID, None, {}, r"axes=2: give positions= of shape \(2, 5, 2\)"),
        (GRID, None, {"positions": jnp.zeros((2, 5))}, r"expected \(2, 5, 2\)"),
        (MROPE, None, {"positions": jnp.zeros((3, 2, 5))}, r"\(2, 5, 3\).*moveaxis\(ids, 0, -1\)"),
        ("tape", None, {"segment_ids": jnp.zeros((2, 5))}, "segment_ids must be integers; got fl"),
        ("tape", None, {"segment_ids": jnp.zeros(4, jnp.int32)}, r"segment_ids of shape \(4,\)"),
        ("tape", None, {"mask": jnp.ones((5, 5))}, "mask must be boolean"),
        ("tape", None, {"mask": jnp.ones((5, 4), bool)}, r"mask must broadcast .* got .*5, 4\)"),
        ("tape", None, {"initial_state": jnp.zeros((4, 8))}, r"shape \(4, 8\) .* \(2, 5, 2, 8\)"),
        (positions.Learned(size=4), None, {}, "limit of the encoding 'learned' of 4"),
        (positions.RandomRope(range=4), None, {}, "limit of the encoding 'random_rope' of 4"),
        (positions.RandomRope(range=64), None, {"length": 65}, "65 positions do not fit"),
        ("tape", None, {"length": 0}, "length must be positive; got 0"),
        ("tape", None, {"length": 5.0}, r"length must be an integer or .* got float32 of shape"),
        ("tape", None, {"length": jnp.ones(3, int)}, r"broadcast to the batch \(2,\); got .* \(3,"),
        ("tape", None, {"output": "hiden"}, r"unknown output 'hiden'.*did you mean 'hidden'"),
    ],
)
def test_bad_inputs(position, tokens, options, message):
    tokens = jnp.zeros((2, 5), jnp.int32) if tokens is None else tokens
    model = small_model(position, max_length=8)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: model.init(jax.random.key(0), tokens, **options))


def test_values_and_lists():
    """What only values tell, and what is no array."""
    model = small_model("rope", num_layers=1)
    with pytest.raises(ValueError, match=r"length must be positive; got \[-5, 3\]"):
        model.apply({}, random_tokens(2, 4), length=np.array([-5, 3]))
    with pytest.raises(ValueError, match="tokens must be an array; got list"):
        model.apply({}, [[1, 2, 3]])


@pytest.mark.parametrize(
    ("batch", "capacity", "shape", "used", "message"),
    [
        (2, 6, (2, 5), 2, "5 tokens do not fit into a cache of capacity 6 with 2 in use"),
        (3, 6, (2, 5), 0, r"cache for 3 sequences, tokens must have shape \(3, T\); got \(2, 5\)"),
        (2, 6, (1, 2, 5), 0, r"tokens must have shape \(2, T\); got \(1, 2, 5\)"),
        (2, 9, (2, 5), 0, "a cache of 9 tokens exceeds the model's max_length of 8"),
        (0, 5, (2, 5), 0, "batch_size must be a positive integer; got 0"),
        (2, 0, (2, 5), 0, "capacity must be a positive integer; got 0"),
    ],
)
def test_bad_caches(batch, capacity, shape, used, message):
    model = small_model("tape", max_length=8)

    def use_cache():
        cache = init_cache(model, batch, capacity).replace(index=jnp.int32(used))
        model.init(jax.random.key(0), jnp.zeros(shape, jnp.int32), cache=cache)

    with pytest.raises(ValueError, match=message):
        use_cache()
