"""The loss of a part of a batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import VOCAB, random_variables, small_model
from train.training import step


@pytest.mark.slow
def test_packed_text_has_its_places_on_every_axis():
    """Where all coordinates are one, multimodal RoPE is RoPE."""
    rng, ids = np.random.default_rng(0), np.array([[1, 1, 1, 2, 2, 2, 2, 2]] * 2)
    part = {
        "inputs": rng.integers(0, VOCAB, (2, 8)),
        "targets": rng.integers(0, VOCAB, (2, 8)),
        "weights": np.ones((2, 8), np.float32),
        "segment_ids": ids,
        "positions": np.array([[0, 1, 2, 5, 6, 7, 8, 9]] * 2),
    }
    part = {name: jnp.asarray(x) for name, x in part.items()}
    rope, mrope = small_model("rope"), small_model("mrope")
    variables = random_variables(rope)
    losses = [
        step.part_loss(model, variables, part, jax.random.key(0), jnp.float32(1))[0]
        for model in (rope, mrope)
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
