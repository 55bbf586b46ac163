"""Types of numbers: half precision, states' own, and 64 bits."""

import chex
import jax
import jax.numpy as jnp
import pytest

from tape_jax import init_cache, init_update, rotary_state, tensor_state
from tests.models import assert_near, random_tokens, random_variables, run, small_model


@pytest.mark.mostly_slow
@pytest.mark.parametrize("position", ["tape", "alibi"])
def test_far_positions_stay_apart_in_bfloat16(position):
    model = small_model(position, dtype="bfloat16", num_layers=2)
    variables, tokens = random_variables(model, std=0.4), random_tokens(1, 12)
    near = run(model, variables, tokens, positions=jnp.arange(12))
    far = run(model, variables, tokens, positions=jnp.arange(12) + 1000)
    # By so much a model in this type differs from one in float32, too.
    assert_near(far, near, 5e-2)
    merged = run(model, variables, tokens, positions=jnp.arange(12) // 8 * 8)
    noticed = jnp.abs(merged - near).max() / jnp.abs(near).max()
    assert noticed > 0.2, "the test would not notice merged positions"


@pytest.mark.parametrize(
    ("position", "dtype", "state_dtype"),
    [("tape", "bfloat16", None), ("fire", "float16", None), ("tape", "bfloat16", "bfloat16")],
)
def test_half_precision_is_near_float32(position, dtype, state_dtype):
    wide = small_model(position, num_layers=2)
    narrow = small_model(position, num_layers=2, dtype=dtype, state_dtype=state_dtype)
    variables, tokens = random_variables(wide, std=0.1), random_tokens(2, 16)
    expected = run(wide, variables, tokens)
    logits, states = run(narrow, variables, tokens, return_states=True)
    chex.assert_type(logits, jnp.float32)
    chex.assert_type(states.hidden[1], dtype)
    for state in states.position:
        if state is not None:
            chex.assert_type(state, state_dtype or jnp.float32)
    assert_near(logits, expected, 2e-2 if dtype == "bfloat16" else 4e-3)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("position", ["tape", "fire", "random_rope"])
def test_x64_changes_nothing_for_a_float32_model(position):
    model = small_model(position, num_layers=2)
    variables, tokens = random_variables(model), random_tokens(2, 6)
    expected = run(model, variables, tokens, return_states=True)
    with jax.enable_x64(True):
        actual = run(model, variables, tokens, return_states=True)
    chex.assert_trees_all_equal_dtypes(actual, expected)
    chex.assert_trees_all_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("field", ["dtype", "param_dtype", "state_dtype"])
def test_64_bits_are_refused_where_they_are_disabled(field):
    """A model may be described and made; what would be computed in float32 is not."""
    model, tokens = small_model("tape", num_layers=1, **{field: "float64"}), jnp.ones((1, 2), int)
    calls = [
        lambda: model.init(jax.random.key(0), tokens),
        lambda: model.apply(random_variables(small_model("tape", num_layers=1)), tokens),
        lambda: init_cache(model, 1, 3),
    ]
    for call in calls if field != "param_dtype" else calls[:2]:
        with pytest.raises(ValueError, match=f"{field} = float64 needs 64-bit types.*enable_x64"):
            call()
    with jax.enable_x64(True):
        params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
        assert (params["embedding"].dtype == jnp.float64) == (field == "param_dtype")


def test_functions_refuse_64_bits_too():
    for call in (
        lambda dtype: rotary_state(jnp.arange(3), 8, dtype=dtype),
        lambda dtype: tensor_state(jnp.arange(3), 8, dtype=dtype),
        lambda dtype: init_update(jax.random.key(0), 8, 2, dtype=dtype),
        lambda dtype: init_cache(small_model("rope"), 1, 3, dtype=dtype),
        lambda dtype: init_cache(small_model("rope"), 1, 3, position_dtype=dtype),
    ):
        with pytest.raises(ValueError, match="dtype = float64 needs 64-bit types"):
            call(jnp.float64)
