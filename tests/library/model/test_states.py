"""States of the encoding in a model: where they start, which layers change them, who draws."""

import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import RopeScaling, init_cache, positions, rotary_state, tensor_state
from tests.models import (
    FLOAT64,
    VOCAB,
    assert_near,
    encoding,
    jit_quickly,
    random_tokens,
    random_variables,
    run,
    small_model,
    without,
)
from tests.selection import mostly_slow


def with_initial_position(model, variables):
    """Variables in which the parameters of the encoding have their initial values."""
    updating = model.encoding.layer_params(model.config.sizes, updates=True)
    updating |= model.encoding.input_params(model.config.sizes)

    def reset(path, x):
        name = path[-1].key.removeprefix("position_")
        if name == path[-1].key:
            return x
        return updating[name].init(jax.random.key(0), x.shape, x.dtype)

    return jax.tree.map_with_path(reset, variables)


YARN = RopeScaling("yarn", factor=2.0, original_length=16)


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    "options",
    [{}, {"form": "tensor", "l": 4, "r": 5, "norm": "rms", "scaling": YARN, "learn_alpha": True}],
)
def test_untrained_tape_is_rope(options):
    scaling = options.get("scaling", RopeScaling())
    shape = {"num_layers": 2, "scan_layers": False, "num_kv_heads": 1}
    tape = small_model(positions.Tape(**options), **shape)
    rope = small_model(positions.Rope(scaling=scaling), **shape)
    variables, tokens = random_variables(tape), random_tokens(2, 9)
    expected = run(rope, without(variables, "position_"), tokens)
    assert jnp.abs(run(tape, variables, tokens) - expected).max() > 1e-3
    assert_near(run(tape, with_initial_position(tape, variables), tokens), expected, 1e-6)


def test_the_base_learns():
    model = small_model(positions.Xpos(learn_base=True), num_layers=1, **FLOAT64)
    with jax.enable_x64(True):
        variables, tokens = random_variables(model), random_tokens(2, 9)
        stretched = variables["params"]["position_log_stretch"]

        @jax.jit
        def loss(stretch):
            params = {**variables["params"], "position_log_stretch": stretch}
            return jnp.square(model.apply({"params": params}, tokens)).mean()

        step = 1e-5
        slope = (loss(stretched + step) - loss(stretched - step)) / (2 * step)
        assert abs(slope) > 1e-6
        np.testing.assert_allclose(jax.grad(loss)(stretched), slope, rtol=1e-5)


@pytest.mark.parametrize(
    ("layers", "updating"), [("all", {0, 1, 2}), ((2, 4), {2}), ((3, 4), set())]
)
def test_only_updating_layers_have_parameters_and_never_the_last(layers, updating):
    model = small_model(positions.Tape(layers=layers), num_layers=4, scan_layers=False)
    params = random_variables(model)["params"]
    having = {i for i in range(4) if any("position" in name for name in params[f"layers_{i}"])}
    assert having == updating
    cache = jax.eval_shape(lambda: init_cache(model, 1, 3))
    assert {i for i, layer in enumerate(cache.layers) if layer.e is not None} == updating


def test_only_updating_layers_change_the_state():
    model = small_model(positions.Tape(layers=(1, 3)), num_layers=5)
    logits, states = run(model, random_variables(model), random_tokens(2, 6), return_states=True)
    chex.assert_shape(logits, (2, 6, VOCAB))
    chex.assert_shape([*states.hidden, states.final_norm], [(2, 6, 16)] * 7)
    entering = [
        jnp.broadcast_to(s if s.ndim > 2 else s[:, None], (2, 6, 2, 8)) for s in states.position
    ]
    same = [bool((a == b).all()) for a, b in itertools.pairwise(entering)]
    assert same == [True, False, False, True]


STATES = {
    "rope": ("rope", rotary_state(jnp.arange(6), 8)),
    "tensor": (positions.Tape(form="tensor"), tensor_state(jnp.arange(6), 8)),
    "late": (positions.Repo(width=4, first_layer=1), rotary_state(jnp.arange(6), 8, 500_000.0)),
}


@pytest.mark.parametrize("name", mostly_slow(STATES, "rope"))
def test_an_initial_state_replaces_the_start(name):
    position, state = STATES[name]
    model = small_model(position, num_layers=1 if name == "rope" else 2)
    variables, tokens = random_variables(model), random_tokens(2, 6)
    expected = run(model, variables, tokens)
    assert_near(run(model, variables, tokens, initial_state=state), expected)
    backwards = run(model, variables, tokens, initial_state=state[::-1])
    assert jnp.abs(backwards - expected).max() > 1e-3


@pytest.mark.parametrize("position", [*positions.registry, "tape+fox", "alibi+fox", "repo+kerple"])
def test_an_initial_state_is_read_or_refused(position):
    chosen = positions.create(position) if "+" in position else encoding(position)
    rotary = {name for name, cls in positions.registry.items() if issubclass(cls, positions.Rope)}
    rotary |= {"fope", "mapformer_wm", "mapformer_em"}
    assert chosen.reads_start is (position in rotary or position.startswith("tape"))
    if not chosen.reads_start:
        model, state = small_model(chosen), (jnp.zeros((5, 8)), jnp.zeros(3))
        told = rf"the encoding '{re.escape(position)}' reads no state .*got \(\(5, 8\), \(3,\)\)"
        with pytest.raises(ValueError, match=told):
            model.init(jax.random.key(0), jnp.zeros((2, 5), jnp.int32), initial_state=state)


def test_encodings_that_draw_follow_the_random_stream():
    model = small_model("abacus", num_layers=1)
    variables, tokens = random_variables(model), random_tokens(2, 8)
    apply = jit_quickly(
        lambda key: model.apply(variables, tokens, rngs={"positions": key}),
    )
    first = apply(jax.random.key(1))
    chex.assert_trees_all_equal(apply(jax.random.key(1)), first)
    assert jnp.abs(apply(jax.random.key(2)) - first).max() > 1e-3
    fixed = run(model, variables, tokens)
    chex.assert_trees_all_equal(run(model, variables, tokens), fixed)
    assert jnp.abs(fixed - first).max() > 1e-3
