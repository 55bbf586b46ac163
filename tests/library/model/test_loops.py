"""Layers in a loop, one by one, and recomputed: the same results, from less memory."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import pytest

from tape_jax import Transformer, positions
from tape_jax._src.model import block
from tape_jax.adapt import restack
from tape_jax.sharding import ShardingConfig
from tests.models import (
    assert_near,
    jit_quickly,
    loss_and_gradients,
    random_tokens,
    random_variables,
    run,
    small_model,
)
from tests.selection import mostly_slow


def test_scanned_layers_equal_unrolled_ones():
    options = {"position": positions.Tape(layers=(1, 3)), "num_layers": 5}
    scanned, unrolled = small_model(**options), small_model(**options, scan_layers=False)
    variables, tokens = random_variables(scanned), random_tokens(2, 7)
    other = {"params": restack(variables["params"], scanned, unrolled)}
    chex.assert_trees_all_equal_shapes(other, random_variables(unrolled))
    logits, states = run(scanned, variables, tokens, return_states=True)
    expected, expected_states = run(unrolled, other, tokens, return_states=True)
    assert_near(logits, expected)
    chex.assert_trees_all_close(states, expected_states, atol=1e-4, rtol=1e-4)


def loops(model, variables, tokens):
    """Loops in the program of a forward pass."""
    program = jax.jit(functools.partial(model.apply, variables)).lower(tokens)
    return program.as_text().count("stablehlo.while")


@pytest.mark.parametrize("position", mostly_slow(["rope", positions.Tape(layers=(1, 3))], "rope"))
def test_layers_without_a_loop_equal_those_of_the_loop(position, monkeypatch):
    model = small_model(position, num_layers=4)
    variables, tokens = random_variables(model), random_tokens(2, 8)
    unrolled = loss_and_gradients(model, variables, tokens)
    whole = loops(model, variables, tokens)
    monkeypatch.setitem(block.MOST_UNROLLED, jax.default_backend(), 3)
    assert whole < loops(model, variables, tokens)
    again = jax.jit(functools.partial(loss_and_gradients.__wrapped__, model))
    chex.assert_trees_all_close(again(variables, tokens), unrolled, atol=1e-5, rtol=1e-4)


def test_a_cpu_has_few_layers_without_a_loop(monkeypatch):
    config = small_model("rope").config
    assert block.unrolls(config)
    for other in ({"num_layers": 9}, {"remat": "dots"}, {"position": "cope"}):
        assert not block.unrolls(dataclasses.replace(config, **other))
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert not block.unrolls(config)


def numbers_kept(loss, variables):
    """How many numbers the gradients of a loss keep from the forward pass."""
    _, residuals = jax.eval_shape(lambda v: jax.vjp(loss, v), variables)
    return sum(x.size for x in jax.tree.leaves(residuals))


@pytest.mark.slow
def test_full_remat_saves_only_what_enters_the_layers_and_dots_also_products():
    """On a mesh that gathers parameters the same is kept: what was gathered is not."""
    tokens = random_tokens(2, 8)

    def saved(policy, sharding=None):
        model = small_model("tape", remat=policy)
        variables = random_variables(model)
        model = Transformer(model.config, sharding=sharding)
        apply = lambda v: model.apply(v, tokens).sum()  # noqa: E731
        return numbers_kept(apply, variables)

    full, dots, none = map(saved, ("full", "dots", "none"))
    assert full < dots < none
    mesh = ShardingConfig(fsdp=2).build(jax.devices()[:2])
    assert [saved("full", mesh), saved("dots", mesh)] == [full, dots]


@pytest.mark.slow
def test_remat_in_groups_of_layers_keeps_less_and_changes_no_gradient():
    """Seven layers that update, in groups of three, three and one; the last is by itself."""
    tokens, ids = random_tokens(2, 8), jnp.array([[1] * 5 + [2] * 3, [1] * 6 + [0] * 2])
    plain = small_model("tape", num_layers=8)
    variables = random_variables(plain)

    def kept_and_gradients(remat):
        model = small_model("tape", num_layers=8, remat=remat)

        def loss(variables):
            return jnp.square(model.apply(variables, tokens, segment_ids=ids)).mean()

        kept = numbers_kept(loss, variables)
        return kept, jit_quickly(jax.value_and_grad(loss))(variables)

    kept, expected = kept_and_gradients("full")
    in_groups, actual = kept_and_gradients("groups")
    chex.assert_trees_all_close(actual, expected, atol=1e-6, rtol=1e-4)
    width = plain.config.hidden_size + plain.config.kv_heads * plain.config.dim
    assert in_groups <= kept - 3 * tokens.size * width


def test_remat_keeps_a_state_with_its_heads_in_one_axis():
    """A TPU would fill up a last axis of one head."""
    position = positions.Tape(form="tensor")
    model, tokens = small_model(position, num_layers=4, remat="full"), random_tokens(2, 8)
    variables, c = random_variables(model), model.config
    e = jax.eval_shape(lambda v: model.apply(v, tokens, return_states=True), variables)[1]
    numbers = e.position[1].size // (2 * 8)
    _, residuals = jax.eval_shape(
        lambda v: jax.vjp(lambda v: model.apply(v, tokens).sum(), v), variables
    )
    shapes = [x.shape for x in jax.tree.leaves(residuals)]
    assert (3, 2, 8, numbers) in shapes
    assert (3, 2, 8, c.hidden_size) in shapes
    assert not [shape for shape in shapes if shape[:3] == (3, 2, 8) and len(shape) > 4]


@pytest.mark.slow
def test_a_single_layer_makes_its_gradients_at_once():
    """They leave one barrier, which keeps none that nobody wants."""
    tokens = random_tokens(1, 8)

    def barriers(remat):
        model = small_model("rope", num_layers=1, remat=remat)
        variables = random_variables(model)
        lowered = jax.jit(jax.grad(lambda v: model.apply(v, tokens).sum())).lower(variables)
        lines = lowered.as_text().splitlines()
        found = [line for line in lines if "optimization_barrier" in line]
        return found, len(jax.tree.leaves(variables["params"]["layers_0"]))

    found, leaves = barriers("full")
    assert all(line.split("optimization_barrier")[1].count("%") > leaves for line in found)
    assert len(found) == 2
    assert not barriers("none")[0]
