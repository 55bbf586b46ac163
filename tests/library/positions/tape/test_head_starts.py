"""Starts that differ between heads: moved in time, or not rotating at all."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tape_jax as tape
from tape_jax import RopeScaling, positions
from tape_jax.positions import create
from tests.models import FLOAT64, random_tokens, random_variables, small_model, without
from tests.selection import mostly_slow

TOKENS = random_tokens(2, 6)
SIZES = {"num_heads": 6, "num_kv_heads": 3, "head_dim": 4, "num_layers": 2}


def wide_model(position, **options):
    return small_model(position, **{**SIZES, **FLOAT64, **options})


SHIFTED = {
    "given": {"head_shift": (0.0, 7.5, -2.0), "learn_base": True},
    "dynamic": {"head_shift": 2.0, "scaling": RopeScaling("dynamic", 2.0, original_length=4)},
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
    config = wide_model(tape.positions.Tape()).config
    start = positions.Tape(head_shift=5.0).start(
        jnp.arange(4)[None], config.sizes, dtype=jnp.float64
    )
    later = positions.rotary_state(jnp.arange(4) + np.array([[0], [5], [10]]), 4)
    chex.assert_trees_all_equal(start, later.swapaxes(0, 1)[None])
    bare = positions.Tape(head_shift=5.0).start(jnp.arange(4), config.sizes, dtype=jnp.float64)
    chex.assert_trees_all_equal(bare, start[0])


@pytest.mark.mostly_slow
@pytest.mark.parametrize("of", ["heads", "tokens"])
def test_phases_keep_what_a_start_owes(of, x64):
    """Drawn once for each head they are RoPE for an untrained model; for each token they are not.

    Moving all positions changes neither.
    """
    model, rng = wide_model(positions.Tape()), np.random.default_rng(0)
    phases = rng.uniform(0, 2 * np.pi, (1, 3, 2) if of == "heads" else (6, 1, 2))
    trained = random_variables(model)
    untrained = jax.tree.map_with_path(
        lambda path, x: 0 * x if path[-1].key in ("position_mix", "position_up") else x, trained
    )

    @jax.jit
    def logits(variables, turns, first=0):
        angle = (first + jnp.arange(6))[:, None, None] * np.array([1, 0.01]) + turns
        state = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)[None]
        return model.apply(variables, TOKENS, initial_state=state)

    found, plain = (logits(untrained, turns) for turns in (phases, np.zeros((1, 3, 2))))
    assert bool(np.abs(found - plain).max() < 1e-12) is (of == "heads")
    moved = logits(trained, phases, 1000)
    chex.assert_trees_all_close(logits(trained, phases), moved, atol=1e-10)
    assert np.abs(moved - logits(trained, np.zeros((1, 3, 2)))).max() > 1e-3


def test_still_heads_do_not_rotate(x64):
    model = wide_model(positions.Rope(still_heads=1))
    config = model.config
    start = model.encoding.start(jnp.arange(5)[None], config.sizes, dtype=jnp.float64)
    plain = positions.Rope().start(jnp.arange(5)[None], config.sizes, dtype=jnp.float64)
    chex.assert_trees_all_equal(start[:, :, :2], jnp.broadcast_to(plain, (1, 5, 2, 4)))
    chex.assert_trees_all_equal(start[:, :, 2], jnp.array([1.0, 1, 0, 0]) * jnp.ones((1, 5, 4)))


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
def test_still_heads_start_as_in_rope(x64):
    model, rope = (
        wide_model(create(kind, still_heads=1), scan_layers=False) for kind in ("tape", "rope")
    )
    variables = jax.jit(model.init)(jax.random.key(0), TOKENS)
    found = jax.jit(model.apply)(variables, TOKENS)
    expected = jax.jit(rope.apply)(without(variables, "position_"), TOKENS)
    chex.assert_trees_all_close(found, expected, atol=1e-12)


@pytest.mark.slow
def test_tokens_of_any_batch(x64):
    """Positions without batch axes serve all of them."""
    model = wide_model(positions.Tape(still_heads=1, head_shift=2.0))
    variables = random_variables(model)
    apply = jax.jit(model.apply)
    expected = apply(variables, TOKENS)
    chex.assert_trees_all_close(apply(variables, TOKENS[None])[0], expected, atol=1e-12)
    chex.assert_trees_all_close(apply(variables, TOKENS[0]), expected[0], atol=1e-12)


def test_misuse():
    with pytest.raises(ValueError, match=r"tape: head_shift must be .* each of the 3 state heads"):
        wide_model(positions.Tape(head_shift=(1.0, 2.0)))
    with pytest.raises(ValueError, match="each of the 2 state heads that rotate"):
        wide_model(create("tape+alibi", head_shift=[1.0, 2.0, 3.0], still_heads=1))
    with pytest.raises(ValueError, match="rope: still_heads = 3 leaves none of the model's 3"):
        wide_model(positions.Rope(still_heads=3))
    with pytest.raises(ValueError, match="rope: still_heads must be an integer from 0 on; got -1"):
        positions.Rope(still_heads=-1)
    with pytest.raises(ValueError, match="tape_place_weights: still_heads is an option of TAPE"):
        create("tape_place_weights", still_heads=1)
    with pytest.raises(ValueError, match="each_layer = True, still_heads = 1"):
        create("random_rope", each_layer=True, still_heads=1)


@pytest.mark.parametrize("wrong", [True, "1", None, np.nan, np.inf, ["a", 1], [0, np.nan]])
def test_wrong_head_shifts_are_named(wrong):
    with pytest.raises(ValueError, match="head_shift must be a finite number"):
        positions.Tape(head_shift=wrong)


@pytest.mark.parametrize("far", [2.0**31, (0.0, -1e300)])
def test_heads_may_not_start_too_far_apart(far):
    with pytest.raises(ValueError, match=r"head_shift must move heads by less than 2\^31 tokens"):
        small_model(positions.Tape(head_shift=far), num_heads=2)


@pytest.mark.parametrize("wrong", [True, 1.5, "2", [1], None, -1])
def test_wrong_still_heads_are_named(wrong):
    with pytest.raises(ValueError, match="still_heads must be an integer"):
        positions.Tape(still_heads=wrong)
