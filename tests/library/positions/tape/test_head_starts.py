"""Starts that differ between heads: moved in time, or not rotating at all."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import RopeScaling, positions
from tape_jax.positions import Tape, create
from tests.models import FLOAT64, random_tokens, random_variables, small_model
from tests.selection import mostly_slow

TOKENS = random_tokens(2, 6)
SIZES = {"num_heads": 6, "num_kv_heads": 3, "head_dim": 4, "num_layers": 2}


def wide_model(position, **options):
    return small_model(position, **{**SIZES, **FLOAT64, **options})


SHIFTED = {
    "given": {"head_shift": (0.0, 7.5, -2.0), "learn_base": True},
    "tensor": {"head_shift": 2.0, "form": "tensor", "l": 2, "r": 3},
}


@pytest.mark.parametrize("name", mostly_slow(SHIFTED, "given"))
def test_shifted_heads_start_as_rope(x64, name):
    """The untrained model has RoPE's logits; a trained one has others than without the shift."""
    options = SHIFTED[name]
    shifted = wide_model(create("tape", **options))
    plain = wide_model(create("tape", **{**options, "head_shift": 0.0}))
    trained = random_variables(shifted)
    untrained = jax.tree.map_with_path(
        lambda path, x: 0 * x if path[-1].key in ("position_mix", "position_up") else x, trained
    )
    applied = [jax.jit(model.apply) for model in (shifted, plain)]
    found, expected = (apply(untrained, TOKENS) for apply in applied)
    chex.assert_trees_all_close(found, expected, atol=1e-12)
    found, expected = (apply(trained, TOKENS) for apply in applied)
    assert np.abs(found - expected).max() > 1e-3


def test_shifts_are_tokens(x64):
    config = wide_model(Tape()).config
    start = Tape(head_shift=5.0).start(jnp.arange(4)[None], config.sizes, dtype=jnp.float64)
    later = positions.rotary_state(jnp.arange(4) + np.array([[0], [5], [10]]), 4)
    chex.assert_trees_all_equal(start, later.swapaxes(0, 1)[None])
    bare = Tape(head_shift=5.0).start(jnp.arange(4), config.sizes, dtype=jnp.float64)
    chex.assert_trees_all_equal(bare, start[0])


def test_still_heads_do_not_rotate(x64):
    for still in (positions.Rope(still_heads=1), Tape(still_heads=1)):
        sizes, at = wide_model(still).config.sizes, jnp.arange(5)[None]
        start, plain = (x.start(at, sizes, dtype=jnp.float64) for x in (still, positions.Rope()))
        chex.assert_trees_all_equal(start[:, :, :2], jnp.broadcast_to(plain, (1, 5, 2, 4)))
        chex.assert_trees_all_equal(start[:, :, 2], jnp.array([1.0, 1, 0, 0]) * jnp.ones((1, 5, 4)))


def test_still_heads_have_no_magnitude(x64):
    """As dimensions that do not rotate have none."""
    for cls, kind in ((positions.Yarn, "yarn"), (positions.LongRope, "longrope"), (Tape, "yarn")):
        scaling = RopeScaling(kind, 4.0)
        still = cls(scaling=scaling, still_heads=1)
        sizes, at = wide_model(still).config.sizes, jnp.arange(5)[None]
        start = still.start(at, sizes, dtype=jnp.float64)
        chex.assert_trees_all_equal(start[:, :, 2], jnp.array([1.0, 1, 0, 0]) * jnp.ones((1, 5, 4)))
        np.testing.assert_allclose(jnp.hypot(*start[0, :, 0, ::2].T), scaling.state_magnitude)


def test_still_heads_take_no_part_in_updates(x64):
    model = wide_model(
        create("tape", still_heads=1, attention_mix="heads", norm="rms", learn_alpha=True,
               alpha_per_head=True)
    )  # fmt: skip
    variables = random_variables(model)
    layer = variables["params"]["layers_0"]
    assert layer["position_mix"].shape == (1, 2, 4)
    assert layer["position_up"].shape == (1, 8, 2)
    assert layer["position_alpha"].shape == (1, 2)
    _, states = jax.jit(functools.partial(model.apply, return_states=True))(variables, TOKENS)
    first, last = states.position
    assert np.abs(last[:, :, :2] - first[:, :, :2]).max() > 1e-3
    chex.assert_trees_all_equal(last[:, :, 2], first[:, :, 2])


@pytest.mark.slow
def test_tokens_of_any_batch(x64):
    """Positions without batch axes serve all of them."""
    model = wide_model(Tape(still_heads=1, head_shift=2.0))
    variables = random_variables(model)
    apply = jax.jit(model.apply)
    expected = apply(variables, TOKENS)
    chex.assert_trees_all_close(apply(variables, TOKENS[None])[0], expected, atol=1e-12)
    chex.assert_trees_all_close(apply(variables, TOKENS[0]), expected[0], atol=1e-12)
