"""Cached decoding against the full pass."""

import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import init_cache
from tests.library.model.generate.passes import jit_apply, jit_extend, jit_prefill
from tests.models import assert_near, random_tokens, random_variables, small_model

QUICK = ("one group, dynamic scaling", "window, bias")


@pytest.mark.slow
def test_what_follows_a_cache_goes_on_with_its_last_token():
    """With the id of each row's last real token, and its position plus one."""
    model = small_model("learned")
    variables = random_variables(model)
    tokens = random_tokens(4, 8)
    ids = jnp.array([[1, 1, 2, 2], [5, 5, 5, 5], [0, 0, 3, 3], [3, 3, 0, 0]])
    empty = init_cache(model, 4, 8)
    _, cache = jit_apply(model, variables, tokens[:, :4], segment_ids=ids, cache=empty)
    followed = [jit_extend(model, variables, cache, tokens[:, 4:])]
    followed.append(jit_apply(model, variables, tokens[:, 4:], cache=cache))
    rest, positions = [2, 5, 3, 3], [2, 4, 2, 2]
    for logits, after in followed:
        np.testing.assert_array_equal(after.segment_ids[:, 4:], np.tile(rest, (4, 1)).T)
        np.testing.assert_array_equal(after.positions[:, 4:], np.add.outer(positions, range(4)))
        for i, own in enumerate(ids):
            row = jnp.concatenate([tokens[i, :4][own == rest[i]], tokens[i, 4:]])
            assert_near(logits[i], jit_apply(model, variables, row)[-4:], 1e-5)


@pytest.mark.slow
def test_new_tokens_may_name_their_segment():
    """Their positions go on behind the last token of that segment, wherever it is."""
    model = small_model("learned", num_layers=2)
    variables = random_variables(model)
    tokens = random_tokens(1, 9)
    ids = jnp.array([[1, 1, 2, 0, 2, 1, 3, 1, 0]])
    full = jit_apply(model, variables, tokens, segment_ids=ids)
    _, cache = jit_prefill(model, variables, tokens[:, :3], segment_ids=ids[:, :3], capacity=9)
    rest, cache = jit_extend(model, variables, cache, tokens[:, 3:], segment_ids=ids[:, 3:])
    np.testing.assert_array_equal(cache.positions[ids != 0], [0, 1, 0, 1, 2, 0, 3])
    real = ids[:, 3:] != 0
    assert_near(rest[real], full[:, 3:][real], 1e-5)
    for segment in (1, 2, 3):
        own = ids == segment
        assert_near(full[own], jit_apply(model, variables, tokens[own]), 1e-5)
