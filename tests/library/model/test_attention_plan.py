"""Backends of a model's attention, what they cost, and the size of a cache."""

import jax
import jax.numpy as jnp
import pytest

from tape_jax import init_cache
from tests.models import small_model


def test_attention_plan():
    """One plan for each run of layers, from shapes alone; the last layer attends no state."""
    unrolled = small_model("tape", scan_layers=False).attention_plan(2, 7)
    assert list(unrolled) == ["layers_0", "layers_1", "layers_2"]
    model = small_model("tape")
    plans = model.attention_plan(2, 7)
    assert list(plans) == ["layers_0", "layers_2"]
    assert {plan.implementation for plan in plans.values()} == {"reference"}
    assert plans["layers_0"].operations > plans["layers_2"].operations > 0
    ids = jax.ShapeDtypeStruct((2, 8192), jnp.int32)
    plans = model.attention_plan(2, 8192, segment_ids=ids)
    assert {plan.implementation for plan in plans.values()} == {"chunked"}


def test_a_named_implementation_never_falls_back():
    model = small_model("fire", attention_implementation="chunked")
    plans = model.attention_plan(1, 8, is_causal=False)
    assert [plan.implementation for plan in plans.values()] == ["chunked"]
    model, tokens = small_model("tape", attention_implementation="splash"), jnp.zeros((1, 8), int)
    for call in (lambda: model.attention_plan(1, 8), lambda: model.init(jax.random.key(0), tokens)):
        with pytest.raises(NotImplementedError, match="'splash': needs a TPU"):
            call()


def test_the_size_of_a_cache():
    model = small_model("tape", num_heads=4, num_kv_heads=2, dtype="bfloat16")
    cache = jax.eval_shape(lambda: init_cache(model, 3, 10))
    keys_and_values = 3 * 2 * (3 * 10 * 2 * 4) * 2
    states = 2 * (3 * 10 * 2 * 4) * 2
    assert cache.capacity == 10
    assert cache.nbytes == keys_and_values + states + 3 * (3 * 10) * 4
