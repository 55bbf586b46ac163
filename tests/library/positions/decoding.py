"""Cached decoding of small models against their full pass."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax import Transformer, init_cache
from tests import drawn
from tests.drawn import Batch
from tests.models import random_variables


def assert_chunks_equal_the_full_pass(
    model: Transformer, *, key: int | None = None, size: int = 3
) -> None:
    """In rows with padding, and with two segments whose positions have gaps.

    Args:
      model: in float64.
      key: seed of the random stream ``"positions"``, and of the cache's draw; None: there is none.
      size: of the chunks, a divisor of 6.
    """
    ids = np.array([[0, 1, 1, 1, 1, 1], [1, 1, 1, 2, 2, 2]], np.int32)
    places = np.array([[0, 0, 1, 3, 4, 7], [2, 3, 4, 0, 1, 5]], np.int32)
    batch = Batch(drawn.tokens(0, 2, 6), places, ids)
    variables = random_variables(model)
    capacity = 9
    full = drawn.compiled_full_pass(model, variables, batch, length=capacity, key=key)
    # What a model draws follows its random stream by the name of the module.
    cache: Any = init_cache(model, 2, capacity, key=None if key is None else stream_key(model, key))
    found = []
    for first in range(0, 6, size):
        part = batch.part(slice(None), slice(first, first + size))
        logits, cache = drawn.compiled_chunk(model, variables, cache, part)
        found.append(logits)
    real = ids != 0
    drawn.assert_near(jnp.concatenate(found, 1)[real], full[real], 1e-10)


def stream_key(model: Transformer, seed: int) -> jax.Array:
    """The key that a model takes from its random stream ``"positions"`` with this seed."""
    key = jax.random.key(seed)
    return model.bind({}, rngs={"positions": key}).make_rng("positions")
