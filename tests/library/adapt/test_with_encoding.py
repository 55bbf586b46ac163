"""An encoding put in place of another."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import RopeScaling, adapt, positions
from tests.models import random_tokens, random_variables, run, small_model

TOKENS = random_tokens(2, 9)
KEY = jax.random.key(1)


ZERO_SLOPES = {"kind": "tape+alibi", "slopes": "learned_from_zero", "norm": "rms"}


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("position", "scan_layers"),
    [(ZERO_SLOPES, True), (ZERO_SLOPES, False), ("rope+t5", True)],
    ids=str,
)
def test_what_starts_at_nothing_leaves_the_logits(position, scan_layers):
    rope = small_model(positions.Rope(base=500.0), scan_layers=scan_layers, num_layers=2)
    variables = random_variables(rope)
    model, new = adapt.with_encoding(rope, variables, position, key=KEY)
    chex.assert_trees_all_equal_shapes(new, jax.eval_shape(model.init, KEY, TOKENS))
    assert model.encoding.encodings[0].base == 500.0
    got, want = run(model, new, TOKENS), run(rope, variables, TOKENS)
    if position == "rope+t5":
        assert np.abs(got - want).max() > 1e-6
        for layer in new["params"].values():
            if isinstance(layer, dict) and "position_t5_table" in layer:
                layer["position_t5_table"] = jnp.zeros_like(layer["position_t5_table"])
        got = run(model, new, TOKENS)
    chex.assert_trees_all_close(got, want, atol=1e-5)


@pytest.mark.slow
def test_parameters_that_both_have_are_kept():
    tape = small_model("tape")
    variables = random_variables(tape)
    model, new = adapt.with_encoding(tape, variables, "tape+fox", key=KEY)
    first, old = new["params"]["layers_0"], variables["params"]["layers_0"]
    for name in ("position_mix", "position_wx", "position_up", "position_down"):
        assert first[name] is old[name]
    assert {n for n in first if "fox" in n} == {
        "position_fox_forget_bias", "position_fox_forget_kernel"
    }  # fmt: skip
    back, left = adapt.with_encoding(model, new, "rope", key=KEY)
    chex.assert_trees_all_equal_shapes(left, jax.eval_shape(back.init, KEY, TOKENS))
    table, _ = adapt.with_encoding(back, left, {"kind": "learned", "size": 20}, key=KEY)
    assert table.encoding == positions.Learned(size=20)


def test_shapes_alone_and_an_encoding_itself():
    rope = small_model(positions.Rope(base=500.0))
    shapes = jax.eval_shape(rope.init, KEY, TOKENS)
    model, new = adapt.with_encoding(rope, shapes, positions.Tape(), key=KEY)
    assert model.encoding.base == 10_000.0
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(new))


def test_what_is_said_of_a_start_is_not_the_old_ones():
    old, own = positions.Rope(base=500.0, scaling=RopeScaling("linear", 3.0)), positions.Rope(7.0)
    linear, yarn = old.scaling, RopeScaling("yarn", 2.0)
    rope = small_model(positions.create((old, "alibi")), num_layers=1)
    shapes = jax.eval_shape(rope.init, KEY, TOKENS)
    for position, base, scaling in (
        ((own, "fox"), 7.0, RopeScaling()),
        (({"kind": "rope", "base": 7.0}, "fox"), 7.0, linear),
        (("rope", "fox"), 500.0, linear),
        ("yarn", 500.0, yarn),
        ("fope", 500.0, None),
        ("yarn+fox", 500.0, yarn),
    ):
        model, _ = adapt.with_encoding(rope, shapes, position, key=KEY)
        state = getattr(model.encoding, "encodings", (model.encoding,))[0]
        assert (state.base, getattr(state, "scaling", None)) == (base, scaling), position
    model, _ = adapt.with_encoding(rope, shapes, "repo+sinusoidal", key=KEY)
    assert model.encoding == positions.create("repo+sinusoidal")


@pytest.mark.parametrize(
    ("position", "words"),
    [
        ({"kind": "tape", "nrom": "rms"}, "did you mean 'norm'"),
        ("tape+rope", "do not go together"),
        ({"kind": "abacus", "digits": (99,)}, "digits must be token ids in 0 .. 12"),
        ("fox", r"scaling is of the rotary .* 'fox', put in its place"),
    ],
    ids=str,
)
def test_wrong_encodings(position, words):
    rope = small_model("rope")
    scaling = RopeScaling("linear", 2.0) if position == "fox" else None
    with pytest.raises(ValueError, match=words):
        adapt.adapt(
            rope, random_variables(rope), "encoding", position=position, key=KEY, scaling=scaling
        )


def test_layers_that_are_no_loop_start_apart():
    """Each with draws of its own, as in the loop."""
    rope = small_model("rope", scan_layers=False, num_layers=3)
    _, new = adapt.with_encoding(rope, random_variables(rope), "tape", key=KEY)
    first, second = (new["params"][f"layers_{n}"]["position_wx"] for n in range(2))
    assert first.shape == second.shape
    assert not jnp.allclose(first, second)
